"""What ranks post of their templates, and what rank 0 concludes: threads as ranks."""

import threading

import numpy as np

from penstock.core.ranks.group import RankGroup
from penstock.core.ranks.session import RankSession
from penstock.core.ranks.templates import RoundOverError, TemplateFit, TemplatesOfRanks
from penstock.core.rounds.round import RestoreRound
from penstock.testing.coordination import MemoryBoard, MemoryCoordination

PATIENCE_S = 100.0
TIMEOUT_S = 60.0  # never passes: each test needs far less CPU time than that


class Counted(MemoryCoordination):
    """Counts the bytes of posts on templates."""

    def __init__(self, board):
        super().__init__(board)
        self.sizes = []

    def post(self, key, value):
        if "/templates/" in key:
            self.sizes.append(len(value))
        super().post(key, value)


def judge_all(fits, *, failing=()):
    """The templates of each rank after its fit was checked; failed ones end the round."""
    board, results = MemoryBoard(), [None] * len(fits)

    def one(rank):
        group = RankGroup(rank, len(fits), Counted(board), timeout_s=TIMEOUT_S)
        session = RankSession(group, RestoreRound(group.place, 0, timeout_s=TIMEOUT_S))
        templates = TemplatesOfRanks("")
        templates.begin(session)
        session.start()
        if rank == 0:
            session.tell(lambda round_: round_.go({}))
        session.next_step(PATIENCE_S)
        if rank in failing:
            session.tell(lambda round_: round_.fail("cannot"))
            return
        try:
            judged = templates.judge(fits[rank])
        except RoundOverError as error:
            results[rank] = error
            return
        session.tell(lambda round_: round_.seal({}))
        while session.next_step(PATIENCE_S) is not None:
            pass
        templates.end()
        results[rank] = judged, templates.lacked, group.coordination.sizes

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(len(fits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


def fit_of(*, patterns=(), unused=(), idle=False, stored=10, extra=()):
    return TemplateFit(patterns, unused, idle, stored, extra)


def test_objects_that_all_ranks_lack_are_found_among_many():
    """Bits without a pattern, which no compression fits into one post."""
    count, drawn = 600_000, np.random.default_rng(1)
    lacks = [np.flatnonzero(drawn.integers(0, 2, count)).tolist() for _ in range(3)]
    results = judge_all([fit_of(stored=count, extra=extra) for extra in lacks])
    _, lacked, _ = results[0]
    assert [lacks[0][number] for number in lacked] == sorted(set.intersection(*map(set, lacks)))
    assert max(results[1][2]) == 1 << 16
    assert [lacked for _, lacked, _ in results[1:]] == [()] * 2


def test_stages_of_many_objects_post_little():
    count, ranks = 200_000, 8
    share = count // ranks
    extra = [[*range(rank * share), *range((rank + 1) * share, count)] for rank in range(ranks)]
    results = judge_all([fit_of(stored=count, extra=e) for e in extra])
    assert [list(lacked) for _, lacked, _ in results] == [[]] * ranks
    assert max(sum(sizes) for _, _, sizes in results) <= 512


def test_ranks_with_a_fitting_template_post_little_and_do_not_wait():
    results = judge_all([fit_of()] * 3)
    assert [len(sizes) for _, _, sizes in results] == [1] * 3
    assert max(sum(sizes) for _, _, sizes in results) <= 128


def test_ranks_with_another_selection_are_ignored():
    here = fit_of(patterns=["w"], unused=[0], extra=[1, 2])
    there = fit_of(patterns=["v"], unused=[], extra=[])
    results = judge_all([here, there])
    judged, lacked, _ = results[0]
    assert (judged.unused, lacked) == ([0], [0, 1])


def test_waiting_rank_ends_with_the_round():
    results = judge_all([fit_of(idle=True), fit_of(), fit_of(idle=True)], failing=[1])
    assert [type(one) for one in results] == [RoundOverError, type(None), RoundOverError]

"""Rounds of real threads, and of real processes that are really killed."""

import os
import signal
import subprocess
import threading
import time

import pytest
import torch.distributed as dist
from tests import interpreters

from penstock.core.catalog.commit_table import Commit, Event
from penstock.core.errors import CoordinationError
from penstock.core.ranks.agreement import SaveAgreement
from penstock.core.ranks.group import RankGroup
from penstock.core.ranks.session import RankSession
from penstock.core.ranks.structure import Brought, pack_numbers
from penstock.core.ranks.torch_job import TorchCoordination
from penstock.core.rounds.posts import GoPost, Result, encode, go_key
from penstock.core.rounds.round import Post, RestoreRound, SaveRound
from penstock.core.rounds.table import Phase, Step
from penstock.testing.coordination import MemoryBoard, MemoryCoordination

WORLD = 4
PATIENCE_S = 60.0


def members_of(kind):
    if kind == "memory":
        board = MemoryBoard()
        return lambda: MemoryCoordination(board)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TorchCoordination(store, prefix="job")


def take_steps(session, rank, published, *, broken=None, timeout_s=PATIENCE_S):
    """A small engine; returns the last step."""
    while True:
        step = session.next_step(timeout_s)
        if step is Step.WORK:
            if rank == broken:
                session.tell(lambda r: r.fail("No space left on /lustre"))
            else:
                session.tell(lambda r: r.seal({"bytes": rank}))
        elif step is Step.MERGE:
            session.tell(lambda r: r.merged())
        elif step is Step.PUBLISH:
            published.append(rank)
            session.tell(lambda r: r.published(Result.COMMITTED))
        elif step is Step.RESOLVE:
            found = Event.RECORD_IS_OURS if published else Event.RECORD_ABSENT
            session.tell(lambda r, found=found: r.resolved(found))
        elif step in {Step.POST_SEALED, Step.AWAIT, Step.DECIDE_ABORT, Step.DECIDE_COMMIT}:
            continue
        else:
            return step


class Counted(RankSession):
    """Counts the posts of a rank."""

    posts = 0

    def _carry_out(self, operation):
        self.posts += isinstance(operation, Post)
        return super()._carry_out(operation)


def go_through(open_member, make_round, *, posts=None, **options):
    ends, rounds, published = {}, {}, []

    def one(rank):
        group = RankGroup(rank, WORLD, open_member(), host=f"node{rank}")
        rounds[rank] = make_round(group.place)
        session = Counted(group, rounds[rank])
        session.start()
        if rank == 0:
            session.tell(lambda r: r.go({"step": 100}))
        ends[rank] = take_steps(session, rank, published, **options)
        assert session.finish()
        if posts is not None:
            posts[rank] = session.posts
        group.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return ends, rounds, published


def save_round(member):
    return SaveRound(member, 0, commit=Commit(), timeout_s=30.0)


def restore_round(member):
    return RestoreRound(member, 0, timeout_s=30.0)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_all_ranks_commit_together(kind):
    posts = {}
    ends, rounds, published = go_through(members_of(kind), save_round, posts=posts)
    assert ends == dict.fromkeys(range(WORLD), Step.DONE)
    assert published == [0]
    assert rounds[0].others.parts == {rank: {"bytes": rank} for rank in range(1, WORLD)}
    assert all(r.terms == {"step": 100} for r in rounds.values())
    assert max(posts.values()) <= 6


@pytest.mark.parametrize("kind", ["memory", "tcp"])
@pytest.mark.parametrize("make_round", [save_round, restore_round])
def test_one_failed_rank_fails_all_by_name(kind, make_round):
    ends, rounds, published = go_through(members_of(kind), make_round, broken=2)
    assert ends == dict.fromkeys(range(WORLD), Step.CLEAN_UP)
    assert not published
    assert rounds[2].error("step 100 was not saved") is None
    error = rounds[3].error("step 100 was not saved", "Checkpoint 90 stays the latest.")
    assert str(error) == (
        "step 100 was not saved: rank 2 on node2 No space left on /lustre. "
        "Checkpoint 90 stays the latest."
    )
    assert (error.rank, error.host, error.cause) == (2, "node2", "No space left on /lustre")


def test_all_ranks_restore_together():
    ends, rounds, _ = go_through(members_of("memory"), restore_round)
    assert ends == dict.fromkeys(range(WORLD), Step.DONE)
    assert {r.phase for r in rounds.values()} == {Phase.COMMITTED}


class Broken(MemoryCoordination):
    def read(self, keys):
        raise ZeroDivisionError("a bug")


def test_a_bug_in_the_coordination_reaches_the_engine_and_nothing_is_published():
    group = RankGroup(0, 2, Broken(MemoryBoard()))
    session = RankSession(group, save_round(group.place))
    session.start()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        take_steps(session, 0, [])


class Gone(MemoryCoordination):
    def read(self, keys):
        raise CoordinationError("the store is gone")

    post = decide = wait = lambda self, *_: self.read([])


def test_a_lost_store_ends_the_round_of_an_unsealed_rank():
    commit = Commit()
    group = RankGroup(1, 2, Gone(MemoryBoard()))
    session = RankSession(group, SaveRound(group.place, 0, commit=commit, timeout_s=0.2))
    session.start()
    assert take_steps(session, 1, []) is Step.CLEAN_UP
    assert commit.may_delete_own_data


class Leaving(MemoryCoordination):
    """A store that ends with the process of rank 0."""

    gone = False

    def _check_open(self):
        super()._check_open()
        if self.gone:
            msg = "the store is gone"
            raise CoordinationError(msg)


@pytest.mark.parametrize("latest", [None, 90])
def test_survivors_of_rank_0_report_its_death_and_the_newest_step(latest):
    board = MemoryBoard()
    store = Leaving(board)
    group = RankGroup(1, 2, store, timeout_s=0.5)
    agreement = SaveAgreement(
        group, 0, commit=Commit(), step=100, called_s=time.monotonic(), alive=lambda: None,
        look=lambda _: Event.RECORD_ABSENT,
    )  # fmt: skip
    agreement.arrive(Brought(), {})
    if latest is not None:  # with it rank 0 dies after its answer
        lists = {"classes": pack_numbers([0, 0]), "shared": {}, "values": "", "unequal": []}
        terms = {**lists, "step": 100, "latest": latest}
        MemoryCoordination(board).post(go_key(0), encode(GoPost("save", terms)))
        agreement.wait_for_go()
    store.gone = True
    while not agreement.round.over:
        time.sleep(0.01)
    with pytest.raises(CoordinationError, match="rank 0 probably died") as raised:
        agreement.check()
    stays = "" if latest is None else f" Step {latest} stays the latest."
    assert str(raised.value) == (
        "step 100 was not saved: rank 0 probably died: the store of the job could not be reached "
        f"for 0.5 s.{stays}"
    )


# -- processes -------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import torch.distributed as dist
from penstock.core.catalog.commit_table import Commit
from penstock.core.ranks.group import RankGroup
from penstock.core.ranks.session import RankSession
from penstock.core.rounds.round import SaveRound
from penstock.core.rounds.table import Step
from penstock.core.ranks.torch_job import TorchCoordination

rank, port, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
member = TorchCoordination(store, prefix="job", world_size=3, call_s=timeout_s / 4)
group = RankGroup(rank, 3, member, timeout_s=timeout_s, host=f"node{rank}")
round_ = SaveRound(group.place, 0, commit=Commit(), timeout_s=timeout_s)
session = RankSession(group, round_)
session.start()
if rank == 0:
    session.tell(lambda r: r.go({"step": 100}))
worked = 0
while True:
    step = session.next_step(0.1)
    worked += bool(round_.terms)
    session.tell(lambda r: r.moved())  # slow, with progress: no rank ever seals
    if worked == 15:  # rank 0 has seen by now that it does
        print("works", flush=True)
    if step is Step.CLEAN_UP:
        break
error = session.abort_error("step 100 was not saved")
print(error.rank, error.host, error.cause, sep="|", flush=True)
session.finish()
group.close()
"""


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(("victim", "how"), [(2, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_all_others_learn_which_rank_was_lost(victim, how):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit_s = 5
    processes = [
        interpreters.start("-c", PROGRAM, rank, store.port, limit_s, stdout=subprocess.PIPE)
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "works\n"
        os.kill(processes[victim].pid, how)
        began_s = time.monotonic()
        others = [p for rank, p in enumerate(processes) if rank != victim]
        outputs = [process.communicate(timeout=100)[0] for process in others]
        print(f"known after {time.monotonic() - began_s:.2f} s of {limit_s} s")
        words = (
            f"{victim}|node{victim}|stood still for {limit_s} s while it wrote: "
            "it is dead or stuck; if it only pauses, raise rank_timeout_s\n"
        )
        assert outputs == [words, words]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()

"""All ranks of a job restore one checkpoint, or all raise: threads as ranks, one folder each.

The folders are copies of one run, so only one rank sees a fault in one.
"""

import re
import threading
import time

import numpy as np
import pytest
from tests.integration.support import Run, place_of

from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.errors import (
    CheckpointNotFoundError,
    CoordinationError,
    DamagedError,
    RankError,
    RestoreError,
    RestoreMismatchError,
    SelectionError,
)
from penstock.core.plugins.registry import default_registry
from penstock.core.ranks.group import RankGroup
from penstock.core.reader import Reader
from penstock.core.reporting.events import EventStream
from penstock.core.storage.open import open_backend
from penstock.core.storage.time_limited import TimeLimitedBackend
from penstock.testing.coordination import MemoryBoard, MemoryCoordination

WORLD = 3
PATIENCE_S = 30.0
STEPS = (100, 200)


@pytest.fixture
def runs(tmp_path):
    """The folder of each rank."""
    with Run(tmp_path / "0").open() as ckpt:
        for step in STEPS:
            ckpt.save(state_of(step), step, mode="blocking")
    return [
        Run(tmp_path / "0").copy_to(tmp_path / str(rank)) if rank else Run(tmp_path / "0")
        for rank in range(WORLD)
    ]


def state_of(step):
    return {"w": np.full(5000, step, np.float32), "step": step}


def blank():
    return {"w": np.zeros(5000, np.float32), "step": 0}


def reader_of(run, group):
    config = load_config({"backend": f"posix://{run.root}?direct_io=off"})
    registry, workers = default_registry(), Workers(1)
    backend = TimeLimitedBackend(open_backend(config.backend, registry=registry), workers, 60.0)
    return Reader(
        backend, config=config, registry=registry, workers=workers, events=EventStream(None),
        drains=None, ranks=lambda: group,
    )  # fmt: skip


def on_ranks(work, ranks, patience_s=PATIENCE_S):
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience_s)
        assert not thread.is_alive(), "a rank waits for ever"


def restore_all(runs, call, *, timeout_s=PATIENCE_S, absent=()):
    """The result of `call(rank, reader, state)` on each rank: the state, or the error."""
    board = MemoryBoard()
    results = [None] * WORLD

    def one(rank):
        member = MemoryCoordination(board)
        group = RankGroup(rank, WORLD, member, timeout_s=timeout_s, host=f"node{rank}")
        state = blank()
        try:
            report = call(rank, reader_of(runs[rank], group), state)
            results[rank] = state, report
        except BaseException as error:  # noqa: BLE001 - checked by the test
            results[rank] = error

    on_ranks(one, {*range(WORLD)} - {*absent})
    return results


def latest(_rank, reader, state, **options):
    return reader.restore(state, **options)


def damage(run, step):
    with run.open() as ckpt:
        place = place_of(ckpt.open(step), "w")
    run.flip(place.blob, place.offset)


def restored(results, step):
    for state, report in results:
        assert state["w"].tobytes() == state_of(step)["w"].tobytes()
        assert state["step"] == step == report.step


def test_all_restore_the_latest_step_of_rank_0(runs):
    for run in runs[1:]:
        with run.open() as ckpt:  # saved since rank 0's check, say
            ckpt.save(state_of(300), 300, mode="blocking")
    results = restore_all(runs, latest)
    restored(results, 200)


def test_all_restore_the_requested_step(runs):
    restored(restore_all(runs, lambda _, reader, state: reader.restore(state, np.int64(100))), 100)


def test_damage_on_one_rank_fails_all_and_names_it(runs):
    damage(runs[2], 200)
    *others, own = restore_all(runs, latest)
    assert isinstance(own, DamagedError)
    for error in others:
        assert isinstance(error, RankError)
        assert (error.rank, error.host) == (2, "node2")
        assert str(error).startswith("step 200 was not restored: rank 2 on node2 found damage: ")


def test_damage_on_one_rank_makes_all_fall_back(runs):
    damage(runs[2], 200)
    results = restore_all(runs, lambda _, r, state: r.restore(state, on_damage="fallback"))
    restored(results, 100)
    assert [report.fell_back_from for _, report in results] == [(200,)] * WORLD


def test_no_older_checkpoint_is_damage_on_all(runs):
    damage(runs[1], 200)
    damage(runs[0], 100)
    results = restore_all(runs, lambda _, r, state: r.restore(state, on_damage="fallback"))
    assert [type(error) for error in results] == [DamagedError] * WORLD


def test_no_checkpoint_is_the_same_error_on_all(tmp_path):
    """A job then begins from scratch on every rank."""
    results = restore_all([Run(tmp_path)] * WORLD, latest)
    assert [type(error) for error in results] == [CheckpointNotFoundError] * WORLD


def test_unshared_folder_is_detected(runs):
    runs[1].remove(runs[1].commit(200))
    error, own, other = restore_all(runs, latest)
    assert isinstance(own, RestoreError)
    assert "is the folder shared by all hosts?" in str(own)
    for each in (error, other):
        assert isinstance(each, RankError)
        assert (each.rank, each.host) == (1, "node1")


def test_another_checkpoint_of_the_same_step_is_refused(runs):
    with runs[1].open() as ckpt:
        ckpt.save(state_of(7), 200, mode="blocking", overwrite=True)
    results = restore_all(runs, latest)
    assert "is not the checkpoint that rank 0 sees" in str(results[1])
    assert [type(error) for error in results] == [RankError, RestoreError, RankError]


def test_unfitting_template_of_one_rank_fails_all(runs):
    def call(rank, reader, state):
        if rank == 1:
            state["w"] = np.zeros(4, np.float32)
        return reader.restore(state)

    first, own, last = restore_all(runs, call)
    assert isinstance(own, RestoreMismatchError)
    for error in (first, last):
        assert (error.rank, error.host) == (1, "node1")
        assert "RestoreMismatchError" in error.cause


def test_rank_may_hold_no_object_that_others_restore(runs, caplog):
    def call(rank, reader, state):
        template = {"w": state["w"]} if rank else {}
        return reader.restore(template, include="w")

    first, *others = restore_all(runs, call)
    assert first[1].restored == ()
    assert [report.restored for _, report in others] == [("w",)] * 2
    assert not caplog.records


def test_nothing_in_common_on_all_ranks_is_the_same_error_on_each(runs):
    def call(_rank, reader, _state):
        return reader.restore({})

    for error in restore_all(runs, call):
        assert isinstance(error, RestoreMismatchError)
        assert "have nothing in common" in str(error)


@pytest.mark.parametrize("owner", range(WORLD))
def test_pattern_may_match_only_the_template_of_one_rank(runs, owner):
    """Only the last stage of a pipeline has the new head to leave alone."""

    def call(rank, reader, state):
        if rank == owner:
            state["head"] = np.ones(3, np.float32)
        return reader.restore(state, exclude="head")

    results = restore_all(runs, call)
    restored(results, 200)
    assert results[owner][0]["head"].tolist() == [1, 1, 1]


def test_pattern_without_a_match_on_any_rank_is_one_error_changing_nothing(runs):
    states = {}

    def call(rank, reader, state):
        states[rank] = state
        return reader.restore(state, include=["w", "step"], exclude=["stpe"])

    for rank, error in enumerate(restore_all(runs, call)):
        assert isinstance(error, SelectionError)
        assert "pattern 'stpe' matches nothing; nearest: step" in str(error)
        assert not states[rank]["w"].any()


def test_objects_of_other_stages_are_not_unexpected(runs, caplog):
    def call(rank, reader, state):
        key = "step" if rank == 2 else "w"
        return reader.restore({key: state[key]})

    results = restore_all(runs, call)
    assert [report.unexpected for _, report in results] == [()] * WORLD
    assert not caplog.records


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda r, s: r.restore(s, 100), "asked for step 100, but rank 0 asked for step latest"),
        (lambda r, _: r.load(), "asked for load, but rank 0 asked for restore"),
        (lambda r, s: r.restore(s, on_damage="fallback"), "asked for on_damage"),
        (
            lambda r, s: r.restore(s, include="w"),
            "asked for the selection include=['w'], but rank 0 asked for the selection of every",
        ),
        (
            lambda r, s: r.restore(s, exclude=[f"none{n}" for n in range(99)]),
            "asked for the selection exclude=['none0', 'none1', ",
        ),
    ],
)
def test_ranks_with_contradicting_calls_are_reported(runs, other, words):
    def call(rank, reader, state):
        return other(reader, state) if rank == 2 else reader.restore(state)

    results = restore_all(runs, call)
    for error in results:
        assert isinstance(error, RankError)
        assert error.rank == 2
        # A rank that did not learn of a step before the end does not name it.
        assert re.match("step 200 was not (restored|loaded)|no checkpoint was restored", str(error))
        assert str(error).partition(": ")[2].startswith(f"rank 2 on {error.host} {words}")


def test_wrong_call_on_one_rank_ends_the_restore_of_all_at_once(runs):
    def call(rank, reader, state):
        return reader.restore(state, include="w[" if rank == 1 else None)

    first, own, last = restore_all(runs, call)
    assert isinstance(own, SelectionError)
    for error in (first, last):
        assert (error.rank, error.host) == (1, "node1")
        assert str(error).partition(": rank 1 on node1 failed with SelectionError")[0] in {
            "no checkpoint was restored",
            "step 200 was not restored",
        }


def test_interrupt_of_one_rank_ends_the_restore_of_all(runs):
    def interrupted(_progress):
        raise KeyboardInterrupt

    def call(rank, reader, state):
        return reader.restore(state, on_progress=interrupted if rank == 0 else None)

    own, *others = restore_all(runs, call)
    assert isinstance(own, KeyboardInterrupt)
    assert [(e.rank, "KeyboardInterrupt" in e.cause) for e in others] == [(0, True)] * 2


def test_absent_rank_is_named(runs):
    results = restore_all(runs, latest, timeout_s=3.0, absent=[1])
    for error in (results[0], results[2]):
        assert isinstance(error, RankError)
        assert error.rank == 1
        assert "has not begun to restore" in str(error)


def test_slow_rank_with_progress_is_awaited(runs):
    def call(rank, reader, state):
        def slow(_progress):
            time.sleep(0.5)  # some seven times

        return reader.restore(state, on_progress=slow if rank == 1 else None)

    restored(restore_all(runs, call, timeout_s=2.5), 200)


def test_later_restores_of_the_same_ranks_have_separate_rounds(runs):
    def call(_rank, reader, state):
        with pytest.raises(CheckpointNotFoundError):
            reader.restore(state, 150)
        reader.restore(state, 100)
        return reader.restore(state)

    restored(restore_all(runs, call), 200)


class Lost(MemoryCoordination):
    """Cannot reach the store of the job once the rank has sealed."""

    sealed = False

    def post(self, key, value):
        self.reach()
        super().post(key, value)
        self.sealed = b'"sealed"' in value

    def read(self, keys):
        self.reach()
        return super().read(keys)

    def wait(self, key, timeout_s):
        self.reach()
        return super().wait(key, timeout_s)

    def reach(self):
        if self.sealed:
            time.sleep(0.05)
            raise CoordinationError("the store is gone")


def test_rank_that_misses_the_decision_reports_it(runs):
    board, errors = MemoryBoard(), []

    def one(rank):
        kind = Lost if rank == 1 else MemoryCoordination
        group = RankGroup(rank, 2, kind(board), timeout_s=3.0)
        try:
            reader_of(runs[rank], group).restore(blank())
        except CoordinationError as error:
            errors.append((rank, str(error)))

    on_ranks(one, range(2))
    ((rank, text),) = errors
    assert rank == 1
    assert "it is not known whether all ranks have it" in text


class Noting(MemoryCoordination):
    """Notes the keys that a rank posts."""

    def __init__(self, board):
        super().__init__(board)
        self.keys = []

    def post(self, key, value):
        self.keys.append(key)
        super().post(key, value)


def test_a_rank_posts_its_host_before_it_plans(runs):
    noting = Noting(board := MemoryBoard())

    def one(rank):
        group = RankGroup(rank, 2, noting if rank else MemoryCoordination(board))
        reader_of(runs[rank], group).restore(blank())

    on_ranks(one, range(2))
    assert noting.keys.index("host/00001") < noting.keys.index("rounds/0/templates/00001-0")


class Server(MemoryCoordination):
    """The store of the job lives in the process of rank 0: notes what others had posted by then."""

    def close(self):
        self.left = self.read([f"left/{rank:05d}" for rank in range(1, WORLD)])
        super().close()


def test_rank_0_closes_the_job_store_once_all_have_finished_the_restore(runs):
    board = MemoryBoard()
    server = Server(board)

    def one(rank):
        member = MemoryCoordination(board) if rank else server
        group = RankGroup(rank, WORLD, member, timeout_s=PATIENCE_S, host=f"node{rank}")
        for _ in range(2):
            reader_of(runs[rank], group).restore(blank())
        if rank == 0:  # a closing rank posts that it has left all rounds
            group.close()

    on_ranks(one, range(WORLD), 2 * PATIENCE_S)
    # The number of the last round, or one beyond all: a closing rank joins no other.
    assert [int(number) >= 1 for number in server.left] == [True, True]

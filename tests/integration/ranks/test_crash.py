"""Two ranks over one store that loses power, or with one that dies: old or new, always whole."""

import functools
import random
import threading

import pytest
from tests.integration.atomic.crash_scenarios import (
    BEFORE,
    BOTH,
    ENCODED,
    OPTIONS,
    RAW,
    TWO_GENERATIONS,
    check_run,
    job,
    mortal,
    opened,
    without,
)
from tests.integration.ranks.saving import Job
from tests.integration.support import FlyingClock

from penstock import RankError
from penstock.core.concurrency.timing import Timing
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.faults import EFFECTS, CrashAt, LatencyBackend, SimulatedCrashError
from penstock.testing.powercut import Disk, PowerCut

WORLD = 2
WRITER_BYTES = 4096  # so two ranks share some 30 KB like gigabytes
AFTER = {**BEFORE, 4: 4}
JITTER = {"create": 0.002, "write": 0.002, "seal": 0.002, "publish": 0.002}


class Save:
    """A save of two ranks, and the allowed contents of the run, from before to after."""

    def __init__(self, name, ends, *, options=BOTH, mode="async", step=4, number=4, **more):
        self.name = name
        self.ends = ends
        self.options = options
        self.step, self.number = step, number
        self.call = {"mode": mode, "step": step, **more}

    def run(self, stores, member=lambda board, _: MemoryCoordination(board), *, lost=None):
        """Save on each rank; return the result of each: a report, or an error.

        Once `lost()` reports a dead rank, the time flies until the others give it up.
        """
        its = job()
        its.fill(self.number)
        options = {"writer_bytes": WRITER_BYTES, **OPTIONS, **self.options}
        ranks = Job(WORLD, lambda rank: stores[rank], **options)
        results = [None] * WORLD

        def one(rank):
            group = {"coordination": member(ranks.board, rank)}
            if lost is not None:
                group["timing"] = Timing(clock=FlyingClock(lost))
            try:
                with ranks.checkpointer(rank, **group) as ckpt:
                    handle = ckpt.save(its.state, **self.call)
                    try:
                        results[rank] = handle.result(300)
                    finally:
                        ckpt._saver.job.released.wait(300)  # work after the end is over, too
            except BaseException as error:  # noqa: BLE001 - of one that dies, too
                results[rank] = results[rank] or error

        with mortal():
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert None not in results
        return results

    def possible(self, results):
        """The allowed contents of the run, by the ranks' reports."""
        committed = next(n for n, end in enumerate(self.ends) if end.get(self.step) == self.number)
        if any(not isinstance(result, BaseException) for result in results):
            return self.ends[committed:]
        if any(isinstance(result, RankError) for result in results):
            return self.ends[:committed]
        return self.ends


SAVES = [
    *(
        Save(f"{mode} {kind}", [BEFORE, AFTER], options=rules, mode=mode)
        for mode, kind, rules in (
            ("blocking", "raw", RAW),
            ("async", "encoded", ENCODED),
            ("lazy", "both", BOTH),
        )
    ),
    Save("overwrite", [BEFORE, TWO_GENERATIONS], step=3, number=30, overwrite=True),
    Save(
        "retention",
        [BEFORE, without(BEFORE, 1), without(AFTER, 1), without(AFTER, 1, 2)],
        options={"retention": {"keep_last": 2}},
    ),
]
each_save = pytest.mark.parametrize(
    "save",
    [
        pytest.param(
            save,
            id=save.name.replace(" ", "-"),
            marks=[] if save.name in ("overwrite", "retention") else [pytest.mark.slow],
        )
        for save in SAVES
    ],
)


@functools.cache
def stored():
    """Three checkpoints saved by two ranks."""
    disk = Disk()
    for step in (1, 2, 3):
        results = Save("", [], step=step, number=step).run([PowerCut(disk)] * WORLD)
        assert {report.ranks for report in results} == {WORLD}
    with opened(PowerCut(disk)) as ckpt:
        ckpt.annotate(2, {"mark": 2})
    blobs = {blob.name.rpartition("/")[2] for blob in PowerCut(disk).list("data/")}
    assert blobs >= {"00000-0.raw", "00001-0.enc"}  # of 30 KB, rank 0 writes the first half
    return disk


each_stride = pytest.mark.parametrize(
    "stride", [12, pytest.param(1, marks=pytest.mark.slow)], ids=["every twelfth", "every"]
)


@each_stride
@each_save
def test_power_cut_at_any_effect_of_two_ranks_leaves_old_or_new(save, stride):
    start = stored()
    found, points, cuts = [], 0, 0
    while True:
        disk = start.copy(cut_at=points + 1)
        # Now one rank is ahead, now the other.
        stores = [
            LatencyBackend(PowerCut(disk), jitter_s=JITTER, seed=2 * points + rank)
            for rank in range(WORLD)
        ]
        possible = save.possible(save.run(stores, lost=lambda disk=disk: disk.dead))
        over = not disk.dead
        chance = random.Random(f"{save.name} {points}")
        for survived in disk.cuts(chance, most=4 if stride == 1 else 2):
            found.append(check_run(survived, save.ends[-1:] if over else possible))
            cuts += 1
        if over:
            break
        points += stride
    print(f"{save.name}: {cuts} cuts at every {stride}. of {points} points")
    assert points >= 10
    assert all(end in found for end in (save.ends if stride == 1 else save.ends[:1]))


def names_of(disk, rank):
    """The data of a rank on a disk, for any save."""
    names = {blob.name for blob in PowerCut(disk).list("data/")}
    return {name for name in names if name.rpartition("/")[2].startswith(f"{rank:05d}")}


class OfOne(MemoryCoordination):
    """The store of the job as a rank sees it, until the rank dies."""

    def __init__(self, board, store):
        super().__init__(board)
        self._store = store

    def _check_open(self):
        super()._check_open()
        if self._store.crashed:
            msg = "the rank is dead"
            raise SimulatedCrashError(msg)


@each_stride
@each_save
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_dies_before_any_effect_leaves_old_or_new(save, victim, stride):
    start = stored()
    found, kinds, points = [], set(), 0
    while True:
        disk = start.copy()
        stores = [PowerCut(disk) for _ in range(WORLD)]
        dying = stores[victim] = CrashAt(stores[victim], points + 1, operations=EFFECTS)

        def member(board, rank, dying=dying):
            return OfOne(board, dying) if rank == victim else MemoryCoordination(board)

        results = save.run(stores, member, lost=lambda dying=dying: dying.crashed)
        if dying.crashed:
            survivor = results[1 - victim]
            kinds.add(type(survivor))
            if isinstance(survivor, RankError):
                assert (survivor.rank, survivor.host) == (victim, f"node{victim}")
                new = names_of(disk, 1 - victim) - names_of(start, 1 - victim)
                assert not new, "the survivor has left data of an abort"
        found.append(check_run(disk, save.possible(results) if dying.crashed else save.ends[-1:]))
        if not dying.crashed:
            break
        points += stride
    print(f"{save.name}: rank {victim} died at {points} points; {kinds}")
    assert points >= (7 if victim == 0 else 4)
    ends = save.ends if stride == 1 else [save.ends[0], save.ends[-1]]
    assert all(end in found for end in (ends if victim == 0 else ends[-1:]))

"""Ranks save to a fast tier together, and only rank 0 copies on from there."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.integration.ranks.saving import SHORT_TIMEOUT_S, Job
from tests.integration.ranks.test_processes import LIMIT_S, START, end, start
from tests.integration.support import FlyingClock, checkpointer, memory
from tests.integration.tiers.places import Places

from penstock import (
    Checkpointer,
    ConfigError,
    NotDrainedError,
    RankError,
    SaveSkippedError,
    Shard,
    StorageError,
)
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.concurrency.timing import Timing
from penstock.core.errors import SaveError, StorageFullError
from penstock.core.rounds.posts import Verdict, encode, end_key
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend
from penstock.testing.hasty import FAST

RANKS = 3


@pytest.fixture(autouse=True)
def impatient(waits):
    waits(FAST, drain_failing_s=0.2)


@pytest.fixture
def places():
    return Places()


def state_of(rank, number=1):
    whole = torch.arange(12.0 * RANKS).view(-1, 4) * number
    part = whole[3 * rank : 3 * rank + 3].clone()
    return {
        "sharded": Shard(part, tuple(whole.shape), (3 * rank, 0)),
        "plain": torch.full((7, 3), float(number)),
        "epoch": number,
    }


def assert_holds(tree, number=1):
    assert torch.equal(tree["sharded"], torch.arange(12.0 * RANKS).view(-1, 4) * number)
    assert tree["plain"].eq(number).all()
    assert tree["epoch"] == number


def run_ranks(count, work, *, until=None, others=()):
    """Return the result or error of `work(rank)` on each; set `until` once `others` end."""
    found = [None] * count

    def one(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - checked by the test
            found[rank] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    if until is not None:
        for rank in others:
            threads[rank].join(300)
        until.set()
    for thread in threads:
        thread.join(300)
    return found


def job_of(places, count=RANKS, *, fast=None, durable=None, options=None, **more):
    """A job whose ranks each open the tiers; `fast(rank)` and `durable(rank)` wrap one rank's."""

    def store(rank):
        return TieredBackend(
            TieredConfig(fast="memory://", durable="memory://", **(options or {})),
            fast=(fast or (lambda _, store: store))(rank, places.other_fast()),
            durable=(durable or (lambda _, store: store))(rank, places.other()),
        )

    return Job(count, store, **more)


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_rank_0_copies_saves_of_ranks_and_all_learn_durability(places, mode):
    job = job_of(places)

    def work(ckpt, rank):
        handle = ckpt.save(state_of(rank), 1, mode=mode)
        committed = handle.committed.result(300)
        report = handle.result(300)
        assert handle.progress().phase == "durable"
        return committed.tiers, report.tiers, report.ranks

    assert job.run(work) == [((), ("fast", "durable"), RANKS)] * RANKS
    assert places.steps() == ([1], [1])
    for backend in (places.fast, places.durable):
        with checkpointer(backend) as alone:
            assert alone.verify().ok
            assert_holds(alone.load())


CHANGES = {"create", "write", "publish", "delete", "seal"}


def test_rank_0_alone_copies_evicts_repairs_and_deletes(places):
    watched = {}

    def watch(name):
        def wrap(rank, store):
            watched[name, rank] = FaultyBackend(store)
            return watched[name, rank]

        return wrap

    job = job_of(
        places,
        fast=watch("fast"),
        durable=watch("durable"),
        options={"keep_fast": 1},
        retention={"keep_last": 2},
    )

    def work(ckpt, rank):
        for step in range(1, 6):
            ckpt.save(state_of(rank, step), step).result(300)
        ckpt.restore(state_of(rank, 0))
        return ckpt.steps()

    job.run(work)
    assert places.steps() == ([5], [4, 5])
    for rank in range(1, RANKS):
        changed = [call for call in watched["durable", rank].calls if call[0] in CHANGES]
        assert changed == []
        changed = {
            (what, name)
            for what, names in watched["fast", rank].calls
            for name in names
            if what in CHANGES and not name.startswith("data/")
        }
        assert changed == set()
        assert not [call for call in watched["fast", rank].calls if call[0] == "delete"]


def test_a_failed_fast_tier_of_a_rank_ends_the_save_and_the_next_bypasses_it(places, caplog):
    def fast(rank, store):
        if rank != 2:
            return store
        return FaultyBackend(store, Fault("create", times=None, error=StorageError("no space")))

    def work(ckpt, rank):
        with pytest.raises((RankError, StorageError)) as info:
            ckpt.save(state_of(rank), 1).result(300)
        return info.value, ckpt.save(state_of(rank, 2), 2).result(300).tiers

    errors, tiers = zip(*job_of(places, fast=fast).run(work), strict=True)
    assert [(type(e), getattr(e, "rank", None)) for e in errors] == [
        (RankError, 2),
        (RankError, 2),
        (StorageError, None),
    ]
    assert "rank 2 on node2 failed with StorageError: no space" in str(errors[0])
    assert tiers == (("durable",),) * RANKS
    assert places.steps() == ([], [2])
    assert "tier fast cannot be used by rank 2" in caplog.text
    with checkpointer(places.durable) as alone:
        assert_holds(alone.load(), 2)
    assert not places.fast.list("data/")


def test_a_fast_tier_unresponsive_to_one_rank_is_bypassed_by_all(places):
    faulty = {}

    def fast(rank, store):
        faulty[rank] = FaultyBackend(store)
        if rank == 1:
            for operation in ("list", "publish", "create", "read", "stat", "delete"):
                faulty[rank].fail(operation, StorageError("no route to host"), times=None)
        return faulty[rank]

    def work(ckpt, rank):
        first = ckpt.save(state_of(rank), 1).result(300).tiers
        if rank == 1:
            faulty[1].clear()
        return first, ckpt.save(state_of(rank, 2), 2).result(300).tiers

    assert job_of(places, fast=fast).run(work) == [(("durable",), ("fast", "durable"))] * RANKS
    assert places.steps() == ([2], [1, 2])


def test_a_fast_tier_of_each_host_is_refused_before_much_is_written():
    hosts = [Places() for _ in range(RANKS)]
    shared = hosts[0]

    def fast(rank, store):
        del store
        return hosts[rank].other_fast()

    def work(ckpt, rank):
        with pytest.raises(SaveError) as info:
            ckpt.save(state_of(rank), 1).result(300)
        return info.value

    errors = job_of(shared, fast=fast).run(work)
    for error in errors:
        assert "If each host has its own fast tier, give it type = 'hosts'" in str(error)
    assert {getattr(errors[0], "rank", None)} <= {1, 2}
    # Closing waits for the deletions of a failed save; its result does not.
    assert [blob.name for host in hosts for blob in host.fast.list("data/")] == []
    assert shared.steps() == ([], [])


@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_while_the_durable_tier_is_away_no_rank_calls_a_checkpoint_durable(places, mode):
    faulty = {}

    def durable(rank, store):
        faulty[rank] = FaultyBackend(store)
        if rank == 0:
            error = StorageError("no route to host")
            faulty[rank].fail("publish", error, times=None, match="data/")
        return faulty[rank]

    def work(ckpt, rank):
        if mode == "blocking":
            with pytest.raises(NotDrainedError, match="no route to host"):
                ckpt.save(state_of(rank), 1, mode=mode)
        handle = ckpt.save(state_of(rank), 2)
        handle.committed.result(300)
        durable_then = handle.durable.done()
        if mode == "blocking":
            faulty[0].clear()
            return durable_then, handle.result(300).tiers
        ckpt.close()
        with pytest.raises(NotDrainedError, match="the run was closed before"):
            handle.result(300)
        return durable_then, ()

    tiers = ("fast", "durable") if mode == "blocking" else ()
    assert job_of(places, durable=durable).run(work) == [(False, tiers)] * RANKS


class Silent(MemoryCoordination):
    """A rank that reports no more copies to the others, as if it had died after a save."""

    def post(self, key, value, /):
        if not key.startswith("drains"):
            super().post(key, value)


def test_a_rank_0_that_dies_during_a_copy_is_not_awaited(places):
    job = job_of(places)
    release, committed = threading.Event(), threading.Event()
    all_committed = threading.Barrier(RANKS)

    def work(rank):
        coordination = Silent(job.board) if rank == 0 else None
        # It is dead to the others once all know of the commit.
        clock = FlyingClock(committed.is_set)
        with job.checkpointer(rank, coordination=coordination, timing=Timing(clock=clock)) as ckpt:
            handle = ckpt.save(state_of(rank), 1)
            handle.committed.result(300)
            if all_committed.wait(300) == 0:
                committed.set()
            if rank == 0:
                release.wait(300)
                return True
            with pytest.raises(NotDrainedError, match="rank 0, which copies it, was silent for"):
                handle.result(300)
            return True

    assert run_ranks(RANKS, work, until=release, others=range(1, RANKS)) == [True] * RANKS
    assert places.steps() == ([1], [1])


@pytest.mark.parametrize("options", [{}, {"drain_every": 2}])
def test_a_save_that_ends_after_its_mark_leaves_nothing(places, options):
    class GivesUp(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            super().publish(name, data, exclusive=exclusive)
            if name.endswith(("/drain.json", "/stays.json")) and self.at == self.left:
                cause = encode(Verdict(commit=False, rank=1, host="node1", cause="failed"))
                MemoryCoordination(job.board).decide(end_key(self.left), cause)

    GivesUp.left, GivesUp.at = len(options), 0  # with `drain_every` the second one stays
    job = job_of(
        places, fast=lambda rank, store: store if rank else GivesUp(store), options=options
    )

    def work(ckpt, rank):
        for step in range(GivesUp.left):
            ckpt.save(state_of(rank), step + 1).result(300)
        before = {blob.name for blob in places.fast.list("data/")}
        gate.wait(300)
        GivesUp.at = GivesUp.left
        with pytest.raises(SaveError, match="failed"):
            ckpt.save(state_of(rank), 9).result(300)
        ckpt.wait()
        gate.wait(300)
        return {blob.name for blob in places.fast.list("data/")} - before

    gate = threading.Barrier(RANKS)
    assert job.run(work) == [set()] * RANKS


def test_a_save_waiting_for_room_beyond_the_timeout_is_not_abandoned(places):
    class Full(WrapperBackend):
        def __init__(self, inner, room):
            super().__init__(inner)
            self.room = room

        def free_bytes(self):
            return None if self.room.is_set() else 0

    in_fast, in_durable = threading.Event(), threading.Event()
    job = job_of(
        places,
        fast=lambda _, store: Full(store, in_fast),
        durable=lambda _, store: Full(store, in_durable),
        options={"on_full": "block"},
    )
    threading.Timer(1.5 * SHORT_TIMEOUT_S, in_fast.set).start()
    # Later, or a search for room in between finds it only in the durable tier.
    threading.Timer(1.5 * SHORT_TIMEOUT_S + 0.3, in_durable.set).start()

    def work(rank):
        with job.checkpointer(rank, timeout_s=SHORT_TIMEOUT_S) as ckpt:
            return ckpt.save(state_of(rank), 1).result(300).tiers

    assert run_ranks(RANKS, work) == [("fast", "durable")] * RANKS


def test_room_is_made_for_the_total_of_all_ranks(places):
    class Counting(WrapperBackend):
        def free_bytes(self):
            return 10 << 20

    job = job_of(places, fast=lambda rank, store: Counting(store) if rank == 0 else store)
    big = torch.ones(1 << 20, dtype=torch.uint8)

    def work(ckpt, rank):
        # Each alone has room beside the 8 MiB that stay free, but not all together.
        held = Shard(big, (RANKS << 20,), (rank << 20,))
        tiers = [ckpt.save({"w": held}, 1).result(300).tiers]
        # Plain tensors are stored once, so there is room.
        return [*tiers, ckpt.save({"w": big}, 2).result(300).tiers]

    assert job.run(work) == [[("durable",), ("fast", "durable")]] * RANKS


def test_a_job_of_fewer_ranks_continues_copies_of_a_dead_one(places):
    def durable(rank, store):
        faulty = FaultyBackend(store)
        faulty.fail("create", StorageError("no route to host"), times=None)
        return faulty if rank == 0 else store

    def work(ckpt, rank):
        return ckpt.save(state_of(rank), 1).committed.result(300).step

    assert job_of(places, durable=durable).run(work) == [1] * RANKS
    assert places.steps() == ([1], [])

    def restarted(ckpt, rank):
        target = {"plain": torch.zeros(7, 3), "epoch": 0}
        step = ckpt.restore(target).step
        ckpt.save(target, 2).result(300)
        return step, target["plain"].eq(1).all().item()

    assert job_of(places, 2).run(restarted) == [(1, True)] * 2
    assert places.steps() == ([1, 2], [1, 2])


def test_damage_that_one_rank_finds_is_repaired_by_rank_0(places):
    job = job_of(places)
    assert [r.step for r in job.save(state_of)] == [1] * RANKS
    store = places.fast
    store.delete([next(b.name for b in store.list("data/") if "/00001-0." in b.name)])

    watched = [FaultyBackend(places.other_fast()) for _ in range(RANKS)]

    def work(ckpt, rank):
        # Rank 0 reads none of the missing data.
        wanted = "epoch" if rank == 0 else "sharded"
        return bool(ckpt.restore({wanted: state_of(rank, 0)[wanted]}).rescued)

    assert job_of(places, fast=lambda rank, _: watched[rank]).run(work)[1]
    changes = [{what for what, _ in faulty.calls} & CHANGES for faulty in watched]
    assert [bool(some) for some in changes] == [True, False, False]
    with checkpointer(places.fast) as alone:
        assert alone.verify().ok


def test_only_rank_0_repairs_by_hand(places):
    def work(ckpt, rank):
        ckpt.save(state_of(rank), 1).result(300)
        if rank == 0:
            return ckpt.verify(1, repair=True).ok
        with pytest.raises(ConfigError, match="rank 0 alone"):
            ckpt.verify(1, repair=True)
        return ckpt.verify(1).ok

    assert job_of(places).run(work) == [True] * RANKS


def test_a_deletion_that_fails_on_another_rank_starts_no_copies_there(places):
    def durable(rank, store):
        faulty = FaultyBackend(store)
        if rank == 0:
            faulty.fail("publish", StorageError("no route to host"), times=None, match="data/")
        else:
            faulty.fail("delete", StorageError("no route to host"), times=None, match="commits/")
        return faulty

    def work(ckpt, rank):
        ckpt.save(state_of(rank), 1).committed.result(300)
        if rank == 1:
            with pytest.raises(StorageError, match="no route to host"):
                ckpt.delete(1)
            time.sleep(0.5)  # such a small copy takes a few milliseconds
            ckpt._drains.settle(300)
        return ckpt.steps()

    assert job_of(places, durable=durable).run(work) == [[1]] * RANKS
    assert places.steps() == ([1], [])


def test_rank_0_closes_once_the_others_know_what_is_durable(places):
    job = job_of(places, 2)
    gate = threading.Event()

    class Late(MemoryCoordination):
        def read(self, keys, /):
            if any(key.startswith("drains/") for key in keys):
                gate.wait(300)
            return super().read(keys)

    def work(rank):
        coordination = Late(job.board) if rank == 1 else None
        ckpt = job.checkpointer(rank, coordination=coordination, timeout_s=30.0)
        handle = ckpt.save({"epoch": 1}, 1)
        if rank == 0:
            handle.result(300)
            closing = threading.Thread(target=ckpt.close)
            closing.start()
            closing.join(0.3)
            waits = closing.is_alive()
            gate.set()
            closing.join(300)
            return waits, closing.is_alive()
        tiers = handle.result(300).tiers
        ckpt.close()
        return tiers

    assert run_ranks(2, work) == [(True, False), ("fast", "durable")]


COPY = """
fast, durable, limit_s = sys.argv[4], sys.argv[5], float(sys.argv[6])
tiers = {"type": "tiered", "fast": fast, "durable": durable, "drain_bytes_per_s": "1 MB"}
ckpt = penstock.Checkpointer(tiers, rank_timeout_s=limit_s)
part = penstock.Shard(torch.ones(12, 1 << 20), (12 * count, 1 << 20), (12 * rank, 0))
handle = ckpt.save({"w": part, "epoch": 1}, 1)
handle.committed.result(300)
print("committed", flush=True)
try:
    handle.result(300)
except penstock.NotDrainedError as error:
    print("which copies it, was silent for" in str(error), flush=True)
    print(ckpt.latest(), flush=True)
    ckpt.close()
    print("closed", flush=True)
"""


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_the_next_job_makes_the_copies_of_a_lost_rank_0(tmp_path, how):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    processes = start(START + COPY, 3, store.port, fast, durable, LIMIT_S)
    try:
        assert [process.stdout.readline() for process in processes] == ["committed\n"] * 3
        while not children_of(processes[0].pid):
            time.sleep(0.02)
        os.kill(processes[0].pid, how)
        others = processes[1:]
        assert [children_of(process.pid) for process in others] == [[], []]  # only rank 0 copies
        assert [process.stdout.readline() for process in others] == ["True\n"] * 2
        assert [process.stdout.readline() for process in others] == ["1\n"] * 2
        assert [process.stdout.readline() for process in others] == ["closed\n"] * 2
    finally:
        end(processes)
    with Checkpointer(durable) as alone:
        assert alone.steps() == []
    tiers = {"type": "tiered", "fast": f"posix://{fast}", "durable": f"posix://{durable}"}
    with Checkpointer(tiers) as ckpt:
        assert ckpt.save({"epoch": 2}, 2).result(300).tiers == ("fast", "durable")
    with Checkpointer(durable) as alone:
        assert alone.steps() == [1, 2]
        assert alone.verify(1).ok
        assert alone.load(1)["w"].eq(1).all()


def children_of(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that ended meanwhile
            found += (task / "children").read_text().split()
    return found


def test_ranks_of_other_backends_are_refused_by_name(places):
    store = memory()

    def work(ckpt, rank):
        with pytest.raises((RankError, ConfigError)) as info:
            ckpt.save(state_of(rank), 1).result(300)
        return str(info.value)

    def tiers(rank):
        return job_of(places)._store(rank) if rank != 1 else store

    found = Job(RANKS, tiers).run(work)
    assert all(
        "the backend of this rank has one place, but that of rank 0 has tiers" in t for t in found
    )


def test_a_save_without_room_is_skipped_on_all_ranks(places, caplog):
    class Full(WrapperBackend):
        def free_bytes(self):
            return 0

    def full(rank, store):
        return Full(store) if rank == 0 else store

    def work(ckpt, rank):
        handle = ckpt.save(state_of(rank), 1)
        with pytest.raises(SaveSkippedError, match="no tier has room"):
            handle.result(300)
        return handle.skipped

    assert job_of(places, fast=full, durable=full).run(work) == [True] * RANKS
    assert places.steps() == ([], [])
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == [
        m for m in caplog.messages if m.startswith("step 1 is not saved: no tier has room")
    ]
    options = {"on_full": "raise"}
    errors = job_of(places, fast=full, durable=full, options=options).save(state_of)
    assert [type(e) for e in errors] == [StorageFullError, RankError, RankError]

"""Ranks of one host read shared data once, and hand it on."""

import errno
import gc
import os
import threading
import time
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch
from tests.integration.ranks.saving import LONG_S, PATIENCE_S, TIMEOUT_S, Job
from tests.integration.support import TINY, memory

import penstock
from penstock import Checkpointer, DamagedError, PenstockError, RankError
from penstock.core.abc import ByteSink, DelegatingBackend, Placement, StateProvider, Target
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import StorageError
from penstock.core.pipeline.loader import Loader
from penstock.core.plugins.registry import GROUPS, Registry
from penstock.core.types import Region, TensorSpec
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.faults import Fault, FaultyBackend

ROWS, COLUMNS = 144, 512
SAME = "one".format  # all ranks are on one host


def tensors(seed=0):
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, COLUMNS, generator=made) for name in "abc"}


def whole(_rank, _count):
    return {name: torch.zeros(ROWS, COLUMNS) for name in "abc"}


def rows(rank, count):
    share = ROWS // count
    return {
        name: penstock.Shard(torch.zeros(share, COLUMNS), (ROWS, COLUMNS), (rank * share, 0))
        for name in "abc"
    }


def columns(rank, count):
    share = COLUMNS // count
    return {
        name: penstock.Shard(torch.zeros(ROWS, share), (ROWS, COLUMNS), (0, rank * share))
        for name in "abc"
    }


def filled(state, values):
    """The state with the expected values."""
    for name, target in state.items():
        if isinstance(target, penstock.Shard):
            index = tuple(
                slice(o, o + n) for o, n in zip(target.offsets, target.tensor.shape, strict=True)
            )
            target.tensor.copy_(values[name][index])
        else:
            target.copy_(values[name])
    return state


def equals(state, values):
    for name, target in state.items():
        if isinstance(target, penstock.Shard):
            index = tuple(
                slice(o, o + n) for o, n in zip(target.offsets, target.tensor.shape, strict=True)
            )
            if not torch.equal(target.tensor, values[name][index]):
                return False
        elif not torch.equal(target, values[name]):
            return False
    return True


def saved(store, values, cut=None, count=1, step=1, **options):
    if cut is None:
        with Checkpointer(store, **TINY, **options) as ckpt:
            return ckpt.save({n: t.clone() for n, t in values.items()}, step).result(300)
    job = Job(count, store, **options)
    reports = job.save(lambda rank: filled(cut(rank, count), values), step)
    assert not [one for one in reports if isinstance(one, BaseException)]
    return reports[0]


def restored(
    store, values, cut, count, *, host=SAME, on_damage="raise", timeout_s=TIMEOUT_S, **options
):
    """The report of each rank, or its error; compares the restored state."""

    def work(ckpt, rank):
        state = cut(rank, count)
        report = ckpt.restore(state, on_damage=on_damage)
        assert equals(state, values), rank
        return report

    return Job(count, store, host=host, **options).run(work, timeout_s=timeout_s)


def read(reports):
    errors = [one for one in reports if isinstance(one, BaseException)]
    assert not errors, errors
    return sum(report.bytes_read for report in reports)


NEEDED = 3 * ROWS * COLUMNS * 4


def test_replicas_of_one_host_read_each_byte_once():
    store, values = memory(), tensors()
    saved(store, values)
    reports = restored(store, values, whole, 3)
    assert read(reports) == NEEDED
    assert all(report.bytes_read + report.bytes_shared == NEEDED for report in reports)
    assert max(report.bytes_read for report in reports) < 0.5 * NEEDED
    assert read(restored(store, values, whole, 3, read_once_per_host=False)) == 3 * NEEDED


def test_ranks_of_other_hosts_read_separately():
    store, values = memory(), tensors()
    saved(store, values)
    reports = restored(store, values, whole, 4, host=lambda rank: f"node{rank % 2}")
    assert read(reports) == 2 * NEEDED
    assert read(restored(store, values, whole, 2, host="node{}".format)) == 2 * NEEDED


@pytest.mark.parametrize(
    ("cut", "wanted"), [(None, columns), (rows, columns), (columns, rows), (columns, columns)]
)
def test_any_sharding_is_read_once_per_host(cut, wanted):
    store, values = memory(), tensors()
    saved(store, values, cut, 2)
    assert read(restored(store, values, wanted, 4)) <= 1.05 * NEEDED


@pytest.mark.parametrize("once", [True, False])
def test_8_to_6_to_8_ranks_along_the_first_dimension_read_little_more_than_they_need(once):
    values = tensors()
    for before, after in ((8, 6), (6, 8)):
        store = memory()
        saved(store, values, rows, before)
        host = SAME if once else "node{}".format
        assert read(restored(store, values, rows, after, host=host)) <= 1.15 * NEEDED


def test_encoded_frames_are_read_once_and_decoded_once():
    store, values = memory(), tensors()
    rules = [{"match": "**", "codecs": ["floatsplit", "zstd"]}]
    stored = saved(store, values, rules=rules).bytes_stored
    for cut in (whole, columns):
        assert read(restored(store, values, cut, 3 if cut is whole else 4)) <= stored


def test_the_frames_of_a_chain_of_deltas_are_read_once():
    store, values = memory(), tensors()
    with Checkpointer(store, **TINY, rules=[{"match": "**", "codecs": ["delta"]}]) as ckpt:
        for step in (1, 2, 3):
            values["a"][step] += 1
            ckpt.save({n: t.clone() for n, t in values.items()}, step, mode="blocking")
    alone = read(restored(store, values, whole, 1, read_once_per_host=False))
    assert read(restored(store, values, whole, 3)) == alone


def test_chains_too_large_to_lend_are_read_by_each_at_once(monkeypatch):
    monkeypatch.setattr(Loader, "together_bytes", 1000)
    store, values = memory(), tensors()
    with Checkpointer(store, **TINY, rules=[{"match": "**", "codecs": ["delta", "zstd"]}]) as ckpt:
        for step in (1, 2, 3):
            values["a"][step] += 1
            ckpt.save({n: t.clone() for n, t in values.items()}, step, mode="blocking")

    def work(ckpt, rank):
        state = whole(rank, 2)
        report = ckpt.restore(state)
        assert equals(state, values)
        return report.bytes_shared

    assert Job(2, store, host=SAME).run(work, timeout_s=LONG_S) == [0, 0]


def test_restores_leave_no_memory_or_files():
    store, values = memory(), tensors()
    saved(store, values)
    met, counts = threading.Barrier(3), []

    def work(ckpt, rank):
        for _ in range(3):
            ckpt.restore(whole(rank, 3))
            met.wait(300)
            if rank == 0:
                counts.append(Path("/proc/self/maps").read_text().count("penstock-window"))
            met.wait(300)

    gc.collect()
    gc.disable()  # like many a training loop
    try:
        Job(3, store, host=SAME).run(work)
    finally:
        gc.enable()
    assert counts == [0, 0, 0]


def test_load_reads_once_per_host_too():
    store, values = memory(), tensors()
    saved(store, values)
    recorded = []

    job = Job(2, store, host=SAME, on_event=recorded.append)
    assert job.run(lambda ckpt, _: equals(ckpt.load(), values)) == [True, True]
    reports = [event.report for event in recorded if event.kind == "load_done"]
    assert sum(report.bytes_read for report in reports) == NEEDED


def test_two_jobs_on_one_host_do_not_interfere():
    stores, values = [memory(), memory()], [tensors(1), tensors(2)]
    for store, value in zip(stores, values, strict=True):
        saved(store, value)
    jobs = [Job(2, store, host=SAME) for store in stores]
    found = [[None, None], [None, None]]

    def work(ckpt, rank, number):
        state = whole(rank, 2)
        report = ckpt.restore(state)
        assert equals(state, values[number])
        found[number][rank] = report

    both = Job(4, None, host=SAME)

    def one(_, rank):
        number, member = divmod(rank, 2)
        with jobs[number].checkpointer(member) as ckpt:
            work(ckpt, member, number)

    both.checkpointer = lambda rank: jobs[rank // 2].checkpointer(rank % 2)
    both.run(lambda ckpt, rank: work(ckpt, rank % 2, rank // 2))
    for reports in found:
        assert read(reports) == NEEDED


def damage(store):
    """Flip a bit in the middle of every blob."""
    for name, blob in store._store.blobs.items():
        if name.endswith(".raw"):
            blob.data[len(blob.data) // 2] ^= 1


def test_damage_read_by_one_rank_for_all_fails_all_by_name():
    store, values = memory(), tensors()
    saved(store, values)
    damage(store)
    found = restored(store, values, whole, 3)
    assert all(isinstance(one, (DamagedError, RankError)) for one in found)
    damaged = [one for one in found if isinstance(one, DamagedError)]
    assert damaged
    name = damaged[0].damaged[0]
    assert all(name in str(one) for one in found)


class Reticent(MemoryCoordination):
    """Reports no damage before the other ranks have their data."""

    def __init__(self, board, until):
        super().__init__(board)
        self._until = until

    def post(self, key, value, /):
        self._hold(value)
        super().post(key, value)

    def decide(self, key, value, /):
        self._hold(value)
        return super().decide(key, value)

    def _hold(self, value):
        deadline = Deadline(PATIENCE_S)
        while b"damaged" in value and not self._until() and not deadline.is_over():
            time.sleep(0.01)


def test_ranks_check_damage_found_by_another_themselves():
    store, bad, values = memory(), memory(), tensors()
    saved(store, values)
    for name, blob in store._store.blobs.items():
        data = bad._store.blobs[name] = replace(blob, data=bytearray(blob.data))
        if name.endswith(".raw"):  # all of it: the frames that rank 0 reads for all are not fixed
            data.data[::64] = bytes(byte ^ 1 for byte in data.data[::64])
    states = {rank: whole(rank, 3) for rank in range(3)}
    job = Job(3, lambda rank: bad if rank == 0 else store, host=SAME)
    restored = lambda: [equals(states[rank], values) for rank in (1, 2)]  # noqa: E731
    rank_0 = Reticent(job.board, lambda: all(restored()))
    group = job.group
    job.group = lambda rank: group(rank, coordination=None if rank else rank_0)
    found = job.run(lambda ckpt, rank: ckpt.restore(states[rank]))
    assert [type(one) for one in found] == [DamagedError, RankError, RankError]
    assert restored() == [True, True]


def test_damage_read_by_one_rank_for_all_makes_all_fall_back():
    store, old = memory(), tensors(1)
    saved(store, old, step=1)
    before = set(store._store.blobs)
    saved(store, tensors(2), step=2)
    for name in set(store._store.blobs) - before:
        if name.endswith(".raw"):
            data = store._store.blobs[name].data
            data[len(data) // 2] ^= 1
    reports = restored(store, old, whole, 3, on_damage="fallback")
    assert [(report.step, report.fell_back_from) for report in reports] == [(1, (2,))] * 3
    assert read(reports) == NEEDED


def test_a_rank_with_a_failed_store_ends_all_restores_by_name():
    store, values = memory(), tensors()
    saved(store, values)

    def seen(rank):
        fault = Fault("read", match=".raw", error=StorageError("the cable is cut"), times=None)
        return FaultyBackend(store, *[fault] * (rank == 1))

    began_s = time.monotonic()
    found = restored(seen, values, whole, 3)
    assert all("the cable is cut" in str(one) for one in found)
    assert [type(one) for one in found if isinstance(one, RankError)] == [RankError] * 2
    print(f"known after {time.monotonic() - began_s:.2f} s")


@pytest.mark.parametrize("call", ["memfd_create", "eventfd"])
@pytest.mark.parametrize("short", [0, 2])
def test_a_rank_without_shared_memory_never_blocks_others(call, short, monkeypatch, caplog):
    """It posts this where the others look: or they would wait for it as for a dead rank."""
    store, values = memory(), tensors()
    saved(store, values)
    without, tried = [], []
    real = getattr(os, call)

    def refused(*arguments, **options):
        if threading.get_ident() in without:
            tried.append(call)
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, refused)

    def work(ckpt, rank):
        if rank == short:
            without.append(threading.get_ident())
        found = []
        for _ in range(2):
            state = whole(rank, 3)
            found.append(ckpt.restore(state))
            assert equals(state, values)
        return found

    reports = Job(3, store, host=SAME).run(work, timeout_s=LONG_S)
    assert read([pair[1] for pair in reports]) == 3 * NEEDED
    assert tried == [call]
    recorded = [
        r.getMessage() for r in caplog.records if "so each of them reads alone" in r.getMessage()
    ]
    assert f"rank {short} cannot read together" in recorded[0]
    assert "Too many open files" in recorded[0]


def test_an_unfitting_rank_ends_the_restore_of_all_at_once():
    store, values = memory(), tensors()
    saved(store, values)

    def work(ckpt, rank):
        return ckpt.restore({"a": torch.zeros(3)} if rank == 2 else whole(rank, 3))

    found = Job(3, store, host=SAME).run(work)
    assert all(isinstance(one, PenstockError) for one in found)
    assert [one.rank for one in found[:2]] == [2, 2]


class Brittle:
    """A tensor that cannot be filled; `failed` is set on the attempt."""

    def __init__(self):
        self.failed = threading.Event()


class BrittleSink(ByteSink):
    address = memory = None
    device = "cpu"
    nbytes = ROWS * COLUMNS * 4

    def __init__(self, failed):
        self._failed = failed

    def view(self):
        return None

    def copy_in(self, start, data, /):
        self._failed.set()
        raise ZeroDivisionError


class BrittleProvider(StateProvider):
    api_version = 1
    name = "brittle"
    forms = ()

    def claims(self, kind, /):
        return 50 if kind is Brittle else None

    def describe(self, value, path, /, *, context):
        raise NotImplementedError

    def place(self, value, path, /, *, context):
        spec = TensorSpec("float32", 4, (ROWS, COLUMNS))
        regions = (Region.whole(spec.shape),)
        return Placement([Target(path, spec, regions, BrittleSink(value.failed))])

    def rebuild(self, stored, /, *, device, context):
        raise NotImplementedError


class Late(DelegatingBackend):
    """Reads no blob before an event; counts the batches."""

    def __init__(self, inner, event):
        super().__init__(inner)
        self.event, self.batches = event, 0

    def read(self, requests, /):
        if any(request.name.endswith(".raw") for request in requests):
            assert self.event.wait(300)
            self.batches += 1
        super().read(requests)

    def submit_read(self, requests, /):
        self.read(requests)
        return super().submit_read([])


def test_a_failed_target_read_by_another_rank_ends_the_restore_at_once():
    store = memory()
    parts = {f"p{number}": torch.zeros(1 << 18) for number in range(24)}
    with Checkpointer(store, chunk_bytes=4096, block_bytes=4096) as ckpt:
        ckpt.save({**tensors(), **parts}, 1, mode="blocking")
    brittle = Brittle()
    late = Late(store, brittle.failed)
    installed = [e for group in GROUPS.values() for e in entry_points(group=group)]
    entry = EntryPoint("brittle", f"{__name__}:BrittleProvider", GROUPS["provider"])

    def work(ckpt, rank):
        own = {"a": brittle, **parts} if rank else {"a": torch.zeros(ROWS, COLUMNS)}
        return ckpt.restore(own)

    job = Job(2, lambda rank: late if rank else store, SAME, registry=Registry([*installed, entry]))
    found = job.run(work)
    assert "ZeroDivisionError" in str(found[1])
    assert isinstance(found[0], RankError)
    assert late.batches <= 12  # of 24, with this rank's own parts


def test_chunks_beyond_the_window_are_read_by_each():
    store = memory()
    large = {"a": torch.arange(20 << 20, dtype=torch.uint8)}
    with Checkpointer(store, chunk_bytes=64 << 20) as ckpt:
        ckpt.save({"a": large["a"].clone()}, 1, mode="blocking")

    def work(ckpt, rank):
        state = {"a": torch.zeros(20 << 20, dtype=torch.uint8)}
        report = ckpt.restore(state)
        assert torch.equal(state["a"], large["a"])
        return report

    # Four windows of a host have 32 MiB each, for two chunks.
    assert read(Job(4, store, host=SAME).run(work)) == 4 * (20 << 20)


def test_every_target_matches_the_save_with_a_window_below_the_state():
    store = memory()
    large = {"a": torch.empty(75 << 20, dtype=torch.int16).random_()}
    with Checkpointer(store, chunk_bytes=8 << 20) as ckpt:
        ckpt.save(large, 1, mode="blocking")

    def work(ckpt, rank):
        state = {"a": torch.zeros_like(large["a"])}
        report = ckpt.restore(state)
        assert torch.equal(state["a"], large["a"])
        return report

    assert read(Job(2, store, host=SAME).run(work)) == 150 << 20

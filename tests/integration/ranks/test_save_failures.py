"""A failure on one rank ends the save on all, by name, and leaves no data."""

import gc
import importlib.metadata
import re
import threading
import time
import weakref
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.integration.ranks.saving import SHORT_TIMEOUT_S, TIMEOUT_S, Job
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Split

from penstock import Checkpointer, Shard
from penstock.codecs.zstd import ZstdCodec
from penstock.core.abc.delegating import DelegatingBackend
from penstock.core.errors import (
    PenstockError,
    RankError,
    SaveError,
    SaveSkippedError,
    StepExistsError,
    StorageError,
    StorageFullError,
    TornSnapshotError,
    UnsupportedStateError,
)
from penstock.core.plugins.registry import GROUPS, Registry
from penstock.core.rounds.posts import go_key
from penstock.providers.tensor import TensorProvider
from penstock.providers.tensor.sources import TensorSource
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.faults import Fault, FaultyBackend

WEIGHT = torch.arange(60_000.0)


def state_of(rank):
    del rank
    return {"weight": WEIGHT, "epoch": 7, "options": {"lr": 0.1}}


def names(store):
    return [blob.name for blob in store.list("data/")]


def kinds_of(errors):
    return [(type(error), getattr(error, "rank", None)) for error in errors]


@pytest.fixture
def job():
    store = memory()
    job = Job(3, store)
    job.store = store
    assert [report.step for report in job.save(state_of)] == [1, 1, 1]
    job.before = names(store)
    return Job(3, store), store, job.before


def assert_unchanged(store, before):
    assert names(store) == before
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]
        assert torch.equal(ckpt.load()["weight"], WEIGHT)


def test_ranks_with_taken_numbers_fail(job):
    """Two jobs over one job store: the second finds its rounds decided."""
    job, store, _ = job
    assert [report.step for report in job.save(state_of, 2)] == [2, 2, 2]
    for error in job.save(state_of, 3):
        assert isinstance(error, SaveError)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1, 2]


def test_values_that_differ_fail_the_save_and_name_path_and_ranks(job):
    job, store, before = job
    errors = job.save(lambda rank: {**state_of(rank), "epoch": 7 + (rank == 1)}, 2)
    assert kinds_of(errors) == [(SaveError, None), (RankError, 0), (RankError, 0)]
    for error in errors:
        assert "epoch is not equal on ranks 0, 2 and rank 1" in str(error)
        assert "penstock.Shard" not in str(error)
    assert str(errors[1]).endswith("Step 1 stays the latest.")
    assert_unchanged(store, before)


@pytest.mark.parametrize(
    ("one", "other"), [({"a": 1, "b": 2}, {"b": 2, "a": 1}), (1, True), (0.0, -0.0)], ids=repr
)
def test_refusal_of_equal_values_says_what_else_must_be_equal(one, other):
    assert one == other
    errors = Job(2, memory()).save(lambda rank: {"v": other if rank else one})
    for error in errors:
        assert (
            "v is not equal on rank 0 and rank 1: make it equal on all ranks, in types and in"
            in (str(error))
        )


def test_all_values_that_differ_are_counted_and_the_first_are_named(job):
    job, store, before = job
    errors = job.save(lambda rank: {**state_of(0), **{f"v{n}": rank for n in range(5)}}, 2)
    for error in errors:
        for name in ("v0", "v1", "v2"):
            assert f"{name} is not equal on rank 0 and rank 1" in str(error)
        assert "; and 2 more: make" in str(error)
        assert "...." not in str(error)
    assert_unchanged(store, before)


def test_a_value_absent_on_one_rank_is_no_difference(job):
    job, store, _ = job
    reports = job.save(lambda rank: state_of(rank) | ({"mine": 5} if rank == 2 else {}), 2)
    assert [report.step for report in reports] == [2, 2, 2]
    with checkpointer(store) as ckpt:
        tree = ckpt.load(2)
        assert (tree["mine"], tree["epoch"]) == (5, 7)
        assert torch.equal(tree["weight"], WEIGHT)
        assert ckpt.verify(2).ok


def test_ranks_called_with_other_steps_fail(job):
    job, store, before = job
    errors = job.run(lambda ckpt, rank: ckpt.save(state_of(rank), 2 + (rank == 2)).result(300))
    assert kinds_of(errors)[:2] == [(RankError, 2), (RankError, 2)]
    assert "was called to save step 3 while rank 0 saves step 2" in str(errors[0])
    assert isinstance(errors[2], SaveError)
    assert_unchanged(store, before)


class Full(DelegatingBackend):
    """A store without room for blobs."""

    def create(self, name, /, *, size_hint=0):
        msg = f"{name}: No space left on device"
        raise StorageError(msg)


def test_a_rank_that_cannot_write_ends_the_save_on_all_at_once(job, caplog):
    _, store, before = job
    big = {"weight": torch.ones(40_000), "epoch": 7}

    def shard_of(rank):
        half = Shard(big["weight"], (120_000,), (40_000 * rank,))
        return {"weight": half, "epoch": 7}

    job = Job(3, lambda rank: Full(store) if rank == 2 else store)
    began = time.monotonic()
    errors = job.save(shard_of, 2)
    assert time.monotonic() - began < TIMEOUT_S
    assert kinds_of(errors) == [(RankError, 2), (RankError, 2), (StorageError, None)]
    assert "rank 2 on node2" in str(errors[0])
    assert "No space left" in str(errors[0])
    logged = [r.getMessage().partition("failed: ")[2] for r in caplog.records]
    short = "rank 2 is the cause; see the log of rank 0"
    assert sorted(logged) == sorted([str(errors[0]), short, str(errors[2])])
    assert_unchanged(store, before)


def test_data_of_no_rank_fails_the_save_by_name(job, caplog):
    job, store, before = job
    caplog.clear()
    errors = job.save(lambda rank: {"w": Shard(torch.ones(4, 3), (12, 3), (4 * (rank % 2), 0))}, 2)
    assert kinds_of(errors) == [(SaveError, None), (RankError, 0), (RankError, 0)]
    assert "w, of shape [12, 3]: no shard has elements [8:12, 0:3]" in str(errors[0])
    logged = [r.getMessage().partition("failed: ")[2] for r in caplog.records]
    short = "rank 0 is the cause; see the log of rank 0"
    assert sorted(logged) == sorted([str(errors[0]), short, short])
    assert_unchanged(store, before)


def test_a_root_not_shared_by_hosts_is_found():
    stores = [memory(), memory()]
    job = Job(2, lambda rank: stores[rank])
    errors = job.save(lambda rank: {"w": Shard(torch.ones(4, 3), (8, 3), (4 * rank, 0))})
    assert "this rank does not see on memory:" in str(errors[0])
    assert "is the folder shared by all hosts?" in str(errors[1])
    assert [names(store) for store in stores] == [[], []]


def test_an_unshared_root_is_found_if_only_rank_0_writes():
    stores = [memory(), memory()]
    errors = Job(2, lambda rank: stores[rank]).save(lambda _: {"epoch": 1})
    for error in errors:
        assert "is the folder shared by all hosts?" in str(error)
    assert [names(store) for store in stores] == [[], []]


@pytest.mark.parametrize("use", ["save", "restore", "load"])
def test_two_checkpointers_first_used_in_another_order_fail_by_name(use):
    """The meeting names of ranks follow that order: then two roots meet."""
    stores = memory(), memory()
    for number, store in enumerate(stores):
        with checkpointer(store) as ckpt:
            ckpt.save({"w": torch.full((3,), float(number))}, 1, mode="blocking")
    before = [names(store) for store in stores]
    crossed = [Job(2, lambda rank, n=n: stores[rank ^ n]) for n in range(2)]

    def work(ckpt, rank):
        del rank
        state = {"w": torch.full((3,), 7.0)}
        if use == "save":
            return ckpt.save(state, 2).result(300)
        return ckpt.restore(state) if use == "restore" else ckpt.load()

    for job in crossed:
        errors = job.run(work)
        assert all(isinstance(error, PenstockError) for error in errors), errors
        assert any("the first time in the same order on all ranks" in str(e) for e in errors)
    assert [names(store) for store in stores] == before


def test_state_undescribable_on_one_rank_fails_all_at_once(job):
    """Before that rank closes its checkpointer, and before its time is over."""
    job, store, before = job
    all_know = threading.Barrier(3)

    def work(ckpt, rank):
        try:
            ckpt.save(state_of(rank) | ({"bad": object()} if rank == 1 else {}), 2).result(300)
        finally:
            all_know.wait(300)

    errors = job.run(work)
    assert kinds_of(errors) == [(RankError, 1), (UnsupportedStateError, None), (RankError, 1)]
    for error in errors[0], errors[2]:
        assert error.cause.startswith("failed with UnsupportedStateError: bad ")
    assert_unchanged(store, before)


def test_a_step_that_exists_is_refused_on_all(job):
    job, store, before = job
    errors = job.save(state_of, 1)
    assert kinds_of(errors) == [(StepExistsError, None)] * 3
    assert str(errors[1]) == str(errors[2]) == f"{str(errors[0]).rstrip('.')}."
    assert_unchanged(store, before)
    reports = Job(3, store).save(state_of, 1, overwrite=True)
    assert [report.generation for report in reports] == [2, 2, 2]


def test_a_job_keeps_saving_after_a_failed_save():
    store = memory()
    job = Job(2, store)

    def work(ckpt, rank):
        with pytest.raises((RankError, SaveError)):
            ckpt.save({"epoch": rank}, 1).result(300)
        return ckpt.save({"epoch": 1}, 2).result(300).step

    assert job.run(work) == [2, 2]
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [2]


def test_an_absent_rank_is_named_and_no_longer_awaited():
    store = memory()
    job = Job(2, store)
    error = None
    with job.checkpointer(0, timeout_s=1.0) as ckpt:  # short: there is no other rank
        handle = ckpt.save(state_of(0), 1)
        with pytest.raises(
            RankError, match="not begun to save for 1 s: all ranks must make the same calls of save"
        ) as info:
            handle.result(300)
        error = info.value
        assert ckpt._ranks.of_save().lost == {1}
    assert error.rank == 1
    assert names(store) == []


def test_ranks_wait_while_rank_0_makes_room():
    store = memory()
    for step in (1, 2):
        Job(2, store).save(state_of, step)
    slow = FaultyBackend(store)
    slow.add(Fault("delete", match="commits/", seconds=1.5 * SHORT_TIMEOUT_S))
    options = {"retention": {"keep_last": 1}, "timeout_s": SHORT_TIMEOUT_S}
    job = Job(2, lambda rank: store if rank else slow, **options)
    assert [report.step for report in job.save(state_of, 3)] == [3, 3]
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [3]


class Compiled(ZstdCodec):
    """Slow work before the first chunk: on every rank at once."""

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "compiled"

    def load(self):
        time.sleep(1.5 * SHORT_TIMEOUT_S)


def test_ranks_wait_for_codec_compilation():
    registry = Registry()
    registry.register(Compiled)
    store = memory()
    rules = [{"match": "**", "codecs": ["compiled"]}]
    limits = {"timeout_s": SHORT_TIMEOUT_S, "io_timeout_s": SHORT_TIMEOUT_S}
    job = Job(2, store, registry=registry, rules=rules, **limits)
    assert [report.step for report in job.save(state_of, 1)] == [1, 1]
    with checkpointer(store, registry=registry) as ckpt:
        assert ckpt.verify(1, deep=True).ok


class FullAndSlow(DelegatingBackend):
    """A store without room that then lists its contents slowly."""

    is_full = False

    def create(self, name, /, *, size_hint=0):
        self.is_full = True
        msg = f"{name}: No space left on device"
        raise StorageFullError(msg)

    def list(self, prefix, /):
        full, self.is_full = self.is_full, False
        time.sleep(1.5 * SHORT_TIMEOUT_S * full)
        return super().list(prefix)


def test_rank_0_reports_a_lack_of_room_before_making_some():
    store = memory()
    job = Job(2, lambda r: store if r else FullAndSlow(store), timeout_s=SHORT_TIMEOUT_S)
    errors = job.save(state_of)
    assert kinds_of(errors) == [(StorageFullError, None), (RankError, 0)]
    assert "No space left on device" in errors[1].cause


class Broken(MemoryCoordination):
    """Fails reads once others have joined, with an error outside the contract."""

    def read(self, keys, /):
        if go_key(0) in keys and self._board.read([go_key(0)])[0] is not None:
            raise ZeroDivisionError("a bug")
        return super().read(keys)


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_bug_in_the_coordination_of_one_rank_ends_the_save_on_all(mode):
    store = memory()
    job = Job(2, store)
    errors = [None, None]

    def one(rank):
        member = Broken(job.board) if rank else None
        with job.checkpointer(rank, coordination=member) as ckpt:
            try:
                ckpt.save(state_of(rank), 1, mode=mode).result(300)
            except Exception as error:  # noqa: BLE001 - checked below
                errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert kinds_of(errors) == [(RankError, 1), (SaveError, None)]
    assert "a bug" in str(errors[1])
    assert names(store) == []


class Slow(DelegatingBackend):
    """A store whose first blob waits until the test releases it."""

    gate = threading.Event()

    def create(self, name, /, *, size_hint=0):
        self.gate.wait(300)
        return super().create(name, size_hint=size_hint)


def test_a_skip_of_rank_0_is_skipped_by_all():
    store = memory()
    Slow.gate.clear()
    job = Job(2, lambda rank: store if rank else Slow(store), on_busy="skip")

    def work(ckpt, rank):
        first = ckpt.save(state_of(rank), 1)
        second = ckpt.save(state_of(rank), 2)
        if rank == 0:
            Slow.gate.set()
        with pytest.raises(SaveSkippedError):
            second.result(300)
        return first.result(300).step, second.skipped, ckpt.save(state_of(rank), 3).result(300).step

    assert job.run(work) == [(1, True, 3), (1, True, 3)]


def test_a_rank_that_alone_is_busy_joins_once_idle():
    """Rank 0 cannot know whether the next step is skipped before all others have joined."""
    job = Job(2, memory(), on_busy="skip")

    def work(ckpt, rank):
        first = ckpt.save(state_of(rank), 1)
        done = threading.Event()
        if rank:
            first.committed.add_done_callback(lambda _: done.wait(0.5))
            first.committed.wait(300)
        else:
            ckpt.wait(300)
        began = time.monotonic()
        report = ckpt.save(state_of(rank), 2).result(300)
        return report.step, time.monotonic() - began < TIMEOUT_S / 2

    assert job.run(work) == [(2, True), (2, True)]


def test_one_process_refuses_a_piece_of_a_tensor():
    with Checkpointer(memory()) as ckpt, pytest.raises(UnsupportedStateError, match="is a piece"):
        ckpt.save({"w": Shard(torch.ones(4, 3), (8, 3), (0, 0))}, 1)


def test_a_tensor_that_changes_before_the_fence_on_one_rank_ends_the_save_on_all(job):
    _, store, before = job
    Slow.gate.clear()
    job = Job(3, lambda rank: Slow(store) if rank == 1 else store, defer="w")

    def work(ckpt, rank):
        mine = torch.ones(40_000)
        handle = ckpt.save({"w": Shard(mine, (120_000,), (40_000 * rank,))}, 2, mode="lazy")
        if rank == 1:
            while not handle.captured.done():  # not by a wait, which would be a fence
                time.sleep(0.01)
            mine.add_(1)
            Slow.gate.set()
        return handle.result(300)

    errors = job.run(work)
    assert kinds_of(errors) == [(RankError, 1), (TornSnapshotError, None), (RankError, 1)]
    assert_unchanged(store, before)


def test_survivors_delete_their_data_at_once():
    store = memory()
    job = Job(3, lambda rank: Full(store) if rank == 2 else store)
    errors = job.save(lambda rank: {"w": Shard(torch.ones(40_000), (120_000,), (40_000 * rank,))})
    assert [type(error) for error in errors] == [RankError, RankError, StorageError]
    assert store.list("") == []


class FullAtLast(Full):
    """A store of rank 2 without room once the blobs of two other ranks exist."""

    def create(self, name, /, *, size_hint=0):
        while sum("/blobs/" in other for other in names(self)) < 2:
            time.sleep(0.01)
        return super().create(name, size_hint=size_hint)


class Listening(DelegatingBackend):
    """A store that notes deletions, and where rank 2 deletes first."""

    deleted: ClassVar[dict[int, set[str]]] = {}
    gate = threading.Event()

    def __init__(self, inner, rank):
        super().__init__(inner)
        self.rank = rank

    def delete(self, names, /):
        self.deleted.setdefault(self.rank, set()).update(n.partition("/blobs/")[2] for n in names)
        if self.rank != 2:
            self.gate.wait(300)
        super().delete(names)
        self.gate.set()


def test_a_rank_deletes_only_its_own_writes():
    store = memory()
    Listening.deleted.clear()
    Listening.gate.clear()
    job = Job(3, lambda rank: Listening(FullAtLast(store) if rank == 2 else store, rank))
    job.save(lambda rank: {"w": Shard(torch.ones(40_000), (120_000,), (40_000 * rank,))})
    for rank, deleted in Listening.deleted.items():
        assert {name for name in deleted if name} <= {f"0000{rank}-0.raw", f"0000{rank}-0.enc"}
    assert Listening.deleted.keys() == {0, 1, 2}


@pytest.mark.parametrize("where", [0, 59_999])
def test_a_plain_tensor_drifted_on_one_rank_fails_the_save_by_name(job, where):
    """Ranks share its bytes: the checkpoint would hold a mixture."""
    job, store, before = job

    def drifted(rank):
        weight = WEIGHT.clone()
        weight[where] += rank == 2
        return {**state_of(rank), "weight": weight}

    for error in job.save(drifted, 2):
        assert isinstance(error, SaveError | RankError)
        assert "weight is not equal on ranks 0-1 and rank 2" in str(error)
        assert "if each rank has a piece of one tensor, use penstock.Shard" in str(error)
    assert_unchanged(store, before)


class OffHostSource(TensorSource):
    """A tensor as on a device: its bytes cannot be read in place, only requested."""

    __slots__ = ()

    def __init__(self, tensor):
        super().__init__(tensor)
        self.address = None


class OffHost(TensorProvider):
    api_version = 1
    name = "off-host"

    def _source(self, tensor, context):
        return OffHostSource(tensor)


def registry_off_host():
    """A registry whose tensors are not in host memory, as far as core knows."""
    groups = {name: importlib.metadata.entry_points(group=name) for name in GROUPS.values()}
    installed = [e for name, found in groups.items() for e in found if e.name != "tensor"]
    return Registry([*installed, EntryPoint("off-host", f"{__name__}:OffHost", GROUPS["provider"])])


@pytest.mark.parametrize(("what", "where"), [("device", 0), ("strided", 59_999)])
def test_drifted_non_contiguous_host_memory_fails_the_save_by_name(what, where):
    store = memory()
    options = {"registry": registry_off_host()} if what == "device" else {}
    job = Job(3, store, **options)

    def state(rank):
        weight = WEIGHT.clone()
        weight[where] += rank == 2
        weight = weight.view(300, 200)
        if what == "strided":  # the same values in a memory order that is not row-major
            weight = weight.t().contiguous().t()
        pieces = by_hand(0, (rank, 3))
        return {"weight": weight, "norm": pieces, "epoch": 7}

    for error in job.save(state):
        assert isinstance(error, SaveError | RankError)
        assert "weight is not equal on ranks 0-1 and rank 2" in str(error)
    assert names(store) == []


def test_drifted_replicas_off_the_host_fail_the_save_by_name():
    store = memory()
    job = Job(3, store, registry=registry_off_host())
    for error in job.save(lambda rank: {"norm": by_hand(rank, (rank, 3)), "epoch": 7}):
        assert DRIFTED in str(error)
    assert names(store) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_finished_save_holds_none_of_the_state(fails):
    def work(ckpt, rank):
        array = np.zeros(100_000)
        gone = weakref.ref(array)
        handle = ckpt.save({"array": array, "epoch": 7 + (rank if fails else 0)}, 1)
        with pytest.raises(PenstockError) if fails else nullcontext():
            handle.result(300)
        ckpt.wait()
        del array
        gc.collect()
        return handle, gone()

    assert [alive for _, alive in Job(2, memory()).run(work)] == [None, None]


class Normed(torch.nn.Module):
    """Each rank computes its buffers from its own data."""

    def __init__(self, rank):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(40_000))
        for name in ("mean", "var", "count"):
            self.register_buffer(name, torch.full((30_000,), float(rank)))


def test_buffers_that_differ_come_from_one_rank():
    store = memory()
    reports = Job(3, store, writer_bytes=4096).save(lambda rank: {"model": Normed(rank)})
    assert [report.step for report in reports] == [1, 1, 1]
    with checkpointer(store) as ckpt:
        model = ckpt.load()["model"]
    assert all((model[name] == 0).all() for name in ("mean", "var", "count"))
    assert (model["weight"] == 1).all()


class ShardedNorm(torch.nn.Module):
    """Statistics that each of two replicas computes from its own data, in pieces of a mesh."""

    def __init__(self, rank, mesh):
        super().__init__()
        for name in ("mean", "var"):
            local = torch.full((15_000,), float(rank))
            parts = DTensor.from_local(local, mesh, [Replicate(), Split(0)], run_check=False)
            self.register_buffer(name, parts)


def test_sharded_buffers_that_differ_come_from_one_of_the_ranks_that_hold_the_same():
    store = memory()
    job = Job(4, store, writer_bytes=4096)

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        with job.checkpointer(rank) as ckpt:
            return ckpt.save({"model": ShardedNorm(rank, mesh)}, 1).result(300).step

    assert run_ranks(4, work) == [1] * 4
    with checkpointer(store) as ckpt:
        model = ckpt.load()["model"]
    expected = torch.cat([torch.zeros(15_000), torch.ones(15_000)])  # of ranks 0 and 1
    assert all(torch.equal(model[name], expected) for name in ("mean", "var"))


DTYPES = torch.float32, torch.bfloat16, torch.float32
UNLIKE = {
    "dtype": (
        lambda r: Shard(torch.zeros(4, 3, dtype=DTYPES[r]), (12, 3), (4 * r, 0)),
        r"a float32 tensor of shape \[12, 3\] on rank 0, and a bfloat16 .* 3\] on rank 1",
    ),
    "shape": (
        lambda r: Shard(torch.zeros(4, 3), (12 + (r == 2), 3), (4 * r, 0)),
        r".* of shape \[12, 3\] on rank 1, and .* of shape \[13, 3\] on rank 2",
    ),
    "kind": (
        lambda r: 3 if r == 2 else Shard(torch.zeros(6, 3), (12, 3), (6 * r, 0)),
        "a float32 tensor .* on rank 1, and a value on rank 2",
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_describe_one_object_differently_fail_the_save_by_name(job, what):
    job, store, before = job
    of_rank, message = UNLIKE[what]
    errors = job.save(lambda rank: {**state_of(rank), "rows": of_rank(rank)}, 2)
    assert re.search(f"rows is {message}", str(errors[0])), errors[0]
    assert_unchanged(store, before)


DRIFTED = "norm from [0, 0], of shape [4, 3] is not equal on ranks 0-1 and rank 2"


def by_hand(rank, replica):
    return Shard(torch.full((4, 3), 1.0 + (rank == 2)), (4, 3), (0, 0), replica=replica)


def on_a_mesh(rank):
    mesh = init_device_mesh("cpu", (3,))
    local = torch.full((4, 3), 1.0 + (rank == 2))
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize("declared", [True, False])
def test_drifted_manual_pieces_fail_the_save_by_name(job, declared):
    job, store, before = job

    def drifted(rank):
        return by_hand(rank, (rank, 3) if declared else (0, 1))

    errors = job.save(lambda rank: {**state_of(rank), "norm": drifted(rank)}, 2)
    assert kinds_of(errors) == [(SaveError, None), (RankError, 0), (RankError, 0)]
    for error in errors:
        assert "norm from [0, 0], of shape [4, 3] is not equal on ranks 0-1 and rank 2" in str(
            error
        )
    assert_unchanged(store, before)


def test_drifted_replicas_are_named_and_others_are_not():
    """Two ranks hold equal first rows of a tensor, two others the equal rest."""
    store = memory()

    def state(rank):
        part, replica = divmod(rank, 2)
        mine = torch.full((6, 64), 2.0 if rank == 1 else 1.0)
        return {"w": Shard(mine, (12, 64), (6 * part, 0), replica=(replica, 2)), "epoch": 1}

    for error in Job(4, store).save(state):
        assert "w from [0, 0], of shape [6, 64] is not equal on rank 0 and rank 1" in str(error)
    assert names(store) == []


def test_drifted_replicas_of_a_dtensor_fail_the_save_by_name(job):
    job, store, before = job

    def work(rank):
        with job.checkpointer(rank) as ckpt, pytest.raises((SaveError, RankError)) as caught:
            ckpt.save({**state_of(rank), "norm": on_a_mesh(rank)}, 2).result(300)
        return str(caught.value)

    for error in run_ranks(3, work):
        assert DRIFTED in error
    assert_unchanged(store, before)


def test_one_drifted_replica_among_other_ranks_is_named(job):
    job, store, before = job

    def pieces(rank):  # rows 0 to 3 on rank 0 alone, the others on ranks 1 and 2
        if rank == 0:
            return Shard(torch.zeros(4, 3), (8, 3), (0, 0))
        return Shard(torch.full((4, 3), float(rank)), (8, 3), (4, 0), replica=(rank - 1, 2))

    errors = job.save(lambda rank: {**state_of(rank), "w": pieces(rank)}, 2)
    assert "w from [4, 0], of shape [4, 3] is not equal on rank 1 and rank 2" in str(errors[0])
    assert_unchanged(store, before)

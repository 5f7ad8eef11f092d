"""A copied checkpoint is identical byte for byte, or absent; and copied data stays."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from tests.effort import every
from tests.integration.support import ENCODED, checkpointer, holding, make_state, memory, same

from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.confirmation import confirmed
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.lease import SILENT_S
from penstock.core.copy.mover import (
    BlobMover,
    BlobTransfer,
    Callbacks,
    CheckedBlob,
)
from penstock.core.errors import (
    BusyError,
    CheckpointGoneError,
    CommitUnknownError,
    DamagedError,
    SaveAbortedError,
    StepExistsError,
    StorageError,
    UnsyncedError,
)
from penstock.core.format.commit_record import encode_commit, seal, unseal
from penstock.core.format.records import (
    commit_name,
    data_prefix,
    intent_name,
    lease_name,
)
from penstock.testing.faults import (
    EFFECTS,
    CrashAt,
    FaultyBackend,
    SimulatedCrashError,
    WrapperBackend,
)

STEP = 7
SMALL = 8 * 4096  # buffers of one page each: hundreds of pieces


@pytest.fixture(scope="module")
def workers():
    with closing(Workers(2)) as threads:
        yield threads


@pytest.fixture(scope="module")
def saved():
    """A store with one checkpoint of a raw and an encoded blob, which no test changes."""
    backend = memory()
    save(backend, STEP, seed=3)
    return backend


@pytest.fixture
def unshared():
    """The same, for only one test."""
    backend = memory()
    save(backend, STEP, seed=3)
    return backend


def save(backend, step, *, seed, **options):
    with checkpointer(backend, **ENCODED) as ckpt:
        ckpt.save(make_state(seed), step=step, mode="blocking", metadata={"seed": seed}, **options)


def files(folder):
    return PosixBackend(PosixConfig(path=str(folder), direct_io="off"))


def contents(backend):
    """All checkpoint data of a store, without intents, which contain times."""
    return {
        info.name: backend.read_record(info.name, limit_bytes=1 << 30)
        for info in backend.list("")
        if not info.name.endswith("intent.json")
    }


def copy_of(source, target, workers, *, step=STEP, **options):
    options = {"buffer_bytes": SMALL, "grace_s": GRACE_S, **options}
    return CheckpointCopy(source, target, Catalog(source).record(step), workers=workers, **options)


def blobs_of(backend, step=STEP):
    uid = Catalog(backend).record(step).uid
    return [info.name for info in backend.list(f"{data_prefix(uid)}blobs/")]


def rewrite(backend, name, data):
    """Replace the bytes of a blob or record."""
    backend.delete([name])
    backend.publish(name, bytes(data))


def release_lease(backend, uid):
    """The leftovers of a copy that failed before any seal."""
    lease = {"token": "", "host": "node7", "pid": 1, "process": "", "sealed": []}
    backend.publish(lease_name(uid), seal(lease))


def bury(backend, uid):
    """Make the copying process look dead, as after a crash."""
    name = lease_name(uid)
    if name not in {info.name for info in backend.list(name)}:
        return
    lease = unseal(backend.read_record(name, limit_bytes=1 << 20), name)
    lease["process"] = lease["process"].rpartition("-")[0] + "-0"
    backend.publish(name, seal(lease))


@contextmanager
def failing(copy, target, *held, error, text=None, **options):
    """A copy that is held at a call of its target, then fails and commits nothing."""
    with ThreadPoolExecutor(1) as pool:
        with holding(target, *held, **options) as fault:
            running = pool.submit(copy.run)
            assert fault.reached.wait(30)
            yield
        with pytest.raises(error, match=text):
            running.result(30)
    assert Catalog(target).steps() == []


# -- what a copy is -----------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [1, SMALL, 64 << 20])
def test_copy_is_the_same_byte_for_byte(saved, workers, buffer_bytes):
    target, seen = memory(), []
    copy = copy_of(saved, target, workers, buffer_bytes=buffer_bytes)
    report = copy.run(on_progress=seen.append)
    assert contents(target) == contents(saved)
    record = Catalog(saved).record(STEP)
    assert sum(seen) == report.bytes_copied == record.bytes_stored
    assert (report.uid, report.blobs, report.already_there) == (record.uid, 2, False)
    with checkpointer(target) as ckpt:
        assert ckpt.verify(STEP).ok
        assert same(ckpt.load(STEP), make_state(3))


def test_source_is_only_read(saved, workers):
    watched = FaultyBackend(saved)
    copy_of(watched, memory(), workers).run()
    assert not {operation for operation, _ in watched.calls} & set(EFFECTS)


@pytest.mark.parametrize("buffer_bytes", [1, 3 * 4096, SMALL, 1 << 20])
def test_memory_stays_within_the_buffers_and_is_returned(saved, workers, buffer_bytes):
    copy, allocated = None, []

    def look(_):
        allocated.append(copy._mover._staging.allocated_bytes)

    copy = copy_of(saved, memory(), workers, buffer_bytes=buffer_bytes)
    copy.run(on_progress=look)
    assert 0 < max(allocated) <= max(buffer_bytes, 2 * 4096)
    assert copy._mover._staging.allocated_bytes == 0


def test_record_comes_last_and_blobs_before_the_manifest(saved, workers):
    watched = FaultyBackend(memory())
    copy_of(saved, watched, workers).run()
    effects = [(what, names[0]) for what, names in watched.calls if what in {"publish", "seal"}]
    names = [name for what, name in effects if not name.endswith("copy.json")]
    record = Catalog(saved).record(STEP)
    assert names[0] == intent_name(record.uid)
    assert names[-1] == commit_name(STEP, 0)
    last_seal = max(n for n, (what, _) in enumerate(effects) if what == "seal")
    assert all(n > last_seal for n, (_, name) in enumerate(effects) if "/parts/" in name)


def test_existing_copy_is_left_alone(saved, workers):
    target = memory()
    copy_of(saved, target, workers).run()
    before = dict(target._store.blobs)
    report = copy_of(saved, target, workers).run()
    assert report.already_there
    name = commit_name(STEP, 0)
    assert target._store.blobs[name].data == before[name].data  # confirmed, since it is unknown
    assert target._store.blobs | {name: None} == before | {name: None}


def test_copy_that_lost_its_data_at_the_target_is_made_again(saved, workers):
    target = memory()
    copy_of(saved, target, workers).run()
    blob = next(name for name in target._store.blobs if "/blobs/" in name)
    target.delete([blob])
    assert not copy_of(saved, target, workers).run().already_there
    assert blob in target._store.blobs


def test_many_blobs_are_copied_and_few_of_them_sealed_at_once(workers):
    """As several ranks make them."""
    source, target = memory(), FaultyBackend(memory())
    mover_calls = []
    blobs = []
    for number in range(20):
        name = f"data/{'0' * 32}/blobs/{number:05d}-0.raw"
        data = bytes([number]) * (3 * 4096 + number)
        source.publish(name, data)
        sums = np.array([xxhash.xxh3_64_intdigest(data)], np.uint64)
        blobs.append(CheckedBlob(name, len(data), np.array([0]), np.array([len(data)]), sums))

    def fail(*_):
        raise AssertionError

    calls = Callbacks(
        moved=lambda _: None,
        sealed=mover_calls.append,
        damaged=fail,
        missing=fail,
        alive=lambda: None,
    )
    mover = BlobMover(
        workers=workers, buffer_bytes=SMALL, unit_bytes=4096, bytes_per_s=None, calls=calls
    )
    with ThreadPoolExecutor(1) as pool:
        with holding(target, "seal"):
            running = pool.submit(mover.run, [BlobTransfer(b, source, target) for b in blobs])
            while [what for what, _ in target.calls].count("seal") < 4:
                assert not running.done()
            created = [what for what, _ in target.calls].count("create")
        running.result(30)
    assert created <= 8  # four being sealed, and those in flight
    assert sorted(mover_calls) == [blob.name for blob in blobs]
    assert contents(target) == contents(source)


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raw", "enc"])
@pytest.mark.parametrize("where", [0, 3, 6])
def test_damage_in_a_frame_is_named_and_nothing_is_committed(unshared, workers, kind, where):
    (name,) = [n for n in blobs_of(unshared) if n.endswith(kind)]
    blob = next(
        b for b in CopySource(unshared, Catalog(unshared).record(STEP)).read() if b.name == name
    )
    which = where * (len(blob.starts) - 1) // 6
    at = int(blob.starts[which]) + where * (int(blob.lengths[which]) - 1) // 6
    data = bytearray(contents(unshared)[name])
    data[at] ^= 0x10
    rewrite(unshared, name, data)
    with checkpointer(unshared) as ckpt:
        expected = {damage.what for damage in ckpt.verify(STEP).damaged}
    target = memory()
    with pytest.raises(DamagedError, match="was not copied") as caught:
        copy_of(unshared, target, workers).run()
    assert set(caught.value.damaged) == expected
    assert Catalog(target).steps() == []


@pytest.mark.parametrize("place", ["parts/00000.json.zst", "index"])
def test_damage_anywhere_in_the_manifest_is_found(unshared, workers, place):
    name = data_prefix(Catalog(unshared).record(STEP).uid) + place
    whole = contents(unshared)[name]
    for at in {*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1}:
        data = bytearray(whole)
        data[at] ^= 1
        rewrite(unshared, name, data)
        target = memory()
        with pytest.raises(DamagedError) as caught:
            copy_of(unshared, target, workers).run()
        assert name in str(caught.value)
        assert target.list("") == []


def test_source_deleted_meanwhile_is_gone_not_damaged(unshared, workers):
    watched, target = FaultyBackend(unshared), FaultyBackend(memory())
    copy = copy_of(watched, target, workers)
    with failing(copy, target, "create", error=CheckpointGoneError):
        Catalog(unshared).delete(STEP)


# -- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_copy_resumes_after_any_crash(saved, workers, tmp_path, after):
    """Crashes at every change of the target, which never lists a partial checkpoint."""
    uid, whole, crashes, kept = Catalog(saved).record(STEP).uid, contents(saved), 0, 0
    while True:
        with closing(files(tmp_path / str(crashes))) as target:
            crash = CrashAt(target, crashes + 1, after=after, operations=EFFECTS)
            with suppress(SimulatedCrashError):
                copy_of(saved, crash, workers, buffer_bytes=64 << 20).run()
            if not crash.crashed:
                break
            if Catalog(target).steps():
                with checkpointer(target) as ckpt:
                    assert ckpt.verify(STEP).ok
            bury(target, uid)
            kept += copy_of(saved, target, workers).run().bytes_kept > 0
            found = contents(target)
            found.pop(lease_name(uid), None)  # a crash in between leaves it, without a meaning
            assert found == whole
        crashes += every(2)
    assert crashes > 10
    assert kept > 1


def test_sealed_blob_is_read_but_not_copied_again(saved, workers):
    target = FaultyBackend(memory())
    target.fail("publish", match="/parts/")
    with pytest.raises(StorageError):
        copy_of(saved, target, workers).run()
    assert Catalog(target).steps() == []
    created = [names for what, names in target.calls if what == "create"]
    report = copy_of(saved, target, workers).run()
    assert [names for what, names in target.calls if what == "create"] == created
    assert (report.bytes_copied, report.bytes_kept) == (0, Catalog(saved).record(STEP).bytes_stored)
    assert contents(target) == contents(saved)


@pytest.mark.parametrize("kind", ["raw", "enc"])
def test_sealed_blob_damaged_since_is_copied_again(saved, workers, kind):
    target = FaultyBackend(memory())
    target.fail("publish", match="/parts/")
    with pytest.raises(StorageError):
        copy_of(saved, target, workers).run()
    (name,) = [n for n in blobs_of(saved) if n.endswith(kind)]
    data = bytearray(contents(target)[name])
    data[8192] ^= 1
    rewrite(target.inner, name, data)
    report = copy_of(saved, target, workers).run()
    assert report.bytes_copied == len(data)
    assert report.bytes_kept > 0
    assert contents(target) == contents(saved)


def test_blob_of_unknown_durability_is_copied_again(saved, workers):
    target = memory()
    release_lease(target, Catalog(saved).record(STEP).uid)
    for name in blobs_of(saved):
        target.publish(name, contents(saved)[name])
    report = copy_of(saved, target, workers).run()
    assert report.bytes_kept == 0
    assert contents(target) == contents(saved)


def test_data_that_prune_may_delete_is_not_reused(saved, workers, tmp_path):
    with closing(files(tmp_path)) as inner:
        target = FaultyBackend(inner)
        target.fail("publish", match="/parts/")
        with pytest.raises(StorageError):
            copy_of(saved, target, workers).run()
        for name in blobs_of(saved):
            old_s = (tmp_path / name).stat().st_mtime - GRACE_S / 2 - 60
            os.utime(tmp_path / name, (old_s, old_s))
        assert copy_of(saved, target, workers).run().bytes_kept == 0
        assert contents(target) == contents(saved)


def test_cancelled_copy_leaves_no_record_and_can_resume(saved, workers):
    target = FaultyBackend(memory())
    copy = copy_of(saved, target, workers)
    with failing(copy, target, "write", nth=3, error=SaveAbortedError, text="copy again"):
        copy.cancel()
    assert not any("/blobs/" in info.name for info in target.list(""))
    copy_of(saved, target, workers).run()
    assert contents(target) == contents(saved)


def test_copy_cancelled_right_before_the_record_is_not_committed(saved, workers):
    target = FaultyBackend(memory())
    copy = copy_of(saved, target, workers)
    with failing(
        copy, target, "publish", match="/index", error=SaveAbortedError, text="copy again"
    ):
        copy.cancel()
    assert copy_of(saved, target, workers).run().bytes_copied == 0


@pytest.mark.parametrize(
    "operation", ["create", "write", "seal", "publish", "read", "stat", "list"]
)
def test_failing_target_leaves_no_record_and_the_next_copy_resumes(saved, workers, operation):
    target = FaultyBackend(memory())
    match = {"publish": "/index", "read": "copy.json"}.get(operation, "")
    target.fail(operation, match=match, times=None)
    with pytest.raises(StorageError):
        copy_of(saved, target, workers).run()
    target.clear()
    assert Catalog(target).steps() == []
    bury(target, Catalog(saved).record(STEP).uid)  # it could not report its end
    copy_of(saved, target, workers).run()
    assert contents(target) == contents(saved)


def test_blob_that_vanishes_before_the_record_is_noticed(saved, workers):
    target = FaultyBackend(memory())
    with failing(
        copy_of(saved, target, workers),
        target,
        "publish",
        match="/index",
        error=SaveAbortedError,
        text="vanished",
    ):
        target.inner.delete(blobs_of(saved)[:1])


# -- others at the same time --------------------------------------------------------------------


def test_prune_at_the_target_spares_a_copy_in_flight(saved, workers):
    target = FaultyBackend(memory())
    with ThreadPoolExecutor(1) as pool:
        with holding(target, "seal") as fault:
            running = pool.submit(copy_of(saved, target, workers).run)
            assert fault.reached.wait(30)
            assert Catalog(target).prune().uids == ()
        running.result(30)
    assert contents(target) == contents(saved)


def test_copy_whose_intent_was_pruned_is_not_committed(saved, workers):
    target = FaultyBackend(memory())
    with failing(
        copy_of(saved, target, workers),
        target,
        "publish",
        match="/index",
        error=SaveAbortedError,
        text="intent",
    ):
        target.inner.delete([intent_name(Catalog(saved).record(STEP).uid)])


def test_concurrent_second_copy_is_refused(saved, workers):
    target = FaultyBackend(memory())
    with ThreadPoolExecutor(1) as pool:
        with holding(target, "write", nth=2) as fault:
            running = pool.submit(copy_of(saved, target, workers).run)
            assert fault.reached.wait(30)
            with pytest.raises(BusyError, match="already"):
                copy_of(saved, target, workers).run()
        running.result(30)
    assert contents(target) == contents(saved)


def lease_of_another_machine(uid):
    lease = {
        "token": "a" * 32,
        "host": "node7",
        "pid": 1,
        "process": "boot/space/1-1",
        "sealed": [],
    }
    return lease_name(uid), seal(lease)


@pytest.mark.parametrize("age_s", [SILENT_S + 60, -SILENT_S - 60], ids=["old", "future"])
def test_silent_lease_of_another_machine_expires(saved, workers, tmp_path, age_s):
    name, lease = lease_of_another_machine(Catalog(saved).record(STEP).uid)
    with closing(files(tmp_path)) as target:
        target.publish(name, lease)
        with pytest.raises(BusyError, match="process 1 on node7"):
            copy_of(saved, target, workers).run()
        old_s = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (old_s, old_s))
        copy_of(saved, target, workers).run()
        assert contents(target) == contents(saved)


def test_copy_that_lost_its_lease_commits_nothing_and_removes_nothing(saved, workers):
    target = FaultyBackend(memory())
    name, lease = lease_of_another_machine(Catalog(saved).record(STEP).uid)
    with ThreadPoolExecutor(1) as pool:
        with holding(target, "seal"):
            running = pool.submit(copy_of(saved, target, workers).run)
            while [what for what, _ in target.calls].count("seal") < 2:
                assert not running.done()
            target.inner.publish(name, lease)
        with pytest.raises(BusyError, match="belongs to another copy"):
            running.result(30)
    assert Catalog(target).steps() == []
    assert target.read_record(name, limit_bytes=1000) == lease
    assert not {"abort", "delete"} & {what for what, _ in target.calls}


def test_copy_that_lost_its_lease_after_its_last_blob_is_not_committed(saved, workers):
    target = FaultyBackend(memory())
    name, lease = lease_of_another_machine(Catalog(saved).record(STEP).uid)
    with failing(
        copy_of(saved, target, workers),
        target,
        "publish",
        match="/index",
        error=BusyError,
        text="belongs to another copy",
    ):
        target.inner.publish(name, lease)


def test_copy_that_lost_its_store_blocks_nothing_in_its_process(saved, workers):
    target = FaultyBackend(memory())
    target.fail("seal", times=None)
    target.fail("publish", nth=2, times=None, match="copy.json")  # nor can it report so
    with pytest.raises(StorageError):
        copy_of(saved, target, workers).run()
    assert lease_name(Catalog(saved).record(STEP).uid) in target.inner._store.blobs
    target.clear()
    copy_of(saved, target, workers).run()
    assert contents(target) == contents(saved)


def test_unreadable_lease_blocks_nothing_and_proves_nothing(saved, workers):
    target = memory()
    target.publish(lease_name(Catalog(saved).record(STEP).uid), b"\xff nonsense")
    assert copy_of(saved, target, workers).run().bytes_kept == 0
    assert contents(target) == contents(saved)


# -- what the target has at that step -------------------------------------------------------------


def test_other_checkpoint_at_that_step_stays(saved, workers):
    target = memory()
    save(target, STEP, seed=9)
    before = contents(target)
    with pytest.raises(StepExistsError, match="--overwrite"):
        copy_of(saved, target, workers).run()
    assert contents(target) == before


def test_higher_generation_replaces_a_lower_one(unshared, workers):
    target = memory()
    copy_of(unshared, target, workers).run()
    save(unshared, STEP, seed=4, overwrite=True)
    report = copy_of(unshared, target, workers).run()
    assert report.generation == 2
    assert contents(target) == contents(unshared)


def test_generation_replaced_at_the_target_is_refused(unshared, workers):
    target = memory()
    save(target, STEP, seed=1)
    save(target, STEP, seed=2, overwrite=True)
    with pytest.raises(StepExistsError):
        copy_of(unshared, target, workers).run()


# -- what else at the target has that uid ---------------------------------------------------------


def forged(saved, **changes):
    """A store with another checkpoint under the uid of `saved`, and matching records."""
    made, uid = memory(), Catalog(saved).record(STEP).uid
    save(made, STEP, seed=8)
    record = Catalog(made).record(STEP)
    for info in made.list(data_prefix(record.uid)):
        data = made.read_record(info.name, limit_bytes=1 << 30)
        made.publish(info.name.replace(record.uid, uid), data)
    named = [replace(part, name=part.name.replace(record.uid, uid)) for part in record.parts]
    index = replace(record.index, name=record.index.name.replace(record.uid, uid))
    record = replace(record, uid=uid, parts=tuple(named), index=index, **changes)
    made.delete([commit_name(STEP, 0)])
    made.publish(commit_name(record.step, record.generation), encode_commit(record))
    return made


def refused_without_a_trace(source, target, workers, error, *, step, match):
    faulty = FaultyBackend(target)
    before = target._store.blobs.copy()
    with pytest.raises(error, match=match):
        copy_of(source, faulty, workers, step=step).run()
    assert target._store.blobs == before
    assert not {what for what, _ in faulty.calls} & {*EFFECTS}


@pytest.mark.parametrize("crashed", [False, True], ids=["", "its copy left a lease"])
def test_a_uid_that_the_target_has_at_another_step_is_refused(unshared, workers, crashed):
    if crashed:
        release_lease(unshared, Catalog(unshared).record(STEP).uid)
    evil = forged(unshared, step=200)
    refused_without_a_trace(
        evil, unshared, workers, StepExistsError, step=200, match="commits/00000007-0.json uses it"
    )


def test_a_uid_with_target_data_from_no_copy_is_refused(unshared, workers):
    """It may belong to a save in flight there."""
    evil = forged(unshared)
    unshared.delete([commit_name(STEP, 0)])
    refused_without_a_trace(evil, unshared, workers, BusyError, step=STEP, match="no copy wrote it")


def test_another_checkpoint_with_the_target_uid_is_refused(unshared, workers):
    refused_without_a_trace(
        forged(unshared), unshared, workers, StepExistsError, step=STEP, match="tampered with"
    )
    data = contents(unshared)
    with pytest.raises(StepExistsError, match="tampered with"):
        confirmed(unshared, Catalog(forged(unshared)).record(STEP))
    assert contents(unshared) == data


@pytest.mark.parametrize(
    ("comes_as", "before"),
    [("intent.json", "/copy.json"), ("intent.json", "/intent.json"), ("index", "/parts/")],
)
def test_data_that_appears_during_lease_acquisition_stays(saved, workers, comes_as, before):
    uid = Catalog(saved).record(STEP).uid
    name = f"{data_prefix(uid)}{comes_as}"

    class Meanwhile(WrapperBackend):
        def publish(self, published, data, /, *, exclusive=False):
            if before in published:
                self.inner.publish(name, b"of a save")
            super().publish(published, data, exclusive=exclusive)

    target = Meanwhile(memory())
    with pytest.raises(BusyError, match="no copy wrote it"):
        copy_of(saved, target, workers).run()
    assert target.read_record(name, limit_bytes=100) == b"of a save"
    left = {info.name for info in target.list("")} - {name}
    assert comes_as == "index" or not left  # nor does a lease stay, which would mark it as a copy's


def blob_named(store, ending):
    return next(name for name in store._store.blobs if name.endswith(ending))


def spoil(store, name):
    blob = store._store.blobs[name]
    data = bytearray(blob.data)
    data[len(data) // 2] ^= 1
    store._store.blobs[name] = replace(blob, data=data)


def test_a_good_copy_is_kept_if_the_source_is_damaged(saved, workers):
    """Each has lost another blob: only both together are complete."""
    source, target = memory(), memory()
    copy_of(saved, source, workers).run()
    copy_of(saved, target, workers).run()
    spoil(source, blob_named(source, ".raw"))
    target.delete([blob_named(target, ".enc")])
    before = dict(target._store.blobs)
    with pytest.raises(DamagedError):
        copy_of(source, target, workers).run()
    assert target._store.blobs == before


def test_another_run_of_a_lower_generation_is_replaced_only_on_request(saved, workers):
    target = memory()
    with checkpointer(target) as ckpt:
        ckpt.save(make_state(3), STEP).result()
    record = replace(Catalog(saved).record(STEP), generation=1)
    options = {"workers": workers, "buffer_bytes": SMALL, "grace_s": GRACE_S}
    with pytest.raises(StepExistsError, match="--overwrite"):
        CheckpointCopy(saved, target, record, replace=False, **options).run()
    assert Catalog(target).record(STEP).uid != record.uid
    CheckpointCopy(saved, target, record, **options).run()
    assert Catalog(target).record(STEP).uid == record.uid


def test_copy_confirms_a_record_that_an_earlier_try_failed_to_sync(saved, workers):
    target = FaultyBackend(memory())
    target.fail("publish", UnsyncedError("no sync"), match="commits/", late=True)
    with pytest.raises(CommitUnknownError):
        copy_of(saved, target, workers).run()
    target.clear()
    before = len(target.calls)
    assert copy_of(saved, target, workers).run().already_there
    assert ("publish", (commit_name(STEP, 0),)) in target.calls[before:]


@pytest.mark.parametrize("kind", ["raw", "enc"])
def test_truncated_or_missing_blob_is_damage(unshared, workers, kind):
    (name,) = [n for n in blobs_of(unshared) if n.endswith(kind)]
    data = contents(unshared)[name]
    for bytes_left in (data[:-1], None):
        unshared.delete([name])
        if bytes_left is not None:
            unshared.publish(name, bytes_left)
        with pytest.raises(DamagedError) as caught:
            copy_of(unshared, memory(), workers).run()
        assert caught.value.damaged == (name,)


def test_sealed_blob_may_be_trusted(saved, workers):
    target = FaultyBackend(memory())
    target.fail("publish", match="/parts/")
    with pytest.raises(StorageError):
        copy_of(saved, target, workers).run()
    seen = []
    copy_of(saved, target, workers, trust_sealed=True).run(on_progress=seen.append)
    assert not any(".raw" in names[0] for what, names in target.calls if what == "read")
    assert contents(target) == contents(saved)


def test_copy_cancelled_beforehand_does_nothing(saved, workers):
    target = FaultyBackend(memory())
    copy = copy_of(saved, target, workers)
    copy.cancel()
    with pytest.raises(SaveAbortedError):
        copy.run()
    assert target.calls == []


def test_record_may_be_copied_as_a_higher_generation(unshared, workers):
    target = memory()
    save(target, STEP, seed=9)
    record = replace(Catalog(unshared).record(STEP), generation=1)
    CheckpointCopy(unshared, target, record, workers=workers, grace_s=GRACE_S).run()
    assert list(Catalog(target).entries().values()) == [[commit_name(STEP, 1)]]
    with checkpointer(target) as ckpt:
        assert same(ckpt.load(STEP), make_state(3))


def test_cancel_ends_a_copy_that_waits_for_its_turn(saved, workers):
    target, moved = memory(), threading.Event()
    copy = copy_of(saved, target, workers, bytes_per_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(copy.run, on_progress=lambda _: moved.set())
        assert moved.wait(30)
        copy.cancel()
        with pytest.raises(SaveAbortedError):
            running.result(30)
    assert Catalog(target).steps() == []


def test_a_record_known_to_be_durable_is_not_published_again(saved, workers):
    """It could replace a save of that step since the check."""
    target = FaultyBackend(memory())
    copy_of(saved, target, workers).run()
    before = len(target.calls)
    assert copy_of(saved, target, workers).run().already_there
    assert "publish" not in [what for what, _ in target.calls[before:]]

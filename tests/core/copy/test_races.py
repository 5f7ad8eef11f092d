"""Stores that change during a copy, and buffers in use at its end."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from tests.integration.support import holding, memory, saved_in_memory

from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.abc import BlobWriter
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.lease import SILENT_S, Lease
from penstock.core.errors import BusyError, FormatError, StorageError
from penstock.core.format.records import data_prefix, lease_name
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend
from penstock.testing.hasty import ShiftedClock


@pytest.fixture
def source():
    return saved_in_memory(3, step=7)


def copy_between(source, target):
    record = Catalog(source).record(7)
    with closing(Workers(2)) as workers:
        copy = CheckpointCopy(
            source, target, record, workers=workers, grace_s=GRACE_S, buffer_bytes=8 * 4096
        )
        return copy.run()


@pytest.mark.parametrize("which", ["/parts/", "/index"])
def test_a_record_that_changes_after_it_was_verified_is_not_copied(which, source):
    class Changing(WrapperBackend):
        reads = 0

        def read_record(self, name, /, *, limit_bytes):
            data = super().read_record(name, limit_bytes=limit_bytes)
            if which not in name:
                return data
            self.reads += 1  # it was verified by `read`, piece by piece
            return data[:-1] + bytes([data[-1] ^ 1])

    target, changing = memory(), Changing(source)
    with pytest.raises(FormatError, match="changed while it was copied"):
        copy_between(changing, target)
    assert changing.reads == 1
    assert Catalog(target).steps() == []


def test_a_failed_copy_ends_once_its_buffers_are_unused(source):
    """A later abort must not meet a write in flight."""
    go, met = threading.Event(), []

    class Slow(BlobWriter):
        def __init__(self, inner):
            self.inner = inner
            self.busy = False

        def write(self, requests, /):
            self.busy = True
            go.wait(30)
            self.inner.write(requests)
            self.busy = False

        def seal(self, length, /):
            self.inner.seal(length)

        def abort(self):
            met.append(self.busy)
            self.inner.abort()

    class SlowStore(WrapperBackend):
        def create(self, name, /, *, size_hint=None):
            return Slow(super().create(name, size_hint=size_hint))

    failing = FaultyBackend(source)
    fault = Fault("read", first=3, times=None, match="blobs/", error=StorageError("gone away"))
    failing.add(fault)

    def let_go():
        fault.reached.wait(30)
        go.wait(0.3)  # gives an abort that does not wait time to arrive
        go.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    with pytest.raises(StorageError, match="gone away"):
        copy_between(failing, SlowStore(memory()))
    letting_go.join()
    assert met
    assert not any(met)


def on_files(folder):
    return PosixBackend(PosixConfig(path=str(folder), direct_io="off"))


def by_fsspec(folder):
    return FsspecBackend(FsspecConfig(url=f"file://{folder}"))


def contents(backend):
    return {
        info.name: backend.read_record(info.name, limit_bytes=1 << 30)
        for info in backend.list("")
        if not info.name.endswith("intent.json")
    }


class Stopping(WrapperBackend):
    """Reads the starts of blobs, and the rest only once released."""

    def __init__(self, inner):
        super().__init__(inner)
        self.going = threading.Event()

    def read(self, requests, /):
        if any(request.offset and "blobs/" in request.name for request in requests):
            self.going.wait()
        super().read(requests)


@contextmanager
def stopping(source, late, where):
    """The source of a copy that stops within a blob, or before any seal."""
    if where == "seal":
        with holding(late, "seal", match="blobs/"):
            yield source
        return
    origin = Stopping(source)
    try:
        yield origin
    finally:
        origin.going.set()


@pytest.mark.parametrize("opened", [on_files, by_fsspec])
@pytest.mark.parametrize("stopped_in", ["read", "seal"])
def test_a_copy_that_wakes_late_spares_the_blobs_of_the_next_one(
    opened, stopped_in, source, tmp_path
):
    """Its writers are aborted when its store closes, long after it lost its lease."""
    lease = tmp_path / lease_name(Catalog(source).record(7).uid)
    with ThreadPoolExecutor(1) as pool, closing(opened(tmp_path)) as after:
        with closing(FaultyBackend(opened(tmp_path))) as late:
            with stopping(source, late, stopped_in) as origin:
                sleeping = pool.submit(copy_between, origin, late)
                made, sealing = 0, 0
                while not made or (stopped_in == "seal" and sealing < 2):
                    assert not sleeping.done()
                    made = len(list(tmp_path.glob("data/*/blobs/*")))
                    sealing = [what for what, _ in late.calls].count("seal")
                silent_s = lease.stat().st_mtime - SILENT_S - 60
                os.utime(lease, (silent_s, silent_s))
                copy_between(source, after)
            with pytest.raises(BusyError, match="belongs to another copy"):
                sleeping.result(30)
        assert contents(after) == contents(source)


def test_a_copy_whose_lease_was_published_late_deletes_nothing(source, waits):
    """It was about to delete an unfinished earlier copy."""
    target = memory()
    failing = FaultyBackend(target)
    failing.fail("publish", nth=1, match="/index")
    with pytest.raises(StorageError):
        copy_between(source, failing)
    uid = Catalog(source).record(7).uid
    blobs = [info.name for info in target.list(f"{data_prefix(uid)}blobs/")]
    target.publish(blobs[0], b"spoilt")
    clock, noted = ShiftedClock(), 0
    waits(clock=clock)

    class Hanging(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            nonlocal noted
            super().publish(name, data, exclusive=exclusive)
            noted += name == lease_name(uid)
            if noted == 2:  # the first takes over the earlier copy's lease
                clock.ahead_s = SILENT_S

    with pytest.raises(BusyError, match="not refreshed"):
        copy_between(source, Hanging(target))
    assert [info.name for info in target.list(f"{data_prefix(uid)}blobs/")] == blobs


def test_a_copy_ends_only_its_own_lease(source):
    target = memory()
    lease = Lease(target, "a" * 32, Timing())
    lease.take()
    target.publish(lease_name("a" * 32), b"{}")
    lease.remove()
    assert target.read_record(lease_name("a" * 32), limit_bytes=10) == b"{}"

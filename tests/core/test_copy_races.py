"""What changes under a copy while it is under way, and who still uses its memory at its end."""

import threading
from contextlib import closing

import pytest
from tests.integration.support import memory, saved_in_memory

from penstock.core.abc import BlobWriter
from penstock.core.catalog import Catalog
from penstock.core.copying import CheckpointCopy
from penstock.core.errors import FormatError, StorageError
from penstock.core.prune import GRACE_S
from penstock.core.testing.faults import Fault, FaultyBackend
from penstock.core.testing.wrapper import WrapperBackend
from penstock.core.workers import Workers


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
            self.reads += 1
            return data if self.reads == 1 else data[:-1] + bytes([data[-1] ^ 1])

    target, changing = memory(), Changing(source)
    with pytest.raises(FormatError, match="changed while it was copied"):
        copy_between(changing, target)
    assert changing.reads == 2
    assert Catalog(target).steps() == []


def test_a_copy_that_fails_is_over_when_nothing_uses_its_buffers(source):
    """An abort, which comes behind that, must not meet a write that is under way."""
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
        go.wait(0.3)  # gives an abort that does not wait the time to come
        go.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    with pytest.raises(StorageError, match="gone away"):
        copy_between(failing, SlowStore(memory()))
    letting_go.join()
    assert met
    assert not any(met)

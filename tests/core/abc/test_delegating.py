"""The delegating backend: each method of the contract passes through its hook."""

from contextlib import closing
from typing import get_args

import pytest
from tests.integration.support import memory

from penstock import StorageError
from penstock.core.abc import (
    Backend,
    BlobWriter,
    DelegatingBackend,
    DelegatingWriter,
    delegating,
)
from penstock.core.types import ReadRequest, WriteRequest

OF_THE_CLASS = {"api_version", "Config", "from_url", "open", "name"}


class Noting(DelegatingBackend):
    name = "noting"

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []

    def around(self, operation, names, call, /):
        self.calls.append((operation, names))
        return super().around(operation, names, call)


@pytest.fixture
def store():
    with closing(memory()) as inner:
        yield Noting(inner)


def public(cls):
    return {name for name in vars(cls) if not name.startswith("_")}


def test_no_method_of_the_contract_is_forgotten():
    """Or a method added to the base class later would be the base's, not the inner backend's."""
    asked = public(Backend) - OF_THE_CLASS
    assert asked <= public(DelegatingBackend)
    assert public(BlobWriter) <= public(DelegatingWriter)
    assert set(get_args(delegating.Operation)) == asked | public(BlobWriter)


def read(store, name):
    target = bytearray(store.stat(name).size_bytes)
    store.read([ReadRequest(name, 0, memoryview(target))])
    return bytes(target)


def test_each_call_runs_the_hook_once_and_reaches_the_inner_backend(store):
    inner = store.inner
    target, later = bytearray(3), bytearray(3)
    writer = store.create("blob", size_hint=3)
    writer.write([WriteRequest(0, (memoryview(b"a"),))])
    store.submit_write(writer, [WriteRequest(1, (memoryview(b"bc"),))]).result(60)
    writer.sync(3)
    writer.seal(3)
    store.read([ReadRequest("blob", 0, memoryview(target))])
    store.submit_read([ReadRequest("blob", 0, memoryview(later))]).result(60)
    assert (target, later) == (b"abc", b"abc")
    store.publish("record", b"{}", exclusive=True)
    assert store.read_record("record", limit_bytes=9) == b"{}"
    assert store.list("") == inner.list("")
    assert store.stat("blob") == inner.stat("blob")
    store.rename("record", "moved")
    store.delete(["moved"])
    assert [info.name for info in inner.list("")] == ["blob"]
    store.create("other").abort()
    answers = (store.url, store.capabilities, store.direct_io, store.tiers, store.free_bytes())
    assert answers == (
        inner.url,
        inner.capabilities,
        inner.direct_io,
        inner.tiers,
        inner.free_bytes(),
    )
    store.check_writable()
    store.sweep(0.0)
    assert store.store_time_s() <= inner.store_time_s()
    store.close()
    with pytest.raises(StorageError):
        inner.list("")

    named = [operation for operation, _ in store.calls]
    assert sorted(set(named)) == sorted(get_args(delegating.Operation))
    assert [name for name in named if named.count(name) > 1] == ["create", "create"]
    assert {names for operation, names in store.calls if operation == "list"} == {("",)}
    assert ("submit_write", ("blob",)) in store.calls


class Doubling(BlobWriter):
    """A writer of a subclass also handles background batches."""

    def __init__(self, inner):
        self._inner = inner

    def write(self, requests, /):
        self._inner.write([WriteRequest(2 * r.offset, 2 * r.buffers) for r in requests])

    def seal(self, length, /):
        self._inner.seal(2 * length)

    def abort(self):
        self._inner.abort()


def test_background_batches_use_the_writer_of_a_subclass(store):
    writer = Doubling(store.create("blob"))
    store.submit_write(writer, [WriteRequest(0, (memoryview(b"ab"),))]).result(60)
    writer.seal(2)
    assert read(store, "blob") == b"abab"

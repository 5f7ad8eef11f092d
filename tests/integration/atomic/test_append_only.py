"""A store that can only append gets the bytes of each blob in order, in every mode."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from tests.integration.support import same

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.abc import BlobWriter
from penstock.core.errors import StorageError
from penstock.core.types import WriteRequest
from penstock.testing.faults import WrapperBackend


class AppendOnly(WrapperBackend):
    """Refuses writes out of order, or during another write of the blob."""

    api_version = 1

    @property
    def capabilities(self):
        return replace(self.inner.capabilities, ordered=True)

    def create(self, name, /, *, size_hint=None):
        return _Appending(self.inner.create(name, size_hint=size_hint))


class _Appending(BlobWriter):
    def __init__(self, inner):
        self.inner = inner
        self.end = 0
        self.busy = threading.Lock()

    def write(self, requests, /):
        if not self.busy.acquire(blocking=False):
            raise StorageError("two writes at once")
        try:
            time.sleep(0.001)  # gives another write time to arrive
            for request in requests:
                if request.offset < self.end:
                    raise StorageError(f"{request.offset} comes after {self.end}")
                self.end = request.offset + request.length
            self.inner.write(requests)
        finally:
            self.busy.release()

    def seal(self, length, /):
        self.inner.seal(length)

    def abort(self):
        self.inner.abort()


@pytest.fixture
def store():
    backend = AppendOnly(MemoryBackend(MemoryConfig()))
    yield backend
    backend.close()


def large_state(seed):
    """More than three batches of raw chunks, and as many encoded ones."""
    made = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(1024, 4096)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 1024, generator=made)).sum().backward()
    optimizer.step()
    packed = torch.randint(0, 9, (52 << 17,), generator=made)
    return {"model": model, "optimizer": optimizer, "packed": packed}


@pytest.mark.parametrize(
    ("mode", "staging_bytes"), [("blocking", 1 << 20), ("async", None), ("lazy", None)]
)
def test_every_blob_is_written_in_order(mode, staging_bytes, store):
    options = {
        "chunk_bytes": 1 << 18,
        "staging_bytes": staging_bytes,
        "rules": [{"match": "packed", "codecs": ["lz4"]}],
    }
    state = large_state(1)
    with penstock.Checkpointer(store, **options) as ckpt:
        ckpt.save(state, 1, mode=mode).result()
        got = ckpt.load(1)
    assert same(got["packed"], state["packed"])
    assert same(got["model"]["weight"], state["model"].weight.detach())


def test_a_hung_write_of_a_blob_blocks_no_other(store):
    event, begun = threading.Event(), threading.Event()

    class Hanging(_Appending):
        def write(self, requests, /):
            begun.set()
            assert event.wait(300)
            super().write(requests)

    stuck, other = Hanging(store.inner.create("stuck")), store.create("other")
    data = [memoryview(bytes([n]) * 10) for n in range(5)]
    try:
        waiting = [store.submit_write(stuck, [WriteRequest(0, (data[0],))])]
        assert begun.wait(300)
        waiting.append(store.submit_write(stuck, [WriteRequest(10, (data[1],))]))
        for number, piece in enumerate(data):
            store.submit_write(other, [WriteRequest(10 * number, (piece,))]).result(300)
        other.seal(50)
        assert not any(future.done() for future in waiting)
    finally:
        event.set()
    for future in waiting:
        future.result(300)
    stuck.seal(20)
    assert bytes(store.inner._store.blobs["stuck"].data) == b"".join(data[:2])

"""The backend `memory`, beyond the conformance suite."""

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.codecs.use import lets_others_run

TRIES = 20  # on a busy machine the other thread may be scheduled only after the copy


def test_training_runs_while_a_blob_is_written_and_read():
    backend = MemoryBackend(MemoryConfig())
    data = memoryview(bytes(16 << 20))
    target = memoryview(bytearray(data.nbytes))
    writer = backend.create("blob", size_hint=data.nbytes)
    assert any(
        lets_others_run(lambda: writer.write([WriteRequest(0, (data,))])) for _ in range(TRIES)
    )
    writer.seal(data.nbytes)
    assert any(
        lets_others_run(lambda: backend.read([ReadRequest("blob", 0, target)]))
        for _ in range(TRIES)
    )

"""The shipped faults behave as tests of engines expect."""

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.errors import StorageError, StorageFullError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.faults import OPERATIONS, CrashAt, FaultyBackend, SimulatedCrashError

REQUEST = WriteRequest(0, (memoryview(b"12345"),))


@pytest.fixture
def inner():
    return MemoryBackend(MemoryConfig())


def every_operation(backend):
    """One call of each operation, in the order of `OPERATIONS`, as a list of thunks."""
    backend.publish("record", b"12345")
    backend.create("w").abort()
    writer, doomed = backend.create("writing"), backend.create("doomed")
    growing = backend.create("growing")
    target = memoryview(bytearray(5))
    return [
        lambda: backend.create("new"),
        lambda: writer.write([REQUEST]),
        lambda: writer.seal(5),
        lambda: growing.sync(5),
        doomed.abort,
        lambda: backend.read([ReadRequest("record", 0, target)]),
        lambda: backend.publish("other", b"x"),
        lambda: backend.list(""),
        lambda: backend.stat("record"),
        lambda: backend.delete(["record"]),
    ]


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_every_operation_can_fail(number, inner):
    faulty = FaultyBackend(inner)
    calls = every_operation(faulty)
    fault = faulty.fail(OPERATIONS[number], StorageFullError("full"))
    for other, call in enumerate(calls):
        if other != number or OPERATIONS[number] == "abort":  # which never raises
            call()
            continue
        with pytest.raises(StorageFullError, match="full"):
            call()
        call()  # only the first call fails
    assert fault.reached.is_set()


def test_a_late_failure_is_a_lost_reply(inner):
    faulty = FaultyBackend(inner)
    faulty.fail("publish", late=True)
    with pytest.raises(StorageError):
        faulty.publish("a", b"x", exclusive=True)
    assert inner.read_record("a", limit_bytes=1) == b"x"


@pytest.mark.parametrize("after", [False, True])
def test_after_a_crash_nothing_reaches_the_store(inner, after):
    crash = CrashAt(inner, 3, after=after, operations=["publish", "create"])
    crash.publish("a", b"")
    crash.list("")
    writer = crash.create("b")
    assert not crash.crashed
    with pytest.raises(SimulatedCrashError):
        crash.publish("c", b"")
    assert crash.crashed
    for call in (lambda: crash.delete(["a"]), lambda: writer.write([REQUEST]), writer.abort):
        with pytest.raises(SimulatedCrashError):
            call()
    assert [info.name for info in inner.list("")] == (["a", "c"] if after else ["a"])

"""The shipped faults do what tests of engines rely on."""

# ruff: noqa: PTH208 - descriptors, flags and links are what is tested

import os
import threading

import pytest
from tests.integration.support import run_program

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.errors import BlobNotFoundError, StorageError, StorageFullError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.faults import (
    OPERATIONS,
    CrashAt,
    FaultyBackend,
    LatencyBackend,
    SimulatedCrashError,
)

REQUEST = WriteRequest(0, (memoryview(b"12345"),))


@pytest.fixture
def inner():
    return MemoryBackend(MemoryConfig())


def every_operation(backend):
    """One call of each operation, in the order of `OPERATIONS`, as a list of thunks."""
    backend.publish("record", b"12345")
    backend.create("w").abort()
    writer, doomed = backend.create("writing"), backend.create("doomed")
    target = memoryview(bytearray(5))
    return [
        lambda: backend.create("new"),
        lambda: writer.write([REQUEST]),
        lambda: writer.seal(5),
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


def test_the_nth_matching_call_fails_and_no_other(inner):
    faulty = FaultyBackend(inner)
    faulty.fail("publish", nth=2, times=2, match="commits/")
    failed = []
    for n in range(5):
        faulty.publish(f"data/{n}", b"")
        try:
            faulty.publish(f"commits/{n}", b"")
        except StorageError:
            failed.append(n)
    assert failed == [1, 2]
    assert [info.name for info in inner.list("commits/")] == ["commits/0", "commits/3", "commits/4"]
    assert faulty.calls.count(("publish", ("commits/1",))) == 1


def test_a_late_failure_is_a_lost_answer(inner):
    faulty = FaultyBackend(inner)
    faulty.fail("publish", late=True)
    with pytest.raises(StorageError):
        faulty.publish("a", b"x", exclusive=True)
    assert inner.read_record("a", limit_bytes=1) == b"x"


def test_a_blocked_call_waits_for_the_event(inner):
    faulty = FaultyBackend(inner)
    release = threading.Event()
    fault = faulty.block("write", release)
    writer = faulty.create("a")
    future = faulty.submit_write(writer, [REQUEST])
    assert fault.reached.wait(300)
    assert not future.done()
    release.set()
    assert future.result(300) is None
    writer.seal(5)
    assert inner.stat("a").size_bytes == 5
    faulty.close()


def test_faults_can_be_cleared(inner):
    faulty = FaultyBackend(inner)
    faulty.fail("stat", times=None)
    faulty.publish("a", b"")
    for _ in range(3):
        with pytest.raises(StorageError):
            faulty.stat("a")
    faulty.clear()
    assert faulty.stat("a").size_bytes == 0


def test_background_reads_meet_the_faults(inner):
    faulty = FaultyBackend(inner)
    faulty.publish("a", b"12345")
    faulty.fail("read", BlobNotFoundError("gone"), nth=2)
    target = memoryview(bytearray(5))
    faulty.submit_read([ReadRequest("a", 0, target)]).result(300)
    with pytest.raises(BlobNotFoundError):
        faulty.submit_read([ReadRequest("a", 0, target)]).result(300)
    faulty.close()


def test_latency_changes_nothing_but_time(inner, monkeypatch):
    slept = []
    monkeypatch.setattr("penstock.testing.faults.time.sleep", slept.append)
    slow = LatencyBackend(inner, latency_s={"publish": 0.5, "write": 0.25}, bytes_per_s=10)
    slow.publish("a", b"12345")
    writer = slow.create("b")
    writer.write([REQUEST])
    writer.seal(5)
    slow.read([ReadRequest("b", 0, memoryview(target := bytearray(5)))])
    assert target == b"12345"
    assert [s for s in slept if s] == [0.5, 0.5, 0.25, 0.5]


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


def test_a_crash_can_kill_the_process(tmp_path):
    script = """
import sys
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.testing.faults import CrashAt
backend = CrashAt(PosixBackend(PosixConfig(path=sys.argv[1])), 2, kill=True)
backend.publish("a", b"")
backend.publish("b", b"")
"""
    assert run_program(script, tmp_path, timeout=300).returncode == -9
    assert os.listdir(tmp_path) == ["a"]

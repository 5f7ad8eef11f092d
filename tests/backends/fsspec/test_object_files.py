"""Stores in which the close of a stream makes the file, and which may hang."""

import gc
import weakref
from contextlib import suppress

import fsspec
import pytest
from fsspec.registry import _registry
from tests.backends.fsspec import object_files
from tests.integration.support import run_program

import penstock
from penstock.core.errors import BlobExistsError, StorageError
from penstock.core.types import WriteRequest


@pytest.fixture
def backend(opened):
    fsspec.register_implementation("gs", object_files.ObjectFiles, clobber=True)
    for name in ("stored", "conditions", "lost_answers", "denied"):
        getattr(object_files, name).clear()
    yield opened("gs://bucket/run")
    _registry.pop("gs", None)


def test_an_unfinished_blob_is_not_stored_when_collected(backend):
    """By then another saver may have stored a blob of that name."""
    writer = backend.create("blob")
    data = memoryview(bytes(20 << 20))
    backend.submit_write(writer, [WriteRequest(0, (data,))]).result(300)
    object_files.stored["bucket/run/blob"] = (b"another's", 0.0)
    writer.itself = writer  # a cycle, so the collector may take the stream before the writer
    gone = weakref.ref(writer)
    del writer
    while gone() is not None:  # the thread that wrote it may still hold it
        gc.collect()
    assert object_files.stored["bucket/run/blob"][0] == b"another's"


def test_an_aborted_blob_is_not_stored_over_another_of_its_name(backend):
    """The close of such a stream would store the bytes that were written so far."""
    writer = backend.create("blob")
    backend.submit_write(writer, [WriteRequest(0, (memoryview(bytes(20 << 20)),))]).result(300)
    object_files.stored["bucket/run/blob"] = (b"another's", 0.0)
    writer.abort()
    assert object_files.stored["bucket/run/blob"][0] == b"another's"


def test_a_store_with_conditional_puts_is_detected(backend):
    object_files.conditions.add("create")
    assert backend.capabilities.exclusive_publish
    backend.publish("commits/1.json", b"one", exclusive=True)
    with pytest.raises(BlobExistsError, match="the name is taken"):
        backend.publish("commits/1.json", b"two", exclusive=True)
    assert backend.read_record("commits/1.json", limit_bytes=9) == b"one"
    assert [info.name for info in backend.list("")] == ["commits/1.json"]


def test_one_of_several_racing_publishers_wins(backend, monkeypatch):
    """Without `refuse_taken`, as if all had checked before one of them put."""
    object_files.conditions.add("create")
    monkeypatch.setattr(backend._store(), "refuse_taken", lambda *_: None)
    won = []
    for number in range(3):
        with suppress(BlobExistsError):
            backend.publish("commits/1.json", b"%d" % number, exclusive=True)
            won.append(number)
    assert won == [0]


def test_a_store_ignoring_conditions_is_detected(backend):
    assert not backend.capabilities.exclusive_publish
    assert "ignores the condition of a put" in " ".join(backend.capabilities.notes)
    assert backend.list("") == []


def test_only_stores_known_to_obey_conditions_are_trusted(opened):
    fsspec.register_implementation("oss", object_files.ObjectFiles, clobber=True)
    other = opened("oss://bucket/run", conditional_put="yes")
    assert not other.capabilities.exclusive_publish
    _registry.pop("oss", None)


def test_a_record_put_by_an_earlier_try_counts_as_our_own(backend):
    object_files.conditions.add("create")
    assert backend.capabilities.exclusive_publish
    object_files.lost_answers.add("bucket/run/commits/1.json")
    with pytest.raises(StorageError, match="unknown outcome") as caught:
        backend.publish("commits/1.json", b"ours", exclusive=True)
    backend.delete(["commits/1.json"])
    assert not isinstance(caught.value, BlobExistsError)
    with penstock.Checkpointer(backend) as ckpt:
        object_files.lost_answers.add("bucket/run/commits/00000007-0.json")
        assert ckpt.save({"x": 1}, 7, mode="blocking").result().exclusive
        assert ckpt.load(7) == {"x": 1}


PROGRAM = """
import sys, logging
from contextlib import ExitStack
import fsspec, torch, penstock
from tests.backends.fsspec import object_files
from tests.integration.support import FlyingClock
from penstock.core.concurrency.timing import Timing, timing_in_force

logging.getLogger("penstock").setLevel(logging.CRITICAL)
stack = ExitStack()
clock = FlyingClock()
waits = Timing(clock=clock, poll_s=0.05, release_s=0.01, interrupt_s=0.01)
stack.enter_context(timing_in_force(waits))
fsspec.register_implementation("gs", object_files.ObjectFiles, clobber=True)
what = sys.argv[1]
calls = {
    "write": lambda: ckpt.save({"w": torch.arange(4 << 20)}, 2).result(300),
    "read": lambda: ckpt.load(1),
    "delete": lambda: ckpt.delete(1),
}
ckpt = penstock.Checkpointer({"type": "fsspec", "url": "gs://bucket/run"})
ckpt.save({"w": torch.arange(1000)}, 1).result()
object_files.hanging.add(what)
clock.flies = object_files.reached.is_set
try:
    calls[what]()
except penstock.PenstockError as error:
    print(type(error).__name__, flush=True)
ckpt.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("what", ["write", "read", "delete"])
def test_a_hung_store_lets_the_run_close_and_the_interpreter_exit(what):
    done = run_program(PROGRAM, what, timeout=300)
    error = "RestoreError" if what == "read" else "StorageTimeoutError"
    assert (done.returncode, done.stdout.splitlines()) == (0, [error, "closed"]), done.stderr

"""A store that hangs or fails under the log ends the log by name, and nothing else."""

import threading
from dataclasses import replace

import pytest
from tests.integration.log.tiny import Tiny, WithoutAppends, logged, logged_with, restored
from tests.integration.support import memory

import penstock
from penstock.core.abc import DelegatingBackend
from penstock.testing.faults import Fault, FaultyBackend
from penstock.testing.hasty import ShiftedClock

CALLS = ["list /log/", "create .log", "write .log", "sync .log", "seal .log"]


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def clock(waits):
    clock = ShiftedClock()
    waits(clock=clock, interrupt_s=0.01, poll_s=0.02, release_s=0.01)
    return clock


def time_flies(clock, fault):
    """From the moment at which a call hangs, so nothing else can be late."""
    clock.ahead_s = lambda: 1e6 if fault.reached.is_set() else 0.0


def store_for(call, inner):
    """A store whose log makes this call for each entry, or once."""
    return FaultyBackend(WithoutAppends(inner) if call.startswith("seal") else inner)


@pytest.mark.parametrize("call", CALLS)
def test_hung_call_ends_the_log_and_training_continues(call, gate, clock, caplog):
    inner = memory()
    store = store_for(call, inner)
    training = Tiny()
    operation, _, match = call.partition(" ")
    with penstock.Checkpointer(store) as ckpt:
        training.step(0)
        ckpt.save(training.state, 0, mode="blocking")
        fault = store.block(operation, gate, match=match)
        time_flies(clock, fault)
        training.step(1)
        ckpt.log(training.state, 1)
        ckpt._log.recorder.flush()
        assert f"did not answer for 600 s (io_timeout_s) when asked to {operation} " in caplog.text
        assert "the log of gradients ends after step 1" in caplog.text
        store.clear()  # only that one call hangs
        training.step(2)
        assert not ckpt.log(training.state, 2)
        training.step(3)
        ckpt.save(training.state, 3, mode="blocking")
        training.step(4)
        assert ckpt.log(training.state, 4)
    assert restored(inner) == 4


def test_close_does_not_wait_for_a_hung_seal(gate, clock, caplog):
    inner = memory()
    store = FaultyBackend(inner)
    time_flies(clock, store.block("seal", gate, match=".log"))
    logged(store)
    assert "when asked to seal" in caplog.text
    assert restored(inner) == 4


@pytest.mark.parametrize("call", ["list /log/", "read .log"])
def test_hung_reading_of_the_log_ends_by_name(call, gate, clock):
    store = FaultyBackend(memory())
    logged(store)
    operation, _, match = call.partition(" ")
    for ask in (lambda c: c.latest(), lambda c: c.restore(Tiny().state)):
        with penstock.Checkpointer(store) as ckpt:
            time_flies(clock, store.block(operation, gate, match=match))
            with pytest.raises(penstock.StorageTimeoutError, match=r"600 s \(io_timeout_s\)"):
                ask(ckpt)
            store.clear()
            clock.ahead_s = 0.0
    assert restored(store) == 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("nth", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS)
def test_failed_call_loses_no_durable_step(call, nth, late, caplog):
    inner = memory()
    store = store_for(call, inner)
    operation, _, match = call.partition(" ")
    full = penstock.StorageFullError("no space left")
    training = Tiny()
    durable = 0
    with penstock.Checkpointer(store) as ckpt:
        training.step(0)
        ckpt.save(training.state, 0, mode="blocking")
        store.add(Fault(operation, nth, match=match, error=full, late=late))
        for number in range(1, 5):
            training.step(number)
            ckpt.log(training.state, number)
            ckpt._log.recorder.flush()
            if not ckpt._log.recorder.ended:
                durable = number
        fails = operation not in {"list", "create"} or nth == 1  # these happen once
        assert (durable < 4) == fails == ("no space left. The next save begins" in caplog.text)
        assert restored(inner) >= durable
        training.step(5)
        ckpt.save(training.state, 5)
        for number in (6, 7):
            training.step(number)
            ckpt.log(training.state, number)
    assert restored(inner) == 7 if fails else restored(inner) >= 5


@pytest.mark.parametrize("call", ["create .log", "write .log", "seal .log"])
def test_failure_after_each_entry_of_a_store_without_appends(call, caplog):
    inner = memory()
    store = FaultyBackend(WithoutAppends(inner))
    operation, _, match = call.partition(" ")
    store.fail(operation, penstock.StorageFullError("no space left"), nth=3, match=match)
    training = Tiny()
    with penstock.Checkpointer(store) as ckpt:
        for number in range(5):
            training.step(number)
            if number:
                ckpt.log(training.state, number)
            else:
                ckpt.save(training.state, number, mode="blocking")
    assert "no space left. The next save begins a new log" in caplog.text
    assert restored(inner) == 2


class Unanswered(DelegatingBackend):
    """Holds the commit records of step 2 back, and does not answer."""

    held = None

    def publish(self, name, data, /, *, exclusive=False):
        if name.startswith("commits/00000002"):
            self.held = name, data
            msg = "no answer"
            raise penstock.StorageError(msg)
        super().publish(name, data, exclusive=exclusive)


def test_checkpoint_that_appears_after_an_unknown_commit_has_its_log():
    inner = memory()
    store = Unanswered(inner)
    training = Tiny()
    with penstock.Checkpointer(store) as ckpt:
        for number in range(5):
            training.step(number)
            if number == 2:
                handle = ckpt.save(training.state, number)
                assert isinstance(handle.committed.exception(), penstock.CommitUnknownError)
            elif number:
                assert ckpt.log(training.state, number)
            else:
                ckpt.save(training.state, number, mode="blocking")
        ckpt._log.recorder.flush()
        assert restored(inner) == 4
        inner.publish(*store.held)  # it was carried out after all
        assert ckpt.steps() == [0, 2]
    assert restored(inner) == 4


class Remote(WithoutAppends):
    """An object store elsewhere."""

    @property
    def capabilities(self):
        return replace(super().capabilities, local=False)


def segments_of(store):
    return [info.name for info in store.list("data/") if "/log/" in info.name]


@pytest.mark.parametrize(
    ("wrap", "sync", "last", "count"),
    [(Remote, None, 17, 2), (Remote, 1, 5, 5), (WithoutAppends, None, 5, 5),
     (WithoutAppends, 2, 5, 2)],
)  # fmt: skip
def test_object_store_gets_one_object_for_log_sync_steps(wrap, sync, last, count):
    inner = memory()
    with penstock.Checkpointer(wrap(inner), log_sync=sync) as ckpt:
        logged_with(ckpt, last)
        ckpt._log.recorder._writing.flush()
        assert len(segments_of(inner)) == count
        assert ckpt.latest() == last  # asks for the rest
        assert restored(inner) == last


def test_failed_sync_of_entries_that_are_asked_for_ends_the_log(caplog):
    inner = memory()
    store = FaultyBackend(WithoutAppends(inner))
    store.fail("seal", penstock.StorageFullError("no space left"), match=".log")
    with penstock.Checkpointer(store, log_sync=9) as ckpt:
        training = logged_with(ckpt, 2)
        assert ckpt.latest() == 0
        assert "ends after step 2: no space left. The next save begins" in caplog.text
        training.step(3)
        assert not ckpt.log(training.state, 3)
    assert restored(inner) == 0

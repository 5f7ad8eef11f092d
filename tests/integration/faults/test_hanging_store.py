"""A store that never answers again: the save fails, training continues, everything ends."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
import torch
from tests.integration.support import FlyingClock, memory, run_program, same
from tests.integration.training import SMALL

from penstock import (
    BusyError,
    Checkpointer,
    CommitUnknownError,
    RestoreError,
    StorageTimeoutError,
)
from penstock.core.concurrency.workers import Workers
from penstock.core.storage.time_limited import TimeLimitedBackend
from penstock.testing.faults import FaultyBackend
from penstock.testing.hasty import ShiftedClock

OPTIONS = {
    **SMALL,
    "rules": [{"match": "encoded", "codecs": ["delta", "zstd"]}],
    "share": True,
}
OPERATIONS = [
    "create .raw",
    "create .enc",
    "write .raw",
    "write .enc",
    "seal .raw",
    "seal .enc",
    "publish intent",
    "publish parts/",
    "publish index",
    "stat intent",
    "publish commits/",
    "read commits/",  # of the base
    "list data/",
]


def error_of(operation):
    return CommitUnknownError if operation == "publish commits/" else StorageTimeoutError


def make(number):
    flat = torch.arange(9000.0) + number
    still = torch.arange(20000.0)
    return {
        "raw": flat,
        "still": still,
        "encoded": -flat,
        "optimizer": torch.optim.SGD([flat]),
        "number": number,
    }


def plain(ckpt, step):
    return ckpt.load(step, include=["raw", "still", "encoded", "number"])


def expected(step):
    return {key: value for key, value in make(step).items() if key != "optimizer"}


@pytest.fixture
def clock(waits):
    clock = ShiftedClock()
    waits(clock=clock, interrupt_s=0.01, poll_s=0.05)
    return clock


class Stuck:
    """A checkpointer whose save of step 2 meets a hung call, for as long as `gate` is closed. From
    `late` on its clock flies, until that save fails.
    """

    handle = None

    def __init__(self, stack, on_busy, operation, *, gate, late, waits):
        name, _, match = operation.partition(" ")
        self.inner = memory()
        self._late = late
        # Its memory is not awaited, either.
        waits(clock=FlyingClock(self._flies), poll_s=0.05, release_s=0.01)
        store = FaultyBackend(self.inner)
        # 600 s exceed the test's time on any machine: only the clock ends it.
        self.ckpt = stack.enter_context(Checkpointer(store, on_busy=on_busy, **OPTIONS))
        self.ckpt.save(make(1), 1).result()
        self.ckpt._saver.job.released.wait()  # work after a commit uses the store as well
        fault = store.block(name, gate, match=match)
        self.state = make(2)
        self.handle = self.ckpt.save(self.state, 2)
        assert fault.reached.wait(300)
        store.clear()  # only that one call hangs

    def _flies(self):
        return self._late.is_set() and self.handle is not None and not self.handle.done()


# The program below blocks the other calls, too.
@pytest.mark.parametrize(
    "operation", ["write .raw", "publish intent", "publish commits/", "list data/"]
)
def test_a_hung_call_loses_that_save_but_never_training(operation, gate, waits):
    late = threading.Event()
    given_up = error_of(operation)
    with ExitStack() as stack:
        stack.callback(gate.set)
        # A busy saver's handling of the next save does not depend on the hung call.
        policies = ("wait", "skip", "raise") if operation == "write .raw" else ("wait",)
        wait, *others = stuck = [
            Stuck(stack, on_busy, operation, gate=gate, late=late, waits=waits)
            for on_busy in policies
        ]
        if others:
            skip, refuse = others
            assert skip.ckpt.save(make(3), 3).skipped
            with pytest.raises(BusyError, match="step 2 is still under way"):
                refuse.ckpt.save(make(3), 3)
        for each in stuck:
            assert not each.handle.done()
            each.state["optimizer"].step()  # does not wait: all is captured
        late.set()
        with pytest.raises(given_up, match=r"step 2.*io_timeout_s=600") as caught:
            wait.ckpt.save(make(3), 3)
        assert "the save of step 3 has started" in caught.value.__notes__[0]
        wait.ckpt.wait()
        for each in others:
            with pytest.raises(given_up, match=r"memory://.*io_timeout_s=600"):
                each.handle.result(300)
            each.ckpt.save(make(3), 3).result(300)
        for each in stuck:
            each.ckpt.close()  # although the call still hangs
            with Checkpointer(each.inner) as fresh:
                assert fresh.steps() == [1, 3]
                assert all(same(plain(fresh, step), expected(step)) for step in (1, 3))
                assert all(fresh.verify(step, deep=True).ok for step in (1, 3))


# -- forever ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [".raw", ".enc"])
def test_a_hung_read_ends_only_the_restore(which, gate, clock):
    store = FaultyBackend(memory())
    with Checkpointer(store, **OPTIONS) as ckpt:
        ckpt.save(make(1), 1).result()
        faults = []
        clock.ahead_s = lambda: 1e6 * sum(fault.reached.is_set() for fault in faults)

        def block():
            store.clear()
            faults.append(store.block("read", gate, match=which))

        for read in (lambda: ckpt.restore(expected(5), 1), lambda: ckpt.load(1)):
            block()
            with pytest.raises(RestoreError, match=rf"step 1.*io_timeout_s=600.*{which}") as caught:
                read()
            assert isinstance(caught.value.__cause__, StorageTimeoutError)
        block()
        with pytest.raises(StorageTimeoutError, match=which):
            ckpt.verify(1)
        store.clear()
        gate.set()
        assert same(plain(ckpt, 1), expected(1))
        assert ckpt.verify(1).ok


# Each call with its last request to a store.
ASKING = {
    "save": (lambda c: c.save(make(2), 2), "list"),
    "steps": (lambda c: c.steps(), "list"),
    "info": (lambda c: c.info(1), "read commits/"),
    "restore": (lambda c: c.restore(expected(5), 1), "read parts/"),
    "open": (lambda c: c.open().read("raw"), "read index"),
    "verify": (lambda c: c.verify(1, deep=False), "stat"),
    "delete": (lambda c: c.delete(1), "read commits/"),
    "prune": (lambda c: c.prune(), "read commits/"),
    "rewind": (lambda c: c.rewind(1), "list"),
}


def time_flies(clock, fault):
    """From the moment at which a call hangs, so nothing else can be late."""
    clock.ahead_s = lambda: 1e6 if fault.reached.is_set() else 0.0


@pytest.mark.parametrize(("ask", "operation"), ASKING.values(), ids=ASKING)
def test_hung_foreground_calls_end_and_change_nothing(ask, operation, gate, clock):
    store = FaultyBackend(memory())
    with Checkpointer(store, rules=OPTIONS["rules"]) as ckpt:
        ckpt.save(make(1), 1).result()
        name, _, match = operation.partition(" ")
        fault = store.block(name, gate, match=match)
        time_flies(clock, fault)
        with pytest.raises(StorageTimeoutError, match=r"memory://.*600 s \(io_timeout_s\).*stuck"):
            ask(ckpt)
        assert fault.reached.is_set()
        store.clear()  # while the one call still hangs
        assert ckpt.steps() == [1]
        assert same(plain(ckpt, 1), expected(1))
        ckpt.save(make(2), 2).result(300)
        assert ckpt.verify(2, deep=True).ok


@pytest.mark.parametrize("count", [1, 2500])
def test_a_hung_delete_ends_for_every_target(count, gate, clock):
    store = FaultyBackend(memory())
    names = [f"data/{number}" for number in range(count)]
    for name in names:
        store.publish(name, b"")
    threads = Workers(1)
    patient = TimeLimitedBackend(store, threads, 600.0)
    time_flies(clock, store.block("delete", gate, match=names[-1]))
    with pytest.raises(StorageTimeoutError, match=r"to delete data/.*may still happen"):
        patient.delete(names)
    left = len(store.list("data/"))
    assert left == (count - 1) % 1000 + 1  # all calls before that one were made
    threads.close()


PROGRAM = """
import sys, threading, logging
from contextlib import ExitStack
from tests.integration.faults import test_hanging_store as test
from penstock import Checkpointer, PenstockError
from penstock.core.concurrency.timing import Timing, timing_in_force
from penstock.testing.faults import FaultyBackend
from tests.integration.support import FlyingClock

logging.getLogger("penstock").setLevel(logging.CRITICAL)
stack = ExitStack()
clock = FlyingClock()
waits = Timing(clock=clock, poll_s=0.05, release_s=0.01, interrupt_s=0.01)
stack.enter_context(timing_in_force(waits))
never = threading.Event()
open_ones = []
for operation in [*test.OPERATIONS, "read .raw", "read .enc"]:
    name, _, match = operation.partition(" ")
    store = FaultyBackend(test.memory())
    ckpt = Checkpointer(store, **test.OPTIONS)
    ckpt.save(test.make(1), 1).result()
    fault = store.block(name, never, match=match)
    handle = None
    if name != "read":
        handle = ckpt.save(test.make(2), 2)
        assert fault.reached.wait(300)
    open_ones.append((operation, ckpt, handle, fault))
for operation, ckpt, handle, fault in open_ones:
    clock.flies = fault.reached.is_set
    try:
        handle.result() if handle else ckpt.load(1)
    except PenstockError as error:
        print(operation, type(error).__name__, flush=True)
    if operation != "seal .enc":  # that one is left to the exit
        ckpt.close()
print("over", flush=True)
"""


def test_an_interpreter_exits_although_calls_of_every_kind_hang():
    done = run_program(PROGRAM, timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = [f"{operation} {error_of(operation).__name__}" for operation in OPERATIONS]
    outcomes += ["read .raw RestoreError", "read .enc RestoreError"]
    assert done.stdout.splitlines() == [*outcomes, "over"]


def test_an_abandoned_deletion_deletes_nothing_saved_since(gate, clock):
    """Its request may still be carried out at any later time."""
    store = FaultyBackend(memory())
    with Checkpointer(store, rules=OPTIONS["rules"]) as ckpt:
        for step in (1, 2):
            ckpt.save(make(step), step).result(300)
        fault = store.block("delete", gate, match="commits/")
        time_flies(clock, fault)
        with pytest.raises(StorageTimeoutError, match="may still happen"):
            ckpt.rewind(1)
        store.clear()
        assert ckpt.rewind(1) == [2]
        assert ckpt.save(make(5), 2).result(300).generation == 2
        gate.set()
        while [t for t in threading.enumerate() if t.name == "penstock-delete"]:
            time.sleep(0.01)
        assert ckpt.steps() == [1, 2]
        assert same(plain(ckpt, 2), expected(5))
        ckpt.rewind(1)
        assert ckpt.save(make(6), 2).result(300).generation == 0  # nothing is in doubt now

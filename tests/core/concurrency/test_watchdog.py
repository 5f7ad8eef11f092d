"""Calls that may never return, and their watchdog."""

import gc
import signal
import threading
import weakref

import pytest

from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.watchdog import (
    Deadline,
    Watchdog,
    call_all_with_deadline,
    call_with_deadline,
)
from penstock.testing.hasty import ShiftedClock

QUICK = Timing(poll_s=0.01, interrupt_s=0.01)


class LateError(Exception):
    pass


@pytest.fixture
def hang():
    """A call that hangs until the test ends; `begun` is set once it does."""
    gate = threading.Event()

    def call():
        call.begun.set()
        assert gate.wait(60)

    call.begun = threading.Event()
    yield call
    gate.set()


def abandoned(name):
    return [thread for thread in threading.enumerate() if thread.name == f"penstock-{name}"]


def test_a_deadline_fires_once_and_progress_postpones_a_watchdog():
    clock = ShiftedClock()
    deadline, watchdog = Deadline(10.0, clock), Watchdog(10.0, clock)
    clock.ahead_s = 9.0
    assert not deadline.is_over()
    assert 0 < deadline.left_s() <= 1.0
    watchdog.moved()
    clock.ahead_s = 12.0
    assert deadline.is_over()
    assert deadline.left_s() == 0.0
    assert deadline.taken_s() >= 12.0
    assert not watchdog.is_over()
    clock.ahead_s = 25.0
    assert watchdog.is_over()


def test_a_hung_call_ends_at_its_deadline_and_abandons_its_thread(hang):
    clock = ShiftedClock(lambda: 1000.0 if hang.begun.is_set() else 0.0)
    deadline = Deadline(60, clock)
    cancelled, others = [], {*abandoned("ask")}  # those of other tests
    with pytest.raises(LateError) as caught:
        call_with_deadline(
            "ask", hang, deadline, LateError, timing=QUICK, cancel=lambda: cancelled.append(1)
        )
    assert caught.value.__notes__ == [
        "penstock: the thread of a call that is stuck (ask) was left behind"
    ]
    assert cancelled == [1]
    (thread,) = {*abandoned("ask")} - others
    assert thread.daemon  # no interpreter waits for it


def test_a_progressing_call_is_awaited():
    clock = ShiftedClock()
    watchdog = Watchdog(10.0, clock)
    looks = threading.Semaphore(0)

    class Looking(Watchdog):
        def is_over(self):
            looks.release()
            return super().is_over()

    watchdog = Looking(10.0, clock)

    def call():
        for _ in range(5):
            watchdog.moved()
            clock.ahead_s += 9.0
            assert looks.acquire(timeout=60)
            assert looks.acquire(timeout=60)
        return "done"

    assert call_with_deadline("x", call, watchdog, LateError, timing=QUICK) == "done"


def test_ctrl_c_cancels_the_call_and_waits_for_its_end():
    begun, cancelled = threading.Event(), threading.Event()
    seen = []

    def call():
        begun.set()
        assert cancelled.wait(60)
        seen.append("over")

    def interrupt():
        assert begun.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        call_with_deadline(
            "x",
            call,
            Deadline(None),
            LateError,
            timing=Timing(interrupt_s=60),
            cancel=cancelled.set,
        )
    thread.join()
    assert seen == ["over"]
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("how", ["one", "all"])
def test_a_handled_error_keeps_nothing_alive(how):
    class Held:
        pass

    def fail(held):
        raise KeyError(held.__class__)

    held = Held()
    ref = weakref.ref(held)
    gc.disable()
    try:
        if how == "one":
            with pytest.raises(KeyError):
                call_with_deadline(
                    "x", lambda held=held: fail(held), Deadline(None), LateError, timing=QUICK
                )
        else:
            call_all_with_deadline("x", [lambda held=held: fail(held)], Deadline(60), LateError)
        del held
        for thread in abandoned("x"):
            thread.join(60)
        assert ref() is None
    finally:
        gc.enable()

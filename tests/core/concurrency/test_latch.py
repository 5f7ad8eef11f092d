"""Latches: every waiter passes an open one, and Ctrl-C during a wait is harmless."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from penstock.core.concurrency.latch import Latch
from penstock.core.reporting.reports import Outcome


def test_it_opens_once_for_all_present_and_later_waiters():
    latch = Latch()
    assert not latch.is_open
    assert not latch.wait(0)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(latch.wait) for _ in range(8)]
        timed = latch.wait(0.01)
        latch.open()
        latch.open()
        assert all(future.result(30) for future in waiting)
    assert not timed
    assert latch.is_open
    assert latch.wait()
    assert latch.wait(0)


def interrupted_at(number, wait, then):
    """Whether `wait` was still running when its `number`-th bytecode raised KeyboardInterrupt.

    Calls `then` with the interrupted thread as an executor: before that thread ends, since the next
    one may get its number, which identifies a lock's owner.
    """
    left = number

    def trace(frame, event, arg):
        del arg
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    def run():
        sys._getframe().f_trace_opcodes = True  # 3.12 traces them only if set before `settrace`
        sys.settrace(trace)
        try:
            wait()
        except (KeyboardInterrupt, RuntimeError):  # the latter from an interrupted `Condition`
            return True
        except TimeoutError:
            return False
        finally:
            sys.settrace(None)
        return False

    # A separate thread: an exception at such a place may stay "the one being handled" in it. No
    # collection meanwhile: an interrupt in one of its callbacks is lost.
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            interrupted = pool.submit(run).result(30)
            then(pool)
            return interrupted
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["latch", "outcome"])
def test_an_interrupted_wait_never_blocks_other_waiters(kind):
    """Ctrl-C at every single bytecode of a wait."""
    number = 0
    interrupted = True
    while interrupted:
        number += 1
        if kind == "latch":
            one = Latch()
            wait, end = one.wait, one.open
        else:
            one = Outcome(lambda: None)
            wait, end = one.result, partial(one.set_result, None)
        ender = threading.Thread(target=end, daemon=True)

        def end_it(_pool, ender=ender):
            ender.start()
            ender.join(30)

        interrupted = interrupted_at(number, partial(wait, 0.001), end_it)
        assert not ender.is_alive()
    assert number > 20

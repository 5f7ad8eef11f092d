"""Deadlines, watchdogs, and calls of a store that may never return.

Store calls cannot be cancelled: the kernel, or a library, holds the thread. So code that must not
hang with a store makes the call on a separate daemonic thread, and waits for it until a deadline.
Then it leaves the thread behind, with everything that the call uses. A daemonic thread does not
keep the interpreter from exiting.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.timing import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.concurrency.timing import Clock, Timing

T = TypeVar("T")


class Deadline:
    """A point in time, `limit_s` seconds after its construction.

    Args:
        limit_s: The time limit; None or infinity sets no limit.
        clock: The clock to read.
    """

    def __init__(self, limit_s: float | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self._clock = clock
        self._began_s = clock.monotonic_s()

    def taken_s(self) -> float:
        """Return the seconds that have passed."""
        return self._clock.monotonic_s() - self._began_s

    def left_s(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self.limit_s - self.taken_s())

    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return self.taken_s() >= self.limit_s


NEVER = Deadline(None)


class Watchdog(Deadline):
    """A deadline that passes when a task makes no progress for `limit_s`.

    The task calls `moved` whenever it makes progress, which restarts the limit. Any thread may read
    the deadline.
    """

    def moved(self) -> None:
        """Restart the time limit."""
        self._began_s = self._clock.monotonic_s()

    @property
    def is_paused(self) -> bool:
        """Whether the watchdog is paused."""
        return self._began_s == math.inf

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no time within the block, whose calls have their own limits."""
        self._began_s = math.inf
        try:
            yield
        finally:
            self.moved()


class BackgroundCall(Generic[T]):
    """Makes one call on its own thread, which is left behind if the call does not return."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._name = name
        # Acquired once: by the call when it begins, or by a waiter that gives up before that.
        self._claim = threading.Lock()
        self._over = Latch()
        # The waiter does not touch this before the call is over: Ctrl-C could interrupt the waiter
        # while it holds the future's lock, and the call's thread would wait for it forever.
        self._outcome: Future[T] | None = Future()
        self._work = partial(_run, call, self._claim, self._outcome, self._over)

    def start(self) -> None:
        """Start the thread."""
        spawn(self._name, self._work)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the call; return whether it is over."""
        return self._over.wait(timeout_s)

    def result(self) -> T:
        """Return the call's result, or raise its error; call only once, after the call is over."""
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        del self._work
        try:
            return outcome.result()
        finally:
            del outcome  # the error's traceback refers to this frame: it would be a cycle

    def outcome(self) -> T | BaseException:
        """Return the call's result or its error; call only once, after the call is over."""
        future, self._outcome = self._outcome, None
        assert future is not None
        error = future.exception()
        return future.result() if error is None else error

    def give_up(self, cancel: Callable[[], None], patience_s: float) -> bool:
        """Keep the call from beginning, or `cancel` it and wait at most `patience_s` for its end.

        Returns:
            True if the call is over or will never begin, False if it is still in flight.
        """
        until_s = math.inf
        while True:
            # One `try` around everything, and after any error the loop begins again: otherwise a
            # second Ctrl-C would raise from here while the call still uses memory that the caller
            # frees.
            try:
                until_s = min(until_s, SYSTEM_CLOCK.monotonic_s() + patience_s)
                if self._claim.acquire(blocking=False):
                    self._over.open()
                elif not self._over.is_open:
                    cancel()
                    self._over.wait(until_s - SYSTEM_CLOCK.monotonic_s())
            except BaseException:  # noqa: BLE001, S112
                continue
            else:
                return self._over.is_open


def spawn(name: str, task: Callable[[], object]) -> threading.Thread:
    """Run `task` on its own daemonic thread, `penstock-NAME`."""
    thread = threading.Thread(target=task, name=f"penstock-{name}", daemon=True)
    thread.start()
    return thread


def call_with_deadline(
    name: str,
    call: Callable[[], T],
    deadline: Deadline = NEVER,
    late: Callable[[], BaseException] = TimeoutError,
    *,
    timing: Timing,
    cancel: Callable[[], None] = lambda: None,
    patience_s: float | None = None,
) -> T:
    """Make `call` on its own thread, and return its result.

    If Ctrl-C or the deadline ends the wait early, this calls `cancel`, and raises once the call is
    over or `patience_s` have passed. A note on the error reports a thread that was left behind.

    Args:
        name: The name of the thread, in logs and notes.
        call: The call that may hang.
        deadline: Ends the wait; a `Watchdog` if `call` reports progress. With the default only
            Ctrl-C ends the wait.
        late: Returns the error to raise at the deadline.
        timing: How often to check the deadline (`poll_s`).
        cancel: Asks `call` to end soon; called in the waiting thread.
        patience_s: Maximum seconds to wait for a call that was given up; None means
            `Timing.interrupt_s`.

    Raises:
        BaseException: The error of `call`, or the error from `late`.
    """
    background = BackgroundCall(name, call)
    try:
        background.start()
        while not background.wait(min(timing.poll_s, deadline.left_s())):
            if deadline.is_over():
                raise late()  # noqa: TRY301 - the call is given up in this case, too
    except BaseException as error:
        if not background.give_up(cancel, timing.interrupt_s if patience_s is None else patience_s):
            error.add_note(f"penstock: the thread of a call that is stuck ({name}) was left behind")
        raise
    return background.result()


def call_all_with_deadline(
    name: str,
    calls: Sequence[Callable[[], T]],
    deadline: Deadline,
    late: Callable[[], BaseException],
) -> list[T | BaseException]:
    """Make all of `calls` at once, each on its own thread.

    Returns:
        Each call's result or error. If a call is not over at the deadline, its thread is left
        behind, and its error comes from `late`.
    """
    begun = [BackgroundCall(name, call) for call in calls]
    for background in begun:
        background.start()
    outcomes: list[T | BaseException] = []
    for background in begun:
        over = background.wait(deadline.left_s())
        outcomes.append(background.outcome() if over else late())
    return outcomes


def _run(call: Callable[[], T], claim: threading.Lock, outcome: Future[T], over: Latch) -> None:
    if claim.acquire(blocking=False):
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the waiter raises it
            outcome.set_exception(error)
        del outcome  # the error's traceback refers to this frame: it would be a cycle
        over.open()

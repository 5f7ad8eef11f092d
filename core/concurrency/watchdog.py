"""Deadlines, watchdogs, and calls of a store that may never return.

A call of a store cannot be cancelled: the kernel, or a library, holds its thread. So whatever must
not hang with a store makes the call on a daemonic thread of its own, waits for it as long as a
deadline allows, and else leaves the thread behind with all that it uses. A daemonic thread does
not keep an interpreter from exiting.
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
    """The end of a length of time that is counted from now on.

    Args:
        limit_s: The length; None or infinity: the end never comes.
        clock: What tells the time.
    """

    def __init__(self, limit_s: float | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self._clock = clock
        self._began_s = clock.monotonic_s()

    def taken_s(self) -> float:
        """Seconds that have passed."""
        return self._clock.monotonic_s() - self._began_s

    def left_s(self) -> float:
        """Seconds until the end, 0 from then on."""
        return max(0.0, self.limit_s - self.taken_s())

    def is_over(self) -> bool:
        """Whether the end has come."""
        return self.taken_s() >= self.limit_s


NEVER = Deadline(None)


class Watchdog(Deadline):
    """A deadline that each progress of a task puts off, so it comes when the task is stuck.

    The task says `moved`; any thread may ask.
    """

    def moved(self) -> None:
        """Count anew from now on."""
        self._began_s = self._clock.monotonic_s()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count within the block: what it calls has limits of its own."""
        self._began_s = math.inf
        try:
            yield
        finally:
            self.moved()


class BackgroundCall(Generic[T]):
    """One call on a thread of its own, which is left behind if it does not return."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._name = name
        # Acquired once: by the call when it begins, or by the waiter that gives up before that.
        self._claim = threading.Lock()
        self._over = Latch()
        # Not touched by the waiter before the call is over: Ctrl-C could come while it holds the
        # lock of the future, which the call would then wait for.
        self._outcome: Future[T] | None = Future()
        self._work = partial(_run, call, self._claim, self._outcome, self._over)

    def start(self) -> None:
        """Begin the call."""
        spawn(self._name, self._work)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the call is over; False: it is not, `timeout_s` seconds later."""
        return self._over.wait(timeout_s)

    def result(self) -> T:
        """What the call returned, or raises what it raised; once, when it is over."""
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        del self._work
        try:
            return outcome.result()
        finally:
            del outcome  # an error holds this frame, and would be held by it

    def outcome(self) -> T | BaseException:
        """What the call returned or raised; once, when it is over."""
        future, self._outcome = self._outcome, None
        assert future is not None
        error = future.exception()
        return future.result() if error is None else error

    def give_up(self, cancel: Callable[[], None], patience_s: float) -> bool:
        """Keep the call from beginning, or `cancel` it and wait for its end.

        Returns:
            Whether it is over; else it goes on, after `patience_s`.
        """
        until_s = math.inf
        while True:
            # All of it in one `try`: whatever interrupts this, as a rule one more Ctrl-C, makes it
            # begin again.
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
    """Run `task` on a daemonic thread of its own, `penstock-NAME`."""
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
    """Make `call` on a thread of its own, and return its result.

    Whatever ends the wait early, Ctrl-C or the deadline, calls `cancel`, and is raised once the
    call is over or `patience_s` have passed. In the latter case the error has a note that says that
    the thread was left behind.

    Args:
        name: Of the thread, for people.
        call: What may hang.
        deadline: When to give it up; a `Watchdog` that `call` feeds, if it makes progress. Without
            one only Ctrl-C ends the wait.
        late: Makes the error that is raised at the deadline.
        timing: How often the deadline is looked at.
        cancel: Asks `call`, from this thread, to end soon.
        patience_s: How long a call that was given up may take to end; None: `interrupt_s`.

    Raises:
        BaseException: What `call` raised, or `late` made.
    """
    background = BackgroundCall(name, call)
    try:
        background.start()
        while not background.wait(min(timing.poll_s, deadline.left_s())):
            if deadline.is_over():
                raise late()  # noqa: TRY301 - what follows is for this as well
    except BaseException as error:
        if not background.give_up(cancel, timing.interrupt_s if patience_s is None else patience_s):
            error.add_note(f"penstock: a stuck {name} was left behind")
        raise
    return background.result()


def call_all_with_deadline(
    name: str,
    calls: Sequence[Callable[[], T]],
    deadline: Deadline,
    late: Callable[[], BaseException],
) -> list[T | BaseException]:
    """Make all of `calls` at once, each on a thread of its own.

    Returns:
        What each of them returned or raised, or what `late` makes for one that is not over at the
        deadline; its thread is left behind.
    """
    begun = [BackgroundCall(name, call) for call in calls]
    for background in begun:
        background.start()
    found: list[T | BaseException] = []
    for background in begun:
        over = background.wait(deadline.left_s())
        found.append(background.outcome() if over else late())
    return found


def _run(call: Callable[[], T], claim: threading.Lock, outcome: Future[T], over: Latch) -> None:
    if claim.acquire(blocking=False):
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the waiter raises it
            outcome.set_exception(error)
        del outcome  # an error holds this frame, and would be held by it
        over.open()

"""The threads of the engine; nothing else in core makes any, but for `pool`."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.latch import Latch
from penstock.core.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_PATIENCE_S = 5.0  # how long Ctrl-C waits for a store that may be stuck
_LOOK_S = 1.0  # only bounds how late a stuck store is noticed


class Workers:
    """The threads of one checkpointer: a pool for hashing and encoding, and one per long task."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pid = os.getpid()
        self._pool = self._make_pool()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` in the pool."""
        if self._pid != os.getpid():  # a forked child has none of the threads
            self._pid, self._pool = os.getpid(), self._make_pool()
        return self._pool.submit(task)

    def _make_pool(self) -> Pool:
        return Pool(self.count, "penstock-work")

    def spawn(self, name: str, task: Callable[[], None]) -> threading.Thread:
        """Run `task` on a thread of its own. Daemonic: a stuck disk must not hold up an exit."""
        thread = threading.Thread(target=task, name=f"penstock-{name}", daemon=True)
        thread.start()
        return thread

    def apart(
        self,
        name: str,
        task: Callable[[], T],
        *,
        cancel: Callable[[], None],
        check: Callable[[], None] = lambda: None,
        patience_s: float | None = None,
    ) -> T:
        """Run `task` on a thread of its own, and return its result.

        Whatever interrupts the wait (Ctrl-C, or what `check` raises now and then) calls `cancel`,
        and is raised once `task` is over, or does not come to its end in `patience_s` (by default
        5 s): its thread then holds on to all that it uses.
        """
        mine = threading.Lock()  # taken for ever by whoever is first
        over = Latch()
        outcome: Future[T] = Future()  # not to be touched here before it is over, as it has a lock
        work = partial(_run, task, mine, outcome, over)
        try:
            self.spawn(name, work)
            while not over.wait(_LOOK_S):
                check()
        except BaseException as error:
            if not _outlast(mine, over, cancel, _PATIENCE_S if patience_s is None else patience_s):
                error.add_note(f"penstock: a stuck {name} was left behind")
            raise
        try:
            return outcome.result()
        finally:
            del outcome, work  # as in `_run`

    def close(self) -> None:
        """Stop the pool once it is idle."""
        self._pool.shutdown(wait=False)


def _run(task: Callable[[], T], mine: threading.Lock, outcome: Future[T], over: Latch) -> None:
    if mine.acquire(blocking=False):
        try:
            outcome.set_result(task())
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            outcome.set_exception(error)
        del outcome  # an error holds this frame, and would be held by it
        over.open()


def _outlast(
    mine: threading.Lock, over: Latch, cancel: Callable[[], None], patience_s: float
) -> bool:
    """Keep a task from beginning, or wait for its end; False: it does not come to it."""
    until_s = math.inf
    while True:
        # All in one `try`: whatever is interrupted here, as a rule by more of the same, is begun
        # again.
        try:
            until_s = min(until_s, time.monotonic() + patience_s)
            if mine.acquire(blocking=False):
                over.open()
            elif not over.is_open:
                cancel()
                over.wait(until_s - time.monotonic())
        except BaseException:  # noqa: BLE001, S112
            continue
        else:
            return over.is_open


class BusyClock:
    """Seconds in which at least one of some overlapping tasks was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the three fields below
        self._running = 0
        self._since = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """One more task runs."""
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            self._running += 1

    def stop(self) -> None:
        """One task less."""
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self.seconds += time.monotonic() - self._since

"""Resolves each future of a save once, in order, and without holding a lock.

Tested in `tests/core/reporting/test_events.py`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.core.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.reporting.reports import Outcome, SaveHandle, SaveReport


class Ending:
    """Resolves the futures of one handle. Thread-safe.

    Resolving a future runs the caller's callbacks, which may do anything. So no lock is held then,
    and a callback that would wait for its own save gets an error instead.
    """

    def __init__(self, handle: SaveHandle) -> None:
        self.handle = handle
        self.lock = threading.RLock()  # guards `error` and `_claimed`
        self.error: BaseException | None = None
        """Why the save was given up; None unless it was."""
        self._claimed: set[Outcome[Any]] = set()  # resolved, or about to be by one thread
        self._calling: set[int] = set()  # identifiers of threads that are in a callback

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in a callback of the save."""
        return threading.get_ident() in self._calling

    def check_may_wait(self) -> None:
        """Raise an error if a wait for the save would never end.

        Raises:
            SaveError: The caller is in a callback that the save itself waits for.
        """
        if self.in_callback and not self.handle.durable.done():
            msg = (
                f"called in a callback of the save of step {self.handle.step}, which cannot "
                "continue until the callback returns: do this after 'durable' or 'failed'. (A "
                "signal handler that interrupted the fence of this save must set a flag instead, "
                "for the training loop to do this.)"
            )
            raise SaveError(msg)

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """Mark this thread as running callbacks of the save."""
        me = threading.get_ident()
        if me in self._calling:  # a callback resolved the next future: the outer call unmarks
            yield
            return
        self._calling.add(me)
        try:
            yield
        finally:
            self._calling.discard(me)

    def capture(self) -> None:
        """Resolve `captured`, unless the save has failed."""
        self._resolve([self.handle.captured], lambda future: future.set_result(None))

    def commit(self, report: SaveReport) -> None:
        """Resolve `committed`, after which the save cannot fail. Does nothing after `fail`."""
        self._resolve([self.handle.committed], lambda future: future.set_result(report))

    def succeed(self, report: SaveReport) -> None:
        """Resolve `committed` and `durable`. Does nothing after `fail`."""
        futures = [self.handle.committed, self.handle.durable]
        self._resolve(futures, lambda future: future.set_result(report))

    def replicate(self, done: bool) -> None:  # noqa: FBT001 - the result of the future
        """Resolve `replicated`, after `committed`."""
        self._resolve([self.handle.replicated], lambda future: future.set_result(done))

    def leave(self, error: BaseException) -> None:
        """Resolve `durable` with an error: the checkpoint is committed, but not durable."""
        self._resolve([self.handle.durable], lambda future: future.set_exception(error))

    def fail(self, why: Callable[[], BaseException], *, first: Callable[[], None]) -> bool:
        """Resolve all futures with an error; return False if the save has ended already.

        Args:
            why: Returns the error; called under `lock`, so that the state that it reads cannot
                change.
            first: Called under `lock`, before any callback can run.
        """
        handle = self.handle
        with self.lock:
            if self.error is not None or handle.committed in self._claimed:
                return False
            error = self.error = why()
            first()
            todo = self._claim(
                [handle.captured, handle.committed, handle.replicated, handle.durable]
            )
        if handle.captured not in todo:
            # Another thread has claimed `captured` and is resolving it. The order of the futures is
            # a promise, so the later ones fail after it.
            handle.captured.wait()
        self._finish(todo, lambda future: future.set_exception(error))
        return True

    def _resolve(
        self, futures: list[Outcome[Any]], resolve: Callable[[Outcome[Any]], None]
    ) -> None:
        with self.lock:
            todo = [] if self.error is not None else self._claim(futures)
        self._finish(todo, resolve)

    def _claim(self, futures: list[Outcome[Any]]) -> list[Outcome[Any]]:
        free = [future for future in futures if future not in self._claimed]
        self._claimed.update(free)
        return free

    def _finish(self, futures: list[Outcome[Any]], resolve: Callable[[Outcome[Any]], None]) -> None:
        with self.calling_back():
            for future in futures:
                resolve(future)

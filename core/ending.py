"""How a save ends: its futures are resolved once each, in order, and outside of any lock."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.core.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.reports import Outcome, SaveHandle, SaveReport


class Ending:
    """Resolves the futures of one handle. Thread-safe.

    Callbacks of the caller's run wherever a future is resolved, and may do anything: so that is
    done without a lock, and whoever would wait in one for the save itself is told so.
    """

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle
        self.lock = threading.RLock()  # guards `error` and `_claimed`
        self.error: BaseException | None = None
        """Why the save was given up."""
        self._claimed: set[Outcome[Any]] = set()  # resolved, or about to be
        self._calling: set[int] = set()

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in a callback of the save."""
        return threading.get_ident() in self._calling

    def check_may_wait(self) -> None:
        """Refuse to wait for the save where that would be for ever.

        Raises:
            SaveError: This is a callback which the save itself waits for.
        """
        if self.in_callback and not self._handle.durable.done():
            msg = (
                f"called in a callback of the save of step {self._handle.step}, which cannot go on "
                "before the callback returns: do this at 'durable' or 'failed'"
            )
            raise SaveError(msg)

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """While callbacks of the save run on this thread."""
        me = threading.get_ident()
        if me in self._calling:
            yield
            return
        self._calling.add(me)
        try:
            yield
        finally:
            self._calling.discard(me)

    def capture(self) -> None:
        """Everything is captured, unless the save has failed."""
        self._resolve([self._handle.captured], lambda future: future.set_result(None))

    def commit(self, report: SaveReport) -> None:
        """It is committed, and cannot fail any more; comes too late after `fail`."""
        self._resolve([self._handle.committed], lambda future: future.set_result(report))

    def succeed(self, report: SaveReport) -> None:
        """It is durable; comes too late after `fail`."""
        futures = [self._handle.committed, self._handle.durable]
        self._resolve(futures, lambda future: future.set_result(report))

    def leave(self, error: BaseException) -> None:
        """It is committed, but will not be durable."""
        self._resolve([self._handle.durable], lambda future: future.set_exception(error))

    def fail(self, why: Callable[[], BaseException], *, first: Callable[[], None]) -> bool:
        """Give the save up; False: it has ended already.

        Args:
            why: Gives the error; called under `lock`, so that what it looks at stays so.
            first: Called under `lock` before anybody is told.
        """
        handle = self._handle
        with self.lock:
            if self.error is not None or handle.committed in self._claimed:
                return False
            error = self.error = why()
            first()
            todo = self._claim([handle.captured, handle.committed, handle.durable])
        if handle.captured not in todo:
            handle.captured.wait()  # another thread is just resolving it: it comes first
        self._tell(todo, lambda future: future.set_exception(error))
        return True

    def _resolve(
        self, futures: list[Outcome[Any]], resolve: Callable[[Outcome[Any]], None]
    ) -> None:
        with self.lock:
            todo = [] if self.error is not None else self._claim(futures)
        self._tell(todo, resolve)

    def _claim(self, futures: list[Outcome[Any]]) -> list[Outcome[Any]]:
        free = [future for future in futures if future not in self._claimed]
        self._claimed.update(free)
        return free

    def _tell(self, futures: list[Outcome[Any]], resolve: Callable[[Outcome[Any]], None]) -> None:
        with self.calling_back():
            for future in futures:
                resolve(future)

"""Futures that stand for several transfers: done only when all of them have ended."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class Batch:
    """A future that is done once all holders have released it; the first holder is its maker."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self._holders = 1
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # guards `_holders` and `_error`

    def hold(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def release(self, error: BaseException | None = None) -> None:
        """Remove a holder; the first error of a holder becomes that of the batch."""
        with self._lock:
            self._holders -= 1
            self._error = self._error or error
            last, error = self._holders == 0, self._error
        if not last:
            return
        # Outside the lock, since this runs the callbacks of the future.
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


def settle(futures: Collection[Future[None]]) -> None:
    """Wait until none of `futures` is running, then raise the first error.

    When one fails, or the wait is interrupted, those that have not begun are cancelled. Those that
    run are waited for: they may still write into the caller's memory.
    """
    try:
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:
        _end(futures)
        raise
    _end(pending)
    error = next((f.exception() for f in futures if not f.cancelled() and f.exception()), None)
    if error is not None:
        raise error


def _end(futures: Collection[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    wait(futures)

"""Waiting for what runs in the background, all of it."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class Batch:
    """A future that is done once everything that holds it has let go."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()
        self._holders = 1
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # guards both

    def hold(self) -> None:
        """One more part is under way."""
        with self._lock:
            self._holders += 1

    def release(self, error: BaseException | None = None) -> None:
        """One part is over; the first error is that of the batch."""
        with self._lock:
            self._holders -= 1
            self._error = self._error or error
            last, error = self._holders == 0, self._error
        if not last:
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


def settle(futures: Collection[Future[None]]) -> None:
    """Wait until none of `futures` runs any more, then raise the first error.

    What has not begun when one fails, or when the wait is interrupted, never begins.
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

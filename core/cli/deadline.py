"""Calls of stores that may hang, in a command that shall end all the same."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.errors import StorageTimeoutError
from penstock.core.pool import fulfil

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.workers import Workers

_END_S = 2.0  # to end what is under way, and to look once more, when the time is over

T = TypeVar("T")


class Deadline:
    """The end of the time that a command may take, counted from now on."""

    def __init__(self, workers: Workers, timeout_s: float | None) -> None:
        """Begin to count `timeout_s` seconds; None: as long as it takes."""
        self._workers = workers
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()

    def taken_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began_s

    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self._timeout_s is not None and self.taken_s() > self._timeout_s

    def ask(self, what: str, call: Callable[[], T], *, ending: bool = False) -> T:
        """What `call` gives; what belongs to the end (`ending`) has a little longer.

        Raises:
            StorageTimeoutError: It gave nothing in time; its thread is left behind.
        """
        if self._timeout_s is None:
            return call()
        future: Future[T] = Future()
        self._workers.spawn("ask", partial(fulfil, future, call))
        left_s = self._timeout_s + (_END_S if ending else 0.0) - self.taken_s()
        try:
            return future.result(max(0.0, left_s))
        except FutureTimeoutError:
            if future.done():
                return future.result()  # at the last moment, or the error is its own
            msg = f"{what} did not end within the {self._timeout_s:g} s of --timeout"
            raise StorageTimeoutError(msg) from None

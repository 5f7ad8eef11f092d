"""Latches, for waits in the training thread, where Ctrl-C may come at any moment."""

from __future__ import annotations

import contextlib
import math
import threading
import time

_POLL_S = 0.2  # a wait that missed its wake-up because of Ctrl-C ends at most this late


class Latch:
    """Makes threads wait until it is opened, and then stays open.

    It uses a bare lock: Ctrl-C at the wrong moment leaves a `threading.Condition` (and so an
    `Event` or a `Future`) locked forever, and the thread that would notify it hangs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether the latch was opened."""
        return self._open

    def open(self) -> None:
        """Let all waiting and later threads pass; idempotent."""
        self._open = True
        self._wake_one()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` (None: forever); return whether the latch is open."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._open:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._lock.acquire(timeout=min(left_s, _POLL_S)):
                self._wake_one()
        return True

    def _wake_one(self) -> None:
        # Each woken thread wakes the next; the loser of a race finds the lock released already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

"""Waiting on the thread that trains, where Ctrl-C may come at any moment."""

from __future__ import annotations

import contextlib
import math
import threading
import time

_POLL_S = 0.2  # only bounds how late a wait ends whose end was missed


class Latch:
    """Opens once and stays open.

    Made of a bare lock: Ctrl-C at the wrong moment leaves a `threading.Condition` (and so an
    `Event` or a `Future`) locked for ever, and whoever wants to notify it hangs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._open

    def open(self) -> None:
        """Let everyone pass; idempotent."""
        self._open = True
        self._wake_one()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open; False: it is not, `timeout_s` seconds later."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._open:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._lock.acquire(timeout=min(left_s, _POLL_S)):
                self._wake_one()
        return True

    def _wake_one(self) -> None:
        with contextlib.suppress(RuntimeError):  # another one did
            self._lock.release()

"""Runs background tasks in order."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


class Threads(Protocol):
    """An executor, or a pool of ours."""

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:
        """Run `fn` on one of the threads."""
        ...


class Lane:
    """Runs tasks in the order of their submission, never two at a time."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._tasks: deque[Callable[[], None]] = deque()
        self._running = False
        self._lock = threading.Lock()  # guards both

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, when all tasks before it have ended."""
        with self._lock:
            self._tasks.append(task)
            if self._running:
                return
            self._running = True
        self._threads.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                task = self._tasks.popleft()
            task()

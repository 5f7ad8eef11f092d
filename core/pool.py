"""A pool of threads that keeps no interpreter from exiting."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_LOOK_S = 1.0  # only bounds how late `shutdown` notices that a thread is stuck


class Pool:
    """At most `count` threads, made when there is work for them.

    They are daemonic, which those of `concurrent.futures` are not: its hook at the exit of the
    interpreter would wait for ever for a call of a store that hangs.

    Args:
        count: Threads.
        name: Of the threads.
        stuck_s: A thread whose task takes longer is not counted any more, and another may take its
            place: calls that never return must not use up the pool.
    """

    def __init__(self, count: int, name: str, *, stuck_s: float = math.inf) -> None:
        self._count = count
        self._name = name
        self._stuck_s = stuck_s
        self._busy_since_s: dict[threading.Thread, float] = {}
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._lock = threading.Lock()  # guards `_threads`, `_idle` and `_closed`

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on one of the threads.

        Raises:
            RuntimeError: It is shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                msg = f"the threads of {self._name} are shut down"
                raise RuntimeError(msg)
            self._queue.put((future, task))
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._count + sum(map(self._is_stuck, self._threads)):
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}_{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Take no more, and end the threads when all is done; idempotent.

        With `wait` until they have ended, but for those that are stuck.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                for _ in self._threads:
                    self._queue.put(None)
        if wait:
            for thread in self._threads:
                while thread.is_alive() and not self._is_stuck(thread):
                    thread.join(_LOOK_S)

    def _is_stuck(self, thread: threading.Thread) -> bool:
        since_s = self._busy_since_s.get(thread, math.inf)
        return time.monotonic() - since_s > self._stuck_s

    def _work(self) -> None:
        me = threading.current_thread()
        while (work := self._queue.get()) is not None:
            self._busy_since_s[me] = time.monotonic()
            fulfil(*work)
            del work
            with self._lock:
                del self._busy_since_s[me]
                self._idle += 1


def fulfil(future: Future[T], task: Callable[[], T]) -> None:
    """Run `task`, unless `future` was cancelled, and tell it what came of that."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001 - raised by who waits
        future.set_exception(error)
        del future  # an error holds this frame, and would be held by it
    else:
        future.set_result(result)

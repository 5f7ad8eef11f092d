"""A pool of threads that keeps no interpreter from exiting."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Pool:
    """At most `count` threads, made when there is work for them.

    They are daemonic, which those of `concurrent.futures` are not: its hook at the exit of the
    interpreter would wait for ever for a call of a store that hangs.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
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
            elif len(self._threads) < self._count:
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._work, name=f"{self._name}_{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Take no more, and end the threads when all is done; idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                for _ in self._threads:
                    self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            _finish(*work)
            del work
            with self._lock:
                self._idle += 1


def _finish(future: Future[T], task: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001 - raised by who waits
        future.set_exception(error)
        del future  # an error holds this frame, and would be held by it
    else:
        future.set_result(result)

"""A pool of threads that keeps no interpreter from exiting."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.concurrency.timing import Timing

T = TypeVar("T")


class Pool:
    """At most `count` threads, made when there is work for them.

    They are daemonic, which those of `concurrent.futures` are not: its hook at the exit of the
    interpreter would wait for ever for a call of a store that hangs.

    Args:
        count: Threads.
        name: Of the threads.
        stuck_s: A thread whose task takes longer is not counted any more, and another may take its
            place: calls that never return must not use up the pool.
        timing: How often stuck threads are looked for; None: as is in force.
    """

    def __init__(
        self, count: int, name: str, *, stuck_s: float = math.inf, timing: Timing | None = None
    ) -> None:
        self._count = count
        self._name = name
        self._stuck_s = stuck_s
        self._timing = timing or current_timing()
        self._busy: dict[threading.Thread, Deadline] = {}
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting = 0  # tasks that no thread has taken yet
        self._watched = False
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above but `_queue`

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
            self._waiting += 1
            self._grow()
            if not self._watched and self._waiting > self._free() and self._stuck_s < math.inf:
                self._watched = True
                self._start("watch", self._watch)
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
                    thread.join(self._timing.poll_s)

    def _free(self) -> int:
        return len(self._threads) - len(self._busy)

    def _grow(self) -> None:
        stuck = sum(map(self._is_stuck, self._threads))
        if self._waiting > self._free() and len(self._threads) < self._count + stuck:
            self._threads.append(self._start(str(len(self._threads)), self._work))
            if self._closed:
                self._queue.put(None)

    def _start(self, what: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"{self._name}_{what}", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        """What was queued before a thread counted as stuck waits for nobody to submit more."""
        while True:
            time.sleep(self._timing.poll_s)
            with self._lock:
                if not self._waiting:
                    self._watched = False
                    return
                self._grow()

    def _is_stuck(self, thread: threading.Thread) -> bool:
        deadline = self._busy.get(thread)
        return deadline is not None and deadline.is_over()

    def _work(self) -> None:
        me = threading.current_thread()
        while (work := self._queue.get()) is not None:
            with self._lock:
                self._waiting -= 1
                self._busy[me] = Deadline(self._stuck_s, self._timing.clock)
            fulfil(*work)
            del work
            with self._lock:
                del self._busy[me]


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

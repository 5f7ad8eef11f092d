"""Pools of daemonic threads, and lanes that run tasks one after the other."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.concurrency.timing import Timing

T = TypeVar("T")
_Queue: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class Pool:
    """Runs tasks on at most `count` threads, each started when there is work for it.

    The threads are daemonic, unlike those of `concurrent.futures`, whose hook at interpreter exit
    would wait forever for a store call that hangs.

    Args:
        count: The maximum number of threads, stuck ones not counted.
        name: The beginning of the threads' names.
        stuck_s: A thread whose task takes longer counts as stuck and may be replaced, so that calls
            that never return do not use up the pool.
        timing: The clock, and how often the pool looks for stuck threads (`poll_s`); None uses the
            current timing.
    """

    def __init__(
        self, count: int, name: str, *, stuck_s: float = math.inf, timing: Timing | None = None
    ) -> None:
        self._count = count
        self._name = name
        self._stuck_s = stuck_s
        self._timing = timing or current_timing()
        self._busy: dict[threading.Thread, Deadline] = {}
        self._queue: _Queue = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting = 0  # tasks in the queue
        self._watched = False
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above but `_queue`
        # Otherwise the threads of a pool that is dropped without `shutdown` would never end.
        weakref.finalize(self, _end, self._queue, self._threads).atexit = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on one of the threads.

        Raises:
            RuntimeError: The pool is shut down, or the process can have no more threads.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                msg = f"the threads of {self._name} are shut down"
                raise RuntimeError(msg)
            self._waiting += 1
            try:
                self._grow()
                if not self._watched and self._waiting > self._free() and self._stuck_s < math.inf:
                    self._start("watch", self._watch)
                    self._watched = True
            except BaseException:  # no thread can be started
                self._waiting -= 1
                raise
            # Last: if this call raises, its task must not run later.
            self._queue.put((future, task))
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Refuse further tasks, and end the threads after the queued tasks; idempotent.

        With `wait`, return when all threads except stuck ones have ended.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                _end(self._queue, self._threads)
        if wait:
            for thread in self._threads:
                while thread.is_alive() and not self._is_stuck(thread):
                    thread.join(self._timing.poll_s)

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of all threads, after `shutdown`."""
        deadline = Deadline(timeout_s, self._timing.clock)
        for thread in self._threads:
            thread.join(deadline.left_s())

    def _free(self) -> int:
        return len(self._threads) - len(self._busy)

    def _grow(self) -> None:
        stuck = sum(map(self._is_stuck, self._threads))
        if self._waiting > self._free() and len(self._threads) < self._count + stuck:
            work = partial(_work, self._queue, weakref.ref(self))
            self._threads.append(self._start(str(len(self._threads)), work))
            if self._closed:  # `shutdown` queued no end for this newer thread
                self._queue.put(None)

    def _start(self, what: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"{self._name}_{what}", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        # If only `submit` replaced stuck threads, tasks queued before a thread counts as stuck
        # would wait until another task is submitted.
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

    def _run(self, future: Future[Any], task: Callable[[], Any]) -> None:
        me = threading.current_thread()
        with self._lock:
            self._waiting -= 1
            self._busy[me] = Deadline(self._stuck_s, self._timing.clock)
        fulfil(future, task)
        # An error's traceback refers to this frame, which would hold the future, and so the error.
        del future, task
        with self._lock:
            del self._busy[me]


def _work(queue: _Queue, pool: weakref.ref[Pool]) -> None:
    """Run tasks until the end is queued; hold no reference to the pool while waiting."""
    while (work := queue.get()) is not None:
        owner = pool()
        if owner is None:
            fulfil(*work)
        else:
            owner._run(*work)  # noqa: SLF001 - this is the thread of the pool
        del work, owner


def _end(queue: _Queue, threads: list[threading.Thread]) -> None:
    """End the threads after the queued tasks."""
    for _ in threads:
        queue.put(None)


class Lane:
    """Runs tasks on a pool in the order of their submission, never two at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: deque[Callable[[], None]] = deque()
        self._running = False
        self._lock = threading.Lock()  # guards `_tasks` and `_running`

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, after all earlier tasks."""
        with self._lock:
            self._tasks.append(task)
            if self._running:
                return
            self._running = True
        self._pool.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                task = self._tasks.popleft()
            task()


def fulfil(future: Future[T], task: Callable[[], T]) -> None:
    """Run `task`, unless `future` was cancelled, and resolve `future` with the outcome."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
        future.set_exception(error)
        del future  # the error's traceback refers to this frame: it would be a cycle
    else:
        future.set_result(result)

"""The threads of one checkpointer, their busy time, and the cores that they may use.

Tested in `tests/core/concurrency/test_cores.py`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.core.concurrency.pool import Pool
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.concurrency.timing import Timing

T = TypeVar("T")

_CGROUP = "/sys/fs/cgroup"
_MOST_WORKERS = 4  # more cores are left to training and its data loaders


class Workers:
    """Runs short tasks (hashing, encoding) in a pool, and each long task on its own thread.

    Args:
        count: The number of threads of the pool.
        timing: The waits of the code that uses these threads; None uses the current timing.
    """

    def __init__(self, count: int, timing: Timing | None = None) -> None:
        self.count = count
        self.timing = timing or current_timing()
        self._pid = os.getpid()
        self._pool = self._make_pool("work", count)
        self._helpers = self._make_pool("copy", max(1, count - 1))

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` in the pool."""
        self._renew_in_child()
        return self._pool.submit(task)

    def side_by_side(self, tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Run short tasks in this thread and in helper threads that run nothing else.

        Returns the result or error of each task, once all are over.
        """
        outcomes: dict[int, T | BaseException] = {}
        left = deque(enumerate(tasks))

        def work() -> None:
            with suppress(IndexError):  # from `popleft`: no task is left
                while True:
                    number, task = left.popleft()
                    outcomes[number] = _outcome(task)

        self._renew_in_child()
        futures: list[Future[None]] = []
        with suppress(RuntimeError):  # no thread can be started: this one runs the tasks
            for _ in range(min(self.count, len(tasks)) - 1):
                futures.append(self._helpers.submit(work))  # noqa: PERF401 - keeps the first ones
        work()
        wait(futures)
        return [outcomes[number] for number in range(len(tasks))]

    def _renew_in_child(self) -> None:
        if self._pid != os.getpid():  # a forked child has none of the threads
            self._pool = self._make_pool("work", self.count)
            self._helpers = self._make_pool("copy", max(1, self.count - 1))
            self._pid = os.getpid()  # last: from here on other threads use the new pools

    def _make_pool(self, name: str, count: int) -> Pool:
        return Pool(count, f"penstock-{name}", timing=self.timing)

    def spawn(self, name: str, task: Callable[[], object]) -> threading.Thread:
        """Run `task` on its own daemonic thread, so that a stuck disk cannot delay an exit."""
        return spawn(name, task)

    def close(self) -> None:
        """End the pool after its queued tasks, without waiting for them."""
        self._pool.shutdown(wait=False)
        self._helpers.shutdown(wait=False)


def _outcome(task: Callable[[], T]) -> T | BaseException:
    try:
        return task()
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        return error


class BusyClock:
    """Counts the seconds in which at least one of several overlapping tasks runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_running`, `_since` and `seconds`
        self._running = 0
        self._since = 0.0
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Count a task that begins."""
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            self._running += 1

    def stop(self) -> None:
        """Count a task that ends."""
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self.seconds += time.monotonic() - self._since


def default_workers(cgroup: str = _CGROUP) -> int:
    """Return the default number of threads that encode and hash."""
    return max(1, min(_MOST_WORKERS, int(usable_cores(cgroup))))


def usable_cores(cgroup: str = _CGROUP) -> float:
    """Return the cores that this process may use; with several local ranks, its share."""
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        count = os.cpu_count() or 1
    return min(count, _quota(cgroup)) / local_ranks()


def _quota(cgroup: str) -> float:
    """Return the cores that a container may use (cgroup v2, else v1); inf without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            texts = [Path(cgroup, name).read_text(encoding="ascii") for name in names]
        except OSError:
            continue
        quota, period = " ".join(texts).split()
        if quota.isdigit():  # no limit is `max`, in v1 -1
            return int(quota) / int(period)
    return math.inf


def local_ranks() -> int:
    """Return the number of ranks on this machine according to their launcher; 1 without one."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

"""How many cores this process may use, and how many of them it keeps busy."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAST_S = 0.5  # a shorter time says too little
_ASSUMED = 1.0  # the thread that trains
_CGROUP = "/sys/fs/cgroup"
_MOST_WORKERS = 4  # more cores are left to training and its data loaders


class CoreMeter:
    """Measures the cores that training uses, from the processor's time between two saves.

    Args:
        read: Returns the seconds of the monotonic clock, and of the processor.
    """

    def __init__(self, read: Callable[[], tuple[float, float]] | None = None) -> None:
        self._read = read or _clocks
        self._began = self._read()
        self._busy = _ASSUMED

    def begin_save(self) -> None:
        """Take the figure of the time since the last save ended, or since this was made."""
        now, used = self._read()
        if now - self._began[0] >= _LEAST_S:
            self._busy = (used - self._began[1]) / (now - self._began[0])

    def end_save(self) -> None:
        """Begin to measure the time until the next save."""
        self._began = self._read()

    @property
    def busy(self) -> float:
        """The cores that training used before the latest save began."""
        return self._busy

    @property
    def cores(self) -> float:
        """The cores that this process may use."""
        return usable_cores()


def default_workers(cgroup: str = _CGROUP) -> int:
    """Return the number of threads that encode and hash, unless the user sets it."""
    return max(1, min(_MOST_WORKERS, int(usable_cores(cgroup))))


def usable_cores(cgroup: str = _CGROUP) -> float:
    """Return the cores that this process may use: its share where several ranks run here."""
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux
        count = os.cpu_count() or 1
    return min(count, _quota(cgroup)) / local_ranks()


def _quota(cgroup: str) -> float:
    """Return the cores whose time a container may use (cgroup v2, else v1); inf without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            texts = [Path(cgroup, name).read_text(encoding="ascii") for name in names]
        except OSError:
            continue
        quota, period = " ".join(texts).split()
        if quota.isdigit():  # without a limit `max`, in v1 -1
            return int(quota) / int(period)
    return math.inf


def local_ranks() -> int:
    """Return the number of ranks on this machine, as their launcher says; 1 without one."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.process_time()

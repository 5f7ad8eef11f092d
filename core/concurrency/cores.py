"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = "/sys/fs/cgroup"
_MOST_WORKERS = 4  # more cores are left to training and its data loaders


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

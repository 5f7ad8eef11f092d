"""The identities of processes, unique even after they have ended."""

from __future__ import annotations

import os
from pathlib import Path


def identity_of(pid: int) -> str:
    """Return boot, PID namespace, PID and start time of a process, which together are unique.

    The start time is empty if there is no such process. The whole identity is empty if `/proc`
    cannot be read, or belongs to another PID namespace, where PIDs mean other processes.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115 - not a path
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
    except OSError:
        return ""
    return f"{boot}/{space}/{pid}-{_start_of(pid) or ''}"


def is_over(identity: str) -> bool:
    """Return whether a process is known to have ended.

    Always False for a process of another PID namespace (another container, or the host), whose
    processes cannot be seen from here.
    """
    mine = identity_of(os.getpid())
    place, _, process = identity.rpartition("/")
    if not place or place != mine.rpartition("/")[0] or identity == mine:
        return False
    number, _, started = process.partition("-")
    if not (number.isascii() and number.isdecimal() and started):
        return False
    start = _start_of(int(number))
    if start is None:
        # The process is gone, or `/proc` hides processes of other users (hidepid).
        return _is_free(int(number))
    return start != started


def _is_free(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _start_of(pid: int) -> str | None:
    """Return the start of a process in ticks since boot; empty if it ended, None if unknown."""
    try:
        # The name in parentheses may hold spaces and parentheses, so fields are counted after it.
        # The 20th is the start time.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        # A zombie has ended, though its parent has not waited for it yet.
        return "" if fields[0] in {"Z", "X"} else fields[19]
    except (OSError, IndexError):
        return None

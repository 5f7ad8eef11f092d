"""Tells the processes of one machine apart, also after they have ended."""

from __future__ import annotations

import os
from pathlib import Path


def identity_of(pid: int) -> str:
    """Boot, PID namespace, number and start of a process; no other process ever has the same.

    The start is empty where there is no such process; all is empty where `/proc` tells nothing, or
    is that of another PID namespace: its numbers are those of other processes.
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
    """Whether a process is known to have ended: only in the PID namespace where it ran.

    A container has a namespace of its own, so there is no answer about processes of another one,
    or of its host.
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
        # It is gone, or `/proc` hides processes of other users.
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
    """When a process started, in ticks since the boot; empty: it has ended; None: not told."""
    try:
        # Behind the name, which may hold anything, the 20th field is when it started.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        # One that nobody has waited for yet is over all the same.
        return "" if fields[0] in {"Z", "X"} else fields[19]
    except (OSError, IndexError):
        return None

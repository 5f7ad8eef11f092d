"""What the kernel says of this process and of a folder. Reads only; knows nothing of Penstock."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that holds a folder.

    Attributes:
        type: `ext4`, `xfs`, `nfs4`, ...
        source: Device, or whatever the file system calls its source.
        point: Where it is mounted.
        read_only: Whether it is mounted so.
    """

    type: str
    source: str
    point: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource limit; None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes and inodes that this user may still use; None: the file system has no fixed number."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    total_inodes: int | None


def mount_of(folder: Path) -> Mount | None:
    """The mount with the longest name above `folder`; None where /proc does not say."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return mount_in(text, folder)


def mount_in(mountinfo: str, folder: Path) -> Mount | None:
    """The same, in the text of `/proc/<pid>/mountinfo`."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:  # noqa: PLR2004 - proc(5)
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # Of several mounts on one folder the last one is seen.
        if folder.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(rest[0], rest[1], point, "ro" in fields[5].split(","))
    return best


def space_of(folder: Path) -> Space:
    """Free space and inodes.

    Raises:
        OSError: The file system does not answer.
    """
    status = os.statvfs(folder)
    return Space(
        status.f_bavail * status.f_frsize,
        status.f_blocks * status.f_frsize,
        status.f_favail if status.f_files else None,
        status.f_files or None,
    )


def limit_of(which: int) -> Limit:
    """A resource limit of this process, such as `resource.RLIMIT_NOFILE`."""
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)
    )
    return Limit(soft, hard)


def kernel_value(name: str) -> str | None:
    """What stands in `/proc/sys/<name>`; None if there is no such file."""
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return None


def is_filtered() -> bool:
    """Whether a seccomp filter decides which system calls this process may use (containers)."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return re.search(r"^Seccomp:\s*2$", status, re.MULTILINE) is not None


def temporary_files(root: Path) -> list[os.stat_result]:
    """Files below `root` that an interrupted publish left: their names begin with `~`."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.startswith("~"):
                try:
                    found.append(Path(folder, name).lstat())
                except FileNotFoundError:  # it was not left, but is in use
                    continue
    return found

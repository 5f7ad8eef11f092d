"""Facts from the kernel on this process and on a folder. Reads only; knows no Penstock."""

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
        source: The device, or what the file system gives as its source.
        point: The folder where it is mounted.
        read_only: Whether it is mounted read-only.
    """

    type: str
    source: str
    point: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource limit; None means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes and inodes that this user may still use; None for a number that is not fixed."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    total_inodes: int | None


def mount_of(folder: Path) -> Mount | None:
    """Return the mount that holds `folder`; None where /proc does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return mount_in(text, folder)


def mount_in(mountinfo: str, folder: Path) -> Mount | None:
    """Return the mount with the longest path above `folder` in a text of `mountinfo`."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:  # noqa: PLR2004 - proc(5)
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # The last of several mounts on one folder hides the others, hence `>=`.
        if folder.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(rest[0], rest[1], point, "ro" in fields[5].split(","))
    return best


def space_of(folder: Path) -> Space:
    """Return the free space and inodes of a folder's file system.

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
    """Return a resource limit of this process, such as `resource.RLIMIT_NOFILE`."""
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)
    )
    return Limit(soft, hard)


def kernel_value(name: str) -> str | None:
    """Return the content of `/proc/sys/<name>`; None if there is no such file."""
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return None


def is_filtered() -> bool:
    """Return whether a seccomp filter limits this process's system calls, as containers do."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return re.search(r"^Seccomp:\s*2$", status, re.MULTILINE) is not None


def temporary_files(root: Path) -> list[os.stat_result]:
    """Return the files below `root` that interrupted publishes left: names that begin with `~`."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.startswith("~"):
                try:
                    found.append(Path(folder, name).lstat())
                except FileNotFoundError:  # a publish in flight has just removed it
                    continue
    return found

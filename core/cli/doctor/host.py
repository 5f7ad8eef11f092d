"""This machine: what the kernel says of it, and the checks of io_uring, limits, disk and memory."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.core.errors import PenstockError
from penstock.core.pipeline.staging import container_memory, machine_memory
from penstock.core.plugins.registry import default_registry
from penstock.core.units import size_text

if TYPE_CHECKING:
    from penstock.core.abc import Backend

_OCTAL = re.compile(r"\\([0-7]{3})")

_FILES_WANTED = 4096
_BLOB_BYTES = 1 << 40  # a blob may come near this: a lower limit of file sizes is worth a warning
_LITTLE_SPACE = 0.05
_FEW_INODES = 10_000
_IN_MEMORY = {"tmpfs", "ramfs"}
_NOT_A_DISK = {
    "overlay": "a layer of a container, slow and gone with it: mount a volume for checkpoints",
    "9p": "a folder shared with a virtual machine, slow and weak in fsync: use a disk of its own",
    "nfs": "a network file system: mount it `hard`; a local disk takes saves faster",
    "nfs4": "a network file system: mount it `hard`; a local disk takes saves faster",
    "cifs": "a network file system without POSIX links: exclusive publishing may not work",
}

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: The subject of the check.
        status: `ok`; `info`, a fact; `warn`, it works but not as well as it could; `fail`, a save
            would fail.
        found: The finding, as a sentence for users.
        advice: The change that would help, if any.
        values: The finding for programs, with keys that depend on `name`.
    """

    name: str
    status: Status
    found: str
    advice: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


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


def check_uring() -> Check:
    """Check whether io_uring works here, and advise on what prevents it."""
    try:
        backend = default_registry().backend_class("uring")
        backend(backend.from_url("/", {})).close()
    except PenstockError as error:
        return Check("io_uring", "warn", str(error), _uring_advice(str(error)), {"works": False})
    return Check("io_uring", "ok", f"works, on Linux {platform.release()}", values={"works": True})


def _uring_advice(why: str) -> str:
    disabled = kernel_value("kernel/io_uring_disabled")
    advice = "until then threads take its place, which cost more CPU"
    if "PENSTOCK_DISABLE_URING" in why:
        advice = f"unset PENSTOCK_DISABLE_URING; {advice}"
    elif "liburing cannot be imported" in why:
        advice = f"pip install liburing; {advice}"
    elif "another CPU" in why:
        advice = f"run on a CPU with AVX-512, which liburing is compiled for; {advice}"
    elif disabled not in {None, "0"}:
        advice = f"sysctl kernel.io_uring_disabled is {disabled}: set it to 0; {advice}"
    elif "EPERM" in why and is_filtered():
        advice = (
            "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile of "
            f"the container; {advice}"
        )
    elif "ENOSYS" in why:
        advice = f"use Linux 5.6 or later, and a container that lets it through; {advice}"
    elif "ENOMEM" in why:
        advice = (
            "raise RLIMIT_MEMLOCK (ulimit -l), which rings count against before Linux 5.12; "
            + advice
        )
    return advice


def check_folder(root: Path, backend: Backend) -> list[Check]:
    """Check the folder, its file system, its space and its inodes.

    The root may also be one file, if the backend takes that.
    """
    try:
        folder = next(f for f in (root, *root.parents) if f.exists()).resolve()
    except OSError as error:
        return [Check("folder", "fail", f"{root}: {error.strerror}", "check the path")]
    if folder.is_dir():
        checks = [_folder(folder, exists=root.exists())]
    else:
        try:
            backend.check_writable()
        except PenstockError:
            return [Check("folder", "fail", f"{folder} is not a folder", "choose another path")]
        checks = []  # whether a file can be written is for `write a record` to find out
    checks.append(_file_system(folder))
    try:
        space = space_of(folder)
    except OSError as error:
        return [*checks, Check("space", "fail", str(error.strerror), "check the mount")]
    return [*checks, _space(space), _inodes(space)]


def _folder(folder: Path, *, exists: bool) -> Check:
    values = {"exists": exists}
    if not os.access(folder, os.W_OK | os.X_OK):
        advice = "change its owner or its permissions"
        return Check("folder", "fail", f"{folder} cannot be written", advice, values)
    found = "exists" if exists else f"does not exist yet; would be made in {folder}"
    return Check("folder", "ok" if exists else "info", found, values=values)


def _file_system(folder: Path) -> Check:
    mount = mount_of(folder)
    if mount is None:
        return Check("file system", "info", "unknown: /proc is not there")
    values = {"type": mount.type, "source": mount.source, "mounted_on": mount.point}
    found = f"{mount.type} ({mount.source} on {mount.point})"
    if mount.read_only:
        return Check("file system", "fail", f"{found}, read-only", "mount it writable", values)
    if mount.type in _IN_MEMORY:
        advice = "checkpoints there are gone after a reboot, and take memory: use a disk"
        return Check("file system", "warn", found, advice, values)
    if mount.type.startswith("fuse"):
        advice = "make sure that its fsync really makes files durable"
        return Check("file system", "warn", found, advice, values)
    if mount.type in _NOT_A_DISK:
        return Check("file system", "warn", found, _NOT_A_DISK[mount.type], values)
    return Check("file system", "ok", found, values=values)


def _space(space: Space) -> Check:
    values = {"free_bytes": space.free_bytes, "total_bytes": space.total_bytes}
    found = f"{size_text(space.free_bytes)} of {size_text(space.total_bytes)} are free"
    if not space.free_bytes:
        return Check("space", "fail", found, "make room, or raise the quota", values)
    if space.free_bytes < _LITTLE_SPACE * space.total_bytes:
        advice = "make room: nearly full file systems are slow, too"
        return Check("space", "warn", found, advice, values)
    return Check("space", "ok", found, values=values)


def _inodes(space: Space) -> Check:
    values = {"free": space.free_inodes, "total": space.total_inodes}
    if space.free_inodes is None:  # btrfs, for instance, creates inodes as they are needed
        return Check("inodes", "ok", "as many as there is space", values=values)
    found = f"{space.free_inodes:,} of {space.total_inodes:,} are free"
    if not space.free_inodes:
        return Check("inodes", "fail", found, "delete small files", values)
    if space.free_inodes < _FEW_INODES:
        return Check("inodes", "warn", found, "delete small files", values)
    return Check("inodes", "ok", found, values=values)


def check_process() -> list[Check]:
    """Check the resource limits that a training process started here would have, and memory."""
    return [_open_files(), _locked_memory(), _file_size(), _memory()]


def _open_files() -> Check:
    limit = limit_of(resource.RLIMIT_NOFILE)
    values = {"soft": limit.soft, "hard": limit.hard}
    found = f"{_count(limit.soft)} (hard limit {_count(limit.hard)})"
    if limit.soft is not None and limit.soft < _FILES_WANTED:
        room = limit.hard is None or limit.hard >= _FILES_WANTED
        where = "ulimit -n" if room else "ulimit -n, as root or in limits.conf"
        advice = f"raise it to {_FILES_WANTED} or more ({where}): data loaders take many, too"
        return Check("open files", "warn", found, advice, values)
    return Check("open files", "ok", found, values=values)


def _locked_memory() -> Check:
    limit = limit_of(resource.RLIMIT_MEMLOCK)
    values = {"soft": limit.soft, "hard": limit.hard}
    found = f"{_size(limit.soft)} (hard limit {_size(limit.hard)}); matters before Linux 5.12"
    return Check("locked memory", "info", found, values=values)


def _file_size() -> Check:
    limit = limit_of(resource.RLIMIT_FSIZE)
    values = {"soft": limit.soft, "hard": limit.hard}
    if limit.soft is None or limit.soft >= _BLOB_BYTES:
        return Check("file size", "ok", _size(limit.soft), values=values)
    advice = "raise it (ulimit -f unlimited): a save with a larger blob fails"
    return Check("file size", "warn", f"at most {_size(limit.soft)}", advice, values)


def _memory() -> Check:
    available, limit = _machine_memory(), container_memory()
    values = {"available_bytes": available, "container_bytes": limit}
    if available is None:
        return Check("memory", "info", "unknown: /proc is not there", values=values)
    found = f"{size_text(available)} available"
    if limit is None or limit >= available:
        return Check("memory", "ok", found, values=values)
    found += f", of which this container may still use {size_text(limit)}"
    if limit < available // 2:
        advice = (
            "set staging_bytes to at most half of what the container may use: by default it is "
            "up to half of what the machine has available"
        )
        return Check("memory", "warn", found, advice, values)
    return Check("memory", "ok", found, values=values)


def _count(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _size(value: int | None) -> str:
    return "unlimited" if value is None else size_text(value)


def _machine_memory() -> int | None:
    try:
        return machine_memory()
    except (OSError, StopIteration):  # a system without /proc/meminfo or its field
        return None

"""Opens, creates and syncs folders, and checks their owners.

In a folder that all users can write to, such as `/dev/shm`, another user may create the folder of a
run first. That user could then change checkpoints before they are restored, or copied to slower
tiers.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

log = logging.getLogger("penstock")

_SHARED = stat.S_ISVTX | stat.S_IWOTH
_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_warned: set[str] = set()


def is_shared(folder: str) -> bool:
    """Return whether a folder is sticky and writable by all, as `/tmp` is."""
    try:
        return os.stat(folder).st_mode & _SHARED == _SHARED
    except OSError:
        return False


class Ownership:
    """Checks who owns the path components of a root that are directly inside shared folders."""

    def __init__(self, root: str) -> None:
        """Prepare the check of `root` without reading the file system."""
        self._root = root
        self._entrances: tuple[str, ...] | None = None

    def check(self) -> None:
        """Refuse a root if another user owns a component; warn if others can write to one.

        Raises:
            CapabilityError: Another user owns a component of the path.
        """
        if self._entrances is None:
            ways = dict.fromkeys((self._root, os.path.realpath(self._root)))
            self._entrances = tuple(dict.fromkeys(e for way in ways for e in _entrances(way)))
        for entrance in self._entrances:
            try:
                status = os.lstat(entrance)
            except OSError:  # there is no such entry, so no other user owns it
                continue
            if status.st_uid not in {0, os.geteuid()}:
                msg = (
                    f"{entrance} belongs to user {status.st_uid}, not to you ({os.geteuid()}), and "
                    "is in a folder where every user can create files: its owner could replace "
                    f"the checkpoints in {self._root}. Use your own folder, such as "
                    f'{os.path.dirname(entrance)}/${{USER}}-run, or set owner = "any" in the '
                    "options of the backend if you trust that user"
                )
                raise CapabilityError(msg)
            if status.st_mode & _OTHERS and not stat.S_ISLNK(status.st_mode):
                _warn_once(entrance)


def _entrances(path: str) -> Iterator[str]:
    """Yield the components of `path` that are directly inside shared folders."""
    parts = path.strip("/").split("/")
    for depth in range(len(parts)):
        if is_shared("/" + "/".join(parts[:depth])):
            yield "/" + "/".join(parts[: depth + 1])


def _warn_once(entrance: str) -> None:
    if entrance not in _warned:
        _warned.add(entrance)
        log.warning(
            "%s can be written by other users, who could change checkpoints before they are "
            "restored, or copied to slower tiers. To prevent that: chmod go-w %s",
            entrance,
            entrance,
        )


class Folders:
    """Keeps all folders open, from the root down to the folder that contains a name."""

    def __init__(self, root: str, fds: list[int]) -> None:
        self._root = root
        self._fds = fds

    @property
    def last(self) -> int:
        """The file descriptor of the folder that contains the name."""
        return self._fds[-1]

    def sync(self) -> None:
        """Make the directory entries of all folders durable, from the innermost to the root's.

        Syncs even folders that this process did not create: another process may have created them
        without syncing them yet, and a power cut would remove them together with the file.
        """
        for fd in reversed(self._fds):
            os.fsync(fd)
        try:
            parent = os.open(os.path.dirname(self._root), FOLDER_FLAGS)
        except PermissionError:  # another user created the root, which synced the parent
            return
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def close(self) -> None:
        """Close all folders. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def make_folder(path: str) -> None:
    """Create `path` and its missing parents, each durable before the next is created.

    A folder directly inside a shared folder gets mode 0700, so that other users cannot replace
    checkpoints.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700 if is_shared(parent) else 0o777)
    fd = os.open(parent, FOLDER_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

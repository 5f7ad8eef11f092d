"""Folders: opened one inside the other, and made durable."""

from __future__ import annotations

import os
from contextlib import suppress

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Open folders from the root down to the one that holds a name."""

    def __init__(self, root: str, fds: list[int]) -> None:
        self._root = root
        self._fds = fds

    @property
    def last(self) -> int:
        """The folder that holds the name, as a file descriptor."""
        return self._fds[-1]

    def sync(self) -> None:
        """Make every entry on the way durable, from the innermost up to the root's own.

        All of them, not only those that we made: another process may have made one and not yet
        synced it.
        """
        for fd in reversed(self._fds):
            os.fsync(fd)
        try:
            parent = os.open(os.path.dirname(self._root), FOLDER_FLAGS)
        except PermissionError:  # so the root was not made by us: making it syncs its parent
            return
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def close(self) -> None:
        """Close all; idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def make_folder(path: str) -> None:
    """Make `path` and what is missing above it, each entry durable before the next is made."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    fd = os.open(parent, FOLDER_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Folders: opened one inside the other, created, and made durable."""

from __future__ import annotations

import os
from contextlib import suppress

from penstock.backends.local.ownership import is_shared

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Open folders from the root down to the one that holds a name."""

    def __init__(self, root: str, fds: list[int]) -> None:
        self._root = root
        self._fds = fds

    @property
    def last(self) -> int:
        """The file descriptor of the folder that holds the name."""
        return self._fds[-1]

    def sync(self) -> None:
        """Make every entry on the way durable, from the innermost up to the root's own.

        All of them, not only those that this process created: another process may have created a
        folder and not yet synced it, and a power cut would take it with our file.
        """
        for fd in reversed(self._fds):
            os.fsync(fd)
        try:
            parent = os.open(os.path.dirname(self._root), FOLDER_FLAGS)
        except PermissionError:  # so another user created the root: creating it syncs the parent
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
    """Create `path` and the missing folders above it, each durable before the next is created.

    A folder directly in one where every user can create files gets mode 0700: other users shall
    not be able to replace checkpoints.
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

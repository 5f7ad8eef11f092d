"""The ownership of roots below a folder in which every user can create one, such as `/dev/shm`.

There another user may be the first to create the folder that a run is configured to use. The owner
of that folder decides which checkpoints are restored, and which are copied to slower tiers.
"""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING

from penstock.core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Checks the owners of the entries of shared folders on the way to one root."""

    def __init__(self, root: str) -> None:
        """Create the check of `root`, and read nothing yet."""
        self._root = root
        self._entrances: tuple[str, ...] | None = None

    def check(self) -> None:
        """Refuse the root if another user owns an entry on the way; warn if others can write there.

        Raises:
            CapabilityError: Another user owns an entry on the way to the root.
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
                    "lies in a folder where every user can create one: its owner could replace "
                    f"the checkpoints in {self._root}. Use a folder of your own, such as "
                    f'{os.path.dirname(entrance)}/${{USER}}-run, or set owner = "any" in the '
                    "options of the backend if that user is to be trusted"
                )
                raise CapabilityError(msg)
            if status.st_mode & _OTHERS and not stat.S_ISLNK(status.st_mode):
                _warn_once(entrance)


def _entrances(path: str) -> Iterator[str]:
    """Yield the entries of shared folders on the way to `path`."""
    parts = path.strip("/").split("/")
    for depth in range(len(parts)):
        if is_shared("/" + "/".join(parts[:depth])):
            yield "/" + "/".join(parts[: depth + 1])


def _warn_once(entrance: str) -> None:
    if entrance not in _warned:
        _warned.add(entrance)
        log.warning(
            "%s can be written by other users, who could change the checkpoints that are "
            "restored, and those that are copied to slower tiers. chmod go-w %s",
            entrance,
            entrance,
        )

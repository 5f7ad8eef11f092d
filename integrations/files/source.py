"""The files that an import reads."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import FormatError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self


_AHEAD_BYTES = 32 << 20
_LEAST_BYTES = 1 << 20  # each request visits all pages ahead, too slow for a small tensor
_MADV_WILLNEED = 3
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was before its first byte was read.

    Attributes:
        path: Its path.
        identity: Facts that differ after a change; None if the file did not exist.
    """

    path: Path
    identity: tuple[int, ...] | None

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the file at a path in its current state."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return cls(path, None)
        return cls(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))

    def check(self, name: str | None = None) -> None:
        """Check, after a read, that the file has not changed.

        Args:
            name: The tensor or object that was read, for the error.

        Raises:
            FormatError: The file has changed.
        """
        if type(self).of(self.path) != self:
            what = "it" if name is None else repr(name)
            raise wrong(self.path, f"changed while {what} was read: import it again")


def read_soon(file: int, start: int, nbytes: int) -> None:
    """Make the kernel read ahead from byte `start`, while the `nbytes` before it are saved.

    Does nothing if `nbytes` is small.
    """
    if nbytes >= _LEAST_BYTES:
        os.posix_fadvise(file, start, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def page_in_soon(address: int, nbytes: int) -> None:
    """Make the kernel page in at `address`, while the `nbytes` before it are saved.

    Otherwise, reads of a mapped file would wait for every 128 KiB. Does nothing if `nbytes` is
    small.
    """
    if nbytes < _LEAST_BYTES:
        return
    # The result is ignored: the file may end before these bytes do.
    begin = address - address % mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(_AHEAD_BYTES), _MADV_WILLNEED)


def wrong(path: Path, reason: str) -> FormatError:
    """Return the error for a damaged file."""
    return FormatError(f"{path} {reason}", [str(path)])

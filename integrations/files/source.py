"""The files that an import reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import FormatError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was before its first byte was read.

    Attributes:
        path: Its place.
        identity: What is different when it has changed; None if it was not there.
    """

    path: Path
    identity: tuple[int, ...] | None

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the file that is at a path now."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return cls(path, None)
        return cls(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))

    def check(self, name: str | None = None) -> None:
        """Check, after bytes were read, that the file has not changed since.

        Args:
            name: The tensor or object that was read, for the error.

        Raises:
            FormatError: It has.
        """
        if type(self).of(self.path) != self:
            what = "it" if name is None else repr(name)
            raise wrong(self.path, f"changed while {what} was read: import it again")


def wrong(path: Path, reason: str) -> FormatError:
    """Return the error for a damaged file."""
    return FormatError(f"{path} {reason}", [str(path)])

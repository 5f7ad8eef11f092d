"""The client of Lustre: all calls of the kernel and of `lfs`, and the output of `lfs df`, parsed.

The form of `lfs df` is that of `lustre/utils/lfs.c` as of v2_17_57, and the older one of the manual
page `lfs-df(1)`.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from dataclasses import dataclass
from typing import Final

from penstock.backends.local.kernel import file_system_type
from penstock.backends.lustre.components import LOV_ATTRIBUTE
from penstock.backends.lustre.policy import Ost
from penstock.core.errors import CapabilityError, FormatError, StorageTimeoutError

LUSTRE_MAGIC: Final = 0x0BD00BD0  # LL_SUPER_MAGIC of lustre_user.h

_OPEN_FOLDER: Final = re.compile(r"/proc/self/fd/(\d+)/")
_NO_LAYOUT: Final = {errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOTTY}

_OST_ROW = re.compile(
    r"(?P<uuid>\S*OST[0-9a-fA-F]{4,}\S*)\s+(?P<total>\d{1,20})\s+\d{1,20}\s+(?P<avail>\d{1,20})\s+"
    r"\d{1,3}%\s+\S.*\[OST:(?P<index>\d{1,10})\]\s*(?P<flags>[A-Za-z]*)"
)
_MAX_LINES: Final = 1 << 17
_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class LfsAnswer:
    """The result of a program.

    Attributes:
        code: The exit status; `lfs` exits with the number of the error.
        text: The standard output.
        complaint: The standard error.
    """

    code: int
    text: str
    complaint: str


class LustreClient:
    """Calls the kernel and `lfs`. Has no state; tests replace it."""

    def __init__(self, lfs: str = "lfs", timeout_s: float = 60.0) -> None:
        self._lfs = lfs
        self._timeout_s = timeout_s

    def file_system(self, folder: str) -> int:
        """Return the magic number of the file system that `folder` is on.

        Raises:
            OSError: The file system does not tell.
        """
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return file_system_type(fd)
        finally:
            os.close(fd)

    def layout_attribute(self, file: int | str) -> bytes | None:
        """Return the bytes of the layout of an open file or of a folder; None if it has none."""
        try:
            return os.getxattr(file, LOV_ATTRIBUTE)
        except OSError as error:
            if error.errno in _NO_LAYOUT:
                return None
            raise

    def lfs(self, *arguments: str) -> LfsAnswer:
        """Run `lfs` to its end.

        Raises:
            CapabilityError: There is no such program.
            StorageTimeoutError: The program did not end in time, and was killed.
        """
        try:
            done = subprocess.run(  # noqa: S603 - arguments are ours, and no shell reads them
                [self._lfs, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=self._timeout_s,
                # A path may go through an open folder of ours (`/proc/self/fd/7/name`), which is
                # then the child's own `/proc/self`.
                pass_fds=[int(m[1]) for a in arguments if (m := _OPEN_FOLDER.match(a))],
                env={**os.environ, "LC_ALL": "C"},
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            msg = f"{self._lfs} {' '.join(arguments)} did not end within {self._timeout_s:g} s"
            raise StorageTimeoutError(msg) from error
        except OSError as error:
            msg = (
                f"{self._lfs!r} cannot be run ({error.strerror}): install the Lustre client's "
                "programs, or name it with the option 'lfs'"
            )
            raise CapabilityError(msg) from error
        return LfsAnswer(done.returncode, done.stdout, done.stderr.strip())


def existing_folder(path: str) -> str:
    """Return the folder at `path`, or the nearest existing one above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def parse_df(text: str, /) -> tuple[Ost, ...]:
    """Parse the OSTs that `lfs df` printed, by index; inactive and unreachable ones are left out.

    Raises:
        FormatError: The text shows no OST.
    """
    found: dict[int, Ost] = {}
    for line in text.splitlines()[:_MAX_LINES]:
        row = _OST_ROW.fullmatch(line.strip())
        if row is not None:
            ost = Ost(int(row["index"]), int(row["avail"]) * _KIB, row["flags"])
            found[ost.index] = ost
    if not found:
        msg = f"lfs df shows no OST: {text.strip()[:200]!r}"
        raise FormatError(msg, ["lfs df"])
    return tuple(found[index] for index in sorted(found))

"""The client of Lustre: all calls of the kernel and of `lfs`, so that tests can replace them."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from dataclasses import dataclass
from typing import Final

from penstock.backends.local.kernel import file_system_type
from penstock.backends.lustre.layout import LOV_ATTRIBUTE
from penstock.core.errors import CapabilityError, StorageTimeoutError

LUSTRE_MAGIC: Final = 0x0BD00BD0  # LL_SUPER_MAGIC of lustre_user.h

# From linux/magic.h and the file systems' own sources; used in messages only.
_NAMES: Final = {
    0xEF53: "ext2, ext3 or ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
    0x6969: "NFS",
    0x47504653: "GPFS (Storage Scale)",
    0x19830326: "BeeGFS",
    0x00C36400: "CephFS",
    0x65735546: "a FUSE file system",
    0x01021997: "9p",
}
_OPEN_FOLDER: Final = re.compile(r"/proc/self/fd/(\d+)/")
_NO_LAYOUT: Final = {errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOTTY}


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


def file_system_name(magic: int) -> str:
    """Return the usual name of the file system with this magic number."""
    return _NAMES.get(magic, f"of the unknown kind {magic:#010x}")

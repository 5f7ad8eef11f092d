"""The Lustre client: all calls to the kernel and to `lfs`, and the parsers of `lfs` output.

The output formats of `getstripe` (YAML and plain) and `df` come from `lustre/utils/liblustreapi.c`
and `lustre/utils/lfs.c` as of v2_17_57. The manual pages `lfs-getstripe(1)` and `lfs-df(1)` have
the older formats.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from penstock.backends.local.kernel import file_system_type
from penstock.backends.lustre.components import (
    ALL_STRIPES,
    LOV_ATTRIBUTE,
    MAX_LAYOUT_BYTES,
    Component,
    Layout,
)
from penstock.backends.lustre.policy import Ost
from penstock.core.errors import CapabilityError, FormatError, StorageTimeoutError

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

_FIELD = re.compile(
    r"(?:\b|_)(stripe_count|stripe_size|extension_size|pattern|stripe_offset"
    r"|lcme_id|lcme_flags|lcme_extent\.e_start|lcme_extent\.e_end"
    r"|foreign_size|lfm_length):[ \t]*([^\s]+)"
)
_OBJECT = re.compile(r"l_ost_idx:\s*(0x[0-9a-fA-F]{1,8}|\d{1,10})\b")
_PLAIN_OBJECT = re.compile(r"\s*(0x[0-9a-fA-F]{1,8}|\d{1,10})\s+\d+\s+(?:0x)?[0-9a-fA-F]+\s+\S+")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]{1,16}|\d{1,20})")
_OST_ROW = re.compile(
    r"(?P<uuid>\S*OST[0-9a-fA-F]{4,}\S*)\s+(?P<total>\d{1,20})\s+\d{1,20}\s+(?P<avail>\d{1,20})\s+"
    r"\d{1,3}%\s+\S.*\[OST:(?P<index>\d{1,10})\]\s*(?P<flags>[A-Za-z]*)"
)
_MAX_LINES: Final = 1 << 17
_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class LfsAnswer:
    """The result of an `lfs` call.

    Attributes:
        code: The exit status; after a failure it is an errno.
        text: The standard output.
        complaint: The standard error.
    """

    code: int
    text: str
    complaint: str


class LustreClient:
    """Calls the kernel and `lfs`. Stateless; tests replace it."""

    def __init__(self, lfs: str = "lfs", timeout_s: float = 60.0) -> None:
        self._lfs = lfs
        self._timeout_s = timeout_s

    def file_system(self, folder: str) -> int:
        """Return the magic number of the file system that `folder` is on.

        Raises:
            OSError: The file system does not report it.
        """
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return file_system_type(fd)
        finally:
            os.close(fd)

    def layout_attribute(self, file: int | str) -> bytes | None:
        """Return the layout of an open file or a folder as bytes; None if it has no layout."""
        try:
            return os.getxattr(file, LOV_ATTRIBUTE)
        except OSError as error:
            if error.errno in _NO_LAYOUT:
                return None
            raise

    def lfs(self, *arguments: str) -> LfsAnswer:
        """Run `lfs` to completion.

        Raises:
            CapabilityError: The program cannot be run.
            StorageTimeoutError: The program timed out and was killed.
        """
        try:
            result = subprocess.run(  # noqa: S603 - arguments are ours, and no shell reads them
                [self._lfs, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=self._timeout_s,
                # A path may go through one of our open folders (`/proc/self/fd/7/name`), and
                # `/proc/self` is then the child's.
                pass_fds=[int(m[1]) for a in arguments if (m := _OPEN_FOLDER.match(a))],
                env={**os.environ, "LC_ALL": "C"},
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            msg = (
                f"{self._lfs} {' '.join(arguments)} did not end within {self._timeout_s:g} s: "
                "check that the Lustre servers answer, or raise lfs_timeout_s"
            )
            raise StorageTimeoutError(msg) from error
        except OSError as error:
            msg = (
                f"{self._lfs!r} cannot be run ({error.strerror}): install the Lustre client's "
                "programs, or name it with the option 'lfs'"
            )
            raise CapabilityError(msg) from error
        return LfsAnswer(result.returncode, result.stdout, result.stderr.strip())


def existing_folder(path: str) -> str:
    """Return the folder at `path`, or its nearest existing parent."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def file_system_name(magic: int) -> str:
    """Return the name of the file system with this magic number."""
    return _NAMES.get(magic, f"a file system of the unknown kind {magic:#010x}")


def parse_getstripe(text: str, /) -> Layout:
    """Parse the output of `lfs getstripe [-y]` for one file, or for one folder (`-d`).

    Raises:
        FormatError: The text shows no layout, or an invalid one.
    """
    if len(text) > 64 * MAX_LAYOUT_BYTES:
        _refuse(text)
    draft = _LayoutDraft()
    for line in text.splitlines()[:_MAX_LINES]:
        draft.take(line)
    return draft.layout(text)


def parse_df(text: str, /) -> tuple[Ost, ...]:
    """Parse the output of `lfs df` into OSTs by index; skips inactive and unreachable OSTs.

    Raises:
        FormatError: The text shows no OST.
    """
    osts: dict[int, Ost] = {}
    for line in text.splitlines()[:_MAX_LINES]:
        row = _OST_ROW.fullmatch(line.strip())
        if row is not None:
            ost = Ost(int(row["index"]), int(row["avail"]) * _KIB, row["flags"])
            osts[ost.index] = ost
    if not osts:
        msg = f"lfs df shows no OST: {text.strip()[:200]!r}"
        raise FormatError(msg, ["lfs df"])
    return tuple(osts[index] for index in sorted(osts))


@dataclass(slots=True)
class _LayoutDraft:
    components: list[Component] = field(default_factory=list)
    foreign: bool = False
    seen: bool = False
    in_table: bool = False

    def take(self, line: str) -> None:
        self.in_table = "obdidx" in line or (self.in_table and bool(line.strip()))
        for key, value in _FIELD.findall(line):
            self._set(key, value)
        for index in _OBJECT.findall(line):
            self._add(int(index, 0))
        row = _PLAIN_OBJECT.match(line) if self.in_table else None
        if row is not None:
            self._add(int(row[1], 0))

    def layout(self, text: str) -> Layout:
        if self.foreign:
            return Layout((), foreign=True)
        if not self.seen:
            _refuse(text)
        for c in self.components:
            ends_early = c.stop is not None and c.start >= c.stop
            if ends_early or (c.osts and (c.stripe_bytes <= 0 or len(c.osts) != c.stripe_count)):
                _refuse(text)
        return Layout(tuple(self.components))

    def _set(self, key: str, value: str) -> None:
        if key == "lcme_id":
            self.components.append(Component())
        elif key in {"foreign_size", "lfm_length"}:
            self.foreign = True
        else:
            self._set_component(key, value)

    def _set_component(self, key: str, value: str) -> None:
        last = self._last()
        if key == "stripe_count":
            self.seen = True
            count = _number(value)
            last = replace(last, stripe_count=ALL_STRIPES if count < 0 else count)
        elif key == "stripe_size":
            last = replace(last, stripe_bytes=_number(value))
        elif key == "extension_size":
            last = replace(last, stripe_bytes=_number(value), extension=True)
        elif key == "pattern":
            last = replace(last, on_mdt="mdt" in value)
            self.foreign = self.foreign or "foreign" in value
        elif key == "lcme_flags":
            flags = value.split(",")
            last = replace(last, stale="stale" in flags, parity="parity" in flags)
            last = replace(last, extension=last.extension or "extension" in flags)
        elif key == "lcme_extent.e_start":
            last = replace(last, start=_number(value))
        elif key == "lcme_extent.e_end":
            last = replace(last, stop=None if value.upper() == "EOF" else _number(value))
        self.components[-1] = last

    def _add(self, ost: int) -> None:
        last = self._last()
        self.components[-1] = replace(last, osts=(*last.osts, ost))

    def _last(self) -> Component:
        if not self.components:
            self.components.append(Component())
        return self.components[-1]


def _number(value: str) -> int:
    if not _NUMBER.fullmatch(value):
        _refuse(value)
    return int(value, 0) if "x" in value else int(value)


def _refuse(text: str) -> NoReturn:
    msg = f"lfs getstripe shows no known layout: {text.strip()[:200]!r}"
    raise FormatError(msg, ["lfs getstripe"])

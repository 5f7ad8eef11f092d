"""Direct I/O: whether the page cache can be bypassed, as the kernel says and real I/O proves."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.backends.local.kernel import direct_alignment, memory_file_system
from penstock.backends.local.namespace import TEMPORARY
from penstock.core.errors import CapabilityError
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.backends.local.config import DirectMode

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectAccess:
    """Decides, once, whether files under `root` are written and read with `O_DIRECT`.

    Probes at the first use, not before, so that listing a run stays quick.
    """

    def __init__(self, mode: DirectMode, root: str) -> None:
        self._mode = mode
        self._root = root
        self._lock = threading.Lock()  # guards `_verdict`: None means granted, "" not yet asked
        self._verdict: str | None = "direct_io is off" if mode == "off" else ""

    @property
    def refusal(self) -> str | None:
        """The reason why direct I/O is not used, None if it is; probes without leaving a file."""
        with self._lock:
            if self._verdict == "":
                verdict, final = _probe_writing(self._root)
                if not final:
                    return verdict
                self._verdict = verdict
            return self._verdict

    def required(self, refusal: str | None) -> bool:
        """Return whether to use direct I/O after this answer.

        Raises:
            CapabilityError: Direct I/O was refused although the options say `direct_io="on"`.
        """
        if refusal is not None and self._mode == "on":
            msg = f"direct I/O is not possible under {self._root}: {refusal}; use direct_io='auto'"
            raise CapabilityError(msg)
        return refusal is None

    def for_write(self, fd: int) -> bool:
        """Switch a file that will be written to direct I/O, if possible; return whether it was."""
        return self.required(self.refusal) and self.required(enable(fd))

    def for_read(self, fd: int) -> bool:
        """Switch a file that will be read to direct I/O, if possible; probes without a write.

        A run that is only restored from may be on a read-only mount.
        """
        with self._lock:
            if self._verdict == "":
                self._verdict = _probe_reading(fd)
            verdict = self._verdict
        return self.required(verdict) and self.required(enable(fd))


def enable(fd: int) -> str | None:
    """Set `O_DIRECT` on an open file; return the reason if it is refused."""
    if not _O_DIRECT:
        return "this operating system has no O_DIRECT"
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    except OSError as error:
        return f"O_DIRECT is refused: {error.strerror}"
    return None


def _probe_writing(root: str) -> tuple[str | None, bool]:
    """Return the reason against direct I/O, if any, and whether it may be remembered."""
    exists = os.path.isdir(root)
    folder = root
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        fd = _nameless(folder, named=exists)
    except OSError as error:
        # Not for good: a root that cannot be written may still be read directly, and a missing one
        # may be created later.
        return f"cannot be probed in {folder}: {error.strerror}", False
    try:
        return _refused(fd) or _round_trip(fd), True
    finally:
        os.close(fd)


def _nameless(folder: str, *, named: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except (AttributeError, OSError):
        if not named:
            raise
    path = os.path.join(folder, TEMPORARY + secrets.token_hex(8))
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):
        os.unlink(path)
    return fd


def _probe_reading(fd: int) -> str | None:
    twin = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        refused = _refused(twin)
        if refused:
            return refused
        with mmap.mmap(-1, PAGE_BYTES) as page:
            try:
                os.preadv(twin, [page], 0)
            except OSError as error:
                return f"a direct read fails: {error.strerror}"
        return None
    finally:
        os.close(twin)


def _refused(fd: int) -> str | None:
    memory = memory_file_system(fd)
    if memory:
        return f"{memory} keeps files in memory"
    alignment = direct_alignment(fd)
    if alignment == 0:
        return "the file system says that it does not support direct I/O"
    if alignment is not None and PAGE_BYTES % alignment:
        return f"the device wants an alignment of {alignment} bytes"
    return enable(fd)


def _round_trip(fd: int) -> str | None:
    with mmap.mmap(-1, 2 * PAGE_BYTES) as memory:
        memory[:PAGE_BYTES] = secrets.token_bytes(PAGE_BYTES)
        view = memoryview(memory)
        halves = [view[:PAGE_BYTES], view[PAGE_BYTES:]]
        try:
            moved = os.pwritev(fd, halves[:1], 0), os.preadv(fd, halves[1:], 0)
        except OSError as error:
            return f"a direct write fails: {error.strerror}"
        else:
            equal = halves[0] == halves[1]
        finally:
            for part in (*halves, view):
                part.release()
    if moved != (PAGE_BYTES, PAGE_BYTES) or not equal:
        return "a page written directly did not read back"
    return None

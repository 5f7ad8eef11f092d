"""A probe of the speed of a store, which writes a blob as a save does, and reads it back.

Tested in `tests/core/cli/test_doctor.py`.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.errors import StorageError
from penstock.core.format.records import blob_name
from penstock.core.types import ReadRequest, WriteRequest

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.abc import Backend

_PIECE_BYTES = 16 << 20
_PIECES_AT_ONCE = 4
_FIRST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a probe.

    Attributes:
        bytes: The bytes that were written and read.
        write_s: The seconds until the bytes were durable.
        read_s: The seconds of reading, past the page cache where the store allows that.
        same: Whether the bytes read are the bytes written.
    """

    bytes: int
    write_s: float
    read_s: float
    same: bool


def measure(backend: Backend, limit_bytes: int, *, root: Path | None) -> Speed:
    """Write and read up to `limit_bytes`, or as much as the store does in a few seconds.

    A small first blob tells how much that is. If this process is killed the blobs remain, under
    names where `prune` finds them.

    Args:
        backend: The store.
        limit_bytes: The most bytes to write.
        root: The folder of a store on this machine, to get the blob out of the page cache.

    Raises:
        StorageError: The store failed; nothing remains in it.
    """
    # In a thread, since a signal's exception is raised in the main thread: between acquiring one of
    # the store's locks and releasing it, the exception would leave that lock taken.
    probe = _Probe(backend, root)
    task = partial(probe.run, limit_bytes)
    return call_with_deadline("probe", task, timing=current_timing(), cancel=probe.stop)


class _Probe:
    def __init__(self, backend: Backend, root: Path | None) -> None:
        self._backend = backend
        self._root = root
        self._piece = secrets.token_bytes(_PIECE_BYTES)  # random: a file system may compress
        # Page-aligned, for direct I/O.
        self._memory = memoryview(mmap.mmap(-1, _PIECE_BYTES * _PIECES_AT_ONCE))
        self._memory[:] = self._piece * _PIECES_AT_ONCE
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def run(self, limit_bytes: int) -> Speed:
        speed = self._blob(min(_FIRST_BYTES, limit_bytes))
        per_s = speed.bytes / max(speed.write_s, 1e-6)
        size = min(limit_bytes, int(per_s * current_timing().probe_s)) >> 20 << 20
        return self._blob(size) if speed.same and size > speed.bytes else speed

    def _blob(self, size: int) -> Speed:
        name = blob_name(secrets.token_hex(16), 0, 0, "raw")
        try:
            began = time.monotonic()
            size = self._write(name, size)
            write_s = time.monotonic() - began
            if self._root is not None:
                _drop_cache(self._root / name)
            read_s, same = self._read(name, size)
        finally:
            self._backend.delete([name])
        return Speed(size, write_s, read_s, same)

    def _write(self, name: str, size: int) -> int:
        """Write up to `size` bytes durably within `Timing.probe_s`, and return how many."""
        deadline = Deadline(current_timing().probe_s)
        writer = self._backend.create(name, size_hint=size)
        try:
            done = 0
            while done < size and not (done and deadline.is_over()):
                parts = self._parts(size - done)
                writer.write([WriteRequest(done + at, (part,)) for at, part in parts])
                done += sum(part.nbytes for _, part in parts)
            writer.seal(done)
        except BaseException:
            writer.abort()
            raise
        return done

    def _read(self, name: str, size: int) -> tuple[float, bool]:
        """Read the blob back; return the seconds of reading alone, and whether all is as written.

        The memory is then as before, if all is.
        """
        seconds, same = 0.0, True
        for start in range(0, size, self._memory.nbytes):
            parts = self._parts(size - start)
            for _, part in parts:  # still filled by the write: a read that does nothing would pass
                part[:] = bytes(part.nbytes)
            requests = [ReadRequest(name, start + at, part) for at, part in parts]
            began = time.monotonic()
            self._backend.read(requests)
            seconds += time.monotonic() - began
            same = same and all(bytes(part) == self._piece[: part.nbytes] for _, part in parts)
        return seconds, same

    def _parts(self, size: int) -> list[tuple[int, memoryview]]:
        """Return what of the memory the next `size` bytes take, cut into pieces with their places.

        Raises:
            StorageError: The probe was stopped.
        """
        if self._stopped:
            msg = "the probe was interrupted"
            raise StorageError(msg)
        length = min(size, self._memory.nbytes)
        places = range(0, length, _PIECE_BYTES)
        return [(at, self._memory[at : min(at + _PIECE_BYTES, length)]) for at in places]


def _drop_cache(path: Path) -> None:
    with suppress(OSError):  # only a hint: without it the read may be measured from memory
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

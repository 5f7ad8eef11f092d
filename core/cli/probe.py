"""A probe of the speed of a store, which writes a blob as a save does, and reads it back."""

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
    stop: list[bool] = []
    task = partial(_measure, backend, limit_bytes, root, stop)
    return call_with_deadline(
        "probe", task, timing=current_timing(), cancel=lambda: stop.append(True)
    )


def _measure(backend: Backend, limit_bytes: int, root: Path | None, stop: list[bool]) -> Speed:
    memory = memoryview(mmap.mmap(-1, _PIECE_BYTES * _PIECES_AT_ONCE))  # page-aligned: direct I/O
    piece = secrets.token_bytes(_PIECE_BYTES)  # random: a file system may compress
    for at in range(0, memory.nbytes, _PIECE_BYTES):
        memory[at : at + _PIECE_BYTES] = piece
    speed = _one(backend, min(_FIRST_BYTES, limit_bytes), memory, piece, root, stop)
    per_s = speed.bytes / max(speed.write_s, 1e-6)
    size = min(limit_bytes, int(per_s * current_timing().probe_s)) >> 20 << 20
    if size <= speed.bytes:
        return speed
    for at in range(0, memory.nbytes, _PIECE_BYTES):  # the first blob was read into it
        memory[at : at + _PIECE_BYTES] = piece
    return _one(backend, size, memory, piece, root, stop)


def _one(  # noqa: PLR0917 - one call of `_measure`, cut in two
    backend: Backend,
    size: int,
    memory: memoryview,
    piece: bytes,
    root: Path | None,
    stop: list[bool],
) -> Speed:
    name = blob_name(secrets.token_hex(16), 0, 0, "raw")
    try:
        began = time.monotonic()
        size = _write(backend, name, size, memory, stop)
        write_s = time.monotonic() - began
        if root is not None:
            _drop_cache(root / name)
        read_s, same = _read(backend, name, size, memory, piece, stop)
    finally:
        backend.delete([name])
    return Speed(size, write_s, read_s, same)


def _write(backend: Backend, name: str, size: int, memory: memoryview, stop: list[bool]) -> int:
    """Write up to `size` bytes durably within `Timing.probe_s`, and return how many."""
    deadline = Deadline(current_timing().probe_s)
    writer = backend.create(name, size_hint=size)
    try:
        done = 0
        while done < size and not (done and deadline.is_over()):
            _check(stop)
            length = min(size - done, memory.nbytes)
            writer.write(
                [
                    WriteRequest(done + at, (memory[at : min(at + _PIECE_BYTES, length)],))
                    for at in range(0, length, _PIECE_BYTES)
                ]
            )
            done += length
        writer.seal(done)
    except BaseException:
        writer.abort()
        raise
    return done


def _read(  # noqa: PLR0917 - likewise
    backend: Backend,
    name: str,
    size: int,
    memory: memoryview,
    piece: bytes,
    stop: list[bool],
) -> tuple[float, bool]:
    """Read the blob back; return the seconds of reading alone, and whether all is as written."""
    seconds, same = 0.0, True
    for start in range(0, size, memory.nbytes):
        _check(stop)
        length = min(size - start, memory.nbytes)
        targets = [
            memory[at : min(at + _PIECE_BYTES, length)] for at in range(0, length, _PIECE_BYTES)
        ]
        for target in targets:  # still filled by the write: a read that does nothing would pass
            target[:] = bytes(target.nbytes)
        requests = [
            ReadRequest(name, start + n * _PIECE_BYTES, target) for n, target in enumerate(targets)
        ]
        began = time.monotonic()
        backend.read(requests)
        seconds += time.monotonic() - began
        same = same and all(bytes(t) == piece[: t.nbytes] for t in targets)
    return seconds, same


def _check(stop: list[bool]) -> None:
    if stop:
        msg = "the probe was interrupted"
        raise StorageError(msg)


def _drop_cache(path: Path) -> None:
    with suppress(OSError):  # only a hint: without it the read may be measured from memory
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

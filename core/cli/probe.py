"""How fast a store writes and reads: a blob like those of a save, durable, read back, deleted."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.errors import StorageError
from penstock.core.manifest import blob_name
from penstock.core.types import ReadRequest, WriteRequest
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.abc import Backend

_PIECE_BYTES = 16 << 20
_PIECES_AT_ONCE = 4
_FIRST_BYTES = 8 << 20
_BUDGET_S = 4.0  # for writing, and again for reading


@dataclass(frozen=True, slots=True)
class Speed:
    """What a probe measured.

    Attributes:
        bytes: Written and read.
        write_s: Until it was durable.
        read_s: Past the page cache, as far as the store lets us.
        same: Whether what was read is what was written.
    """

    bytes: int
    write_s: float
    read_s: float
    same: bool


def measure(backend: Backend, limit_bytes: int, *, root: Path | None) -> Speed:
    """Write and read up to `limit_bytes`, or as much as the store does in a few seconds.

    A small blob comes first, and tells how much that is. The blobs stand where `prune` would find
    them, should even this process be killed.

    Args:
        backend: Where.
        limit_bytes: At most.
        root: The folder of a store on this machine, to get the blob out of the page cache.

    Raises:
        StorageError: The store failed; nothing stays behind.
    """
    # A signal must not come between taking one of the store's locks and giving it back.
    stop: list[bool] = []
    task = partial(_measure, backend, limit_bytes, root, stop)
    return Workers(1).apart("probe", task, cancel=lambda: stop.append(True))


def _measure(backend: Backend, limit_bytes: int, root: Path | None, stop: list[bool]) -> Speed:
    memory = memoryview(mmap.mmap(-1, _PIECE_BYTES * _PIECES_AT_ONCE))  # begins with a page
    piece = secrets.token_bytes(_PIECE_BYTES)  # so that no file system can make it smaller
    for at in range(0, memory.nbytes, _PIECE_BYTES):
        memory[at : at + _PIECE_BYTES] = piece
    speed = _one(backend, min(_FIRST_BYTES, limit_bytes), memory, piece, root, stop)
    per_s = speed.bytes / max(speed.write_s, 1e-6)
    size = min(limit_bytes, int(per_s * _BUDGET_S)) >> 20 << 20
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
    """Bytes that were written durably: less than `size` where that takes too long."""
    until_s = time.monotonic() + _BUDGET_S
    writer = backend.create(name, size_hint=size)
    try:
        done = 0
        while done < size and (not done or time.monotonic() < until_s):
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
    """Seconds that reading took, without comparing, and whether all was as written."""
    seconds, same = 0.0, True
    for start in range(0, size, memory.nbytes):
        _check(stop)
        length = min(size - start, memory.nbytes)
        targets = [
            memory[at : min(at + _PIECE_BYTES, length)] for at in range(0, length, _PIECE_BYTES)
        ]
        for target in targets:
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
    with suppress(OSError):  # a hint: without it the figure says less
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

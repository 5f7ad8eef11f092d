"""The raw limit of a store: a plain loop of large writes and reads of one blob or several.

Tested in `tests/core/cli/test_bench.py`.
"""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.cli.bench.scratch import drop_cache, in_time
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import NEVER, Deadline, call_all_with_deadline
from penstock.core.errors import StorageError
from penstock.core.format.records import blob_name
from penstock.core.pipeline.staging import map_memory
from penstock.core.types import ReadRequest, WriteRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.core.abc import Backend

T = TypeVar("T")

_PIECE_BYTES = 16 << 20
_PIECES_AT_ONCE = 4
_FIRST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a loop.

    Attributes:
        bytes: The number of bytes written and read.
        write_s: The seconds until the bytes were durable.
        read_s: The seconds of reading, without the page cache if the store can bypass it.
        same: Whether the bytes read equal the bytes written; True if they were not compared.
    """

    bytes: int
    write_s: float
    read_s: float
    same: bool

    @property
    def write_bytes_per_s(self) -> float:
        """The bytes written per second."""
        return self.bytes / max(self.write_s, 1e-6)

    @property
    def read_bytes_per_s(self) -> float:
        """The bytes read per second."""
        return self.bytes / max(self.read_s, 1e-6)


def measure(
    backend: Backend, limit_bytes: int, *, root: Path | None, stuck_s: float | None = None
) -> Speed:
    """Write, then read, `limit_bytes`, or less if the store would take more than a few seconds.

    The speed of a small first blob decides how much to write. The bytes read are compared with the
    bytes written. If this process is killed, `prune` finds the remaining blobs.

    Args:
        backend: The store.
        limit_bytes: Maximum bytes to write.
        root: The folder of a local store, to drop the blob from the page cache.
        stuck_s: The seconds after which the store counts as stuck; None waits forever.

    Raises:
        StorageError: The store failed. The blobs were deleted, unless that failed too.
        StorageTimeoutError: The store took longer than `stuck_s`.
    """
    loop = _BlobLoop(backend, root, check=True)

    def run() -> Speed:
        speed = _run([loop], min(_FIRST_BYTES, limit_bytes))
        per_s = speed.write_bytes_per_s
        size = min(limit_bytes, int(per_s * current_timing().probe_s)) >> 20 << 20
        return _run([loop], size) if speed.same and size > speed.bytes else speed

    return _watched(run, [loop], backend, stuck_s)


def measure_limit(
    backend: Backend, size: int, *, root: Path | None, blobs: int, stuck_s: float
) -> Speed:
    """Write, then read, up to `size` bytes in all, in `blobs` blobs at once.

    Writes for `Timing.probe_s` at most. Uses plain system calls for a folder of this machine, and
    the backend for any other store.

    Raises:
        StorageError: The store failed. The blobs were deleted, unless that failed too.
        StorageTimeoutError: The store took longer than `stuck_s`.
    """
    loops: list[_Loop] = [
        _BlobLoop(backend, None) if root is None else _FileLoop(backend, root) for _ in range(blobs)
    ]
    return _watched(partial(_run, loops, size // blobs >> 12 << 12), loops, backend, stuck_s)


def _watched(
    call: Callable[[], Speed], loops: Sequence[_Loop], backend: Backend, stuck_s: float | None
) -> Speed:
    def stop() -> None:
        for loop in loops:
            loop.stopped = True

    return in_time(backend, call, stuck_s=stuck_s, cancel=stop)


def _run(loops: Sequence[_Loop], size: int) -> Speed:
    """Let all loops at once write a new blob of up to `size` bytes; then let all read theirs."""
    try:
        began = time.monotonic()
        sizes = _at_once([partial(loop.write, size) for loop in loops])
        write_s = time.monotonic() - began
        read = _at_once([partial(loop.read, n) for loop, n in zip(loops, sizes, strict=True)])
    finally:
        for loop in loops:
            loop.remove()
    return Speed(sum(sizes), write_s, max(s for s, _ in read), all(same for _, same in read))


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    # Daemon threads: if the store hangs, an executor's threads would keep the process from ending.
    found = call_all_with_deadline("probe", calls, NEVER, TimeoutError)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return [result for result in found if not isinstance(result, BaseException)]


class _Loop(ABC):
    """Writes one blob at a time in pieces, and reads it back."""

    def __init__(self, backend: Backend, root: Path | None, *, check: bool = False) -> None:
        self.stopped = False
        self._backend = backend
        self._root = root
        self._check = check
        self._piece = secrets.token_bytes(_PIECE_BYTES)  # random: a file system may compress
        # Page-aligned, for direct I/O, and of huge pages, which some disks fill twice as fast.
        self._memory = memoryview(map_memory(_PIECE_BYTES * _PIECES_AT_ONCE))
        self._memory[:] = self._piece * _PIECES_AT_ONCE
        self._name = ""

    @abstractmethod
    def _write(self, size: int) -> int:
        """Write up to `size` bytes, until `Timing.probe_s` is over; return how many are durable."""

    @abstractmethod
    def _read(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each part from its offset in the blob."""

    def write(self, size: int) -> int:
        """Write a new blob of up to `size` bytes; return the number of durable bytes."""
        self._name = blob_name(secrets.token_hex(16), 0, 0, "raw")
        return self._write(size)

    def read(self, size: int) -> tuple[float, bool]:
        """Read the blob back; return the seconds of the reads alone, and whether the bytes match.

        Bytes that are not compared count as matching. If they match, the loop's memory holds the
        written bytes again, as the next write needs them.
        """
        if self._root is not None:
            drop_cache(self._root / self._name)
        seconds, same = 0.0, True
        for start in range(0, size, self._memory.nbytes):
            parts = self._parts(start, size)
            if self._check:
                for _, part in parts:  # else a read that does nothing would pass
                    part[:] = bytes(part.nbytes)
            began = time.monotonic()
            self._read(parts)
            seconds += time.monotonic() - began
            if self._check:
                same = same and all(bytes(part) == self._piece[: part.nbytes] for _, part in parts)
        return seconds, same

    def remove(self) -> None:
        """Delete the blob."""
        if self._name:
            self._backend.delete([self._name])

    def _parts(self, start: int, size: int) -> list[tuple[int, memoryview]]:
        """Return the pieces of memory for the bytes from `start` on, each with its blob offset.

        Raises:
            StorageError: The loop was stopped.
        """
        if self.stopped:
            msg = "the probe was interrupted"
            raise StorageError(msg)
        length = min(size - start, self._memory.nbytes)
        places = range(0, length, _PIECE_BYTES)
        return [(start + at, self._memory[at : min(at + _PIECE_BYTES, length)]) for at in places]


class _BlobLoop(_Loop):
    """Uses the backend, with several pieces in a batch."""

    def _write(self, size: int) -> int:
        deadline = Deadline(current_timing().probe_s)
        writer = self._backend.create(self._name, size_hint=size)
        try:
            done = 0
            while done < size and not (done and deadline.is_over()):
                parts = self._parts(done, size)
                writer.write([WriteRequest(at, (part,)) for at, part in parts])
                done += sum(part.nbytes for _, part in parts)
            writer.seal(done)
        except BaseException:
            writer.abort()
            raise
        return done

    def _read(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        self._backend.read([ReadRequest(self._name, at, part) for at, part in parts])


class _FileLoop(_Loop):
    """Uses system calls, one piece at a time, with O_DIRECT if the backend uses it."""

    def __init__(self, backend: Backend, root: Path) -> None:
        super().__init__(backend, root)
        self._folder = root
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if backend.direct_io else 0)

    def _write(self, size: int) -> int:
        deadline = Deadline(current_timing().probe_s)
        path = self._folder / self._name
        with self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            done = 0
            while done < size and not (done and deadline.is_over()):
                for at, part in self._parts(done, size):
                    written = os.pwrite(fd, part, at)
                    if written != part.nbytes:
                        msg = f"{path}: wrote {written} of {part.nbytes} bytes; is the disk full?"
                        raise StorageError(msg)
                    done += written
            os.fsync(fd)
        return done

    def _read(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        with self._open(os.O_RDONLY) as fd:
            for at, part in parts:
                if os.preadv(fd, [part], at) != part.nbytes:
                    msg = f"{self._folder / self._name} was cut short while it was read"
                    raise StorageError(msg)

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        """Open the file for the block; map OSErrors, also those of the block, to StorageError."""
        path = self._folder / self._name
        try:
            if flags & os.O_CREAT:
                path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, flags | self._flags, 0o666)
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            msg = f"{path}: {error.strerror}"
            raise StorageError(msg) from error

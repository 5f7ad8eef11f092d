"""Transfers: requests cut into vectored calls, with bounce pages for unaligned bytes.

A direct transfer covers whole pages of the file. If a buffer and its range of the file have the
same offset in a page, the aligned middle is moved in place. Edges and other buffers are copied
through a slot of page-aligned memory: `[head | middle | tail]` in one call. Each lane of an engine
(a thread, or an entry of the ring) moves one transfer at a time, and has one slot.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.backends.local.failures import advised, storage_error
from penstock.backends.local.kernel import address, move
from penstock.core.errors import BlobTruncatedError, StorageError
from penstock.core.types import PAGE_BYTES, ByteRange, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.backends.local.failures import Advise

TRANSFER_BYTES = 16 << 20
SLACK_BYTES = 64 << 10  # so that a chunk of 16 MiB fits into one call with its edge pages
SLOT_BYTES = 1 << 20
MIN_DIRECT_BYTES = 16 << 10  # below this a copy is cheaper than one more entry in the vector
MAX_VECTOR = 1024  # IOV_MAX
RETRY_S = 10.0  # if a device asks only for retries for this long, it counts as broken

# After these a call has moved nothing and may be repeated. ECANCELED comes from io_uring: the
# process limit kept the kernel from starting a worker thread for the call.
_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ECANCELED}


class TransferBatch:
    """Counts the transfers of a batch, and completes its future after the last one.

    The future raises the first error. It is done only when the kernel no longer uses any buffer of
    the batch, so the caller may then free them.
    """

    def __init__(
        self,
        what: str,
        root: str,
        *,
        finish: Callable[[], None] | None = None,
        advise: Advise | None = None,
    ) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # no cancelling: the kernel has the buffers
        self._what = what
        self._root = root
        self._finish = finish
        self._advise = advise
        self._left = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()  # guards `_left` and `_error`

    @property
    def failed(self) -> bool:
        """Whether a transfer has failed, so that transfers that have not begun may be dropped."""
        return self._error is not None

    def begin(self, count: int) -> None:
        """Expect `count` calls of `done`; 0 completes the batch at once."""
        self._left = count
        if count == 0:
            self._resolve()

    def fail(self, error: Exception, transfer: Transfer | None = None) -> None:
        """Record the batch's first error, mapped to one of Penstock's errors; ignore later ones."""
        with self._lock:
            if self._error is None:
                self._error = self._explain(error, transfer)

    def done(self) -> None:
        """Count a transfer that has ended or failed, and no longer uses its buffers."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._resolve()

    def _resolve(self) -> None:
        if self._finish is not None:
            self._finish()
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(None)

    def _explain(self, error: Exception, transfer: Transfer | None) -> Exception:
        name = transfer.name if transfer else ""
        if isinstance(error, OSError):
            advice = ""
            if self._advise is not None and transfer is not None:
                where = ByteRange(transfer.offset, transfer.offset + transfer.length)
                advice = self._advise(error, where)
            failure = storage_error(error, self._what, name, self._root)
            mapped: Exception = advised(failure, advice)
        elif isinstance(error, EOFError):
            msg = f"{name} under {self._root} ends before the requested range"
            mapped = BlobTruncatedError(msg)
        elif isinstance(error, StorageError):
            return error
        else:
            msg = f"cannot {self._what} {name} under {self._root}: {error!r}"
            mapped = StorageError(msg)
        mapped.__cause__ = error
        return mapped


class Engine(Protocol):
    """Moves the transfers of batches; several batches may be in flight."""

    def start(self, batch: TransferBatch, transfers: Sequence[Transfer]) -> None:
        """Start the transfers without waiting for I/O; they complete `batch.future`."""

    def close(self) -> None:
        """Wait for the transfers in flight, then release all resources. Idempotent."""


def failed(error: StorageError) -> Future[None]:
    """Return a future with the error of a call that could not begin."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def settle(future: Future[None]) -> None:
    """Wait for `future`, and raise its error.

    An interrupt (Ctrl-C) is raised only once no buffer is in use. Otherwise the caller would free
    memory that the kernel still writes to.
    """
    try:
        future.result()
    finally:
        if not future.done():
            wait([future])


@dataclass(frozen=True, slots=True)
class Bounce:
    """Whole pages of the file that are copied through the slot.

    Attributes:
        length: The size of the pages in bytes.
        copies: Buffers of the caller, each with its offset within these pages; the rest is zero.
    """

    length: int
    copies: tuple[tuple[int, memoryview], ...]


@dataclass(slots=True)
class Transfer:
    """One contiguous range of a file, moved by one vectored call; short results take more calls.

    Attributes:
        batch: The batch that counts the end of the transfer.
        name: The name of the blob, for messages.
        fd: The open file.
        write: True for a write, False for a read.
        direct: Whether `fd` bypasses the page cache. If so, all offsets are multiples of a page.
        offset: The offset in the file.
        stripe_bytes: As in `OpenBlob`.
        needed: The bytes from `offset` that must be moved; the last page of a read may be short.
        parts: The caller's memory, or pages of the slot, in file order.
        length: The number of bytes of the file that the parts cover.
        slot_bytes: The number of bytes of the slot that the parts use.
    """

    batch: TransferBatch
    name: str
    fd: int
    write: bool
    direct: bool
    offset: int
    stripe_bytes: int = 0
    needed: int = 0
    parts: list[memoryview | Bounce] = field(default_factory=list)
    length: int = 0
    slot_bytes: int = 0

    def take(self, at: int, part: memoryview | Bounce) -> bool:
        """Append `part` if it follows the last part and fits; return whether it was appended."""
        length = part_bytes(part)
        slot = length if isinstance(part, Bounce) else 0
        if at != self.offset + self.length or len(self.parts) >= MAX_VECTOR:
            return False
        if self.parts and self.stripe_bytes and at % self.stripe_bytes == 0:
            return False
        if self.parts and (
            self.length + length > TRANSFER_BYTES + SLACK_BYTES
            or self.slot_bytes + slot > SLOT_BYTES
        ):
            return False
        self.parts.append(part)
        self.length += length
        self.slot_bytes += slot
        self.needed = self.length
        return True


def part_bytes(part: memoryview | Bounce) -> int:
    """Return the number of bytes of the file that `part` covers."""
    return part.length if isinstance(part, Bounce) else part.nbytes


class Slot:
    """Page-aligned memory of one lane, allocated at its first use.

    Unlike a bytearray, the mapping is aligned, and shared with forked children. After a fork during
    a transfer, copy-on-write of a private page would leave the device writing to the old page.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self.view = memoryview(b"")

    def open(self) -> memoryview:
        """Return the memory; the first call allocates it."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, SLOT_BYTES)
            self.view = memoryview(self._memory)
        return self.view

    def close(self) -> None:
        """Drop the memory, which is freed with its last view."""
        self.view = memoryview(b"")
        self._memory = None


class Flight:
    """The progress of a transfer in flight in a lane, across short results."""

    def __init__(self, transfer: Transfer, slot: Slot) -> None:
        self.transfer = transfer
        self._slot = slot
        self._done = 0
        self._reached = 0
        self._give_up_s = 0.0  # when retries end; 0 if the last call moved bytes
        self._views = self._lay_out()

    @property
    def offset(self) -> int:
        """The file offset of the next call."""
        return self.transfer.offset + self._done

    def views(self) -> list[memoryview]:
        """Return the buffers of the next call."""
        skip = self._done
        left = []
        for view in self._views:
            if skip >= view.nbytes:
                skip -= view.nbytes
            else:
                left.append(view[skip:] if skip else view)
                skip = 0
        return left

    def moved(self, count: int) -> bool:
        """Record the result of a call; return whether the transfer is complete.

        Raises:
            EOFError: A read reached the end of the file.
            OSError: A write made no progress and reported no error.
        """
        reached = self._done + count
        if reached >= self.transfer.needed:
            self._deliver()
            return True
        if reached <= self._reached:
            if not self.transfer.write:
                raise EOFError
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._reached = reached
        self._give_up_s = 0.0
        # A direct call must begin at a page, so an incomplete page is moved again.
        self._done = align_down(reached, PAGE_BYTES) if self.transfer.direct else reached
        return False

    def retry_after(self, number: int) -> bool:
        """Return whether to retry a call that failed with errno `number`; waits 1 ms first."""
        now_s = time.monotonic()
        self._give_up_s = self._give_up_s or now_s + RETRY_S
        if number not in _TRANSIENT or now_s >= self._give_up_s:
            return False
        time.sleep(0.001)
        return True

    def _lay_out(self) -> list[memoryview]:
        views, at = [], 0
        for part in self.transfer.parts:
            if isinstance(part, memoryview):
                views.append(part)
                continue
            pages = self._slot.open()[at : at + part.length]
            if self.transfer.write:
                _fill(pages, part)
            views.append(pages)
            at += part.length
        return views

    def _deliver(self) -> None:
        if self.transfer.write:
            return
        for part, pages in zip(self.transfer.parts, self._views, strict=True):
            if isinstance(part, Bounce):
                for at, target in part.copies:
                    _copy(target, pages[at : at + target.nbytes])


def _fill(pages: memoryview, part: Bounce) -> None:
    position = 0
    for at, source in part.copies:
        if at > position:
            pages[position:at] = bytes(at - position)
        _copy(pages[at : at + source.nbytes], source)
        position = at + source.nbytes
    if position < part.length:
        pages[position:] = bytes(part.length - position)


def _copy(target: memoryview, source: memoryview) -> None:
    if source.nbytes <= PAGE_BYTES:
        target[:] = source
    else:
        move(address(target), address(source), source.nbytes)


# -- cutting --------------------------------------------------------------------------------------

Piece = tuple[int, "memoryview | Bounce"]


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """An open file, to be read or written.

    Attributes:
        name: The name of the blob, for messages.
        fd: The open file.
        direct: Whether `fd` bypasses the page cache.
        stripe_bytes: No transfer crosses a multiple of this size, which is a multiple of a page; 0
            sets no limit.
        advise: Returns advice on a failed write.
    """

    name: str
    fd: int
    direct: bool
    stripe_bytes: int = 0
    advise: Advise | None = None


def cut_writes(
    batch: TransferBatch, blob: OpenBlob, requests: Iterable[tuple[int, Iterable[memoryview]]]
) -> list[Transfer]:
    """Cut ascending `(offset, buffers)` requests into transfers; adjacent requests share one.

    Direct transfers fill the rest of their edge pages with zeros, so no two requests may touch the
    same page.
    """
    transfers: list[Transfer] = []
    for offset, buffers in requests:
        for at, part in _pieces(blob, offset, buffers):
            _put(transfers, batch, blob, at, part, write=True)
    return transfers


def cut_read(
    batch: TransferBatch, blob: OpenBlob, offset: int, target: memoryview
) -> list[Transfer]:
    """Cut a read that fills `target` into transfers.

    A direct read requests its last page whole; at the end of the file the result is short.
    """
    transfers: list[Transfer] = []
    for at, part in _pieces(blob, offset, (target,)):
        _put(transfers, batch, blob, at, part, write=False)
    if transfers:
        last = transfers[-1]
        last.needed = offset + target.nbytes - last.offset
    return transfers


def _put(
    transfers: list[Transfer],
    batch: TransferBatch,
    blob: OpenBlob,
    at: int,
    part: memoryview | Bounce,
    *,
    write: bool,
) -> None:
    if not transfers or not transfers[-1].take(at, part):
        transfers.append(
            Transfer(batch, blob.name, blob.fd, write, blob.direct, at, blob.stripe_bytes)
        )
        transfers[-1].take(at, part)


def _pieces(blob: OpenBlob, offset: int, buffers: Iterable[memoryview]) -> Iterator[Piece]:
    cut = _aligned if blob.direct else _plain
    return cut(offset, buffers, blob.stripe_bytes)


def _spans(start: int, stop: int, most: int, stripe_bytes: int) -> Iterator[tuple[int, int]]:
    """Split `[start, stop)` at stripe boundaries, and into ranges of at most `most` bytes."""
    while start < stop:
        end = min(start + most, stop)
        if stripe_bytes:
            end = min(end, align_down(start, stripe_bytes) + stripe_bytes)
        yield start, end
        start = end


def _plain(offset: int, buffers: Iterable[memoryview], stripe_bytes: int) -> Iterator[Piece]:
    for buffer in buffers:
        for low, high in _spans(offset, offset + buffer.nbytes, TRANSFER_BYTES, stripe_bytes):
            yield low, buffer[low - offset : high - offset]
        offset += buffer.nbytes


def _aligned(offset: int, buffers: Iterable[memoryview], stripe_bytes: int) -> Iterator[Piece]:
    waiting: list[tuple[int, memoryview]] = []
    start = align_down(offset, PAGE_BYTES)
    position = offset
    for buffer in buffers:
        end = position + buffer.nbytes
        low, high = align_up(position, PAGE_BYTES), align_down(end, PAGE_BYTES)
        if high - low >= MIN_DIRECT_BYTES and (address(buffer) - position) % PAGE_BYTES == 0:
            if low > position:
                waiting.append((position, buffer[: low - position]))
            yield from _bounced(start, low, waiting, stripe_bytes)
            for at, stop in _spans(low, high, TRANSFER_BYTES, stripe_bytes):
                yield at, buffer[at - position : stop - position]
            start = high
            waiting = [(high, buffer[high - position :])] if end > high else []
        elif buffer.nbytes:
            waiting.append((position, buffer))
        position = end
    if waiting:
        yield from _bounced(start, align_up(position, PAGE_BYTES), waiting, stripe_bytes)


def _bounced(
    start: int, stop: int, waiting: list[tuple[int, memoryview]], stripe_bytes: int
) -> Iterator[Piece]:
    queue = iter(waiting)
    at, view = next(queue, (stop, memoryview(b"")))
    for low, high in _spans(start, stop, SLOT_BYTES, stripe_bytes):
        copies = []
        while at < high and view:
            part = view[: high - at]
            copies.append((at - low, part))
            if part.nbytes < view.nbytes:
                at, view = high, view[part.nbytes :]
                break
            at, view = next(queue, (stop, memoryview(b"")))
        yield low, Bounce(high - low, tuple(copies))

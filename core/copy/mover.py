"""Moves blobs from one store to another: reads, verifies and writes them, in bounded memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.pool import fulfil
from penstock.core.concurrency.watchdog import NEVER, Deadline
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    BusyError,
    SaveAbortedError,
)
from penstock.core.pipeline.codec_chain import mismatches
from penstock.core.pipeline.staging import Staging
from penstock.core.types import ByteRange, ReadRequest, WriteRequest, align_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.concurrency.timing import Clock
    from penstock.core.concurrency.workers import Workers
    from penstock.core.errors import StorageError
    from penstock.core.pipeline.staging import Block

_PIECES = 8  # buffers: some are read into while others are written from
_MAX_PIECE_BYTES = 16 << 20
_SEALING = 4  # blobs at once: each takes a thread and an open file
_PIECES_PER_S = 8  # if a rate is set


@dataclass(frozen=True, slots=True)
class CheckedBlob:
    """A blob with checksums of ascending, disjoint ranges; the rest is padding.

    Attributes:
        name: The name of the blob.
        length: Its length in bytes.
        starts: The offset of each range in the blob.
        lengths: The length of each range in bytes.
        sums: The xxh3-64 of each range.
    """

    name: str
    length: int
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlobTransfer:
    """One blob to move, or only to verify if `target` is None."""

    blob: CheckedBlob
    source: Backend
    target: Backend | None


class Cursor:
    """Pairs the bytes of a blob, in order, with their checksums. Sans-IO."""

    def __init__(self, blob: CheckedBlob) -> None:
        self._blob = blob
        self._next = 0
        self._open: xxhash.xxh3_64 | None = None  # the hash of a range that is still incomplete

    def take(
        self, offset: int, data: memoryview
    ) -> tuple[list[ByteRange], list[int], list[ByteRange]]:
        """Continue with `data`, the bytes from `offset` on.

        Returns:
            The ranges that are entirely within `data`, for `mismatches`; their checksums; and the
            ranges of the blob that began in earlier data, end in `data`, and do not match.
        """
        stop = offset + data.nbytes
        whole: list[ByteRange] = []
        sums: list[int] = []
        wrong: list[ByteRange] = []
        while self._next < len(self._blob.starts):
            start = int(self._blob.starts[self._next])
            end = start + int(self._blob.lengths[self._next])
            if start >= stop:
                break
            expected = int(self._blob.sums[self._next])
            if start >= offset and end <= stop:
                whole.append(ByteRange(start - offset, end - offset))
                sums.append(expected)
            else:
                self._open = self._open or xxhash.xxh3_64()
                self._open.update(data[max(start - offset, 0) : min(end, stop) - offset])
                if end > stop:
                    break
                if self._open.intdigest() != expected:
                    wrong.append(ByteRange(start, end))
                self._open = None
            self._next += 1
        return whole, sums, wrong


class Throttle:
    """Spreads bytes evenly over time, without bursts after idle time."""

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._due_s = clock.monotonic_s()

    def take(self, size_bytes: int) -> float:
        """Return the seconds to wait before moving these bytes, and count them as moved."""
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._clock.monotonic_s()
        start_s = max(self._due_s, now_s)
        self._due_s = start_s + size_bytes / self._bytes_per_s
        return start_s - now_s


@dataclass(eq=False, slots=True)
class _BlobState:
    """The progress of one blob in flight."""

    transfer: BlobTransfer
    cursor: Cursor
    writer: BlobWriter | None = None
    left: int = 0
    sealing: Future[None] | None = None


@dataclass(eq=False, slots=True)
class _Piece:
    """Bytes of a blob in a buffer, which is in use until all futures are done."""

    state: _BlobState
    offset: int
    view: memoryview
    block: Block
    reading: Future[None] | None = None
    writing: Future[None] | None = None
    checking: Future[list[ByteRange]] | None = None

    def pending(self) -> list[Future[Any]]:
        futures: tuple[Future[Any] | None, ...] = (self.reading, self.writing, self.checking)
        return [future for future in futures if future is not None and not future.done()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The callbacks of a `BlobMover`, called on the thread that moves the blobs.

    Attributes:
        moved: Called with the number of additional bytes that were verified and written.
        sealed: Called with the name of a blob that is durable.
        damaged: Called with the ranges of a blob that do not match. If it raises, the move ends;
            otherwise the move continues.
        missing: Called with the error for a missing or truncated blob. If it raises, the move ends;
            otherwise the move continues.
        alive: Called at least every few seconds, even while a store hangs; may raise to end the
            move.
        owned: Called after a failure; returns whether the names at the target still belong to this
            copy.
    """

    moved: Callable[[int], None]
    sealed: Callable[[str], None]
    damaged: Callable[[BlobTransfer, list[ByteRange]], None]
    missing: Callable[[BlobTransfer, StorageError], None]
    alive: Callable[[], None]
    owned: Callable[[], bool] = lambda: True


class BlobMover:
    """Moves blobs through fixed-size buffers. `run` may be called again after it returns."""

    def __init__(
        self,
        *,
        workers: Workers,
        buffer_bytes: int,
        unit_bytes: int,
        bytes_per_s: float | None,
        calls: Callbacks,
    ) -> None:
        """Create a mover; `run` allocates its buffers.

        Args:
            workers: The threads that compare checksums and seal.
            buffer_bytes: The total size of all buffers.
            unit_bytes: Buffer sizes and offsets are multiples of this, as both stores require.
            bytes_per_s: Maximum bytes to move per second; None sets no limit.
            calls: The callbacks.
        """
        self._workers = workers
        self._timing = workers.timing
        size = min(buffer_bytes // _PIECES, _MAX_PIECE_BYTES)
        if bytes_per_s is not None:
            size = min(size, int(bytes_per_s / _PIECES_PER_S))
        self._piece_bytes = max(align_down(size, unit_bytes), unit_bytes)
        self._throttle = Throttle(bytes_per_s, workers.timing.clock)
        self._calls = calls
        self._cancelled = Latch()
        self.buffer_bytes = max(buffer_bytes, 2 * self._piece_bytes)
        self._staging = Staging(0)  # replaced by `run`
        self._reading: deque[_Piece] = deque()
        self._moving: list[_Piece] = []
        self._states: list[_BlobState] = []

    def cancel(self) -> None:
        """Make `run` end soon. Thread-safe."""
        self._cancelled.open()

    def check(self) -> None:
        """Raise if the move was cancelled.

        Raises:
            SaveAbortedError: The move was cancelled.
        """
        if self._cancelled.is_open:
            msg = "the copy was given up; copy again to continue it"
            raise SaveAbortedError(msg)

    def pause(self, seconds: float) -> None:
        """Wait between two calls of `run`.

        Raises:
            SaveAbortedError: The move was cancelled.
        """
        deadline = Deadline(seconds)
        self.check()
        while not deadline.is_over():
            self._calls.moved(0)  # no progress, but the store is not stuck
            self._cancelled.wait(min(deadline.left_s(), self._timing.copy_alive_s))
            self._check_alive()

    def run(self, transfers: Iterable[BlobTransfer]) -> None:
        """Move all blobs; on return, and after an error, nothing is in flight.

        After an error, aborts unsealed blobs unless another copy has taken over their names.

        Raises:
            SaveAbortedError: The move was cancelled.
            StorageError: A store failed.
            BusyError: `Callbacks.alive` or `Callbacks.sealed` found that another copy took over.
        """
        self._staging = Staging(self.buffer_bytes)
        self._staging.expect(self.buffer_bytes)
        try:
            for transfer in transfers:
                self._start(transfer)
            while self._states:
                self._settle()
        except BaseException as error:
            if isinstance(error, BusyError) or not self._calls.owned():
                for state in self._states:
                    state.writer = None  # its abort could remove the other copy's blob of that name
            raise
        finally:
            self._wait_for_all()

    # ------------------------------------------------------------------------------------------

    def _start(self, transfer: BlobTransfer) -> None:
        self.check()
        while sum(state.sealing is not None for state in self._states) >= _SEALING:
            self._settle()
        blob = transfer.blob
        size = self._piece_bytes
        state = _BlobState(transfer, Cursor(blob), left=-(-blob.length // size))
        self._states.append(state)
        if transfer.target is not None:
            state.writer = transfer.target.create(blob.name, size_hint=blob.length)
        for offset in range(0, blob.length, size):
            length = min(size, blob.length - offset)
            while (block := self._staging.acquire(length, 0)) is None:
                self._settle()
            self._wait(self._throttle.take(length))
            piece = _Piece(state, offset, block.view, block)
            self._reading.append(piece)
            request = ReadRequest(blob.name, offset, block.view)
            piece.reading = transfer.source.submit_read([request])
        if not state.left:
            self._seal(state)

    def _wait(self, seconds: float) -> None:
        """Wait for `seconds`, and handle pieces in flight meanwhile."""
        deadline = Deadline(seconds)
        while not deadline.is_over():
            if self._reading or self._moving:
                self._settle(deadline)
            else:
                self._cancelled.wait(min(deadline.left_s(), self._timing.copy_alive_s))
                self._check_alive()
        self.check()

    def _check_alive(self) -> None:
        self.check()
        self._calls.alive()

    def _settle(self, deadline: Deadline = NEVER) -> None:
        """Wait until a piece or a blob makes progress, and handle it."""
        if not self._anything_done():
            pieces = [*list(self._reading)[:1], *self._moving]
            sealing = [state.sealing for state in self._states if state.sealing is not None]
            futures: list[Future[Any]] = [f for piece in pieces for f in piece.pending()]
            timeout_s = min(deadline.left_s(), self._timing.copy_alive_s)
            wait([*futures, *sealing], timeout_s, FIRST_COMPLETED)
        self._check_alive()
        while self._reading and not self._reading[0].pending():
            self._verify_and_write()
        for piece in [p for p in self._moving if not p.pending()]:
            self._finish(piece)
        for state in [n for n in self._states if n.sealing is not None and n.sealing.done()]:
            assert state.sealing is not None
            state.sealing.result()
            self._states.remove(state)
            self._calls.sealed(state.transfer.blob.name)

    def _anything_done(self) -> bool:
        waiting = [*list(self._reading)[:1], *self._moving]
        return any(not piece.pending() for piece in waiting) or any(
            state.sealing is not None and state.sealing.done() for state in self._states
        )

    def _verify_and_write(self) -> None:
        """Pass the oldest piece, whose read is done, to the workers and to the target."""
        # In order: a range that began in the previous piece is hashed to its end here.
        piece = self._reading.popleft()
        self._moving.append(piece)  # first, so that an error below cannot free its buffer
        state = piece.state
        assert piece.reading is not None
        try:
            piece.reading.result()
        except (BlobNotFoundError, BlobTruncatedError) as error:
            self._calls.missing(state.transfer, error)
            return
        whole, sums, wrong = state.cursor.take(piece.offset, piece.view)
        if wrong:
            self._calls.damaged(state.transfer, wrong)
        if whole:
            task = partial(mismatches, piece.view, whole, sums, offset=piece.offset)
            piece.checking = self._workers.submit(task)
        if state.writer is not None and state.transfer.target is not None:
            request = WriteRequest(piece.offset, (piece.view,))
            piece.writing = state.transfer.target.submit_write(state.writer, [request])

    def _finish(self, piece: _Piece) -> None:
        if piece.checking is not None and (wrong := piece.checking.result()):
            self._calls.damaged(piece.state.transfer, wrong)
        if piece.writing is not None:
            piece.writing.result()
        self._moving.remove(piece)
        self._staging.release(piece.block)
        piece.state.left -= 1
        self._calls.moved(piece.view.nbytes)
        if not piece.state.left:
            self._seal(piece.state)

    def _seal(self, state: _BlobState) -> None:
        """Make a completely written blob durable."""
        writer = state.writer
        if writer is None:
            self._states.remove(state)
        else:
            # On its own thread: in the pool an fsync of seconds would hold up hashing.
            state.sealing = Future()
            seal = partial(writer.seal, state.transfer.blob.length)
            self._workers.spawn("seal", partial(fulfil, state.sealing, seal))

    def _wait_for_all(self) -> None:
        """Wait until no store and no worker uses the buffers, and abort unsealed blobs."""
        pieces = [*self._reading, *self._moving]
        sealing = [state.sealing for state in self._states if state.sealing is not None]
        futures: list[Future[Any]] = [f for piece in pieces for f in piece.pending()]
        wait([*futures, *sealing])
        for piece in pieces:
            self._staging.release(piece.block)
        self._reading.clear()
        self._moving.clear()
        self._staging = Staging(0)  # a mover that is kept holds no memory
        states, self._states = self._states, []
        for state in states:
            if state.writer is not None:
                state.writer.abort()

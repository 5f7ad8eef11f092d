"""Blobs from one store to another: read, verified and written at once, in bounded memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.concurrency.latch import Latch
from penstock.core.concurrency.pool import fulfil
from penstock.core.concurrency.watchdog import NEVER, Deadline
from penstock.core.copy.checks import Cursor, compare
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    BusyError,
    SaveAbortedError,
)
from penstock.core.pipeline.staging import Staging
from penstock.core.types import (
    ReadRequest,
    WriteRequest,
    align_down,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.concurrency.timing import Clock
    from penstock.core.concurrency.workers import Workers
    from penstock.core.copy.checks import CheckedBlob
    from penstock.core.errors import StorageError
    from penstock.core.pipeline.staging import Block
    from penstock.core.types import ByteRange

_PIECES = 8  # of the buffers: some are read into while others are written from
_MAX_PIECE_BYTES = 16 << 20
_SEALING = 4  # blobs at once: each has a thread of its own, and an open file
_PER_SECOND = 8  # pieces, where a rate is given


@dataclass(frozen=True, slots=True)
class BlobTransfer:
    """One blob to move, or with no target to verify where it is."""

    blob: CheckedBlob
    source: Backend
    target: Backend | None


class Throttle:
    """Spreads bytes over time; what was not used is not saved up."""

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._due_s = clock.monotonic_s()

    def take(self, size_bytes: int) -> float:
        """Seconds to wait before so many bytes are moved; they count as moved then."""
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._clock.monotonic_s()
        start_s = max(self._due_s, now_s)
        self._due_s = start_s + size_bytes / self._bytes_per_s
        return start_s - now_s


@dataclass(eq=False, slots=True)
class _Lane:
    """A blob under way."""

    transfer: BlobTransfer
    cursor: Cursor
    writer: BlobWriter | None = None
    left: int = 0
    sealing: Future[None] | None = None


@dataclass(eq=False, slots=True)
class _Piece:
    """Some bytes of a blob in a buffer, which is in use until all futures are done."""

    lane: _Lane
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
class Calls:
    """Whom to tell what; all on the thread that moves the blobs.

    Attributes:
        moved: So many bytes more are verified, and handed to the target's store.
        sealed: That blob is durable.
        damaged: These ranges of it are not what was written: raises, or the rest of it goes on.
        missing: It is not there, or cut off: likewise.
        alive: Every few seconds at least; may raise to end it all.
        owned: After a failure: whether the names at the target are still this copy's.
    """

    moved: Callable[[int], None]
    sealed: Callable[[str], None]
    damaged: Callable[[BlobTransfer, list[ByteRange]], None]
    missing: Callable[[BlobTransfer, StorageError], None]
    alive: Callable[[], None]
    owned: Callable[[], bool] = lambda: True


class BlobMover:
    """Moves blobs through buffers of a fixed size. `run` may be called again once it returned."""

    def __init__(
        self,
        *,
        workers: Workers,
        buffer_bytes: int,
        unit_bytes: int,
        bytes_per_s: float | None,
        calls: Calls,
    ) -> None:
        """Prepare to move blobs.

        Args:
            workers: Compare checksums, and seal.
            buffer_bytes: Of all buffers.
            unit_bytes: Buffers and cuts are multiples of it, so that they suit all stores.
            bytes_per_s: Most that is moved; None: as fast as it goes.
            calls: Whom to tell what.
        """
        self._workers = workers
        self._timing = workers.timing
        size = min(buffer_bytes // _PIECES, _MAX_PIECE_BYTES)
        if bytes_per_s is not None:
            size = min(size, int(bytes_per_s / _PER_SECOND))
        self._piece_bytes = max(align_down(size, unit_bytes), unit_bytes)
        self._throttle = Throttle(bytes_per_s, workers.timing.clock)
        self._calls = calls
        self._cancelled = Latch()
        self.buffer_bytes = max(buffer_bytes, 2 * self._piece_bytes)
        self._staging = Staging(0)  # made by `run`
        self._reading: deque[_Piece] = deque()
        self._moving: list[_Piece] = []
        self._lanes: list[_Lane] = []

    def cancel(self) -> None:
        """Make `run` end soon, from any thread."""
        self._cancelled.open()

    def check(self) -> None:
        """Raise if it was cancelled.

        Raises:
            SaveAbortedError: It was.
        """
        if self._cancelled.is_open:
            msg = "the copy was given up; copy again to go on from where it ended"
            raise SaveAbortedError(msg)

    def run(self, transfers: Iterable[BlobTransfer]) -> None:
        """Move all; on return nothing is in flight, and what was not sealed is aborted.

        Raises:
            SaveAbortedError: It was cancelled.
            StorageError: A store failed.
            BusyError: `Calls.alive` or `Calls.sealed` found that this is another's to do.
        """
        self._staging = Staging(self.buffer_bytes)
        self._staging.expect(self.buffer_bytes, pin=False)
        try:
            for transfer in transfers:
                self._move(transfer)
            while self._lanes:
                self._settle()
        except BaseException as error:
            if isinstance(error, BusyError) or not self._calls.owned():
                for lane in self._lanes:
                    lane.writer = None  # its abort could remove the other copy's blob of that name
            raise
        finally:
            self._outlast()

    # ------------------------------------------------------------------------------------------

    def _move(self, transfer: BlobTransfer) -> None:
        self.check()
        while sum(lane.sealing is not None for lane in self._lanes) >= _SEALING:
            self._settle()
        blob = transfer.blob
        size = self._piece_bytes
        lane = _Lane(transfer, Cursor(blob.checks), left=-(-blob.length // size))
        self._lanes.append(lane)
        if transfer.target is not None:
            lane.writer = transfer.target.create(blob.name, size_hint=blob.length)
        for offset in range(0, blob.length, size):
            length = min(size, blob.length - offset)
            while (block := self._staging.acquire(length, 0)) is None:
                self._settle()
            self._wait(self._throttle.take(length))
            piece = _Piece(lane, offset, block.view, block)
            self._reading.append(piece)
            request = ReadRequest(blob.name, offset, block.view)
            piece.reading = transfer.source.submit_read([request])
        if not lane.left:
            self._end(lane)

    def _wait(self, seconds: float) -> None:
        """Let time pass, and what is under way go on."""
        deadline = Deadline(seconds)
        while not deadline.is_over():
            if self._reading or self._moving:
                self._settle(deadline)
            else:
                self._cancelled.wait(min(deadline.left_s(), self._timing.copy_alive_s))
                self._look_around()
        self.check()

    def _look_around(self) -> None:
        self.check()
        self._calls.alive()

    def _settle(self, deadline: Deadline = NEVER) -> None:
        """Wait until something is done, and go on with it."""
        if not self._anything_done():
            pieces = [*list(self._reading)[:1], *self._moving]
            sealing = [lane.sealing for lane in self._lanes if lane.sealing is not None]
            futures: list[Future[Any]] = [f for piece in pieces for f in piece.pending()]
            timeout_s = min(deadline.left_s(), self._timing.copy_alive_s)
            wait([*futures, *sealing], timeout_s, FIRST_COMPLETED)
        self._look_around()
        while self._reading and not self._reading[0].pending():
            self._arrived()
        for piece in [p for p in self._moving if not p.pending()]:
            self._landed(piece)
        for lane in [n for n in self._lanes if n.sealing is not None and n.sealing.done()]:
            assert lane.sealing is not None
            lane.sealing.result()
            self._lanes.remove(lane)
            self._calls.sealed(lane.transfer.blob.name)

    def _anything_done(self) -> bool:
        waiting = [*list(self._reading)[:1], *self._moving]
        return any(not piece.pending() for piece in waiting) or any(
            lane.sealing is not None and lane.sealing.done() for lane in self._lanes
        )

    def _arrived(self) -> None:
        """The oldest piece that is read goes to the hashes and to the target."""
        piece = self._reading.popleft()
        self._moving.append(piece)  # first, so that its memory is held whatever happens
        lane = piece.lane
        assert piece.reading is not None
        try:
            piece.reading.result()
        except (BlobNotFoundError, BlobTruncatedError) as error:
            self._calls.missing(lane.transfer, error)
            return
        whole, sums, wrong = lane.cursor.take(piece.offset, piece.view)
        if wrong:
            self._calls.damaged(lane.transfer, wrong)
        if whole:
            task = partial(compare, piece.view, piece.offset, whole, sums)
            piece.checking = self._workers.submit(task)
        if lane.writer is not None and lane.transfer.target is not None:
            request = WriteRequest(piece.offset, (piece.view,))
            piece.writing = lane.transfer.target.submit_write(lane.writer, [request])

    def _landed(self, piece: _Piece) -> None:
        if piece.checking is not None and (wrong := piece.checking.result()):
            self._calls.damaged(piece.lane.transfer, wrong)
        if piece.writing is not None:
            piece.writing.result()
        self._moving.remove(piece)
        self._staging.release(piece.block)
        piece.lane.left -= 1
        self._calls.moved(piece.view.nbytes)
        if not piece.lane.left:
            self._end(piece.lane)

    def _end(self, lane: _Lane) -> None:
        """All of a blob is where it belongs: make it durable."""
        writer, length = lane.writer, lane.transfer.blob.length
        if writer is None:
            self._lanes.remove(lane)
        else:
            # Not in the pool: nobody's hashing shall wait for a disk.
            lane.sealing = Future()
            self._workers.spawn("seal", partial(fulfil, lane.sealing, partial(writer.seal, length)))

    def _outlast(self) -> None:
        """Nothing uses any memory of ours afterwards."""
        pieces = [*self._reading, *self._moving]
        sealing = [lane.sealing for lane in self._lanes if lane.sealing is not None]
        futures: list[Future[Any]] = [f for piece in pieces for f in piece.pending()]
        wait([*futures, *sealing])
        for piece in pieces:
            self._staging.release(piece.block)
        self._reading.clear()
        self._moving.clear()
        self._staging = Staging(0)  # whoever keeps this keeps no memory
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            if lane.writer is not None:
                lane.writer.abort()

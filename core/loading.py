"""Frames -> verified bytes in sinks: the reading half of the pipeline.

A whole raw frame is read into the target's own memory; everything else passes through a small
staging area. Every byte is verified before a restore reports success: blocks of raw frames, the
stored and the decoded bytes of encoded ones.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.blocks import frame_blocks
from penstock.core.chain import checksum, checksum_blocks
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    CodecError,
    PenstockError,
)
from penstock.core.pipeline import BATCH_BYTES
from penstock.core.staging import Staging
from penstock.core.types import PAGE_BYTES, ByteRange, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import Backend, ByteSink, CodecContext
    from penstock.core.chain import CodecChain
    from penstock.core.manifest import Frame
    from penstock.core.pipeline import Workers
    from penstock.core.staging import Block

_SCRATCH_BYTES = 64 << 20
_BATCHES_IN_FLIGHT = 3
_BATCH_FRAMES = 256


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes `[at, at + length)` of a chunk go to `sink` from `start` on; None: only verify."""

    sink: ByteSink | None
    at: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class FrameJob:
    """One frame to read: which blocks of it (relative to its first byte), and what for.

    `label` names the objects in it, for messages.
    """

    frame: Frame
    blob: str
    block_bytes: int
    ranges: tuple[ByteRange, ...]
    uses: tuple[Use, ...]
    chain: CodecChain | None
    context: CodecContext | None
    label: tuple[str, ...]


@dataclass(slots=True)
class LoadStats:
    """What a load read, and the damage it found: `(object, detail)`."""

    bytes_read: int = 0
    frames: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing_blob: bool = False


@dataclass(eq=False, slots=True)
class _Read:
    job: FrameJob
    request: ReadRequest
    span: ByteRange
    block: Block | None
    direct: bool
    error: PenstockError | None = None


@dataclass(eq=False, slots=True)
class _Flight:
    """A batch under way: its memory is in use until the future and all checks are done."""

    reads: list[_Read]
    future: Future[None]
    checks: list[Future[list[tuple[str, str]]]] = field(default_factory=list)

    def outlast(self) -> None:
        """Wait until nothing uses the memory, whatever interrupts that."""
        interrupted: BaseException | None = None
        futures: list[Future[Any]] = [self.future, *self.checks]
        for future in futures:
            while not future.done():
                try:
                    wait([future])
                except BaseException as error:  # noqa: BLE001 - raised below, when it is safe
                    interrupted = error
        if interrupted is not None:
            raise interrupted


class Loader:
    """Reads frames of one backend. Thread-safe."""

    def __init__(self, backend: Backend, workers: Workers) -> None:
        self._backend = backend
        self._workers = workers
        self._pid = os.getpid()
        self._staging = Staging(_SCRATCH_BYTES)
        self._scratch = threading.local()

    def run(
        self,
        jobs: Sequence[FrameJob],
        *,
        decode: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> LoadStats:
        """Read, verify and place all of `jobs`; damage is collected, not raised.

        Args:
            jobs: Frames in the order in which they shall be read.
            decode: Whether encoded frames are decoded (verification may do without).
            progress: Called with bytes read.

        Raises:
            StorageError: The store failed in another way than by missing or short blobs.
        """
        if self._pid != os.getpid():  # shared mappings: a forked child would write into ours
            self._pid, self._staging = os.getpid(), Staging(_SCRATCH_BYTES)
            self._scratch = threading.local()
        session = _Session(self, decode=decode, progress=progress)
        try:
            for job in jobs:
                session.stats.frames += 1
                for span in job.ranges:
                    session.add(job, span)
            session.finish()
        finally:
            session.close()
        return session.stats

    def submit(self, reads: list[_Read]) -> Future[None]:
        """Start a batch."""
        return self._backend.submit_read([read.request for read in reads])

    def prepare(self, job: FrameJob, span: ByteRange, *, may_allocate: bool) -> _Read | None:
        """Decide where `span` is read to; None: scratch is full for now."""
        offset = job.frame.offset + span.start
        target = self._direct_target(job, span)
        if target is not None:
            return _Read(job, ReadRequest(job.blob, offset, target), span, None, direct=True)
        block = self._staging.acquire(span.length, offset % PAGE_BYTES)
        if block is None:
            if not may_allocate or self._staging.fits(span.length, offset % PAGE_BYTES):
                return None
            view = memoryview(mmap.mmap(-1, span.length))  # larger than all of the scratch
        else:
            view = block.view
        return _Read(job, ReadRequest(job.blob, offset, view), span, block, direct=False)

    def _direct_target(self, job: FrameJob, span: ByteRange) -> memoryview | None:
        """The memory of the one sink that takes the whole raw frame as it is."""
        if job.chain is not None or len(job.uses) != 1 or span.length != job.frame.length:
            return None
        use = job.uses[0]
        if use.sink is None or use.at != 0 or use.length != job.frame.raw_length:
            return None
        view = use.sink.view()
        return None if view is None else view[use.start : use.start + use.length]

    def settle(self, flight: _Flight, stats: LoadStats, *, decode: bool) -> None:
        """Wait for a batch, verify and place it; `release` is the caller's."""
        error = flight.future.exception()
        if isinstance(error, BlobNotFoundError | BlobTruncatedError):
            self._read_singly(flight.reads)
        elif error is not None:
            raise error
        share = -(-len(flight.reads) // self._workers.count)
        for at in range(0, len(flight.reads), share):
            check = self._verifier(flight.reads[at : at + share], decode=decode)
            flight.checks.append(self._workers.submit(check))
        for task in flight.checks:
            stats.damaged += task.result()
        stats.missing_blob |= any(isinstance(r.error, BlobNotFoundError) for r in flight.reads)

    def _read_singly(self, reads: list[_Read]) -> None:
        """A batch failed: find out which of its frames are missing or cut off."""
        for read in reads:
            try:
                self._backend.read([read.request])
            except (BlobNotFoundError, BlobTruncatedError) as error:
                read.error = error

    def release(self, reads: list[_Read]) -> None:
        """Give scratch back."""
        for read in reads:
            if read.block is not None:
                self._staging.release(read.block)

    def _verifier(self, reads: list[_Read], *, decode: bool) -> Callable[[], list[tuple[str, str]]]:
        def task() -> list[tuple[str, str]]:
            damaged = []
            for read in reads:
                detail = self._verify_and_place(read, decode=decode)
                if detail is not None:
                    damaged += [(name, detail) for name in read.job.label]
            return damaged

        return task

    def _verify_and_place(self, read: _Read, *, decode: bool) -> str | None:
        if read.error is not None:
            return str(read.error)
        job, frame, data = read.job, read.job.frame, read.request.target
        if job.chain is None:
            detail = _verify_blocks(job, read.span, data)
            if detail is None and not read.direct:
                _place(job.uses, data, base=read.span.start)
            return detail
        if checksum(data) != frame.checksums[0]:
            return f"checksum of the frame at {job.blob}:{frame.offset} does not match"
        if not decode:
            return None
        return self._decode(job, data)

    def _decode(self, job: FrameJob, data: memoryview) -> str | None:
        frame, chain = job.frame, job.chain
        assert chain is not None
        assert job.context is not None
        use = job.uses[0]
        whole = len(job.uses) == 1 and use.at == 0 and use.length == frame.raw_length
        target = use.sink.view() if whole and use.sink is not None else None
        if target is not None:
            out = target[use.start : use.start + use.length]
        else:
            out = self._output(frame.raw_length)
        try:
            chain.decode(data, out, context=job.context, lengths=frame.lengths)
        except CodecError as error:
            return f"the frame at {job.blob}:{frame.offset} does not decode: {error}"
        if frame.raw_checksum is not None and checksum(out) != frame.raw_checksum:
            return f"decoded bytes of the frame at {job.blob}:{frame.offset} do not match"
        if target is None:
            _place(job.uses, out, base=0)
        return None

    def _output(self, length: int) -> memoryview:
        """This thread's reused memory for decoded chunks."""
        held: memoryview | None = getattr(self._scratch, "view", None)
        if held is None or held.nbytes < length:
            held = self._scratch.view = memoryview(mmap.mmap(-1, max(length, 1)))
        return held[:length]


class _Session:
    """The batches of one `Loader.run`."""

    def __init__(
        self, loader: Loader, *, decode: bool, progress: Callable[[int], None] | None
    ) -> None:
        self.stats = LoadStats()
        self._loader = loader
        self._decode = decode
        self._progress = progress
        self._flights: deque[_Flight] = deque()
        self._batch: list[_Read] = []
        self._size = 0

    def add(self, job: FrameJob, span: ByteRange) -> None:
        """Put one range of a frame into the batch, and the batch under way when it is full."""
        while (
            read := self._loader.prepare(
                job, span, may_allocate=not self._flights and not self._batch
            )
        ) is None:
            # Scratch is full. Nobody waits while holding what only he can free.
            self._submit()
            self._settle_oldest()
        self._batch.append(read)
        self._size += span.length
        self.stats.bytes_read += span.length
        if self._size >= BATCH_BYTES or len(self._batch) >= _BATCH_FRAMES:
            self._submit()

    def finish(self) -> None:
        """Read, verify and place what is left."""
        self._submit()
        while self._flights:
            self._settle_oldest()

    def close(self) -> None:
        """After an error: nothing may be in flight into memory that the caller gets back."""
        interrupted: BaseException | None = None
        while self._flights:
            try:
                self._flights[0].outlast()
            except BaseException as error:  # noqa: BLE001 - raised below, when it is safe
                interrupted = error
            self._loader.release(self._flights.popleft().reads)
        self._loader.release(self._batch)
        self._batch = []
        if interrupted is not None:
            raise interrupted

    def _submit(self) -> None:
        if self._batch:
            self._flights.append(_Flight(self._batch, self._loader.submit(self._batch)))
            self._batch, self._size = [], 0
        while len(self._flights) >= _BATCHES_IN_FLIGHT:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        if self._flights:
            flight = self._flights[0]
            self._loader.settle(flight, self.stats, decode=self._decode)
            self._flights.popleft()
            self._loader.release(flight.reads)
            if self._progress is not None:
                self._progress(sum(r.span.length for r in flight.reads))


def _verify_blocks(job: FrameJob, span: ByteRange, data: memoryview) -> str | None:
    frame = job.frame
    ranges, expected = [], []
    for number, block in enumerate(frame_blocks(frame.offset, frame.length, job.block_bytes)):
        if span.start <= block.start and block.stop <= span.stop:
            ranges.append(ByteRange(block.start - span.start, block.stop - span.start))
            expected.append(frame.checksums[number])
    if sum(r.length for r in ranges) != span.length:
        return f"the range {span} of {job.blob}:{frame.offset} is not made of whole blocks"
    for block, got, want in zip(ranges, checksum_blocks(data, ranges), expected, strict=True):
        if got != want:
            at = frame.offset + span.start + block.start
            return f"checksum of {block.length} bytes at {job.blob}:{at} does not match"
    return None


def _place(uses: Sequence[Use], data: memoryview, *, base: int) -> None:
    """Copy what lies inside `data` (bytes of the chunk from `base` on) to its sinks."""
    for use in uses:
        if use.sink is None or use.at < base or use.at + use.length > base + data.nbytes:
            continue
        use.sink.copy_in(use.start, data[use.at - base : use.at - base + use.length])

"""Batches of frames from a backend into sinks: the reading half of the pipeline.

A whole raw frame is read into the target's own memory; everything else passes through a small
staging area. Every byte is verified before a restore reports success: blocks of raw frames, the
stored and the decoded bytes of encoded ones.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    PenstockError,
    RestoreError,
)
from penstock.core.frames import FrameReader, direct_target
from penstock.core.pipeline import BATCH_BYTES
from penstock.core.staging import Staging
from penstock.core.types import PAGE_BYTES, ByteRange, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import Backend
    from penstock.core.frames import FrameJob
    from penstock.core.staging import Block
    from penstock.core.workers import Workers

_SCRATCH_BYTES = 64 << 20
_BATCHES_IN_FLIGHT = 3
_BATCH_FRAMES = 256


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
    future: Future[None] | None
    checks: list[Future[list[tuple[str, str]]]] = field(default_factory=list)

    def outlast(self) -> None:
        """Wait until nothing uses the memory."""
        futures: list[Future[Any]] = [*self.checks]
        if self.future is not None:
            futures.append(self.future)
        wait(futures)


class Loader:
    """Reads frames of one backend. Thread-safe."""

    def __init__(self, backend: Backend, workers: Workers) -> None:
        self._backend = backend
        self._workers = workers
        self._pid = os.getpid()
        self._idle: deque[Staging] = deque(maxlen=1)  # one is kept for the next run
        self._reader = FrameReader()

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
            progress: Called with bytes read, on a thread of the loader's own.

        Raises:
            StorageError: The store failed in another way than by missing or short blobs.
        """
        scratch = self._borrow()
        session = _Session(
            self._backend,
            self._workers,
            scratch,
            reader=self._reader,
            decode=decode,
            progress=progress,
        )
        # Ctrl-C must not come between handing memory to the store and taking note of it.
        stats = self._workers.apart("load", lambda: session.run(jobs), cancel=session.cancel)
        self._idle.append(scratch)  # after an error it is not worth finding out what it holds
        return stats

    def _borrow(self) -> Staging:
        """Scratch for one run: whoever shared it could wait for what another run holds."""
        if self._pid != os.getpid():  # shared mappings: a forked child would write into ours
            self._pid, self._idle = os.getpid(), deque(maxlen=1)
            self._reader = FrameReader()
        try:
            return self._idle.pop()
        except IndexError:
            return Staging(_SCRATCH_BYTES)


class _Session:
    """The batches of one `Loader.run`."""

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        scratch: Staging,
        *,
        reader: FrameReader,
        decode: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._stats = LoadStats()
        self._cancelled = False
        self._backend = backend
        self._workers = workers
        self._scratch = scratch
        self._reader = reader
        self._decode = decode
        self._progress = progress
        self._flights: deque[_Flight] = deque()
        self._batch: list[_Read] = []
        self._size = 0

    def run(self, jobs: Sequence[FrameJob]) -> LoadStats:
        """Read everything; on return nothing is in flight, whatever went wrong."""
        try:
            for job in jobs:
                self._stats.frames += 1
                for span in job.ranges:
                    self._add(job, span)
            self._submit()
            while self._flights:
                self._settle_oldest()
        finally:
            for flight in self._flights:
                flight.outlast()
        return self._stats

    def cancel(self) -> None:
        """Make `run` end soon, from any thread."""
        self._cancelled = True

    def _add(self, job: FrameJob, span: ByteRange) -> None:
        """Put one range of a frame into the batch, and the batch under way when it is full."""
        while (read := self._prepare(job, span)) is None:
            # Scratch is full. Nobody waits while holding what only he can free.
            self._submit()
            self._settle_oldest()
        self._batch.append(read)
        self._size += span.length
        self._stats.bytes_read += span.length
        if self._size >= BATCH_BYTES or len(self._batch) >= _BATCH_FRAMES:
            self._submit()

    def _prepare(self, job: FrameJob, span: ByteRange) -> _Read | None:
        """Decide where `span` is read to; None: scratch is full for now."""
        offset = job.frame.offset + span.start
        target = direct_target(job, span)
        if target is not None:
            return _Read(job, ReadRequest(job.blob, offset, target), span, None, direct=True)
        block = self._scratch.acquire(span.length, offset % PAGE_BYTES)
        if block is not None:
            return _Read(job, ReadRequest(job.blob, offset, block.view), span, block, direct=False)
        if self._flights or self._batch:
            return None
        try:
            view = memoryview(mmap.mmap(-1, span.length))  # larger than all of the scratch
        except (OSError, OverflowError, ValueError) as error:
            msg = (
                f"{span.length} bytes of {job.blob} are recorded as one piece, and this process "
                f"cannot get so much memory at once: {error}"
            )
            raise RestoreError(msg) from error
        return _Read(job, ReadRequest(job.blob, offset, view), span, None, direct=False)

    def _submit(self) -> None:
        if self._cancelled:
            msg = "given up: the caller was interrupted"
            raise RestoreError(msg)
        if self._batch:
            requests = [read.request for read in self._batch]
            self._flights.append(_Flight(self._batch, self._backend.submit_read(requests)))
            self._batch, self._size = [], 0
        while len(self._flights) >= _BATCHES_IN_FLIGHT:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        if self._flights:
            flight = self._flights[0]
            self._settle(flight)
            self._flights.popleft()
            for read in flight.reads:
                if read.block is not None:
                    self._scratch.release(read.block)
            if self._progress is not None:
                self._progress(sum(r.span.length for r in flight.reads))

    def _settle(self, flight: _Flight) -> None:
        """Wait for a batch, verify and place it."""
        assert flight.future is not None
        error = flight.future.exception()
        flight.future = None
        if isinstance(error, BlobNotFoundError | BlobTruncatedError):
            self._read_singly(flight.reads)
        elif error is not None:
            try:
                raise error
            finally:
                del error  # else a cycle of it, its traceback and this frame keeps targets alive
        share = -(-len(flight.reads) // self._workers.count)
        for at in range(0, len(flight.reads), share):
            check = self._checker(flight.reads[at : at + share])
            flight.checks.append(self._workers.submit(check))
        wait(flight.checks)
        while flight.checks:
            self._stats.damaged += flight.checks.pop(0).result()
        if any(isinstance(r.error, BlobNotFoundError) for r in flight.reads):
            self._stats.missing_blob = True

    def _read_singly(self, reads: list[_Read]) -> None:
        """A batch failed: find out which of its frames are missing or cut off."""
        for read in reads:
            try:
                self._backend.read([read.request])
            except (BlobNotFoundError, BlobTruncatedError) as error:
                read.error = error

    def _checker(self, reads: list[_Read]) -> Callable[[], list[tuple[str, str]]]:
        def task() -> list[tuple[str, str]]:
            damaged = []
            for read in reads:
                if read.error is not None:
                    detail: str | None = str(read.error)
                else:
                    detail = self._reader.finish(
                        read.job,
                        read.span,
                        read.request.target,
                        placed=read.direct,
                        decode=self._decode,
                    )
                if detail is not None:
                    damaged += [(name, detail) for name in read.job.label]
            return damaged

        return task

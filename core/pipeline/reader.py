"""Batches of frames from a backend into sinks: the reading half of the pipeline.

A whole raw frame is read into the target's own memory; everything else passes through a small
staging area. Every byte is verified before a restore reports success: blocks of raw frames, the
stored and the decoded bytes of encoded ones.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.concurrency.watchdog import Watchdog, call_with_deadline
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    PenstockError,
    RestoreError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.foreign import noting_origin, said
from penstock.core.pipeline.frames import FrameReader, direct_target
from penstock.core.pipeline.staging import Staging
from penstock.core.pipeline.writer import BATCH_BYTES
from penstock.core.types import PAGE_BYTES, ByteRange, ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.pipeline.staging import Block
    from penstock.core.plan.restore import FrameJob

log = logging.getLogger("penstock")

_SCRATCH_BYTES = 64 << 20
_BATCHES_IN_FLIGHT = 3
_BATCH_FRAMES = 256


@dataclass(slots=True)
class LoadStats:
    """What a load read, and the damage it found.

    Attributes:
        bytes_read: Of blobs.
        frames: Looked at.
        damaged: `(object, detail)`.
        missing_blob: Whether a blob was not there.
        rescued: Of damage that another tier made good, `(blob, tier)`.
    """

    bytes_read: int = 0
    frames: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing_blob: bool = False
    rescued: list[tuple[str, str]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Read:
    job: FrameJob[CodecChain]
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
    checks: list[Future[list[tuple[_Read, str]]]] = field(default_factory=list)

    def outlast(self) -> None:
        """Wait until nothing uses the memory."""
        futures: list[Future[Any]] = [*self.checks]
        if self.future is not None:
            futures.append(self.future)
        wait(futures)


class Loader:
    """Reads frames of one backend. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        *,
        io_timeout_s: float | None = None,
        on_failover: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        """Make one.

        Args:
            backend: Where to read.
            workers: Threads that verify and place.
            io_timeout_s: How long a `run` may go without progress; None: for ever.
            on_failover: Called with a blob that is damaged, and the tier whose copy was read.
        """
        self._on_failover = on_failover
        self._io_timeout_s = io_timeout_s
        self._backend = backend
        self._workers = workers
        self._pid = os.getpid()
        self._idle: deque[Staging] = deque(maxlen=1)  # one is kept for the next run
        self._reader = FrameReader()

    def of(self, backend: Backend) -> Loader:
        """Return a loader of another place, with the same threads and the same time limit."""
        return Loader(backend, self._workers, io_timeout_s=self._io_timeout_s)

    def run(
        self,
        jobs: Sequence[FrameJob[CodecChain]],
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
            StorageTimeoutError: It made no progress for `io_timeout_s`. What was to be filled may
                still change when it answers.
        """
        scratch = self._borrow()
        timing = self._workers.timing
        watchdog = Watchdog(self._io_timeout_s, timing.clock)
        session = _Session(
            self._backend,
            self._workers,
            scratch,
            watchdog=watchdog,
            reader=self._reader,
            decode=decode,
            progress=progress,
        )
        # Ctrl-C must not come between handing memory to the store and taking note of it.
        stats = call_with_deadline(
            "load",
            lambda: session.run(jobs),
            watchdog,
            session.stuck,
            timing=timing,
            cancel=session.cancel,
        )
        for blob, tier in dict(stats.rescued).items():
            log.warning("%s is damaged; the copy in tier %s is good, and was read", blob, tier)
        for blob, tier in dict.fromkeys(stats.rescued):
            self._on_failover(blob, tier)
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
        watchdog: Watchdog,
        reader: FrameReader,
        decode: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._stats = LoadStats()
        self._cancelled = False
        self._watchdog = watchdog
        self._backend = backend
        self._workers = workers
        self._scratch = scratch
        self._reader = reader
        self._decode = decode
        self._progress = progress
        self._flights: deque[_Flight] = deque()
        self._batch: list[_Read] = []
        self._size = 0

    def run(self, jobs: Sequence[FrameJob[CodecChain]]) -> LoadStats:
        """Read everything; on return nothing is in flight, whatever went wrong."""
        try:
            for job in jobs:
                self._stats.frames += 1
                for span in job.ranges:
                    self._add(job, span)
            self._submit()
            while self._flights:
                self._settle_oldest()
        except PenstockError:
            raise
        except BaseException as error:  # on this thread nothing is Ctrl-C
            msg = f"reading failed: {said(error)}"
            raise RestoreError(msg) from error
        finally:
            for flight in self._flights:
                flight.outlast()
        return self._stats

    def cancel(self) -> None:
        """Make `run` end soon, from any thread."""
        self._cancelled = True

    def stuck(self) -> StorageTimeoutError:
        """The error that says that the store made no progress for too long; from any thread."""
        names = {read.request.name for flight in list(self._flights) for read in flight.reads}
        return StorageTimeoutError(
            f"{self._backend.url} made no progress for {self._watchdog.taken_s():.0f} s "
            f"(io_timeout_s={self._watchdog.limit_s:g}) while it read {' '.join(sorted(names))}; "
            "what that was to fill is undefined, and may still change when the store answers"
        )

    def _add(self, job: FrameJob[CodecChain], span: ByteRange) -> None:
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

    def _prepare(self, job: FrameJob[CodecChain], span: ByteRange) -> _Read | None:
        """Decide where `span` is read to; None: scratch is full for now."""
        offset = job.frame.offset + span.start
        with noting_origin(lambda: _whose(job)):
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
            self._watchdog.moved()
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
        self._watchdog.moved()
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
            for read, detail in flight.checks.pop(0).result():
                if not self._rescue(read):
                    self._stats.damaged += [(name, detail) for name in read.job.label]
        if any(isinstance(r.error, BlobNotFoundError) for r in flight.reads):
            self._stats.missing_blob = True

    def _read_singly(self, reads: list[_Read]) -> None:
        """A batch failed: find out which of its frames are missing or cut off."""
        for read in reads:
            try:
                self._backend.read([read.request])
            except (BlobNotFoundError, BlobTruncatedError) as error:
                read.error = error

    def _rescue(self, read: _Read) -> bool:
        """Take a damaged piece from another tier, if one has it whole."""
        for tier in self._backend.tiers:
            try:
                tier.backend.read([read.request])
            except StorageError:
                continue
            if self._check(read) is None:
                read.error = None
                self._stats.rescued.append((read.job.blob, tier.name))
                return True
        return False

    def _checker(self, reads: list[_Read]) -> Callable[[], list[tuple[_Read, str]]]:
        def task() -> list[tuple[_Read, str]]:
            damaged = []
            for read in reads:
                detail = self._check(read) if read.error is None else str(read.error)
                if detail is not None:
                    damaged.append((read, detail))
            return damaged

        return task

    def _check(self, read: _Read) -> str | None:
        with noting_origin(lambda: _whose(read.job)):
            return self._reader.finish(
                read.job, read.span, read.request.target, placed=read.direct, decode=self._decode
            )


def _whose(job: FrameJob[CodecChain]) -> str:
    kinds = {type(u.sink) for u in job.uses if u.sink is not None}
    sinks = "".join(f", for {k.__module__}.{k.__qualname__}" for k in kinds)
    return f"with {' '.join(job.label)} from {job.blob}{sinks}"

"""Reads batches of frames from a backend, verifies and decodes them, and places their bytes.

A whole raw frame is read directly into the target's memory, unless reading into huge pages is so
much faster that it is worth an extra copy. All other bytes pass through a small staging area. Every
byte is verified before a restore reports success: the blocks of raw frames, and the stored and
decoded bytes of encoded ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, wait
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from penstock.core.abc import copies_of, first_whole, place_text
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.concurrency.watchdog import Watchdog, call_with_deadline
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    CodecError,
    DamagedError,
    PenstockError,
    RestoreError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.foreign import noting_origin, said
from penstock.core.format.blocks import frame_blocks
from penstock.core.pipeline.codec_chain import checksum, mismatches
from penstock.core.pipeline.staging import Staging, ThreadMemory, has_small_pages, map_memory
from penstock.core.pipeline.writer import BATCH_BYTES
from penstock.core.suggest import listed
from penstock.core.types import PAGE_BYTES, ByteRange, ReadRequest, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import Backend, ByteSink, Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.pipeline.exchange import Exchange
    from penstock.core.pipeline.staging import Block
    from penstock.core.plan.reads import ChunkUse, FrameJob

log = logging.getLogger("penstock")

_SCRATCH_BATCHES = 4  # some are read while others are decoded
_PHASE_BYTES = 2 * PAGE_BYTES  # spare bytes for each chunk, so that its address can get its phase
_BATCHES_IN_FLIGHT = 3
_BATCH_FRAMES = 256


@dataclass(slots=True)
class LoadStats:
    """The counts of a load, and the damage it found.

    Attributes:
        bytes_read: Bytes read from blobs.
        frames: Number of frames read.
        damaged: `(object, detail, blob)` of each damage; the blob may be that of a base.
        missing_blob: Whether a blob was missing.
        rescued: `(blob, tier)` of each damage for which another tier's copy was read.
    """

    bytes_read: int = 0
    frames: int = 0
    damaged: list[tuple[str, str, str]] = field(default_factory=list)
    missing_blob: bool = False
    rescued: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: LoadStats) -> None:
        """Add the counts and damage of another load."""
        self.bytes_read += other.bytes_read
        self.frames += other.frames
        self.damaged += other.damaged
        self.missing_blob |= other.missing_blob
        self.rescued += other.rescued


@dataclass(eq=False, slots=True)
class _Read:
    """A read of one range.

    Attributes:
        job: The frame.
        request: The bytes to read, and the memory for them.
        span: The range of the stored frame.
        block: The scratch memory that gets the bytes, if any.
        direct: Whether the store writes the bytes directly into the target.
        lent: The window block for the chunk's bytes, if other processes get them too.
        error: The error of the read, if it failed.
        bases: The reads of the bases that the frame decodes with.
    """

    job: FrameJob[CodecChain]
    request: ReadRequest
    span: ByteRange
    block: Block | None
    direct: bool
    lent: Block | None = None
    error: PenstockError | None = None
    bases: list[_Read] = field(default_factory=list)

    @property
    def links(self) -> tuple[_Read, ...]:
        """The read itself, and the reads of its bases."""
        return (self, *self.bases)


@dataclass(eq=False, slots=True)
class _Flight:
    """A batch in flight. Its memory is in use until the future and all checks are done.

    Attributes:
        number: The number of batches submitted before.
        reads: Its reads.
        future: Done when the read ends; None once checks have begun.
        checks: The tasks that verify, decode and place the bytes.
    """

    number: int
    reads: list[_Read]
    future: Future[None] | None
    checks: list[Future[list[tuple[_Read, str, str]]]] = field(default_factory=list)

    def is_over(self) -> bool:
        """Return whether everything is read and checked."""
        return self.future is None and all(check.done() for check in self.checks)

    def outlast(self) -> None:
        """Wait until nothing uses the batch's memory."""
        futures: list[Future[Any]] = [*self.checks]
        if self.future is not None:
            futures.append(self.future)
        wait(futures)


class Loader:
    """Reads frames of one backend. Thread-safe.

    Attributes:
        backend: The store of the blobs.
        workers: The threads that verify, decode and place bytes.
        io_timeout_s: How long a `run` may go without progress; None: forever.
        together_bytes: If a frame and its bases are larger than this together, they are read
            separately, one after the other.
        scratch_bytes: Memory for encoded frames, and for parts of raw ones. Frames with many bases
            may take as much again for each worker.
        piece_bytes: Raw frames that pass through scratch memory are read in pieces of this size,
            rounded up to whole blocks.
        by_copy: Whether whole raw frames, too, are read into scratch memory and copied from there.
            None: the first `run` decides. It copies only if the store reads with direct I/O and
            prefers huge pages, which targets are unlikely to have.
        reader: Verifies, decodes and places the bytes.
    """

    together_bytes = 256 << 20
    scratch_bytes = _SCRATCH_BATCHES * ((16 << 20) + _PHASE_BYTES)
    piece_bytes = 8 << 20
    by_copy: bool | None = None

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        *,
        io_timeout_s: float | None = None,
        on_failover: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        """Create a loader for a backend.

        Args:
            backend: The store of the blobs.
            workers: The threads that verify, decode and place bytes.
            io_timeout_s: How long a `run` may go without progress; None: forever.
            on_failover: Called with each damaged blob and the tier whose copy was read instead.
        """
        self.backend = backend
        self.workers = workers
        self.io_timeout_s = io_timeout_s
        self.reader = FrameReader()
        self._on_failover = on_failover
        self._pid = os.getpid()
        self._idle: deque[Staging] = deque(maxlen=1)  # one is kept for the next run

    def over(self, backend: Backend) -> Loader:
        """Return a copy of this loader that reads through `backend`, a wrapper around its own."""
        loader = copy(self)
        loader.backend = backend
        return loader

    def of(self, backend: Backend) -> Loader:
        """Return a loader for another backend, with the same threads and time limit."""
        return Loader(backend, self.workers, io_timeout_s=self.io_timeout_s)

    def run(
        self,
        jobs: Sequence[FrameJob[CodecChain]],
        *,
        decode: bool = True,
        progress: Callable[[int], None] | None = None,
        exchange: Exchange | None = None,
    ) -> LoadStats:
        """Read, verify and place all of `jobs`. Damage is reported in the result, not raised.

        Args:
            jobs: Frames in the order of reading.
            decode: Whether to decode encoded frames (verification may skip it).
            progress: Called with the bytes read since the last call, on the loader's own thread.
            exchange: Lends all bytes read to other processes of this host. Each job must have one
                range and fit into the window. None: nothing is lent.

        Raises:
            TakersStuckError: Another process does not take lent bytes. Some of `jobs` were read.
            StorageError: The store failed. A missing or truncated blob counts as damage instead.
            StorageTimeoutError: The store made no progress for `io_timeout_s`. The memory to fill
                may still change when the store answers.
        """
        if self.by_copy is None:
            # Ask for `direct_io` first: some stores have to write to find out `capabilities`.
            direct = has_small_pages() and self.backend.direct_io
            self.by_copy = direct and self.backend.capabilities.prefers_huge_pages
        scratch = self._borrow(self._needed_bytes(jobs))
        timing = self.workers.timing
        watchdog = Watchdog(self.io_timeout_s, timing.clock)
        session = _Session(
            self, scratch, watchdog, decode=decode, progress=progress, exchange=exchange
        )
        # Runs on its own thread. Only the main thread gets Ctrl-C, which must not come between
        # handing memory to the store and noting that.
        stats = call_with_deadline(
            "load",
            lambda: session.run(jobs),
            watchdog,
            session.stuck,
            timing=timing,
            cancel=session.cancel,
        )
        for blob, tier in dict(stats.rescued).items():
            log.warning("%s is damaged; the good copy %s was read instead", blob, place_text(tier))
        for blob, tier in dict.fromkeys(stats.rescued):
            self._on_failover(blob, tier)
        self._idle.append(scratch)  # not after an error: a stuck store may still write into it
        return stats

    def _borrow(self, size_bytes: int) -> Staging:
        """Return scratch memory for one run, since two runs that share it could deadlock."""
        if self._pid != os.getpid():  # a forked child would write into the parent's shared mapping
            self._pid, self._idle = os.getpid(), deque(maxlen=1)
            self.reader = FrameReader()
        with contextlib.suppress(IndexError):
            scratch = self._idle.pop()
            if scratch.budget_bytes >= size_bytes:
                return scratch
        scratch = Staging(size_bytes)
        scratch.expect(size_bytes)  # one arena, so that frames of any size find room
        return scratch

    def _needed_bytes(self, jobs: Sequence[FrameJob[CodecChain]]) -> int:
        """Return the size of scratch memory that keeps all workers busy, within a limit.

        Each worker decodes a chunk from a frame and its bases, while two more chunks are read. The
        limit is `scratch_bytes` times the number of workers plus one.
        """
        chains = (job for job in jobs if job.chain is not None)
        largest = max((sum(link.frame.length for link in job.links) for job in chains), default=0)
        least, workers = self.scratch_bytes, self.workers.count
        return min(max((workers + 2) * largest, least), (workers + 1) * least)


class _Session:
    """Runs the batches of one `Loader.run`."""

    def __init__(
        self,
        loader: Loader,
        scratch: Staging,
        watchdog: Watchdog,
        *,
        decode: bool,
        progress: Callable[[int], None] | None,
        exchange: Exchange | None,
    ) -> None:
        self._loader = loader
        self._scratch = scratch
        self._share_bytes = scratch.budget_bytes // _SCRATCH_BATCHES - _PHASE_BYTES
        # The scratch memory for one batch.
        self._batch_bytes = self._share_bytes
        if loader.by_copy:
            self._batch_bytes = min(self._batch_bytes, loader.piece_bytes)
        self._watchdog = watchdog
        self._decode = decode
        self._progress = progress
        self._exchange = exchange
        self._stats = LoadStats()
        self._cancelled = False
        self._flights: list[_Flight] = []
        self._submitted = 0
        self._damaged: list[tuple[int, list[tuple[str, str, str]]]] = []
        self._batch: list[_Read] = []
        self._size = 0
        self._staged = 0  # bytes of the batch that take scratch memory
        self._window_bytes = 0  # bytes of the batch that take memory of the window

    def run(self, jobs: Sequence[FrameJob[CodecChain]]) -> LoadStats:
        """Read everything; on return, and after an error, nothing is in flight."""
        try:
            for job in jobs:
                self._stats.frames += 1
                for span in self._pieces(job):
                    self._add(job, span)
            self._submit()
            while self._flights:
                self._advance()
        except PenstockError:
            raise
        except BaseException as error:  # never Ctrl-C, which only the main thread gets
            msg = f"reading failed: {said(error)}"
            raise RestoreError(msg) from error
        finally:
            for flight in self._flights:
                flight.outlast()
        for _, damage in sorted(self._damaged, key=itemgetter(0)):  # in the order of jobs
            self._stats.damaged += damage
        return self._stats

    def cancel(self) -> None:
        """Make `run` end soon; any thread may call this."""
        self._cancelled = True

    def stuck(self) -> StorageTimeoutError:
        """Return the error for a store without progress; any thread may call this."""
        names = {read.request.name for flight in list(self._flights) for read in flight.reads}
        return StorageTimeoutError(
            f"{self._loader.backend.url} made no progress for {self._watchdog.taken_s():.0f} s "
            f"(io_timeout_s={self._watchdog.limit_s:g}) while it read {' '.join(sorted(names))}. "
            "The objects being restored have undefined contents, and may still change when the "
            "store answers. If the store is only slow, increase io_timeout_s"
        )

    def _pieces(self, job: FrameJob[CodecChain]) -> Iterable[ByteRange]:
        """Return the ranges of a frame; ranges to copy are cut into pieces of whole blocks.

        The disk then reads some pieces while others are verified and copied. A piece may end inside
        an element, so ranges are cut only if the target is flat memory.
        """
        lent = self._exchange is not None
        if not self._loader.by_copy or lent or job.chain is not None or len(job.uses) != 1:
            return job.ranges
        sink = job.uses[0].sink
        with noting_origin(lambda: _whose(job)):
            if sink is not None and sink.view() is None:
                return job.ranges
        step = align_up(self._loader.piece_bytes, job.block_bytes)
        phase = job.frame.offset % PAGE_BYTES
        return [
            ByteRange(max(span.start, at - phase), min(span.stop, at + step - phase))
            for span in job.ranges
            for at in range(align_down(span.start + phase, step), span.stop + phase, step)
        ]

    def _add(self, job: FrameJob[CodecChain], span: ByteRange) -> None:
        """Put one range of a frame into the batch, and submit the batch when it is full."""
        most = self._loader.together_bytes
        if job.bases and sum(link.frame.length for link in job.links) > most:
            self._load_by_links(job)
            return
        read = self._placed(job, span) if self._exchange is None else self._lendable(job, span)
        for base in job.bases:  # only encoded frames have bases, and are one range
            read.bases += [self._placed(base, whole) for whole in base.ranges]
        self._batch.append(read)
        size = sum(link.span.length for link in read.links)
        self._size += size
        self._staged += sum(link.span.length for link in read.links if link.block is not None)
        self._stats.bytes_read += size
        if (
            self._size >= BATCH_BYTES
            or self._staged >= self._batch_bytes
            or len(self._batch) >= _BATCH_FRAMES
            or self._fills_window(read)
        ):
            self._submit()

    def _fills_window(self, read: _Read) -> bool:
        """Count the window memory of a read; return whether the batch has used its share."""
        if self._exchange is None or read.lent is None:
            return False
        self._window_bytes += read.lent.reserved
        return self._window_bytes >= self._exchange.window.budget_bytes // _SCRATCH_BATCHES

    def _placed(self, job: FrameJob[CodecChain], span: ByteRange) -> _Read:
        while (read := self._prepare(job, span)) is None:
            # Scratch is full, and only this thread frees it, when a batch is over.
            self._submit()
            self._advance()
        return read

    def _lendable(self, job: FrameJob[CodecChain], span: ByteRange) -> _Read:
        """Choose window memory to read or decode the chunk's bytes into."""
        offset = job.frame.offset + span.start
        if job.chain is None:
            block = self._window_block(span.length, offset % PAGE_BYTES)
            request = ReadRequest(job.blob, offset, block.view)
            return _Read(job, request, span, None, direct=False, lent=block)
        block = self._window_block(job.frame.raw_length, 0)
        read = self._placed(job, span)
        read.lent = block
        return read

    def _window_block(self, length: int, phase: int) -> Block:
        assert self._exchange is not None
        while (block := self._exchange.window.acquire(length, phase)) is None:
            self._submit()
            if self._flights:
                self._advance()
                continue
            block = self._exchange.acquire(length, phase)  # once takers have freed it
            self._watchdog.moved()  # the store had nothing to do during the wait
            return block
        return block

    def _prepare(self, job: FrameJob[CodecChain], span: ByteRange) -> _Read | None:
        """Choose the memory to read `span` into; return None if scratch is full for now."""
        offset = job.frame.offset + span.start
        with noting_origin(lambda: _whose(job)):
            target = _direct_target(job, span)
        if target is not None and not self._goes_by_copy(span):
            return _Read(job, ReadRequest(job.blob, offset, target), span, None, direct=True)
        block = self._scratch.acquire(span.length, offset % PAGE_BYTES)
        if block is not None:
            return _Read(job, ReadRequest(job.blob, offset, block.view), span, block, direct=False)
        if self._flights or self._batch:
            return None
        view = _own_memory(job, span)  # `span` is larger than all of scratch
        return _Read(job, ReadRequest(job.blob, offset, view), span, None, direct=False)

    def _goes_by_copy(self, span: ByteRange) -> bool:
        """Return whether to read a whole raw frame into scratch memory and copy it.

        Scratch must have room for several such frames, to read one while another is copied.
        """
        return bool(self._loader.by_copy) and span.length <= self._share_bytes

    def _load_by_links(self, job: FrameJob[CodecChain]) -> None:
        """Read, verify and place a frame whose bases take too much memory to read together."""
        self._submit()
        while self._flights:
            self._advance()
        try:
            with noting_origin(lambda: _whose(job)):
                stored = map(self._stored, reversed(job.links))
                self._loader.reader.finish(job, stored, decode=self._decode)
        except DamagedError as error:
            damage = [(name, str(error), error.damaged[0]) for name in job.label]
            self._damaged.append((self._submitted, damage))
        if self._exchange is not None:
            # A chunk that needs so much memory leaves no room to lend it.
            self._exchange.refuse(job)

    def _stored(self, link: FrameJob[CodecChain]) -> memoryview:
        """Read and verify all stored bytes of a frame.

        Raises:
            DamagedError: They are missing or damaged in every tier.
        """
        self._raise_if_cancelled()
        (span,) = link.ranges
        request = ReadRequest(link.blob, link.frame.offset, _own_memory(link, span))
        read = _Read(link, request, span, None, direct=True)
        self._read_singly([read])
        try:
            _verify(read)
        except DamagedError:
            if not self._rescue(read, _verify):
                self._stats.missing_blob |= isinstance(read.error, BlobNotFoundError)
                raise
        self._watchdog.moved()
        self._stats.bytes_read += span.length
        if self._progress is not None:
            self._progress(span.length)
        return request.target

    def _raise_if_cancelled(self) -> None:
        if self._cancelled:
            msg = "reading was given up because the caller was interrupted"
            raise RestoreError(msg)

    def _submit(self) -> None:
        self._raise_if_cancelled()
        if self._batch:
            requests = [link.request for read in self._batch for link in read.links]
            future = self._loader.backend.submit_read(requests)
            self._flights.append(_Flight(self._submitted, self._batch, future))
            self._submitted += 1
            self._batch, self._size, self._staged, self._window_bytes = [], 0, 0, 0
        while sum(flight.future is not None for flight in self._flights) >= _BATCHES_IN_FLIGHT:
            self._advance()
        while len(self._flights) > 2 * _BATCHES_IN_FLIGHT:
            self._advance()

    def _advance(self) -> None:
        """Wait until a batch is read or checked, and advance each such batch by one step."""
        self._await_change()
        for flight in list(self._flights):
            if flight.future is not None and flight.future.done():
                self._check_batch(flight)
            elif flight.is_over():
                self._retire(flight)
                self._flights.remove(flight)

    def _await_change(self) -> None:
        reading = [flight.future for flight in self._flights if flight.future is not None]
        checking = [flight for flight in self._flights if flight.future is None]
        while not any(future.done() for future in reading):
            if any(flight.is_over() for flight in checking):
                return
            checks = [check for flight in checking for check in flight.checks if not check.done()]
            futures: list[Future[Any]] = [*reading, *checks]
            wait(futures, None, FIRST_COMPLETED)

    def _check_batch(self, flight: _Flight) -> None:
        """Make the workers verify and place a batch that was read."""
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
                # Otherwise a cycle (error, traceback, this frame) would keep targets alive.
                del error
        share = -(-len(flight.reads) // self._loader.workers.count)
        for at in range(0, len(flight.reads), share):
            check = partial(self._check_all, flight.reads[at : at + share])
            flight.checks.append(self._loader.workers.submit(check))

    def _retire(self, flight: _Flight) -> None:
        """Note the damage that the checks of a batch found, and free or lend its memory."""
        damaged: set[_Read] = set()
        while flight.checks:
            for read, detail, blob in flight.checks.pop(0).result():
                if not self._rescue(read, self._check):
                    damaged.add(read)
                    damage = [(name, detail, blob) for name in read.job.label]
                    self._damaged.append((flight.number, damage))
        links = [link for read in flight.reads for link in read.links]
        if any(isinstance(link.error, BlobNotFoundError) for link in links):
            self._stats.missing_blob = True
        self._watchdog.moved()
        for link in links:
            if link.block is not None:
                self._scratch.release(link.block)
        if self._progress is not None:
            self._progress(sum(link.span.length for link in links))
        if self._exchange is not None:
            self._hand_on(self._exchange, flight.reads, damaged)

    @staticmethod
    def _hand_on(exchange: Exchange, reads: Sequence[_Read], damaged: Collection[_Read]) -> None:
        """Lend undamaged bytes; make the takers of damaged ones read them themselves."""
        lent = []
        for read in reads:
            assert read.lent is not None
            if read in damaged:
                exchange.window.release(read.lent)
                exchange.refuse(read.job)
            else:
                lent.append((read.job, read.lent))
        exchange.lend(lent)

    def _read_singly(self, reads: list[_Read]) -> None:
        """Read each frame of a failed batch alone, to find missing or truncated ones."""
        for link in (link for read in reads for link in read.links):
            try:
                self._loader.backend.read([link.request])
            except (BlobNotFoundError, BlobTruncatedError) as error:
                link.error = error

    def _rescue(self, read: _Read, check: Callable[[_Read], None]) -> bool:
        """Read the damaged ranges of a frame and its bases from other tiers.

        Returns whether a tier had good bytes. `check` is called after each tier was read, and
        raises DamagedError if its bytes are damaged, too.
        """
        rescued: dict[int, tuple[str, str]] = {}  # the last tier that each link was read from

        def reread(tier: Tier) -> bool:
            # If all stored bytes are good, one of the links does not decode: reread all of them.
            for link in [link for link in read.links if _is_damaged(link)] or read.links:
                with contextlib.suppress(StorageError):
                    tier.backend.read([link.request])
                    link.error = None
                    if tier.name:  # a tier without a name is the store itself: nothing to repair
                        rescued[id(link)] = link.job.blob, tier.name
            check(read)
            return True

        if not first_whole(copies_of(self._loader.backend), reread):
            return False
        self._stats.rescued += rescued.values()
        return True

    def _check_all(self, reads: list[_Read]) -> list[tuple[_Read, str, str]]:
        """Check reads; return each damaged read with the damage as text, and the blob."""
        damaged = []
        for read in reads:
            try:
                self._check(read)
            except DamagedError as error:  # not kept: its traceback would keep targets alive
                damaged.append((read, str(error), error.damaged[0]))
        return damaged

    def _check(self, read: _Read) -> None:
        """Verify, decode and place the bytes of a read.

        Raises:
            DamagedError: The frame or one of its bases is missing or damaged; names the blob.
        """
        job = read.job
        for link in read.links:
            if link.error is not None or job.chain is None:
                _verify(link)
        with noting_origin(lambda: _whose(job)):
            if job.chain is not None:
                stored = [link.request.target for link in reversed(read.links)]
                out = None if read.lent is None else read.lent.view
                self._loader.reader.finish(job, stored, decode=self._decode, out=out)
            elif not read.direct:
                place(job.uses, read.request.target, base=read.span.start)


def _own_memory(job: FrameJob[CodecChain], span: ByteRange) -> memoryview:
    try:
        return memoryview(map_memory(span.length))
    except (OSError, OverflowError, ValueError) as error:
        msg = (
            f"a frame of {job.blob} must be read in one piece of {span.length} bytes, but this "
            f"process cannot get that much memory: {error}. Free memory, or raise its memory limit"
        )
        raise RestoreError(msg) from error


def _verify(read: _Read) -> None:
    """Compare the bytes of a read with their checksums.

    Raises:
        DamagedError: They are missing or damaged; names the blob.
    """
    if read.error is not None:
        raise DamagedError(str(read.error), [read.job.blob])
    _verify_stored(read.job, read.span, read.request.target)


def _is_damaged(read: _Read) -> bool:
    try:
        _verify(read)
    except DamagedError:
        return True
    return False


def _whose(job: FrameJob[CodecChain]) -> str:
    kinds = {type(u.sink) for u in job.uses if u.sink is not None}
    sinks = "".join(f", for {k.__module__}.{k.__qualname__}" for k in kinds)
    return f"with {listed(job.label)} from {job.blob}{sinks}"


def _direct_target(job: FrameJob[CodecChain], span: ByteRange) -> memoryview | None:
    """Return the memory of the one sink that takes the whole raw frame unchanged, or None."""
    if job.chain is not None or len(job.uses) != 1 or span.length != job.frame.length:
        return None
    use = job.uses[0]
    if use.sink is None or use.at != 0 or use.length != job.frame.raw_length:
        return None
    view = use.sink.view()
    return None if view is None else view[use.start : use.start + use.length]


class FrameReader:
    """Verifies, decodes and places the stored bytes of frames. Thread-safe."""

    def __init__(self) -> None:
        self._memory = ThreadMemory(3)  # for a decoded chunk, and two of its bases

    def finish(
        self,
        job: FrameJob[CodecChain],
        stored: Iterable[memoryview],
        *,
        decode: bool,
        out: memoryview | None = None,
    ) -> None:
        """Verify and decode an encoded frame, and copy its chunk to its sinks.

        Args:
            job: The frame, and its sinks.
            stored: As for `decode_chunk`.
            decode: Whether to decode; if not, only checksums of the stored bytes are compared.
            out: Memory that gets the chunk in addition to the sinks; None: only the sinks get it.

        Raises:
            DamagedError: A link is damaged or does not decode; names its blob.
        """
        if not decode:
            for link, data in zip(reversed(job.links), stored, strict=True):
                _verify_whole(link, data)
            return
        out, is_target = self._out(job) if out is None else (out, False)
        self.decode_chunk(job, stored, out)
        if not is_target:
            place(job.uses, out, base=0)

    def decode_chunk(
        self, job: FrameJob[CodecChain], stored: Iterable[memoryview], out: memoryview
    ) -> None:
        """Verify and decode one chunk into `out`.

        Args:
            job: The frame, whose encoded links have codec contexts.
            stored: Yields all stored bytes of each frame in `job.links`, the lowest base first.
                Only the last two of them are in use at any time.
            out: Memory of the chunk's length; undefined after an error.

        Raises:
            DamagedError: A link is damaged or does not decode; names its blob.
        """
        chunk: memoryview | None = None
        for number, (link, data) in enumerate(zip(reversed(job.links), stored, strict=True)):
            _verify_whole(link, data)
            if link is not job and link.chain is None:
                chunk = data.toreadonly()
                continue
            target = out
            if link is not job:
                target = self._memory.take(link.frame.raw_length, 1 + number % 2)
            if link.chain is None:
                copy_bytes(target, data)
            else:
                _decode_frame(link, data, target, chunk)
            chunk = target.toreadonly()

    def _out(self, job: FrameJob[CodecChain]) -> tuple[memoryview, bool]:
        """Return memory for the chunk, and whether it belongs to the only sink."""
        use = job.uses[0]
        whole = len(job.uses) == 1 and use.at == 0 and use.length == job.frame.raw_length
        target = use.sink.view() if whole and use.sink is not None else None
        if target is not None:
            return target[use.start : use.start + use.length], True
        return self._memory.take(job.frame.raw_length), False


def _verify_stored(job: FrameJob[CodecChain], span: ByteRange, data: memoryview) -> None:
    """Compare `data`, the bytes of `span` of a frame, with its checksums.

    Raises:
        DamagedError: They differ; names the blob.
    """
    if job.chain is None:
        _verify_blocks(job, span, data)
        return
    if checksum(data) != job.frame.checksums[0]:
        msg = f"checksum of the frame at {job.blob}:{job.frame.offset} does not match"
        raise DamagedError(msg, [job.blob])


def _verify_whole(job: FrameJob[CodecChain], data: memoryview) -> None:
    _verify_stored(job, ByteRange(0, data.nbytes), data)


def _decode_frame(
    job: FrameJob[CodecChain], data: memoryview, out: memoryview, base: memoryview | None
) -> None:
    """Decode a frame into `out`, and compare the result with its checksum.

    Raises:
        DamagedError: The frame does not decode to the bytes that were encoded; names the blob.
    """
    frame, chain = job.frame, job.chain
    assert chain is not None
    assert job.context is not None
    context = job.context if base is None else replace(job.context, base=base)
    try:
        chain.decode(data, out, context=context, lengths=frame.lengths)
    except CodecError as error:
        msg = f"the frame at {job.blob}:{frame.offset} does not decode: {error}"
        raise DamagedError(msg, [job.blob]) from error
    if frame.raw_checksum is not None and checksum(out) != frame.raw_checksum:
        codecs = " and ".join(codec.name for codec in chain.codecs)
        msg = (
            f"the decoded bytes of the frame at {job.blob}:{frame.offset} do not match their "
            f"checksum, but the stored bytes do: the fault is in {codecs} or in this machine's "
            "memory, not in the store"
        )
        raise DamagedError(msg, [job.blob])


def _verify_blocks(job: FrameJob[CodecChain], span: ByteRange, data: memoryview) -> None:
    frame = job.frame
    ranges, expected = [], []
    for number, block in enumerate(frame_blocks(frame.offset, frame.length, job.block_bytes)):
        if span.start <= block.start and block.stop <= span.stop:
            ranges.append(ByteRange(block.start - span.start, block.stop - span.start))
            expected.append(frame.checksums[number])
    if sum(r.length for r in ranges) != span.length:
        msg = f"the range {span} of {job.blob}:{frame.offset} is not made of whole blocks"
        raise DamagedError(msg, [job.blob])
    wrong = mismatches(data, ranges, expected, offset=frame.offset + span.start)
    if wrong:
        msg = f"checksum of {wrong[0].length} bytes at {job.blob}:{wrong[0].start} does not match"
        raise DamagedError(msg, [job.blob])


def place(uses: Sequence[ChunkUse], data: memoryview, *, base: int) -> None:
    """Copy `data`, the chunk's bytes from offset `base` on, to the sinks of `uses`."""
    stop = base + data.nbytes
    copies: list[tuple[ByteSink, int, int, int]] = []
    for sink, at, start, length in uses:
        low, high = max(at, base), min(at + length, stop)
        if sink is not None and low < high:
            copies.append((sink, start + low - at, low - base, high - base))
    for kind, alike in groupby(copies, lambda item: type(item[0])):
        kind.copy_in_each([*alike], data)

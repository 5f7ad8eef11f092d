"""Writes captured chunks as frames into the blobs of a save.

Batches move, not frames: under a busy training loop every return to Python waits for the GIL.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.concurrency.workers import BusyClock
from penstock.core.errors import CodecError
from penstock.core.format.blocks import frame_blocks
from penstock.core.pipeline.chain import checksum_blocks, content_hash
from penstock.core.pipeline.chunks import DERIVED, ChunkResult
from penstock.core.plan.save import RawLayout, context_of
from penstock.core.types import PAGE_BYTES, ByteRange, WriteRequest, align_down, show_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chain import CodecChain, EncodedFrame
    from penstock.core.pipeline.choices import ChainChoices
    from penstock.core.pipeline.chunks import Captured
    from penstock.core.plan.bases import StoredFrame
    from penstock.core.plan.save import Chunk, SavePlan

log = logging.getLogger("penstock")

BATCH_BYTES = 64 << 20
_BATCHES_IN_FLIGHT = 3
_GROUP_BYTES = 8 << 20  # encoded frames go out in writes of half of this at least
_GROUPS = 3


class ChunkBases(Protocol):
    """The earlier contents of chunks, for codecs that encode a chunk against them. Thread-safe.

    Attributes:
        shares: Whether chunks with the content of a stored one are not stored again.
    """

    shares: bool

    def shared(self, index: int, content: int, chain: int) -> StoredFrame | None:
        """Return a stored frame with the content of a chunk, if there is one.

        Args:
            index: The number of the chunk.
            content: The `content_hash` of its bytes.
            chain: The number of the chain that would encode it.
        """
        ...

    def base_of(self, index: int) -> tuple[StoredFrame, memoryview] | None:
        """Return the frame and the bytes of the base of a chunk; None: encode it whole.

        The bytes stay as they are until this thread calls `keep` for the chunk, or `base_of` for
        another one.
        """
        ...

    def keep(self, index: int, view: memoryview) -> None:
        """Note the bytes of a chunk that was encoded: the base for the next save."""
        ...


@dataclass(eq=False, slots=True)
class _Batch:
    captured: list[Captured]
    futures: list[Future[None]]


class FrameWriter:
    """Writes the chunks of one save into its `.raw` and `.enc` blob.

    One thread calls all methods. `release` and `tick` are called from any thread.
    """

    def __init__(  # noqa: PLR0913 - options, each by name
        self,
        backend: Backend,
        plan: SavePlan,
        *,
        choices: ChainChoices,
        block_bytes: int,
        workers: Workers,
        blob_prefix: str,
        release: Callable[[Captured], None],
        tick: Callable[[int], None],
        bases: ChunkBases | None = None,
    ) -> None:
        """Prepare to write; nothing has begun.

        Args:
            backend: The store of the blobs.
            plan: Chunks and objects of the save.
            choices: The codec chain of each chunk, which may be chosen while they are written.
            block_bytes: Distance of the checksums in raw frames.
            workers: The threads that hash and encode.
            blob_prefix: Name of both blobs, less their endings.
            release: Called once for every chunk, as soon as its memory is no longer needed.
            tick: Called with the bytes written whenever the store made progress.
            bases: The earlier contents of the chunks whose chains need them.
        """
        self._backend = backend
        self._plan = plan
        self._bases = bases
        self._choices = choices
        self._block_bytes = block_bytes
        self._workers = workers
        self._release = release
        self._tick = tick
        self._raw_name = f"{blob_prefix}.raw"
        self._enc_name = f"{blob_prefix}.enc"
        self._raw: BlobWriter | None = None
        self._layout = RawLayout()
        self._enc: EncodedBlob | None = None
        self._batches: deque[_Batch] = deque()
        self._contents: dict[int, int] = {}
        self._slots = threading.local()
        self._slot_bytes = choices.max_encoded_size()
        self.results: list[ChunkResult | None] = [None] * len(plan.chunks)
        self.write_clock = BusyClock()
        self.encode_clock = BusyClock()
        self._raw_clock = BusyClock(self.write_clock)
        self._raw_written = 0

    def put(self, captured: list[Captured]) -> None:
        """Take chunks over, in plan order; return while they are in flight.

        Raises:
            PenstockError: An earlier chunk failed.
        """
        rest = []
        for one in captured:
            if one.derived:
                self.results[one.index] = DERIVED
                self._tick(self._plan.chunks[one.index].length)
            else:
                rest.append(one)
        try:
            while rest:
                chosen, rest = self._choices.take(rest)
                if chosen:
                    self._start(chosen)
                else:
                    self._choices.decide(self._settle_raw)
        except BaseException:
            for item in rest:
                self._release(item)
            raise

    def _start(self, captured: list[Captured]) -> None:
        """Put chunks whose chains are known in flight."""
        raw = [c for c in captured if self._choices.chain(c.index) is None]
        encoded = deque(c for c in captured if self._choices.chain(c.index))
        try:
            raw = self._unshared(raw)
            if raw:
                self._start_raw(raw)
            waiting, encoded = list(encoded), deque()  # released by `_unshared`, if it fails
            encoded = deque(self._unshared(waiting))
            if encoded:
                self._start_encoded(encoded)
        except BaseException:
            for item in encoded:  # chunks that no worker has taken
                self._release(item)
            raise
        while len(self._batches) > _BATCHES_IN_FLIGHT:
            self._settle(self._batches[0])
            self._batches.popleft()

    @property
    def blob_names(self) -> tuple[str, str]:
        """Names of both blobs, whether they were begun or not."""
        return self._raw_name, self._enc_name

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._batches

    def settle_oldest(self) -> None:
        """Wait for one batch, if any."""
        if self._batches:
            self._settle(self._batches[0])
            self._batches.popleft()

    def finish(self) -> list[tuple[str, int]]:
        """Wait for all batches, make the blobs durable, and return `(name, length)` of each.

        Raises:
            PenstockError: Something failed; call `abort`.
        """
        while self._batches:
            self.settle_oldest()
        blobs = []
        seals: list[Future[None]] = []
        if self._raw is not None:
            raw, length = self._raw, self._layout.end
            seals.append(self._workers.submit(lambda: _seal(raw, self._raw_name, length)))
            blobs.append((self._raw_name, length))
        try:
            if self._enc is not None and self._enc.is_empty:  # all that was encoded is shared
                self._enc.abort()
            elif self._enc is not None:
                blobs.append((self._enc_name, self._enc.seal()))
        finally:
            wait(seals)  # `abort` must not run while a seal is in flight
        for seal in seals:
            seal.result()
            self._tick(0)
        self._choices.finish(self._raw_written, self._raw_clock.elapsed())
        return blobs

    def abort(self) -> None:
        """Give both blobs up; on return the store uses no memory of the save any more."""
        for batch in self._batches:
            for future in batch.futures:
                future.exception()
        for batch in self._batches:
            for captured in batch.captured:
                self._release(captured)
        self._batches.clear()
        if self._raw is not None:
            self._raw.abort()
        if self._enc is not None:
            self._enc.abort()

    def _unshared(self, captured: list[Captured]) -> list[Captured]:
        """Return the chunks that are not stored yet, and release the others; after an error all."""
        if self._bases is None or not self._bases.shares:
            return captured
        try:
            # Before a chunk gets its place in the blob: one that is stored already gets none.
            share = max(1, -(-len(captured) // self._workers.count))
            finders = [
                self._workers.submit(self._finder(captured[at : at + share]))
                for at in range(0, len(captured), share)
            ]
            wait(finders)
            for finder in finders:
                finder.result()
        except BaseException:
            for item in captured:
                self._release(item)
            raise
        for item in captured:
            if self.results[item.index] is not None:
                self._release(item)
        return [item for item in captured if self.results[item.index] is None]

    def _finder(self, captured: list[Captured]) -> Callable[[], None]:
        def task() -> None:
            with self.encode_clock:
                for item in captured:
                    self._is_shared(item)

        return task

    def _is_shared(self, captured: Captured) -> bool:
        """Hash a chunk; return whether it is stored already, and note its frame then."""
        bases, index = self._bases, captured.index
        if bases is None or not bases.shares:
            return False
        chain = self._choices.chain(index)
        content = self._contents[index] = content_hash(captured.view)
        if chain is not None and not chain.lossless:
            return False  # see `_is_encoded_alike`: its errors arise when the chunk is encoded
        stored = bases.shared(index, content, self._choices.number(index))
        if stored is None:
            return False
        self.results[index] = ChunkResult(0, 0, (), chain=0, shared=stored)
        if chain is not None and chain.needs_base:
            bases.keep(index, captured.view)
        self._tick(captured.view.nbytes)
        return True

    def _start_raw(self, captured: list[Captured]) -> None:
        batch = _Batch(captured, [])
        # Before anything is submitted, so that `abort` waits for all that is in flight.
        self._batches.append(batch)
        if self._raw is None:
            self._raw = self._backend.create(self._raw_name, size_hint=self._raw_bytes())
        places = [(item, self._layout.place(self._plan.chunks[item.index])) for item in captured]
        requests = [WriteRequest(offset, (item.view,)) for item, offset in places]
        total = sum(r.length for r in requests)

        def done(future: Future[None]) -> None:
            self._raw_clock.stop()
            if future.exception() is None:
                self._tick(total)

        write = self._backend.submit_write(self._raw, requests)
        self._raw_clock.start()
        self._raw_written += total
        batch.futures.append(write)
        write.add_done_callback(done)
        share = -(-len(places) // self._workers.count)
        for at in range(0, len(places), share):
            batch.futures.append(self._workers.submit(self._hasher(places[at : at + share])))

    def _start_encoded(self, captured: deque[Captured]) -> None:
        """Hand each chunk to a worker, which releases it, and take it out of `captured`."""
        if self._enc is None:
            # By this thread: a store that hangs in it would keep a worker from all later saves.
            raw_bytes = sum(k.length for k in self._plan.chunks if k.chain)
            self._enc = EncodedBlob(
                self._backend,
                self._enc_name,
                size_hint=raw_bytes,  # the blob gets no larger unless codecs make chunks larger
                clock=self.write_clock,
                tick=self._tick,
            )
        batch = _Batch([], [])
        self._batches.append(batch)
        while captured:
            batch.futures.append(self._workers.submit(self._encoder(captured[0])))
            captured.popleft()

    def _raw_bytes(self) -> int:
        """Return the length of the `.raw` blob if all raw chunks are written."""
        layout = RawLayout()
        for index, chunk in enumerate(self._plan.chunks):
            if self._choices.chain(index) is None:
                layout.place(chunk)
        return layout.end

    def _settle_raw(self) -> tuple[int, float]:
        while self._batches:
            self.settle_oldest()
        return self._raw_written, self._raw_clock.elapsed()

    def _hasher(self, places: list[tuple[Captured, int]]) -> Callable[[], None]:
        def task() -> None:
            with self.encode_clock:
                for item, offset in places:
                    length = item.view.nbytes
                    ranges = frame_blocks(offset, length, self._block_bytes)
                    sums = checksum_blocks(item.view, ranges)
                    self.results[item.index] = ChunkResult(
                        offset,
                        length,
                        tuple(sums),
                        chain=self._choices.number(item.index),
                        content=self._contents.get(item.index),
                    )

        return task

    def _encoder(self, captured: Captured) -> Callable[[], None]:
        chunk = self._plan.chunks[captured.index]
        number = self._choices.number(captured.index)
        chain, stream = self._choices.chain(captured.index), self._enc
        assert chain is not None
        assert stream is not None

        def task() -> None:
            with self.encode_clock:
                try:
                    slot = self._slot()
                    effort = self._choices.begin_encoding(captured.index)
                    frame, base = self._encoded(chain, captured, slot, chunk)
                    effort.end_encoding()
                    if not chain.lossless and self._is_encoded_alike(captured.index, chain, frame):
                        return
                    if len(frame.declined) == len(chain.codecs):
                        self._store_raw(stream, captured, number, frame.declined)
                        self._choices.end_encoding(captured.index, chunk.length, effort)
                        return
                finally:
                    self._release(captured)
            offset = stream.append(slot[: frame.length])
            self.results[captured.index] = ChunkResult(
                offset,
                frame.length,
                (frame.checksum,),
                frame.raw_checksum,
                frame.lengths,
                frame.declined,
                base,
                number,
                self._contents.get(captured.index),
                errors=frame.errors,
            )
            self._choices.end_encoding(captured.index, frame.length, effort)
            self._tick(chunk.length)

        return task

    def _is_encoded_alike(self, index: int, chain: CodecChain, frame: EncodedFrame) -> bool:
        """Return whether what a lossy chain made of a chunk is stored already, and note it then."""
        bases, content = self._bases, self._contents.get(index)
        if bases is None or content is None:
            return False
        stored = bases.shared(index, content, self._choices.number(index))
        # Equal chunks: but a frame by other codecs gives back other values.
        if stored is None or len(stored.chain) != len(chain.codecs) - len(frame.declined):
            return False
        if stored.chain and stored.frame.raw_checksum != frame.raw_checksum:
            return False
        self.results[index] = ChunkResult(0, 0, (), chain=0, shared=stored, errors=frame.errors)
        self._tick(self._plan.chunks[index].length)
        return True

    def _slot(self) -> memoryview:
        """This thread's memory for one encoded frame."""
        slot: memoryview | None = getattr(self._slots, "view", None)
        if slot is None:
            slot = self._slots.view = memoryview(mmap.mmap(-1, max(self._slot_bytes, 1)))
        return slot

    def _store_raw(
        self, stream: EncodedBlob, captured: Captured, number: int, declined: tuple[int, ...]
    ) -> None:
        """Append a chunk that every codec declined, as a raw frame among the encoded ones."""
        view = captured.view
        offset = stream.append(view)
        sums = checksum_blocks(view, frame_blocks(offset, view.nbytes, self._block_bytes))
        self.results[captured.index] = ChunkResult(
            offset,
            view.nbytes,
            tuple(sums),
            declined=declined,
            chain=number,
            content=self._contents.get(captured.index),
        )
        self._tick(view.nbytes)

    def _encoded(
        self, chain: CodecChain, captured: Captured, slot: memoryview, chunk: Chunk
    ) -> tuple[EncodedFrame, StoredFrame | None]:
        context = context_of(self._plan, chunk)
        bases = self._bases if chain.needs_base else None
        base = None if bases is None else bases.base_of(captured.index)
        if base is not None:
            context = replace(context, base=base[1].toreadonly())
        try:
            frame = chain.encode(captured.view, slot, context=context, ranges=_ranges(chain, chunk))
        except CodecError as error:
            first = show_path(self._plan.objects[chunk.pieces[0].item].entry.path)
            more = f" and {len(chunk.pieces) - 1} more" if len(chunk.pieces) > 1 else ""
            msg = f"{first}{more}: {error}"
            raise CodecError(msg) from (error.__cause__ or error)
        if bases is not None:
            bases.keep(captured.index, captured.view)
        taken = base is not None and 0 not in frame.declined
        return frame, base[0] if base is not None and taken else None

    def _settle(self, batch: _Batch) -> None:
        """Wait for all of a batch, then release it; raise its first error."""
        error: BaseException | None = None
        for future in batch.futures:
            error = error or future.exception()
        captured, batch.captured = batch.captured, []
        for item in captured:
            self._release(item)
        if error is not None:
            raise error


def _ranges(chain: CodecChain, chunk: Chunk) -> list[ByteRange]:
    """Return where the pieces of a chunk stand that a lossy chain is to be judged by."""
    if chain.lossless:
        return []
    return [ByteRange(p.at, p.at + p.stop - p.start) for p in chunk.pieces]


def _seal(writer: BlobWriter, name: str, length: int) -> None:
    began = time.monotonic()
    writer.seal(length)
    log.debug("sealed %s: %d bytes in %.3f s", name, length, time.monotonic() - began)


class EncodedBlob:
    """An `.enc` blob: frames appended when ready, written in groups cut at page boundaries.

    Any worker may append.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        size_hint: int,
        clock: BusyClock,
        tick: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._name = name
        self._writer = backend.create(name, size_hint=size_hint)
        self._clock = clock
        self._tick = tick
        self._lock = threading.Lock()  # guards everything below; appending is serial
        self._groups = [memoryview(mmap.mmap(-1, _GROUP_BYTES)) for _ in range(_GROUPS)]
        self._flights: list[Future[None] | None] = [None] * _GROUPS
        self._current = 0
        self._base = 0
        self._filled = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was appended."""
        with self._lock:
            return self._base + self._filled == 0

    def append(self, frame: memoryview) -> int:
        """Copy `frame` behind the frames before it and return its offset."""
        with self._lock:
            offset = self._base + self._filled
            at = 0
            while at < frame.nbytes:
                count = min(frame.nbytes - at, _GROUP_BYTES - self._filled)
                copy_bytes(self._groups[self._current][self._filled :], frame[at : at + count])
                self._filled += count
                at += count
                if self._filled == _GROUP_BYTES:
                    self._rotate()
            if self._filled >= _GROUP_BYTES // 2:
                self._rotate()
            return offset

    def seal(self) -> int:
        """Write the rest, make the blob durable, and return its length."""
        with self._lock:
            length = self._base + self._filled
            if self._filled:
                self._submit(self._filled)
            for flight in self._flights:
                if flight is not None:
                    flight.result()
            began = time.monotonic()
            self._writer.seal(length)
            seconds = time.monotonic() - began
            self._tick(0)
        log.debug("sealed %s: %d bytes in %.3f s", self._name, length, seconds)
        return length

    def abort(self) -> None:
        """Wait until nothing is in flight, then give the blob up."""
        for flight in self._flights:
            if flight is not None:
                flight.exception()
        self._writer.abort()

    def _rotate(self) -> None:
        """Submit whole pages; the rest of the last page opens the next group.

        No two writes touch one page, as direct I/O needs.
        """
        whole = align_down(self._filled, PAGE_BYTES)
        full, rest = self._current, self._filled - whole
        self._submit(whole)
        self._current = (full + 1) % _GROUPS
        flight = self._flights[self._current]
        if flight is not None:
            flight.result()
            self._flights[self._current] = None
        copy_bytes(self._groups[self._current], self._groups[full][whole : whole + rest])
        self._base += whole
        self._filled = rest

    def _submit(self, length: int) -> None:
        request = WriteRequest(self._base, (self._groups[self._current][:length],))
        flight = self._backend.submit_write(self._writer, [request])
        self._clock.start()

        def done(future: Future[None]) -> None:
            self._clock.stop()
            if future.exception() is None:
                self._tick(0)

        flight.add_done_callback(done)
        self._flights[self._current] = flight

"""Writes captured chunks as frames into the blobs of a save.

Submits batches instead of single frames: while training is busy, every return to Python waits for
the GIL.

Tested in `tests/integration/sharing/test_sharing.py`.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.concurrency.workers import BusyClock
from penstock.core.errors import CodecError
from penstock.core.format.blocks import frame_blocks
from penstock.core.pipeline.chunks import ChunkResult
from penstock.core.pipeline.codec_chain import checksum_blocks, content_hash
from penstock.core.pipeline.staging import ThreadMemory
from penstock.core.plan.earlier_frames import content_key
from penstock.core.plan.save import RawLayout, context_of, elements_of
from penstock.core.types import PAGE_BYTES, ByteRange, WriteRequest, align_down, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import Backend
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.auto import ChainChoices
    from penstock.core.pipeline.chunks import Captured
    from penstock.core.pipeline.codec_chain import CodecChain, EncodedFrame
    from penstock.core.plan.earlier_frames import ContentKey, StoredFrame
    from penstock.core.plan.save import Chunk, SavePlan
    from penstock.core.save.bases import SaveBases

log = logging.getLogger("penstock")

T = TypeVar("T")

BATCH_BYTES = 64 << 20
_BATCHES_IN_FLIGHT = 3
_GROUP_BYTES = 8 << 20  # writes of encoded frames have at least half of this
_GROUPS = 3


@dataclass(eq=False, slots=True)
class _Batch:
    captured: list[Captured]
    futures: list[Future[None]]


class _OpenBlob:
    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        size_hint: int,
        clock: BusyClock,
        tick: Callable[[int], None],
    ) -> None:
        """Create the blob.

        Args:
            backend: The store.
            name: The name of the blob.
            size_hint: Its approximate length.
            clock: Counts the time in which writes are in flight.
            tick: Called with the bytes that a write adds to the save's progress.
        """
        self._backend = backend
        self._name = name
        self._writer = backend.create(name, size_hint=size_hint)
        self._clock = clock
        self._tick = tick
        self.written_bytes = 0
        self.busy = BusyClock()
        """The time in which writes of this blob are in flight."""

    def submit(self, requests: Sequence[WriteRequest], progress_bytes: int = 0) -> Future[None]:
        """Begin to write; report `progress_bytes` once everything is written."""

        def done(future: Future[None]) -> None:
            self.busy.stop()
            self._clock.stop()
            if future.exception() is None:
                self._tick(progress_bytes)

        write = self._backend.submit_write(self._writer, requests)
        self.busy.start()
        self._clock.start()
        self.written_bytes += sum(request.length for request in requests)
        write.add_done_callback(done)
        return write

    def seal(self, length: int) -> tuple[str, int]:
        """Make the blob durable; return its name and length."""
        began = time.monotonic()
        self._writer.seal(length)
        log.debug("sealed %s: %d bytes in %.3f s", self._name, length, time.monotonic() - began)
        self._tick(0)
        return self._name, length

    def abort(self) -> None:
        """Give up the blob; nothing may be in flight."""
        self._writer.abort()


class _EncodedBlob:
    """The blob of encoded frames. Appends frames, and writes them in groups of whole pages.

    Any worker may append.
    """

    def __init__(self, blob: _OpenBlob) -> None:
        self._blob = blob
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
        """Copy `frame` to the end of the blob and return its offset."""
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

    def seal(self) -> tuple[str, int]:
        """Write the rest, and make the blob durable; return its name and length."""
        with self._lock:
            if self._filled:
                self._submit(self._filled)
            for flight in self._flights:
                if flight is not None:
                    flight.result()
            return self._blob.seal(self._base + self._filled)

    def abort(self) -> None:
        """Wait until nothing is in flight, then give up the blob."""
        for flight in self._flights:
            if flight is not None:
                flight.exception()
        self._blob.abort()

    def _rotate(self) -> None:
        """Submit whole pages; the rest of the last page begins the next group.

        Direct I/O requires that no two writes touch one page.
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
        self._flights[self._current] = self._blob.submit([request])


class ChunkSharing:
    """Looks up the chunks of one save by their content. Thread-safe.

    Searches an earlier checkpoint first, then this save. The first of equal chunks is stored, and
    the others refer to its frame.
    """

    def __init__(self, plan: SavePlan, choices: ChainChoices, bases: SaveBases | None) -> None:
        """Prepare to look up chunks.

        Args:
            plan: Chunks and objects of the save.
            choices: The codec chain of each chunk.
            bases: Finds the frames of earlier saves; None: there are none.
        """
        self._plan = plan
        self._choices = choices
        self._bases = bases
        self._contents: dict[int, int] = {}
        self._lock = threading.Lock()  # guards `_first`
        self._first: dict[tuple[int, ContentKey], int] = {}

    def content(self, index: int) -> int | None:
        """Return the hash of a chunk, if `find` has computed it."""
        return self._contents.get(index)

    def find(self, captured: Captured) -> ChunkResult | None:
        """Hash a chunk; return its result if its bytes are stored already, else None."""
        index = captured.index
        chain = self._choices.chain(index)
        content = self._contents[index] = content_hash(captured.view)
        if chain is not None and not chain.lossless:
            return None  # see `find_encoded`: only encoding shows its errors
        stored = self._earlier(index, content)
        same_as = None if stored is not None else self._earlier_in_save(index, content)
        if stored is None and same_as is None:
            return None
        if self._bases is not None and chain is not None and chain.needs_base:
            self._bases.keep(index, captured.view)
        return ChunkResult(0, 0, (), chain=0, shared=stored, same_as=same_as)

    def _earlier(self, index: int, content: int) -> StoredFrame | None:
        if self._bases is None:
            return None
        return self._bases.shared(index, content, self._choices.number(index))

    def _earlier_in_save(self, index: int, content: int) -> int | None:
        """Return the number of an equal chunk of this save, whose frame serves this chunk, too."""
        chunk, number = self._plan.chunks[index], self._choices.number(index)
        context, elements = context_of(self._plan, chunk), elements_of(self._plan, chunk)
        is_raw = self._choices.chain(index) is None
        key = number, content_key(content, context, elements, is_raw=is_raw)
        with self._lock:
            first = self._first.setdefault(key, index)
        return None if first == index else first

    def find_encoded(self, index: int, frame: EncodedFrame) -> ChunkResult | None:
        """Return the result of a chunk if an equal frame of a lossy chain is stored already."""
        chain, content = self._choices.chain(index), self._contents.get(index)
        if chain is None or chain.lossless or content is None:
            return None
        stored = self._earlier(index, content)
        # The chunks are equal, but a frame by other codecs decodes to other values.
        if stored is None or len(stored.chain) != len(chain.codecs) - len(frame.declined):
            return None
        if stored.chain and stored.frame.raw_checksum != frame.raw_checksum:
            return None
        return ChunkResult(0, 0, (), chain=0, shared=stored, errors=frame.errors)


class FrameWriter:
    """Writes the chunks of one save into its `.raw` and `.enc` blobs.

    One thread calls all methods. The callbacks `release` and `tick` may be called on any thread.
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
        hashers: int,
        share: bool = False,
        bases: SaveBases | None = None,
    ) -> None:
        """Prepare to write; `put` creates each blob when it is first needed.

        Args:
            backend: The store of the blobs.
            plan: Chunks and objects of the save.
            choices: The codec chain of each chunk, which may be chosen during the save.
            block_bytes: The bytes per checksum in raw frames.
            workers: The threads that hash and encode.
            blob_prefix: Name of both blobs without their endings.
            release: Called once for every chunk, as soon as its memory is no longer needed.
            tick: Called on each progress, with the bytes of chunks that are finished: written,
                encoded, or found to be stored already. 0 after other progress, such as a seal.
            hashers: The number of workers that hash the chunks of one batch.
            share: Whether to reuse chunks whose bytes are stored already.
            bases: The frames of earlier saves for the chunks; None: there are none.
        """
        self._backend = backend
        self._plan = plan
        self.choices = choices
        self._bases = bases
        self._memory = ThreadMemory()  # of each worker, for one encoded frame
        self._sharing = ChunkSharing(plan, choices, bases) if share else None
        self._block_bytes = block_bytes
        self._workers = workers
        self._release = release
        self._tick = tick
        self._hashers = hashers
        self.blob_names = f"{blob_prefix}.raw", f"{blob_prefix}.enc"
        """The names of both blobs, whether or not they are created."""
        self._raw: _OpenBlob | None = None
        self._layout = RawLayout()
        self._enc: _EncodedBlob | None = None
        self._batches: deque[_Batch] = deque()
        self.results: dict[int, ChunkResult] = {}
        """How each chunk is stored, by its number; ascending once `finish` has returned."""
        self.write_clock = BusyClock()
        self.encode_clock = BusyClock()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._batches

    def put(self, captured: list[Captured]) -> None:
        """Accept chunks, in plan order; return while they are in flight.

        Raises:
            PenstockError: An earlier chunk failed.
        """
        try:
            while captured:
                chosen, captured = self.choices.take(captured)
                if chosen:
                    self._start(chosen)
                else:
                    self.choices.measure(self._settle_raw)
        except BaseException:
            self._release_all(captured)
            raise

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
        seals: list[Future[tuple[str, int]]] = []
        if self._raw is not None:
            seals.append(self._workers.submit(partial(self._raw.seal, self._layout.end)))
        encoded = []
        try:
            if self._enc is not None and self._enc.is_empty:  # all encoded chunks are shared
                self._enc.abort()
            elif self._enc is not None:
                encoded.append(self._enc.seal())
        finally:
            wait(seals)  # `abort` must not run while a seal is in flight
        blobs = [*(seal.result() for seal in seals), *encoded]
        self.results = dict(sorted(self.results.items()))
        size_bytes = sum(length for _, length in blobs)
        self.choices.finish(self.results, size_bytes, self.write_clock.seconds)
        return blobs

    def abort(self) -> None:
        """Give up both blobs; on return the store uses no memory of the save."""
        for batch in self._batches:
            for future in batch.futures:
                future.exception()
        for batch in self._batches:
            self._release_all(batch.captured)
        self._batches.clear()
        if self._raw is not None:
            self._raw.abort()
        if self._enc is not None:
            self._enc.abort()

    def _start(self, captured: list[Captured]) -> None:
        """Put chunks with known chains in flight."""
        # This comes first, since a chunk that is stored already gets no place in a blob.
        captured = self._unshared(captured)
        raw = [c for c in captured if self.choices.chain(c.index) is None]
        encoded = deque(c for c in captured if self.choices.chain(c.index))
        try:
            if raw:
                self._start_raw(raw)
            if encoded:
                self._start_encoded(encoded)
        except BaseException:
            self._release_all(encoded)  # chunks that no worker has taken
            raise
        while len(self._batches) > _BATCHES_IN_FLIGHT:
            self.settle_oldest()

    def _unshared(self, captured: list[Captured]) -> list[Captured]:
        """Return the chunks not stored yet; release the others, or all after an error."""
        if self._sharing is None:
            return captured
        futures: list[Future[None]] = []
        try:
            for some in self._shares(captured):
                task = partial(self._look_up, self._sharing, some)
                futures.append(self._workers.submit(task))
            for future in futures:
                future.result()
        except BaseException:
            wait(futures)
            self._release_all(captured)
            raise
        self._release_all(c for c in captured if c.index in self.results)
        return [c for c in captured if c.index not in self.results]

    def _start_raw(self, captured: list[Captured]) -> None:
        batch = _Batch(captured, [])
        # Append first, so that `abort` waits for everything in flight.
        self._batches.append(batch)
        if self._raw is None:
            self._raw = self._blob(self.blob_names[0], self._raw_bytes())
        places = [(item, self._layout.place(self._plan.chunks[item.index])) for item in captured]
        requests = [WriteRequest(offset, (item.view,)) for item, offset in places]
        batch.futures.append(self._raw.submit(requests, sum(r.length for r in requests)))
        for some in self._shares(places):
            batch.futures.append(self._workers.submit(partial(self._hash, some)))

    def _start_encoded(self, captured: deque[Captured]) -> None:
        """Hand each chunk to a worker, which releases it, and remove it from `captured`."""
        if self._enc is None:
            # On this thread: a store that hangs here would block a worker for all later saves.
            raw_bytes = sum(k.length for k in self._plan.chunks if k.chain)
            # The blob gets no larger than this unless codecs enlarge chunks.
            self._enc = _EncodedBlob(self._blob(self.blob_names[1], raw_bytes))
        batch = _Batch([], [])
        self._batches.append(batch)
        while captured:
            task = partial(self._encode, captured[0], self._enc)
            batch.futures.append(self._workers.submit(task))
            captured.popleft()

    def _blob(self, name: str, size_hint: int) -> _OpenBlob:
        return _OpenBlob(
            self._backend, name, size_hint=size_hint, clock=self.write_clock, tick=self._tick
        )

    def _settle(self, batch: _Batch) -> None:
        """Wait for all of a batch, then release it; raise its first error."""
        error: BaseException | None = None
        for future in batch.futures:
            error = error or future.exception()
        captured, batch.captured = batch.captured, []
        self._release_all(captured)
        if error is not None:
            raise error

    def _settle_raw(self) -> tuple[int, float]:
        while self._batches:
            self.settle_oldest()
        return (0, 0.0) if self._raw is None else (self._raw.written_bytes, self._raw.busy.seconds)

    # -- tasks of the workers --------------------------------------------------------------------

    def _look_up(self, sharing: ChunkSharing, captured: Iterable[Captured]) -> None:
        """Note the results of chunks that are stored already."""
        with self.encode_clock:
            for item in captured:
                result = sharing.find(item)
                if result is not None:
                    self._set_result(item.index, result)

    def _hash(self, places: Iterable[tuple[Captured, int]]) -> None:
        """Compute the checksums of raw chunks while the store writes them."""
        with self.encode_clock:
            for item, offset in places:
                self.results[item.index] = self._raw_result(item, offset)

    def _encode(self, captured: Captured, blob: _EncodedBlob) -> None:
        """Encode and append one chunk; release it as soon as its memory is not needed."""
        index = captured.index
        result: ChunkResult | None = None
        with self.encode_clock:
            try:
                frame, data, base = self._encoded(captured)
                if self._sharing is not None:
                    result = self._sharing.find_encoded(index, frame)
                if (
                    result is None and data is None
                ):  # the chunk becomes a raw frame among the encoded ones
                    offset = blob.append(captured.view)
                    result = self._raw_result(captured, offset, declined=frame.declined)
            finally:
                self._release(captured)
        if result is None:
            assert data is not None
            result = ChunkResult(
                blob.append(data),
                frame.length,
                (frame.checksum,),
                frame.raw_checksum,
                frame.lengths,
                frame.declined,
                base,
                self.choices.number(index),
                self._content(index),
                errors=frame.errors,
            )
        self._set_result(index, result)

    def _encoded(
        self, captured: Captured
    ) -> tuple[EncodedFrame, memoryview | None, StoredFrame | None]:
        """Encode a chunk that has a chain.

        Returns:
            The frame; its bytes, valid until this thread encodes the next chunk; and the frame that
            it was encoded against. The bytes are None if all codecs declined the chunk, which must
            then be stored itself.

        Raises:
            CodecError: A codec refused the chunk; the message names its objects.
        """
        index = captured.index
        chunk, chain = self._plan.chunks[index], self.choices.chain(index)
        assert chain is not None
        bases = self._bases if chain.needs_base else None
        context = context_of(self._plan, chunk)
        base_chunk = None if bases is None else bases.base_of(index)
        if base_chunk is not None:
            context = replace(context, base=base_chunk[1].toreadonly())
        try:
            slot = self._memory.take(chain.max_encoded_size(chunk.length))
            frame = chain.encode(captured.view, slot, context=context, ranges=_ranges(chain, chunk))
        except CodecError as error:
            first = show_path(self._plan.objects[chunk.pieces[0].item].entry.path)
            more = f" and {len(chunk.pieces) - 1} more" if len(chunk.pieces) > 1 else ""
            msg = f"{first}{more}: {error}"
            raise CodecError(msg) from (error.__cause__ or error)
        if bases is not None:
            bases.keep(index, captured.view)
        if len(frame.declined) == len(chain.codecs):
            return frame, None, None
        base = None if base_chunk is None or 0 in frame.declined else base_chunk[0]
        return frame, slot[: frame.length], base

    def _raw_result(
        self, captured: Captured, offset: int, *, declined: tuple[int, ...] = ()
    ) -> ChunkResult:
        index, view = captured.index, captured.view
        blocks = frame_blocks(offset, view.nbytes, self._block_bytes)
        return ChunkResult(
            offset,
            view.nbytes,
            tuple(checksum_blocks(view, blocks)),
            declined=declined,
            chain=self.choices.number(index),
            content=self._content(index),
        )

    # --------------------------------------------------------------------------------------------

    def _set_result(self, index: int, result: ChunkResult) -> None:
        """Note how a chunk is stored, once it is finished."""
        self.results[index] = result
        self._tick(self._plan.chunks[index].length)

    def _content(self, index: int) -> int | None:
        return None if self._sharing is None else self._sharing.content(index)

    def _release_all(self, captured: Iterable[Captured]) -> None:
        for item in captured:
            self._release(item)

    def _shares(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield a share of `items` for each hashing worker."""
        size = max(1, -(-len(items) // self._hashers))
        for at in range(0, len(items), size):
            yield items[at : at + size]

    def _raw_bytes(self) -> int:
        """Return the length of the `.raw` blob if all raw chunks are written."""
        layout = RawLayout()
        for index, chunk in enumerate(self._plan.chunks):
            if self.choices.chain(index) is None:
                layout.place(chunk)
        return layout.end


def _ranges(chain: CodecChain, chunk: Chunk) -> list[ByteRange]:
    """Return the ranges whose errors a lossy chain must report: the chunk's pieces."""
    if chain.lossless:
        return []
    return [ByteRange(p.at, p.at + p.stop - p.start) for p in chunk.pieces]

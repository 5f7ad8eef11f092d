"""Captured chunks -> frames -> blobs.

Batches move, not frames: under a busy training loop every return to Python waits for the GIL.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.abc import CodecContext
from penstock.core.concurrency.workers import BusyClock
from penstock.core.errors import CodecError
from penstock.core.format.blocks import frame_blocks
from penstock.core.pipeline.chain import checksum_blocks
from penstock.core.pipeline.encoded_blob import EncodedStream
from penstock.core.types import WriteRequest, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chain import CodecChain, EncodedFrame
    from penstock.core.pipeline.staging import Block
    from penstock.core.plan.save import Chunk, SavePlan

log = logging.getLogger("penstock")

BATCH_BYTES = 64 << 20
_BATCHES_IN_FLIGHT = 3


@dataclass(eq=False, slots=True)
class Captured:
    """A chunk's bytes, ready for encoding and writing.

    Attributes:
        index: Number of the chunk in the plan.
        view: Its raw bytes.
        block: Staging to give back, None when straight.
        straight: Whether the bytes are the live tensor's own memory.
        end_hold: Ends the hold on that memory, where there is one.
    """

    index: int
    view: memoryview
    block: Block | None
    straight: bool
    end_hold: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of one chunk of the plan: fields as in `Frame`, and what codecs declined it."""

    offset: int
    length: int
    checksums: tuple[int, ...]
    raw_checksum: int | None = None
    lengths: tuple[int, ...] = ()
    declined: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class _Batch:
    captured: list[Captured]
    futures: list[Future[None]]


class FrameWriter:
    """Writes the chunks of one save into its `.raw` and `.enc` blob.

    `put` and `finish` are called by one thread. `release` is called for every chunk as soon as
    its memory is no longer needed, from any thread; `tick` whenever the store made progress.
    """

    def __init__(
        self,
        backend: Backend,
        plan: SavePlan,
        *,
        chains: Sequence[CodecChain | None],
        block_bytes: int,
        workers: Workers,
        blob_prefix: str,
        release: Callable[[Captured], None],
        tick: Callable[[int], None],
    ) -> None:
        """Prepare to write; nothing has begun.

        Args:
            backend: Where the blobs go.
            plan: Chunks and objects of the save.
            chains: Codec chains by number; None is raw.
            block_bytes: Distance of the checksums in raw frames.
            workers: Threads that hash and encode.
            blob_prefix: Name of both blobs, less their endings.
            release: See above.
            tick: See above; gets the bytes that were written.
        """
        self._backend = backend
        self._plan = plan
        self._chains = chains
        self._block_bytes = block_bytes
        self._workers = workers
        self._release = release
        self._tick = tick
        self._raw_name = f"{blob_prefix}.raw"
        self._enc_name = f"{blob_prefix}.enc"
        self._raw: BlobWriter | None = None
        self._enc: EncodedStream | None = None
        self._batches: deque[_Batch] = deque()
        self._slots = threading.local()
        self._slot_bytes = max(
            (c.max_encoded_size(k.length) for k in plan.chunks if (c := chains[k.chain])),
            default=0,
        )
        self.results: list[ChunkResult | None] = [None] * len(plan.chunks)
        self.write_clock = BusyClock()
        self.encode_clock = BusyClock()

    def put(self, captured: list[Captured]) -> None:
        """Take chunks over, in plan order; returns while they are under way.

        Raises:
            PenstockError: An earlier chunk failed.
        """
        raw = [c for c in captured if self._chains[self._plan.chunks[c.index].chain] is None]
        encoded = deque(c for c in captured if self._chains[self._plan.chunks[c.index].chain])
        try:
            if raw:
                self._start_raw(raw)
            if encoded:
                self._start_encoded(encoded)
        except BaseException:
            for item in encoded:  # those that no worker has got
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
        """Whether nothing is under way."""
        return not self._batches

    def settle_oldest(self) -> None:
        """Wait for one batch, if any."""
        if self._batches:
            self._settle(self._batches[0])
            self._batches.popleft()

    def finish(self) -> list[tuple[str, int]]:
        """Wait for everything and make the blobs durable; `(name, length)` of each.

        Raises:
            PenstockError: Something failed; call `abort`.
        """
        while self._batches:
            self.settle_oldest()
        blobs = []
        seals: list[Future[None]] = []
        if self._raw is not None:
            raw, length = self._raw, self._plan.raw_blob_bytes
            seals.append(self._workers.submit(lambda: _seal(raw, self._raw_name, length)))
            blobs.append((self._raw_name, length))
        try:
            if self._enc is not None:
                blobs.append((self._enc_name, self._enc.seal()))
        finally:
            wait(seals)  # `abort` must not meet a seal that is under way
        for seal in seals:
            seal.result()
            self._tick(0)
        return blobs

    def abort(self) -> None:
        """Give both blobs up; returns when no memory of the save is in use any more."""
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

    # ------------------------------------------------------------------------------------------

    def _start_raw(self, captured: list[Captured]) -> None:
        batch = _Batch(captured, [])
        self._batches.append(batch)  # first, so that `abort` knows of whatever got under way
        if self._raw is None:
            self._raw = self._backend.create(self._raw_name, size_hint=self._plan.raw_blob_bytes)
        requests = []
        for item in captured:
            offset = self._plan.chunks[item.index].offset
            assert offset is not None
            requests.append(WriteRequest(offset, (item.view,)))
        total = sum(r.length for r in requests)

        def done(future: Future[None]) -> None:
            self.write_clock.stop()
            if future.exception() is None:
                self._tick(total)

        write = self._backend.submit_write(self._raw, requests)
        self.write_clock.start()
        batch.futures.append(write)
        write.add_done_callback(done)
        share = -(-len(captured) // self._workers.count)
        for at in range(0, len(captured), share):
            batch.futures.append(self._workers.submit(self._hasher(captured[at : at + share])))

    def _start_encoded(self, captured: deque[Captured]) -> None:
        """Give each to a worker, which releases it, and take it out of `captured`."""
        if self._enc is None:
            raw_bytes = sum(k.length for k in self._plan.chunks if self._chains[k.chain])
            self._enc = EncodedStream(
                self._backend,
                self._enc_name,
                size_hint=raw_bytes,  # what it will have at most, unless nothing gets smaller
                clock=self.write_clock,
                tick=self._tick,
            )
        batch = _Batch([], [])
        self._batches.append(batch)
        while captured:
            batch.futures.append(self._workers.submit(self._encoder(captured[0])))
            captured.popleft()

    def _hasher(self, captured: list[Captured]) -> Callable[[], None]:
        def task() -> None:
            with self.encode_clock:
                for item in captured:
                    offset = self._plan.chunks[item.index].offset
                    assert offset is not None
                    length = item.view.nbytes
                    ranges = frame_blocks(offset, length, self._block_bytes)
                    sums = checksum_blocks(item.view, ranges)
                    self.results[item.index] = ChunkResult(offset, length, tuple(sums))

        return task

    def _encoder(self, captured: Captured) -> Callable[[], None]:
        chunk = self._plan.chunks[captured.index]
        chain, stream = self._chains[chunk.chain], self._enc
        assert chain is not None
        assert stream is not None

        def task() -> None:
            with self.encode_clock:
                try:
                    slot = self._slot()
                    frame = self._encoded(chain, captured, slot, chunk)
                    if len(frame.declined) == len(chain.codecs):
                        self._store_raw(stream, captured, frame.declined)
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
            )
            self._tick(chunk.length)

        return task

    def _slot(self) -> memoryview:
        """This thread's memory for one encoded frame."""
        slot: memoryview | None = getattr(self._slots, "view", None)
        if slot is None:
            slot = self._slots.view = memoryview(mmap.mmap(-1, max(self._slot_bytes, 1)))
        return slot

    def _store_raw(
        self, stream: EncodedStream, captured: Captured, declined: tuple[int, ...]
    ) -> None:
        """Append a chunk that every codec declined, as a raw frame among the encoded ones."""
        view = captured.view
        offset = stream.append(view)
        sums = checksum_blocks(view, frame_blocks(offset, view.nbytes, self._block_bytes))
        self.results[captured.index] = ChunkResult(
            offset, view.nbytes, tuple(sums), declined=declined
        )
        self._tick(view.nbytes)

    def _encoded(
        self, chain: CodecChain, captured: Captured, slot: memoryview, chunk: Chunk
    ) -> EncodedFrame:
        try:
            return chain.encode(captured.view, slot, context=self._context(chunk))
        except CodecError as error:
            first = show_path(self._plan.objects[chunk.pieces[0].item].entry.path)
            more = f" and {len(chunk.pieces) - 1} more" if len(chunk.pieces) > 1 else ""
            msg = f"{first}{more}: {error}"
            raise CodecError(msg) from (error.__cause__ or error)

    def _context(self, chunk: Chunk) -> CodecContext:
        piece, *others = chunk.pieces
        if others:
            count = chunk.length // chunk.itemsize
            return CodecContext(chunk.dtype, chunk.itemsize, (count,), 0, chunk.length)
        # The piece is all of the chunk: a reader can tell that from the object's references.
        entry = self._plan.objects[piece.item].entry
        dtype, itemsize = entry.spec.dtype, entry.spec.itemsize
        return CodecContext(dtype, itemsize, entry.region.sizes, piece.start, chunk.length)

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


def _seal(writer: BlobWriter, name: str, length: int) -> None:
    began = time.monotonic()
    writer.seal(length)
    log.debug("sealed %s: %d bytes in %.3f s", name, length, time.monotonic() - began)

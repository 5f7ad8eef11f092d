"""Plans a save: objects -> chunks and slabs -> places in the `.raw` blob. Sans-IO.

`plan/reads` plans a restore.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.abc.codec import CodecContext
from penstock.core.errors import ConfigError
from penstock.core.limits import MAX_CHUNK_BYTES
from penstock.core.tree.known import Known
from penstock.core.types import PAGE_BYTES, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import ByteSource, StateObject
    from penstock.core.types import ObjectPath, Region, Role, TensorSpec

SLAB_ALIGNMENT = 64
"""The pieces of a slab begin at multiples of this number of bytes. Padding bytes are zero."""

LARGEST_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK_BYTES = 256 << 10
_BLOCKS_OF_A_PIECE = 6  # 48 bytes of checksums; a shard may take 80 bytes of the manifest

_DEVICE_PHASE = 64  # that of torch's large CPU tensors, so that a restore meets the same phase


class Capture(StrEnum):
    """When the bytes of an object are captured."""

    FROZEN = "frozen"  # a value, which is bytes already
    NOW = "now"  # before `save` returns
    DEFERRED = "deferred"  # later, before the fence passes


_CAPTURE_ORDER = {Capture.FROZEN: 0, Capture.NOW: 1, Capture.DEFERRED: 2}


class PlannedObject(NamedTuple):
    """An object whose bytes are saved. Tied objects are left out: they have no bytes of their own.

    Attributes:
        entry: The object's description.
        capture: When its bytes are captured.
        chain: Number of its codec chain; 0 is raw.
        version: The version of its memory when it was described; None if versions are not counted.
        may_stay_raw: Whether the codecs are chosen while it is written, so that its chunks are cut
            like raw ones.
    """

    entry: StateObject
    capture: Capture
    chain: int = 0
    version: int | None = None
    may_stay_raw: bool = False


class ShardSpan(NamedTuple):
    """A stored rectangle of an object, whose bytes begin at byte `start` of the source."""

    start: int
    region: Region


class Piece(NamedTuple):  # a frozen dataclass takes twice as long, once for each object
    """Bytes `[start, stop)` of object number `item`, at byte `at` of the chunk."""

    item: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of capture and encoding.

    Attributes:
        pieces: One piece; several in a slab.
        length: Raw bytes, including padding between pieces.
        phase: Address modulo 4096 of the first byte in memory. The offset of a raw chunk in its
            blob has the same phase.
        chain: Number of the codec chain; 0 is raw.
        capture: When the chunk is captured; all objects of a slab agree.
        slab: Whether the chunk is gathered from several small objects.
        dtype: The dtype of all elements of an encoded slab, if they have the same one.
        itemsize: Bytes of one such element.
    """

    pieces: tuple[Piece, ...]
    length: int
    phase: int
    chain: int
    capture: Capture
    slab: bool
    dtype: str = "uint8"
    itemsize: int = 1


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The chunks of a save.

    Attributes:
        objects: All objects whose bytes are saved, in the order of their description.
        chunks: In order of capture (frozen and now, then deferred), which is the order of raw
            frames in their blob.
        raw_bytes: Bytes of all objects, without padding.
        masters: The possible masters of each object that may be derived. The chunks of these
            objects come last among those captured together, and none is a slab.
    """

    objects: Sequence[PlannedObject]
    chunks: tuple[Chunk, ...]
    raw_bytes: int
    masters: Mapping[int, Sequence[int]] = field(default_factory=dict)
    spans: dict[int, tuple[ShardSpan, ...]] = field(default_factory=dict)
    """The rectangles that this rank stores of objects that it does not store whole.

    Filled once it is known which chunks this rank writes (`plan.writers`).
    """

    def bytes_of_chunks(self, numbers: Collection[int] | None) -> int:
        """Return the bytes of objects in these chunks (None: all), without padding."""
        if numbers is None:
            return self.raw_bytes
        return sum(p.stop - p.start for n in numbers for p in self.chunks[n].pieces)

    def fitting_block_bytes(self) -> int:
        """Return the bytes per checksum that fit the pieces: 256 KiB to 4 MiB, a power of two.

        A reader of part of a piece reads up to one extra block at each end. An average piece has
        three to six blocks, so that this excess, and the manifest, stay small.
        """
        pieces = sum(len(chunk.pieces) for chunk in self.chunks)
        smallest = self.raw_bytes // (_BLOCKS_OF_A_PIECE * max(1, pieces))
        fitting = 1 << max(0, smallest - 1).bit_length()
        return min(max(fitting, _SMALLEST_BLOCK_BYTES), LARGEST_BLOCK_BYTES)

    def bytes_of(self, capture: Capture) -> int:
        """Return the bytes of all objects with this capture, without padding."""
        pieces = (p for chunk in self.chunks if chunk.capture is capture for p in chunk.pieces)
        return sum(piece.stop - piece.start for piece in pieces)


def context_of(plan: SavePlan, chunk: Chunk) -> CodecContext:
    """Return the codec context of a chunk. A reader of the manifest gets the same context."""
    piece, *others = chunk.pieces
    if others:
        return slab_context(chunk.length, (chunk.dtype, chunk.itemsize))
    # One piece is the whole chunk, and a reader finds its shape in the object's record.
    spec = plan.objects[piece.item].entry.spec
    dtype, itemsize = spec.dtype, spec.itemsize
    spans = plan.spans.get(piece.item)
    if spans is None:
        return CodecContext(dtype, itemsize, spec.shape, piece.start, chunk.length)
    span = _span_of(piece, spans, itemsize)
    if span is None:
        return slab_context(chunk.length, (dtype, itemsize))
    start = piece.start - span.start
    return CodecContext(dtype, itemsize, span.region.sizes, start, chunk.length)


def _span_of(piece: Piece, spans: Sequence[ShardSpan], itemsize: int) -> ShardSpan | None:
    """Return the rectangle that holds all bytes of a piece; None if several do."""
    span = spans[bisect_right(spans, piece.start, key=lambda span: span.start) - 1]
    return span if piece.stop <= span.start + span.region.numel * itemsize else None


def slab_context(length: int, elements: tuple[str, int] | None) -> CodecContext:
    """Return the codec context of a slab of several objects, as one row of elements.

    Args:
        length: Raw bytes of the slab.
        elements: Dtype and bytes of an element, as its frame records them; None: bytes.
    """
    dtype, itemsize = elements or ("uint8", 1)
    return CodecContext(dtype, itemsize, (length // itemsize,), 0, length)


def elements_of(plan: SavePlan, chunk: Chunk) -> tuple[str, int] | None:
    """Return dtype and item size of an encoded slab, which a reader cannot get from its objects.

    A chunk with bytes in several rectangles of an object counts as a slab. None means plain bytes,
    or a chunk that is no slab.
    """
    dtype, itemsize = chunk.dtype, chunk.itemsize
    if len(chunk.pieces) == 1:
        piece = chunk.pieces[0]
        spans = plan.spans.get(piece.item)
        spec = plan.objects[piece.item].entry.spec
        if spans is None or _span_of(piece, spans, spec.itemsize) is not None:
            return None
        dtype, itemsize = spec.dtype, spec.itemsize
    return None if dtype == "uint8" else (dtype, itemsize)


def plan_save(
    objects: Sequence[PlannedObject],
    *,
    chunk_bytes: int,
    slab_limit_bytes: int = 1 << 20,
    encoded_slab_bytes: int = 1 << 20,
    masters: Mapping[int, Sequence[int]] | None = None,
    even_cuts: bool = False,
    known: Known | None = None,
) -> SavePlan:
    """Cut objects into chunks and slabs; the same objects and sizes give the same plan.

    Args:
        objects: The objects of this rank, in the order of their description.
        chunk_bytes: Most raw bytes of a chunk; rounded down to pages, at least one page.
        slab_limit_bytes: Smaller objects are gathered into slabs.
        encoded_slab_bytes: Most raw bytes of a slab that goes through a codec chain.
        masters: See `SavePlan.masters`.
        even_cuts: Cut raw objects at the same bytes whatever their address, so that other processes
            make equal chunks. The frames of an object then have gaps of a page between them.
        known: Results of the last save, which are reused if nothing has changed.

    Raises:
        ConfigError: `chunk_bytes` is beyond `MAX_CHUNK_BYTES`, or cannot hold one element.
    """
    chunk_bytes = max(PAGE_BYTES, align_down(chunk_bytes, PAGE_BYTES))
    if chunk_bytes > MAX_CHUNK_BYTES:
        msg = f"chunk_bytes is {chunk_bytes}; the format allows at most {MAX_CHUNK_BYTES}"
        raise ConfigError(msg)
    masters = masters or {}
    sizes = _CutSizes(
        chunk_bytes, slab_limit_bytes, min(encoded_slab_bytes, chunk_bytes), even_cuts
    )
    facts = _facts(objects, sizes, masters)

    def cut() -> tuple[tuple[Chunk, ...], int]:
        cuttings = [_CutFacts(*each) for each in facts]
        return _chunks(cuttings, sizes, masters), sum(each.nbytes for each in cuttings)

    basis = sizes, tuple(masters), facts
    chunks, raw_bytes = (known or Known()).recall("cuts", basis, cut)
    return SavePlan(objects, chunks, raw_bytes, masters)


class _CutSizes(NamedTuple):
    chunk: int
    slab_limit: int
    encoded_slab: int
    even: bool


class _CutFacts(NamedTuple):
    """All facts about an object that its cuts depend on.

    Attributes:
        spec: Dtype and shape.
        nbytes: Bytes of the object.
        phase: Address modulo 4096 of its first byte; 0 if it surely goes into a slab.
        group: Its top-level key.
        replicas: See `replicas_of`.
    """

    spec: TensorSpec
    nbytes: int
    phase: int
    group: ObjectPath
    role: Role
    chain: int
    may_stay_raw: bool
    capture: Capture
    device: str
    replicas: object


def _facts(
    objects: Sequence[PlannedObject], sizes: _CutSizes, alone: Collection[int]
) -> list[tuple[Any, ...]]:
    """Return the `_CutFacts` fields of each object, as tuples for speed: each save makes them.

    Args:
        objects: The objects.
        sizes: The sizes of chunks and slabs.
        alone: Numbers of the objects that go into no slab.
    """
    small = 0 if alone else min(sizes.slab_limit - 1, sizes.encoded_slab)
    return [
        (
            spec, source.nbytes, 0 if source.nbytes <= small else _phase(source), path[:1], role,
            chain, may_stay_raw, capture, source.device, replica and replicas_of(entry),
        )
        for entry, capture, chain, _, may_stay_raw in objects
        for path, _, spec, _, role, _, source, _, replica in [entry]
    ]  # fmt: skip


def _phase(source: ByteSource) -> int:
    return _DEVICE_PHASE if source.address is None else source.address % PAGE_BYTES


def _chunks(
    facts: Sequence[_CutFacts], sizes: _CutSizes, masters: Collection[int]
) -> tuple[Chunk, ...]:
    gatherer = _SlabGatherer(sizes)
    drafts: list[Chunk] = []
    for number, item in enumerate(facts):
        capacity = min(sizes.slab_limit - 1, sizes.encoded_slab if item.chain else sizes.chunk)
        if not item.nbytes:
            continue
        if item.nbytes <= capacity and number not in masters:
            gatherer.take(number, item)
        else:
            drafts += _cut(number, item, sizes)
    drafts += gatherer.finish()
    drafts.sort(
        key=lambda c: (_CAPTURE_ORDER[c.capture], c.pieces[0].item in masters, c.pieces[0].item)
    )
    return tuple(drafts)


class RawLayout:
    """Gives raw chunks their places in the `.raw` blob, in the order of writing.

    Every frame has whole pages of the blob to itself, so no two writes touch one alignment unit.
    Places are not part of the plan, since the content of chunks decides which ones are written.

    Attributes:
        end: End of the last frame, including gaps: the length of the blob.
    """

    def __init__(self) -> None:
        self.end = 0

    def place(self, chunk: Chunk) -> int:
        """Return the offset of `chunk`, the next to write."""
        # A chunk that continues its object at a page boundary goes right after the previous one.
        offset = align_up(self.end, PAGE_BYTES) + chunk.phase
        self.end = offset + chunk.length
        return offset


class _SlabKey(NamedTuple):
    """The properties that all objects of a slab share; `group` is their top-level key."""

    group: ObjectPath
    role: Role
    chain: int
    device: str
    capture: Capture
    dtype: str
    itemsize: int
    replicas: object = None


def replicas_of(entry: StateObject) -> object:
    """Return a key that is equal for objects with equal copies on the same ranks.

    None means all ranks that have the object. Ranks that share a key have the same objects under
    it, in the same order, so each rank knows which chunks the others write.
    """
    replica = entry.replica
    if replica is None:
        return None
    if replica.place:
        return replica.place
    if replica.count == 1:
        return 1
    # Sharding by hand does not name these ranks: another object with the same number of replicas
    # may be on other ranks.
    return replica.ranks or (replica, entry.path)


def _slab_key(item: _CutFacts) -> _SlabKey:
    # A codec gets the dtype of its elements, so an encoded slab has only one dtype. Elements whose
    # size does not divide the alignment of pieces would not be at multiples of their size.
    dtype, itemsize = "uint8", 1
    if item.chain and SLAB_ALIGNMENT % item.spec.itemsize == 0:
        dtype, itemsize = item.spec.dtype, item.spec.itemsize
    return _SlabKey(
        item.group, item.role, item.chain, item.device, item.capture, dtype, itemsize, item.replicas
    )


class _SlabGatherer:
    def __init__(self, sizes: _CutSizes) -> None:
        self._sizes = sizes
        self._open: dict[_SlabKey, tuple[list[Piece], int]] = {}
        self._done: list[Chunk] = []

    def take(self, number: int, item: _CutFacts) -> None:
        capacity = self._sizes.encoded_slab if item.chain else self._sizes.chunk
        key = _slab_key(item)
        pieces, end = self._open.get(key, ([], 0))
        at = align_up(end, SLAB_ALIGNMENT)
        if pieces and at + item.nbytes > capacity:
            self._close(key, pieces, end)
            pieces, at = [], 0
        pieces.append(Piece(number, 0, item.nbytes, at))
        self._open[key] = (pieces, at + item.nbytes)

    def finish(self) -> list[Chunk]:
        for key, (pieces, end) in self._open.items():
            self._close(key, pieces, end)
        return self._done

    def _close(self, key: _SlabKey, pieces: list[Piece], end: int) -> None:
        self._done.append(
            Chunk(
                tuple(pieces),
                end,
                0,
                key.chain,
                key.capture,
                slab=True,
                dtype=key.dtype,
                itemsize=key.itemsize,
            )
        )


def _cut(number: int, item: _CutFacts, sizes: _CutSizes) -> Iterator[Chunk]:
    itemsize, chain, phase = item.spec.itemsize, item.chain, item.phase
    chunk_bytes, even = sizes.chunk, sizes.even
    if even and (not chain or item.may_stay_raw) and chunk_bytes > PAGE_BYTES:
        chunk_bytes -= PAGE_BYTES  # so that a chunk with its phase stays within the limit
    else:
        even = False
    step = chunk_bytes - chunk_bytes % itemsize
    if not step:
        msg = f"chunk_bytes is {chunk_bytes}, less than one element of {itemsize} bytes"
        raise ConfigError(msg)
    # Elements of an odd size may cross a page boundary, so their chunks are copied to pages of
    # their own.
    encoded = chain and not item.may_stay_raw
    if PAGE_BYTES % itemsize or encoded or phase % itemsize:
        phase = 0
    start = 0
    while start < item.nbytes:
        stop = min(item.nbytes, start + step - (0 if even else phase))
        piece = Piece(number, start, stop, 0)
        yield Chunk((piece,), stop - start, phase, chain, item.capture, slab=False)
        # The phase of the next chunk, whose memory begins where this chunk's ends.
        phase = (phase + stop - start) % PAGE_BYTES if even and phase else 0
        start = stop

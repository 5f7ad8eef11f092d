"""Plans a restore's reads: requested objects -> shards -> frames -> ranges of blocks. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from penstock.core.abc.byte_sources import ByteSink
from penstock.core.abc.codec import CodecContext
from penstock.core.errors import FormatError
from penstock.core.format.blocks import blocks_covering, blocks_span, merge_spans
from penstock.core.plan.regions import (
    common_region,
    copy_region,
    flaw_of_cover,
    one_copy,
    region_runs,
    relative,
    run_of,
)
from penstock.core.plan.save import slab_context
from penstock.core.types import ByteRange, Region, regions_of_range, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.format.records import ChunkRef, Frame, ObjectRecord, PartHead, ShardRecord
    from penstock.core.types import ObjectPath

ChainT = TypeVar("ChainT")


class ObjectRequest(NamedTuple):  # a frozen dataclass takes three times as long, for each object
    """A request to read an object into `sink`: all of it, or a region.

    Attributes:
        record: The object's record in one part.
        sink: Takes the bytes of the region, row-major; None: they are only verified.
        region: The region; None: the whole object.
        at: The place of the region's first byte in the sink.
        path: The object's path in messages; None: the path of `record`.
    """

    record: ObjectRecord
    sink: ByteSink | None
    region: Region | None = None
    at: int = 0
    path: ObjectPath | None = None


class ChunkUse(NamedTuple):  # as `ObjectRequest`
    """Bytes `[at, at + length)` of a chunk go to `sink` from `start` on, if there is a sink."""

    sink: ByteSink | None
    at: int
    start: int
    length: int


_UseOfShard: TypeAlias = "tuple[ObjectRecord, ShardRecord, ChunkRef, ChunkUse]"


@dataclass(eq=False, slots=True)
class FrameJob(Generic[ChainT]):
    """One frame to read. `plan_reads` fills it; nothing changes it afterwards.

    Attributes:
        frame: The frame.
        blob: Name of the blob that holds it.
        block_bytes: The bytes per checksum in raw frames of its part.
        chain: Decodes the frame; None for a raw frame.
        context: The context for the codecs; None for a raw frame.
        ranges: The ranges to fetch, relative to the frame's first byte: whole blocks of a raw
            frame, all of an encoded one. Ascending, not touching.
        uses: Where the chunk's bytes go.
        paths: The paths of the objects in the frame, one for each use.
        bases: The frames that it needs as bases, nearest first; each decodes with the next one.
    """

    frame: Frame
    blob: str
    block_bytes: int
    chain: ChainT | None
    context: CodecContext | None = None
    ranges: tuple[ByteRange, ...] = ()
    uses: list[ChunkUse] = field(default_factory=list)
    paths: list[ObjectPath] = field(default_factory=list)
    bases: tuple[FrameJob[ChainT], ...] = ()

    @property
    def links(self) -> tuple[FrameJob[ChainT], ...]:
        """All frames to read for the chunk: its own, then its bases."""
        return (self, *self.bases)

    @property
    def label(self) -> tuple[str, ...]:
        """Shown paths of the objects in the frame, for messages."""
        return tuple(dict.fromkeys(map(show_path, self.paths)))


def plan_reads(
    requests: Iterable[tuple[ObjectRequest, Sequence[ObjectRecord]]],
    chain_of: Callable[[PartHead, int], ChainT],
) -> tuple[tuple[FrameJob[ChainT], ...], int]:
    """Find the fewest whole blocks and frames that hold everything requested.

    Args:
        requests: Requests, each with the object's record in every part whose shards overlap the
            region. One object may be requested several times; its frames are read once.
        chain_of: Returns the decoder of a part's chain by its number; not called for raw frames.

    Returns:
        The frames to read, each once, sorted by part, blob and offset; and the number of needed
        bytes: the selected bytes of raw frames, and all stored bytes of encoded ones.

    Raises:
        FormatError: Two sections describe one frame differently, or the shards of an object do not
            hold each element of the region exactly once.
    """
    jobs: dict[tuple[int, int, int], FrameJob[ChainT]] = {}
    job: FrameJob[ChainT] | None = None
    head: PartHead | None = None
    for request, parts in requests:
        for record, shard, ref, use in chunk_uses(request, parts):
            frame = record.frames[ref.frame]
            if job is None or job.frame is not frame or head is not record.head:
                head = record.head  # nearly all uses are of the previous frame
                job = _job_of(frame, head, jobs, chain_of)
            job.uses.append(use)
            job.paths.append(request.path or record.path)
            # For a frame with one piece of an object, codecs get the dtype and shape that they got
            # for encoding. Frames of slabs get the context of a slab.
            if frame.chain and ref.at == 0 and ref.stop - ref.start == frame.raw_length:
                job.context = _context(record, shard, ref, frame)
    # In order of offsets, so that neighboring frames are read in one batch.
    ordered = tuple(jobs[key] for key in sorted(jobs))
    return ordered, sum(map(_complete, ordered))


def _job_of(
    frame: Frame,
    head: PartHead,
    jobs: dict[tuple[int, int, int], FrameJob[ChainT]],
    chain_of: Callable[[PartHead, int], ChainT],
) -> FrameJob[ChainT]:
    """Return the job of a frame, adding it to `jobs` if it is new."""
    key = head.rank, frame.blob, frame.offset
    job = jobs.get(key)
    if job is None:
        job, *bases = (_frame_job(link, head, chain_of) for link in frame.links())
        job.bases = tuple(bases)
        jobs[key] = job
    elif job.frame is not frame and job.frame != frame:
        where = f"frame at {frame.offset} of blob {frame.blob}, part {head.rank}"
        msg = f"{where}: two sections describe it differently"
        raise FormatError(msg, [where])
    return job


def _frame_job(
    frame: Frame, head: PartHead, chain_of: Callable[[PartHead, int], ChainT]
) -> FrameJob[ChainT]:
    chain = chain_of(head, frame.chain) if frame.chain else None
    return FrameJob(frame, head.blobs[frame.blob].name, head.block_bytes, chain)


def _complete(job: FrameJob[Any]) -> int:
    """Set the ranges that hold all uses of a frame; return the number of needed bytes."""
    frame = job.frame
    if frame.chain:  # an encoded frame decodes only as a whole
        context = job.context or slab_context(frame.raw_length, frame.elements)
        for link in job.links:
            # A frame and its base have the same place in the same object, so one context.
            link.context = context
            link.ranges = (ByteRange(0, link.frame.length),)
            link.paths = job.paths
        return sum(link.frame.length for link in job.links)
    used = merge_spans([(use.at, use.at + use.length) for use in job.uses])
    runs = blocks_covering(frame.offset, frame.length, job.block_bytes, used)
    job.ranges = tuple(blocks_span(frame.offset, frame.length, job.block_bytes, r) for r in runs)
    return sum(r.length for r in used)


def _context(record: ObjectRecord, shard: ShardRecord, ref: ChunkRef, frame: Frame) -> CodecContext:
    spec = record.spec
    return CodecContext(spec.dtype, spec.itemsize, shard.region.sizes, ref.start, frame.raw_length)


def chunk_uses(request: ObjectRequest, parts: Sequence[ObjectRecord]) -> Iterable[_UseOfShard]:
    """Return the uses of the chunks that hold the region of a request, each with its shard.

    A shard that several ranks have stored is read once.

    Args:
        request: The request, for an object that is neither tied nor derived.
        parts: The object's records in all parts, at least those whose shards overlap the region.

    Raises:
        FormatError: The shards do not hold each element of the region exactly once.
    """
    record, sink = request.record, request.sink
    stored = [(part, shard) for part in parts for shard in part.shards]
    if sink is None:
        return chain.from_iterable(_uses_of(part, shard, None, 0) for part, shard in stored)
    region = Region.whole(record.spec.shape) if request.region is None else request.region
    held = stored[0][1].region if len(stored) == 1 else None
    if held is region or held == region:  # nearly always, and mostly the same object
        return _uses_of(*stored[0], sink, request.at)
    distinct = {shard.region: (part, shard) for part, shard in stored}.values()
    meeting = [
        (part, shard, common)
        for part, shard in distinct
        if (common := common_region(shard.region, region)) is not None
    ]
    inside = [relative(common, region) for *_, common in meeting]
    chosen = one_copy(region.sizes, inside)  # there may be copies with different cuts
    if chosen is None:
        shown = show_path(record.path)
        msg = f"{shown} from {region.offsets} on: {flaw_of_cover(region.sizes, inside)}"
        raise FormatError(msg, [shown])
    request = request._replace(region=region)
    return chain.from_iterable(_uses_in(request, *meeting[number]) for number in chosen)


def _uses_in(
    request: ObjectRequest, record: ObjectRecord, shard: ShardRecord, common: Region
) -> Iterable[_UseOfShard]:
    """Return the uses that read the elements `common` of a shard."""
    _, sink, region, at, _ = request
    assert sink is not None
    assert region is not None
    itemsize = record.spec.itemsize
    inside = relative(common, shard.region)
    run = run_of(shard.region.sizes, inside, itemsize)
    place = run_of(region.sizes, relative(common, region), itemsize)
    if run is not None and place is not None:
        ranges = None if common == shard.region else [run]
        return _uses_of(record, shard, sink, at + place.start - run.start, ranges)
    gap = record.head.block_bytes - 1  # a gap up to this size contains no whole block
    runs = region_runs(shard.region.sizes, inside, itemsize, merge_gap_bytes=gap)
    scattered = RegionSink(sink, at, region, shard.region, itemsize)
    return _uses_of(record, shard, scattered, 0, runs)


def _uses_of(
    record: ObjectRecord,
    shard: ShardRecord,
    sink: ByteSink | None,
    base: int,
    wanted: Sequence[ByteRange] | None = None,
) -> Iterable[_UseOfShard]:
    """Return a use of each chunk of a shard, or of its ascending `wanted` bytes.

    `base` is the place of the shard's first byte in the sink; it may be negative.
    """
    if wanted is not None:
        return _uses_of_ranges(record, shard, sink, base, wanted)
    return [
        (record, shard, ref, ChunkUse(sink, ref.at, base + ref.start, ref.stop - ref.start))
        for ref in shard.chunks
    ]


def _uses_of_ranges(
    record: ObjectRecord,
    shard: ShardRecord,
    sink: ByteSink | None,
    base: int,
    wanted: Sequence[ByteRange],
) -> Iterator[_UseOfShard]:
    first = 0  # chunks and ranges both ascend, so earlier ranges are finished
    for ref in shard.chunks:
        while first < len(wanted) and wanted[first].stop <= ref.start:
            first += 1
        for number in range(first, len(wanted)):
            if wanted[number].start >= ref.stop:
                break
            start = max(ref.start, wanted[number].start)
            length = min(ref.stop, wanted[number].stop) - start
            use = ChunkUse(sink, ref.at + start - ref.start, base + start, length)
            yield record, shard, ref, use


class RegionSink(ByteSink):
    """Takes the bytes of a shard, and passes on those in a region of the same tensor."""

    __slots__ = (
        "_at",
        "_inner",
        "_itemsize",
        "_region",
        "_shard",
        "address",
        "device",
        "memory",
        "nbytes",
    )

    def __init__(
        self, inner: ByteSink, at: int, region: Region, shard: Region, itemsize: int
    ) -> None:
        """Make a sink for the bytes of `shard`; `region` goes to `inner`, at byte `at` of it."""
        self._inner = inner
        self._at = at
        self._region = relative(region, shard)
        self._shard = Region.whole(shard.sizes)
        self._itemsize = itemsize
        self.nbytes = shard.numel * itemsize
        self.device = inner.device
        self.address = None
        self.memory = inner.memory

    def view(self) -> memoryview | None:
        """Return None: no memory holds all bytes of the shard."""
        return None

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy the complete elements of `data` that are in the region."""
        size = self._itemsize
        first, stop = start // size, (start + data.nbytes) // size
        view = self._inner.view()
        for rectangle in regions_of_range(self._shard.sizes, first, stop):
            common = common_region(rectangle, self._region)
            if common is None:
                continue
            span = ByteRange(start, start + data.nbytes)
            if view is not None:
                self._copy(data, span, common, view[self._at :], self._region)
            else:
                self._hand_on(data, span, common)

    def _hand_on(self, data: memoryview, span: ByteRange, common: Region) -> None:
        """Pass `common` to a sink without a view of its memory, in as few runs as possible."""
        piece = memoryview(bytearray(common.numel * self._itemsize))
        self._copy(data, span, common, piece, common)
        done = 0
        for run in region_runs(self._region.sizes, relative(common, self._region), self._itemsize):
            self._inner.copy_in(self._at + run.start, piece[done : done + run.length])
            done += run.length

    def _copy(
        self, data: memoryview, span: ByteRange, common: Region, out: memoryview, held: Region
    ) -> None:
        copy_region(data, span, common, out, held, shape=self._shard.sizes, itemsize=self._itemsize)

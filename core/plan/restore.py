"""Plans a restore's reads: requested objects -> frames -> merged ranges of blocks. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from penstock.core.abc.codec import CodecContext
from penstock.core.errors import FormatError
from penstock.core.format.blocks import blocks_covering, blocks_span, merge_spans
from penstock.core.plan.save import slab_context
from penstock.core.types import ByteRange, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.abc.byte_sources import ByteSink
    from penstock.core.format.records import ChunkRef, Frame, ObjectRecord, PartHead, ShardRecord
    from penstock.core.types import ObjectPath, Region

ChainT = TypeVar("ChainT")


class Located(NamedTuple):  # a frozen dataclass takes three times as long, once for each object
    """An object as one part describes it, that part, and the frames that its chunks count in.

    Of an object that several ranks hold, this is one of several descriptions, alike but for their
    shards.
    """

    record: ObjectRecord
    part: int
    frames: Sequence[Frame]


class ObjectRequest(NamedTuple):  # as `Located`
    """A request to read an object into `sink`: all of it, or a region.

    Attributes:
        located: The object.
        sink: Takes the bytes of the region, row-major; None: they are only verified.
        region: The region; None: the whole object.
        at: Where the region's first byte goes in the sink.
        path: How messages name the object; None: by the path of the one that is read.
    """

    located: Located
    sink: ByteSink | None
    region: Region | None = None
    at: int = 0
    path: ObjectPath | None = None


class ShardRequest(NamedTuple):  # as `Located`
    """A request to read a shard, or `ranges` of its bytes.

    Attributes:
        located: The object that the shard belongs to, as the shard's part describes it.
        shard: The shard.
        sink: Takes the bytes; None: they are only verified.
        base: Where the shard's first byte goes in the sink, or would; it may be negative.
        ranges: The bytes of the shard that are wanted, ascending; None: all.
        path: As in `ObjectRequest`.
    """

    located: Located
    shard: ShardRecord
    sink: ByteSink | None
    base: int = 0
    ranges: Sequence[ByteRange] | None = None
    path: ObjectPath | None = None


class ChunkUse(NamedTuple):  # as `Located`
    """Bytes `[at, at + length)` of a chunk go to `sink` from `start` on, if there is a sink."""

    sink: ByteSink | None
    at: int
    start: int
    length: int


@dataclass(eq=False, slots=True)
class FrameJob(Generic[ChainT]):
    """One frame that has to be read. `plan_restore` fills it; nothing changes it afterwards.

    Attributes:
        frame: The frame.
        blob: Name of the blob that holds it.
        block_bytes: Distance of checksum cuts in raw frames of its part.
        chain: Decodes the frame; None for a raw frame.
        context: The context for the codecs; None for a raw frame.
        ranges: The ranges to fetch, relative to the frame's first byte: whole blocks of a raw
            frame, all of an encoded one. Ascending, not touching.
        uses: Where the chunk's bytes go.
        paths: The paths of the objects in the frame, one for each use.
        bases: The frames below it in its chain, the nearest first; each decodes with the next one
            as its base.
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
        """All frames that are read for the chunk: its own, then its bases."""
        return (self, *self.bases)

    @property
    def label(self) -> tuple[str, ...]:
        """Shown paths of the objects in the frame, for messages."""
        return tuple(dict.fromkeys(map(show_path, self.paths)))


def plan_restore(
    requests: Iterable[ShardRequest],
    *,
    head_of: Callable[[int], PartHead],
    chain_of: Callable[[int, int], ChainT],
) -> tuple[tuple[FrameJob[ChainT], ...], int]:
    """Find the fewest whole blocks and frames that hold everything that is requested.

    Args:
        requests: Shards; one may be requested several times, its frames are read once.
        head_of: Returns the head of a part, by its number.
        chain_of: Returns the decoder of chain `(part, number)`; not called for raw frames.

    Returns:
        The frames to read, by part, blob and offset, each once; and the selected bytes of raw
        frames and of whole encoded ones as stored.

    Raises:
        FormatError: Two sections describe one frame differently.
    """
    jobs: dict[tuple[int, int, int], FrameJob[ChainT]] = {}
    for request in requests:
        located, shard = request.located, request.shard
        record, part, frames = located
        for ref, start, stop in _overlaps(shard, request.ranges):
            number, at, begin, end = ref
            frame = frames[number]
            key = part, frame.blob, frame.offset
            job = jobs.get(key)
            if job is None:
                head = head_of(part)
                job, *bases = (
                    _frame_job(link, head, partial(chain_of, part)) for link in frame.links()
                )
                job.bases = tuple(bases)
                jobs[key] = job
            elif job.frame is not frame and job.frame != frame:
                where = f"frame at {frame.offset} of blob {frame.blob}, part {part}"
                msg = f"{where}: two sections describe it differently"
                raise FormatError(msg, [where])
            use = ChunkUse(request.sink, at + start - begin, request.base + start, stop - start)
            job.uses.append(use)
            job.paths.append(request.path or record.path)
            # A frame of one chunk: codecs get the dtype and shape that they got when it was
            # encoded. Frames of slabs get the context of a slab.
            if frame.chain and at == 0 and end - begin == frame.raw_length:
                job.context = _context(record, shard, ref, frame)
    # In order of offsets, so that neighbouring frames are read in one batch.
    ordered = tuple(jobs[key] for key in sorted(jobs))
    return ordered, sum(map(_complete, ordered))


def _frame_job(frame: Frame, head: PartHead, chain_of: Callable[[int], ChainT]) -> FrameJob[ChainT]:
    chain = chain_of(frame.chain) if frame.chain else None
    return FrameJob(frame, head.blobs[frame.blob].name, head.block_bytes, chain)


def _complete(job: FrameJob[Any]) -> int:
    """Set the ranges that hold all uses of a frame; return how many of their bytes are needed."""
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


def _overlaps(
    shard: ShardRecord, wanted: Sequence[ByteRange] | None
) -> Iterable[tuple[ChunkRef, int, int]]:
    """Return chunks and their wanted bytes, counted from the shard's start."""
    if wanted is None:
        return [(ref, ref.start, ref.stop) for ref in shard.chunks]
    return _overlaps_of(shard, wanted)


def _overlaps_of(
    shard: ShardRecord, wanted: Sequence[ByteRange]
) -> Iterator[tuple[ChunkRef, int, int]]:
    first = 0  # chunks and ranges both ascend, so ranges before this one are done with
    for ref in shard.chunks:
        while first < len(wanted) and wanted[first].stop <= ref.start:
            first += 1
        for number in range(first, len(wanted)):
            if wanted[number].start >= ref.stop:
                break
            yield ref, max(ref.start, wanted[number].start), min(ref.stop, wanted[number].stop)


def _context(record: ObjectRecord, shard: ShardRecord, ref: ChunkRef, frame: Frame) -> CodecContext:
    spec = record.spec
    return CodecContext(spec.dtype, spec.itemsize, shard.region.sizes, ref.start, frame.raw_length)

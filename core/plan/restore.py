"""Plans a restore's reads: requested objects -> frames -> merged ranges of blocks. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.abc.codec import CodecContext
from penstock.core.errors import FormatError
from penstock.core.format.blocks import blocks_covering, blocks_span, merge_ranges
from penstock.core.plan.regions import region_runs
from penstock.core.plan.save import slab_context
from penstock.core.types import ByteRange, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.abc.memory import ByteSink
    from penstock.core.format.records import ChunkRef, Frame, ObjectRecord, PartHead, ShardRecord
    from penstock.core.types import ObjectPath, Region

ChainT = TypeVar("ChainT")


@dataclass(frozen=True, slots=True)
class Located:
    """An object, the part that describes it, and the frames that its chunks count in."""

    record: ObjectRecord
    part: int
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A request to read an object into `sink`: all its bytes, or `ranges` of them.

    Without a sink the bytes are only verified. Messages name the object at `path`; None: the one
    that is read.
    """

    located: Located
    sink: ByteSink | None
    ranges: Sequence[ByteRange] | None = None
    path: ObjectPath | None = None


@dataclass(frozen=True, slots=True)
class ChunkUse:
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


@dataclass(frozen=True, slots=True)
class RestorePlan(Generic[ChainT]):
    """Frames to read, by part, blob and offset, each once.

    Attributes:
        jobs: The frames.
        bytes_needed: Selected bytes of raw frames, and whole stored frames of encoded ones.
    """

    jobs: tuple[FrameJob[ChainT], ...]
    bytes_needed: int


def plan_restore(
    requests: Sequence[ObjectRequest],
    *,
    heads: Mapping[int, PartHead],
    chain_of: Callable[[int, int], ChainT],
) -> RestorePlan[ChainT]:
    """Find the fewest whole blocks and frames that hold everything that is requested.

    Args:
        requests: Objects; one may be requested several times, its frames are read once.
        heads: Of the parts that describe them, by number.
        chain_of: Returns the decoder of chain `(part, number)`; not called for raw frames.

    Raises:
        FormatError: Two sections describe one frame differently, or the shards of an object do not
            make it whole in a way that this version can place.
    """
    jobs: dict[tuple[int, int, int], FrameJob[ChainT]] = {}
    for request in requests:
        located, sink = request.located, request.sink
        record, part = located.record, located.part
        for shard, base in _placed(record, sink):
            for ref, start, stop in _overlaps(shard, base, request.ranges):
                frame = located.frames[ref.frame]
                key = part, frame.blob, frame.offset
                job = jobs.get(key)
                if job is None:
                    job, *bases = (
                        _frame_job(link, heads[part], partial(chain_of, part))
                        for link in frame.links()
                    )
                    job.bases = tuple(bases)
                    jobs[key] = job
                elif job.frame is not frame and job.frame != frame:
                    where = f"frame at {frame.offset} of blob {frame.blob}, part {part}"
                    msg = f"{where}: two sections describe it differently"
                    raise FormatError(msg, [where])
                at = ref.at + start - ref.start
                job.uses.append(ChunkUse(sink, at, base + start, stop - start))
                job.paths.append(request.path or record.path)
                # A frame of one chunk: codecs get the dtype and shape that they got when it was
                # encoded. Frames of slabs get the context of a slab.
                if frame.chain and ref.at == 0 and ref.stop - ref.start == frame.raw_length:
                    job.context = _context(record, shard, ref, frame)
    # In order of offsets, so that neighbouring frames are read in one batch.
    ordered = tuple(jobs[key] for key in sorted(jobs))
    return RestorePlan(ordered, sum(map(_complete, ordered)))


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
    used = merge_ranges(ByteRange(u.at, u.at + u.length) for u in job.uses)
    runs = blocks_covering(frame.offset, frame.length, job.block_bytes, used)
    job.ranges = tuple(blocks_span(frame.offset, frame.length, job.block_bytes, r) for r in runs)
    return sum(r.length for r in used)


def _placed(record: ObjectRecord, sink: ByteSink | None) -> Sequence[tuple[ShardRecord, int]]:
    """Return the shards, each with the offset of its first byte in the object.

    A shard that several ranks hold counts once. A shard that is only verified may lie anywhere.

    Raises:
        FormatError: A shard is no run of the object's bytes, or together they do not fill it.
    """
    shards, shape = record.shards, record.spec.shape
    if sink is None or (len(shards) == 1 and shards[0].region.sizes == shape):
        return [(shard, 0) for shard in shards]
    placed: dict[Region, tuple[int, ShardRecord]] = {}
    for shard in shards:
        runs = region_runs(shape, shard.region, record.spec.itemsize)
        if len(runs) > 1:
            raise _unplaceable(record, f"its region {shard.region} is no run of its bytes")
        if runs:
            placed.setdefault(shard.region, (runs[0].start, shard))
    result = []
    end = 0
    for base, shard in sorted(placed.values(), key=lambda pair: pair[0]):
        if base != end:
            raise _unplaceable(record, f"its shards leave out or repeat byte {end}")
        end = base + sum(ref.stop - ref.start for ref in shard.chunks)
        result.append((shard, base))
    if end != record.spec.nbytes:
        raise _unplaceable(record, f"its shards end at byte {end} of {record.spec.nbytes}")
    return result


def _unplaceable(record: ObjectRecord, why: str) -> FormatError:
    shown = show_path(record.path)
    msg = (
        f"{shown} is stored in {len(record.shards)} shard(s), and this version cannot put it "
        f"together: {why}"
    )
    return FormatError(msg, [shown])


def _overlaps(
    shard: ShardRecord, base: int, wanted: Sequence[ByteRange] | None
) -> Iterator[tuple[ChunkRef, int, int]]:
    """Yield chunks and their wanted bytes; the ranges in `wanted` count from the object's start."""
    if wanted is None:
        for ref in shard.chunks:
            yield ref, ref.start, ref.stop
        return
    ranges = merge_ranges(ByteRange(max(r.start - base, 0), r.stop - base) for r in wanted)
    first = 0  # chunks and ranges both ascend, so ranges before this one are done with
    for ref in shard.chunks:
        while first < len(ranges) and ranges[first].stop <= ref.start:
            first += 1
        for number in range(first, len(ranges)):
            if ranges[number].start >= ref.stop:
                break
            yield ref, max(ref.start, ranges[number].start), min(ref.stop, ranges[number].stop)


def _context(record: ObjectRecord, shard: ShardRecord, ref: ChunkRef, frame: Frame) -> CodecContext:
    spec = record.spec
    return CodecContext(spec.dtype, spec.itemsize, shard.region.sizes, ref.start, frame.raw_length)

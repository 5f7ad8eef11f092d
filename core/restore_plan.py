"""The restore plan, sans-IO: wanted objects -> frames -> merged ranges of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.blocks import blocks_covering, blocks_span, merge_ranges
from penstock.core.errors import FormatError
from penstock.core.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.core.manifest import ChunkRef, Frame


@dataclass(frozen=True, slots=True)
class Wanted:
    """A shard, or parts of it, that shall be read.

    Attributes:
        part: Number of the part that describes it.
        frames: Frames of the section that describes it.
        chunks: Where the shard's bytes are, as in its `ShardRecord`.
        ranges: Bytes of the shard that are needed; None: all.
    """

    part: int
    frames: Sequence[Frame]
    chunks: Sequence[ChunkRef]
    ranges: Sequence[ByteRange] | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes `[at, at + length)` of a chunk are bytes from `start` on of wanted shard `wanted`."""

    wanted: int
    at: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class FrameRead:
    """One frame that has to be read.

    Attributes:
        part: Number of the part it belongs to.
        frame: The frame.
        blocks: What of it to fetch, relative to its first byte: whole blocks of a raw frame,
            all of an encoded one. Ascending, not touching.
        uses: Where the chunk's bytes go, ascending by shard.
    """

    part: int
    frame: Frame
    blocks: tuple[ByteRange, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Frames to read, by part, blob and offset, each once.

    Attributes:
        reads: See above.
        bytes_needed: Selected bytes of raw frames, and whole stored frames of encoded ones.
        bytes_to_read: Bytes of all blocks to fetch.
    """

    reads: tuple[FrameRead, ...]
    bytes_needed: int
    bytes_to_read: int


@dataclass(slots=True)
class _Draft:
    part: int
    frame: Frame
    uses: list[Use] = field(default_factory=list)


def plan_restore(wanted: Sequence[Wanted], *, block_bytes: Mapping[int, int]) -> RestorePlan:
    """Find the fewest whole blocks and frames that hold everything that is wanted.

    Args:
        wanted: Shards; one may be wanted several times, its frames are read once.
        block_bytes: By part number, as in the part's head.

    Raises:
        FormatError: Two sections describe one frame differently.
    """
    drafts: dict[tuple[int, int, int], _Draft] = {}
    for index, shard in enumerate(wanted):
        for ref, start, stop in _overlaps(shard):
            frame = shard.frames[ref.frame]
            draft = drafts.setdefault(
                (shard.part, frame.blob, frame.offset), _Draft(shard.part, frame)
            )
            if draft.frame is not frame and draft.frame != frame:
                where = f"frame at {frame.offset} of blob {frame.blob}, part {shard.part}"
                msg = f"{where}: two sections describe it differently"
                raise FormatError(msg, [where])
            draft.uses.append(Use(index, ref.at + start - ref.start, start, stop - start))
    reads: list[FrameRead] = []
    needed = to_read = 0
    for _, draft in sorted(drafts.items()):
        frame = draft.frame
        if frame.chain:
            blocks: tuple[ByteRange, ...] = (ByteRange(0, frame.length),)
            needed += frame.length
        else:
            unit = block_bytes[draft.part]
            used = merge_ranges(ByteRange(u.at, u.at + u.length) for u in draft.uses)
            runs = blocks_covering(frame.offset, frame.length, unit, used)
            blocks = tuple(blocks_span(frame.offset, frame.length, unit, r) for r in runs)
            needed += sum(r.length for r in used)
        to_read += sum(r.length for r in blocks)
        reads.append(FrameRead(draft.part, frame, blocks, tuple(draft.uses)))
    return RestorePlan(tuple(reads), needed, to_read)


def _overlaps(shard: Wanted) -> Iterator[tuple[ChunkRef, int, int]]:
    if shard.ranges is None:
        for ref in shard.chunks:
            yield ref, ref.start, ref.stop
        return
    ranges = merge_ranges(shard.ranges)
    first = 0
    for ref in shard.chunks:
        while first < len(ranges) and ranges[first].stop <= ref.start:
            first += 1
        for number in range(first, len(ranges)):
            if ranges[number].start >= ref.stop:
                break
            yield ref, max(ref.start, ranges[number].start), min(ref.stop, ranges[number].stop)

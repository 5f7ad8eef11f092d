"""The comparison of stored bytes: by checksums where these decide, else by reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.format.blocks import block_range, blocks_covering
from penstock.core.plan.restore import ObjectRequest
from penstock.core.restore.fill import BytesSink, fill
from penstock.core.types import PAGE_BYTES, ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.format.records import ChunkRef, Frame
    from penstock.core.plan.restore import Located
    from penstock.core.restore.contents import Contents
    from penstock.core.restore.fill import Opened
    from penstock.core.restore.stored_source import StoredReader
    from penstock.core.types import Region

PIECE_BYTES = 16 << 20
"""The bytes that are read at once of each side."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints, and the reader of its objects."""

    checkpoint: Opened
    reader: StoredReader

    @property
    def contents(self) -> Contents:
        """The manifest of the checkpoint."""
        return self.checkpoint.contents


@dataclass(frozen=True, slots=True)
class Pair:
    """An object of both checkpoints, with the same kind, dtype and shape; ties are resolved."""

    a: Located
    b: Located

    @property
    def nbytes(self) -> int:
        """The raw bytes of either object."""
        return self.a.record.spec.nbytes


def same_by_checksums(a: Contents, b: Contents, pair: Pair) -> bool | None:
    """Compare the bytes of a pair by stored checksums; return None where these do not decide."""
    if not pair.nbytes:
        return True
    if pair.a.record.derived is not None or pair.b.record.derived is not None:
        masters = Pair(a.master(pair.a), b.master(pair.b))
        # Equal masters round to equal elements. Of others nothing follows, and an object that is
        # its own master here has bytes of another length.
        same_kind = masters.a.record.spec == masters.b.record.spec
        return (same_kind and same_by_checksums(a, b, masters)) or None
    # Chunks of other bounds have checksums over other bytes, which cannot be compared.
    ones, others = _stored(a, pair.a), _stored(b, pair.b)
    if [one.place for one in ones] != [other.place for other in others]:
        return None
    answers = [_same_chunk(one, other) for one, other in zip(ones, others, strict=True)]
    if False in answers:
        return False
    return None if None in answers else True


def read_pairs(
    a: Side, b: Side, pairs: Sequence[Pair]
) -> Iterator[tuple[Pair, int, memoryview, memoryview]]:
    """Read both sides piece by piece, in whole elements; small objects are read many at once.

    Yields:
        The pair, the offset of the piece, and its bytes of either side, valid until the next piece.
    """
    # One read for each small object would be a request to the store for each.
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        if pair.nbytes > PIECE_BYTES // 4:
            yield from _read_large(a, b, pair)
            continue
        if size + pair.nbytes > PIECE_BYTES:
            yield from _read_small(a, b, batch)
            batch, size = [], 0
        batch.append(pair)
        size += pair.nbytes
    yield from _read_small(a, b, batch)


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Compare bytes in numpy, since `==` of memoryviews goes byte by byte."""
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A chunk of an object, its shard, its frame, and the size of the frame's blocks."""

    region: Region
    ref: ChunkRef
    frame: Frame
    block_bytes: int

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Where the chunk stands in the object."""
        return self.region.offsets, self.region.sizes, self.ref.start, self.ref.stop

    @property
    def alone(self) -> bool:
        """Whether the chunk fills its frame, so that the frame's checksum is the chunk's."""
        return self.ref.at == 0 and self.ref.stop - self.ref.start == self.frame.raw_length


def _stored(contents: Contents, located: Located) -> list[_Stored]:
    """Return the chunks of an object, in an order that does not depend on who saved it."""
    found = (
        _Stored(
            shard.region, ref, one.frames[ref.frame], contents.manifest.head(one.part).block_bytes
        )
        for one in contents.descriptions(located)
        for shard in one.record.shards
        for ref in shard.chunks
    )
    return sorted(found, key=lambda stored: stored.place)


def _same_chunk(one: _Stored, other: _Stored) -> bool | None:
    f, g = one.frame, other.frame
    if bool(f.chain) is not bool(g.chain) or one.ref.at != other.ref.at:
        return None
    if f.chain:
        if f.raw_length != g.raw_length:
            return None
        if f.raw_checksum == g.raw_checksum:
            return True
        # In a shared frame (a slab) the difference may be another object's.
        return False if one.alone and other.alone else None
    # Blocks are cut at offsets in the file: frames of another phase have other blocks.
    if one.block_bytes != other.block_bytes or f.offset % PAGE_BYTES != g.offset % PAGE_BYTES:
        return None
    return _same_blocks(one, other)


def _same_blocks(one: _Stored, other: _Stored) -> bool | None:
    """Compare the blocks of raw frames that hold the chunk.

    Blocks that differ decide only where they hold bytes of this object alone: in a shared block
    the difference may be another object's.
    """
    inside = ByteRange(one.ref.at, one.ref.at + one.ref.stop - one.ref.start)
    answer: bool | None = True
    for run in blocks_covering(one.frame.offset, one.frame.length, one.block_bytes, [inside]):
        for number in run:
            spans = [
                block_range(s.frame.offset, s.frame.length, s.block_bytes, number)
                for s in (one, other)
            ]
            if spans[0] != spans[1]:
                answer = None
            elif one.frame.checksums[number] != other.frame.checksums[number]:
                if inside.start <= spans[0].start and spans[0].stop <= inside.stop:
                    return False
                answer = None
    return answer


def _read_large(a: Side, b: Side, pair: Pair) -> Iterator[tuple[Pair, int, memoryview, memoryview]]:
    itemsize = pair.a.record.spec.itemsize
    step = max(itemsize, PIECE_BYTES - PIECE_BYTES % itemsize)
    one, other = memoryview(bytearray(step)), memoryview(bytearray(step))
    for start in range(0, pair.nbytes, step):
        length = min(step, pair.nbytes - start)
        a.reader.read(pair.a, start, one[:length])
        b.reader.read(pair.b, start, other[:length])
        yield pair, start, one[:length], other[:length]


def _read_small(
    a: Side, b: Side, pairs: Sequence[Pair]
) -> Iterator[tuple[Pair, int, memoryview, memoryview]]:
    ones = [BytesSink(pair.nbytes) for pair in pairs]
    others = [BytesSink(pair.nbytes) for pair in pairs]
    requests = [ObjectRequest(p.a, s) for p, s in zip(pairs, ones, strict=True)]
    fill(a.checkpoint, requests)
    requests = [ObjectRequest(p.b, s) for p, s in zip(pairs, others, strict=True)]
    fill(b.checkpoint, requests)
    for pair, one, other in zip(pairs, ones, others, strict=True):
        yield pair, 0, memoryview(one.data), memoryview(other.data)

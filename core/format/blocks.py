"""Computes the blocks of a raw frame, the units of its checksums. Sans-IO.

Blocks are cut where the file offset, counted from the page in which the frame begins, is a multiple
of `block_bytes`. So blocks begin at pages of the file, as direct I/O requires, and the first and
the last block of a frame may be shorter than the others.

Tested in `tests/core/plan/test_save.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.types import PAGE_BYTES, ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def block_count(offset: int, length: int, block_bytes: int) -> int:
    """Return the number of blocks of a raw frame of `length` bytes at `offset` of its blob."""
    return -(-(offset % PAGE_BYTES + length) // block_bytes) if length else 0


def block_range(offset: int, length: int, block_bytes: int, number: int) -> ByteRange:
    """Return the range of block `number`, relative to the frame's first byte."""
    phase = offset % PAGE_BYTES
    start = max(0, number * block_bytes - phase)
    return ByteRange(start, min(length, (number + 1) * block_bytes - phase))


def frame_blocks(offset: int, length: int, block_bytes: int) -> list[ByteRange]:
    """Return all blocks of a raw frame, relative to its first byte: ascending, without gaps."""
    count = block_count(offset, length, block_bytes)
    return [block_range(offset, length, block_bytes, number) for number in range(count)]


def blocks_covering(
    offset: int, length: int, block_bytes: int, ranges: Iterable[ByteRange]
) -> list[range]:
    """Return the numbers of the blocks that hold `ranges`, as runs that ascend and do not touch.

    Args:
        offset: Offset of the frame in its blob.
        length: Length of the frame.
        block_bytes: Distance between two cuts.
        ranges: Ranges within the frame, relative to its first byte; none is empty, and they ascend
            like those of `merge_spans`.
    """
    phase = offset % PAGE_BYTES
    runs: list[range] = []
    for span in ranges:
        if span.start < 0 or span.stop > length:
            msg = f"range {span.start}-{span.stop} is outside of a frame of {length} bytes"
            raise ValueError(msg)
        first = (phase + span.start) // block_bytes
        stop = (phase + span.stop - 1) // block_bytes + 1
        if runs and first <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, stop)
        else:
            runs.append(range(first, stop))
    return runs


def blocks_span(offset: int, length: int, block_bytes: int, blocks: range) -> ByteRange:
    """Return the range of a run of blocks, relative to the frame's first byte."""
    first = block_range(offset, length, block_bytes, blocks.start)
    last = block_range(offset, length, block_bytes, blocks.stop - 1)
    return ByteRange(first.start, last.stop)


def merge_spans(spans: Iterable[tuple[int, int]]) -> Sequence[ByteRange]:
    """Merge `(start, stop)` pairs into ascending ranges that do not touch; drop empty ones."""
    merged: list[ByteRange] = []
    begin = end = -1
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if start > end:
            if end >= 0:
                merged.append(ByteRange(begin, end))
            begin, end = start, stop
        elif stop > end:
            end = stop
    if end >= 0:
        merged.append(ByteRange(begin, end))
    return merged

"""What the bytes of a blob have to be, compared as they pass. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from penstock.core.pipeline.chain import checksum_blocks
from penstock.core.types import ByteRange

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Checks:
    """Checksums of ranges of one blob, ascending and apart; what lies between is padding.

    Attributes:
        starts: Where each range begins in the blob.
        lengths: Bytes of each.
        sums: xxh3-64 of each.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CheckedBlob:
    """A blob, and what its bytes have to be."""

    name: str
    length: int
    checks: Checks


class Cursor:
    """Goes through a blob's bytes in order, and says which checksums to compare with what."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._next = 0
        self._open: xxhash.xxh3_64 | None = None  # of the range that is not complete yet

    def take(
        self, offset: int, data: memoryview
    ) -> tuple[list[ByteRange], list[int], list[ByteRange]]:
        """Go on with `data`, the bytes from `offset` on.

        Returns:
            Ranges of `data` that can be compared on their own, their checksums, and those ranges
            of the blob that end here, began earlier, and do not match.
        """
        stop = offset + data.nbytes
        whole: list[ByteRange] = []
        sums: list[int] = []
        wrong: list[ByteRange] = []
        while self._next < len(self._checks.starts):
            start = int(self._checks.starts[self._next])
            end = start + int(self._checks.lengths[self._next])
            if start >= stop:
                break
            expected = int(self._checks.sums[self._next])
            if start >= offset and end <= stop:
                whole.append(ByteRange(start - offset, end - offset))
                sums.append(expected)
            else:
                self._open = self._open or xxhash.xxh3_64()
                self._open.update(data[max(start - offset, 0) : min(end, stop) - offset])
                if end > stop:
                    break
                if self._open.intdigest() != expected:
                    wrong.append(ByteRange(start, end))
                self._open = None
            self._next += 1
        return whole, sums, wrong


def compare(
    data: memoryview, offset: int, ranges: list[ByteRange], sums: list[int]
) -> list[ByteRange]:
    """Which of `ranges` of `data` are not what they should be, as ranges of the blob."""
    found = zip(ranges, checksum_blocks(data, ranges), sums, strict=True)
    return [ByteRange(r.start + offset, r.stop + offset) for r, got, want in found if got != want]

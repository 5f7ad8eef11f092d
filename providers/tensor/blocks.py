"""Blocks of a row-major array: a range of its elements, cut so that plain indexing reaches it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Index: TypeAlias = "tuple[int | slice, ...]"


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Index, int]]:
    """Cut elements `[start, stop)` of an array of `shape`, counted row-major.

    Yields `(index, position)`: the elements of `array[index]` stand at `position` of the range.
    For any shape these are at most two blocks per dimension and one more.
    """
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield (), 0
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        begin = last * row
        for index, position in blocks(inner, start - begin, stop - begin):
            yield (last, *index), position
        return
    if start % row:
        begin = (first - 1) * row
        for index, position in blocks(inner, start - begin, row):
            yield (first - 1, *index), position
    if first < last:
        yield (slice(first, last),), first * row - start
    if stop % row:
        for index, position in blocks(inner, 0, stop - last * row):
            yield (last, *index), last * row - start + position


def may_overlap(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Return whether two elements of `width` may share memory; False is always right.

    `strides` and `width` are in the same unit.
    """
    # By stride, the smallest first: elements are apart if each stride exceeds the reach of all
    # smaller dimensions. An exact answer takes far more, and a wrong yes only scratch memory.
    reach = width - 1
    dims = zip(strides, shape, strict=True)
    for stride, size in sorted((abs(st), n) for st, n in dims if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False

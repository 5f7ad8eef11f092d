"""Finds the bytes of a rectangle in the row-major bytes of a tensor, and copies them. Sans-IO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.types import ByteRange, Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True, slots=True)
class RegionBatch:
    """A piece of a region whose bytes all lie within `cover`."""

    region: Region
    cover: ByteRange


def region_runs(
    shape: Sequence[int], region: Region, itemsize: int, *, merge_gap_bytes: int = 0
) -> list[ByteRange]:
    """Return the contiguous runs of bytes that hold `region` of a tensor of `shape`, ascending.

    Args:
        shape: Shape of the tensor; `region` lies within it.
        region: The region that is wanted.
        itemsize: Bytes per element.
        merge_gap_bytes: Runs are joined across gaps of at most so many bytes. A gap below the block
            size never makes a reader fetch one more block.
    """
    if not region.numel:
        return []
    strides = _strides(shape, itemsize)
    inner = len(shape)  # dimensions from here on are whole, so they are one run
    while inner and region.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    length = region.sizes[outer] * strides[outer] if shape else itemsize
    first = sum(o * s for o, s in zip(region.offsets, strides, strict=True))
    starts: NDArray[np.int64] = np.array([first], dtype=np.int64)
    for size, stride in zip(region.sizes[:outer], strides[:outer], strict=True):
        steps = np.arange(size, dtype=np.int64) * stride
        starts = (starts[:, None] + steps).reshape(-1)
    breaks = np.flatnonzero(np.diff(starts) - length > merge_gap_bytes)
    begins = starts[np.concatenate(([0], breaks + 1))].tolist()
    ends = (starts[np.concatenate((breaks, [len(starts) - 1]))] + length).tolist()
    return [ByteRange(begin, end) for begin, end in zip(begins, ends, strict=True)]


def region_batches(
    shape: Sequence[int], region: Region, itemsize: int, limit_bytes: int
) -> Iterator[RegionBatch]:
    """Cut `region` into pieces that each span at most `limit_bytes` of the tensor's bytes.

    So a region of any size and shape is read in bounded memory, in ascending order. A single
    element may be larger than the limit.
    """
    if not region.numel:
        return
    strides = _strides(shape, itemsize)
    yield from _batches(region, strides, itemsize, limit_bytes)


def copy_region(
    source: memoryview,
    cover: ByteRange,
    batch: Region,
    out: memoryview,
    region: Region,
    *,
    shape: Sequence[int],
    itemsize: int,
) -> None:
    """Copy a piece of a region out of the tensor's bytes into the region's own bytes.

    Args:
        source: Bytes `cover` of the tensor; those outside of `batch` may be anything.
        cover: The range of the tensor's bytes that `source` holds.
        batch: The piece to copy, within `region`.
        out: All bytes of `region`, row-major; only those of `batch` are written.
        region: The region that `out` holds.
        shape: Shape of the tensor.
        itemsize: Bytes per element.
    """
    if not batch.numel:
        return
    offsets = tuple(b - r for b, r in zip(batch.offsets, region.offsets, strict=True))
    origin = _view(source, shape, batch, itemsize, shift=-cover.start)
    target = _view(out, region.sizes, Region(offsets, batch.sizes), itemsize, shift=0)
    np.copyto(target, origin)


def _view(
    buffer: memoryview, shape: Sequence[int], region: Region, itemsize: int, *, shift: int
) -> NDArray[np.void]:
    strides = _strides(shape, itemsize)
    start = shift + sum(o * s for o, s in zip(region.offsets, strides, strict=True))
    if itemsize in _UNSIGNED:
        return np.ndarray(region.sizes, _UNSIGNED[itemsize], buffer, start, tuple(strides))
    return np.ndarray((*region.sizes, itemsize), "u1", buffer, start, (*strides, 1))


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    return [itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _batches(
    region: Region, strides: Sequence[int], itemsize: int, limit_bytes: int
) -> Iterator[RegionBatch]:
    start = sum(o * s for o, s in zip(region.offsets, strides, strict=True))
    spans = [(n - 1) * s for n, s in zip(region.sizes, strides, strict=True)]
    length = sum(spans) + itemsize
    cut = next((d for d, n in enumerate(region.sizes) if n > 1), None)
    if length <= limit_bytes or cut is None:
        yield RegionBatch(region, ByteRange(start, start + length))
        return
    rows = max(1, 1 + (limit_bytes - (length - spans[cut])) // strides[cut])
    first = region.offsets[cut]
    stop = first + region.sizes[cut]
    for at in range(first, stop, rows):
        piece = Region(
            (*region.offsets[:cut], at, *region.offsets[cut + 1 :]),
            (*region.sizes[:cut], min(rows, stop - at), *region.sizes[cut + 1 :]),
        )
        yield from _batches(piece, strides, itemsize, limit_bytes)

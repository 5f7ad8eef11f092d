"""Finds the bytes of a rectangle in the row-major bytes of a tensor, and copies them. Sans-IO."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.types import ByteRange, Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def common_region(one: Region, other: Region) -> Region | None:
    """Return the elements that two regions of a tensor have in common; None if there are none."""
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = map(min, _stops(one), _stops(other))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Region(starts, sizes) if all(size > 0 for size in sizes) else None


def _stops(region: Region) -> Iterator[int]:
    return (o + n for o, n in zip(region.offsets, region.sizes, strict=True))


def relative(region: Region, origin: Region) -> Region:
    """Return `region` with offsets that count from those of `origin`."""
    offsets = tuple(o - p for o, p in zip(region.offsets, origin.offsets, strict=True))
    return Region(offsets, region.sizes)


def flaw_of_cover(shape: Sequence[int], regions: Iterable[Region]) -> str | None:
    """Return how `regions` fail to cover a tensor of `shape` once each, as a clause; None: not.

    A region may stand there several times: replicas.
    """
    distinct = list(dict.fromkeys(region for region in regions if region.numel))
    if distinct == [Region.whole(shape)] or (not distinct and not math.prod(shape)):
        return None
    # A grid of all edges: each cell is within a region as a whole, or not at all.
    edges = [
        np.unique([0, size, *(e for r in distinct for e in _ends(r, d))]).tolist()
        for d, size in enumerate(shape)
    ]
    places = [{edge: n for n, edge in enumerate(row)} for row in edges]
    counts = np.zeros([len(row) - 1 for row in edges], np.uint32)
    for region in distinct:
        cells = (slice(*map(p.__getitem__, _ends(region, d))) for d, p in enumerate(places))
        counts[tuple(cells)] += 1
    for wrong, what in ((counts == 0, "no shard has"), (counts > 1, "several shards have")):
        if wrong.any():
            cell = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            spans = [(row[n], row[n + 1]) for row, n in zip(edges, cell, strict=True)]
            return f"{what} elements [{', '.join(f'{a}:{b}' for a, b in spans)}]"
    return None


def _ends(region: Region, dimension: int) -> tuple[int, int]:
    start = region.offsets[dimension]
    return start, start + region.sizes[dimension]


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


def run_of(shape: Sequence[int], region: Region, itemsize: int) -> ByteRange | None:
    """Return the bytes of `region` of a tensor of `shape` if they are one run, else None."""
    cut = len(shape)
    while cut and region.sizes[cut - 1] == shape[cut - 1]:
        cut -= 1
    if any(size != 1 for size in region.sizes[: max(cut - 1, 0)]):
        return None
    strides = _strides(shape, itemsize)
    start = sum(o * s for o, s in zip(region.offsets, strides, strict=True))
    return ByteRange(start, start + region.numel * itemsize)


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

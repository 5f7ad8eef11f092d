"""Finds the bytes of a rectangle in the row-major bytes of a tensor, and copies them. Sans-IO."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.types import ByteRange, Region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

_MAX_TRIES = 10_000
_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def common_region(one: Region, other: Region) -> Region | None:
    """Return the elements that two regions of a tensor have in common; None if there are none."""
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = map(min, _stops(one), _stops(other))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Region(starts, sizes) if all(size > 0 for size in sizes) else None


def _stops(region: Region) -> Iterator[int]:
    return (o + n for o, n in zip(region.offsets, region.sizes, strict=True))


def are_disjoint(regions: Sequence[Region]) -> bool:
    """Return whether no two of `regions`, none of them empty, have an element in common.

    Regions that one dimension tells apart, as ranks cut nearly all tensors, take a sort. Each other
    one is compared with those that begin within it along the dimension with the most cuts.
    """
    if len(regions) <= 1:  # nearly all that is read
        return True
    cut = max(range(len(regions[0].sizes)), key=lambda d: len({r.offsets[d] for r in regions}))
    ordered = sorted(regions, key=lambda region: region.offsets[cut])
    if all(_ends(one, cut)[1] <= other.offsets[cut] for one, other in pairwise(ordered)):
        return True
    starts = np.array([region.offsets for region in ordered], np.int64)
    stops = starts + np.array([region.sizes for region in ordered], np.int64)
    for number, behind in enumerate(np.searchsorted(starts[:, cut], stops[:, cut]).tolist()):
        others = slice(number + 1, behind)
        meets = (starts[others] < stops[number]) & (stops[others] > starts[number])
        if meets.all(axis=1).any():
            return False
    return True


def relative(region: Region, origin: Region) -> Region:
    """Return `region` with offsets that count from those of `origin`."""
    offsets = tuple(o - p for o, p in zip(region.offsets, origin.offsets, strict=True))
    return Region(offsets, region.sizes)


def flaw_of_cover(shape: Sequence[int], regions: Iterable[Region]) -> str | None:
    """Return how `regions` fail to hold a tensor of `shape`, as a clause; None if they do not.

    They may hold copies of it, which need not be cut alike: each region has to be of a copy that
    holds each element once.
    """
    distinct = list(dict.fromkeys(region for region in regions if region.numel))
    if distinct == [Region.whole(shape)] or (not distinct and not math.prod(shape)):
        return None
    grid = _Grid(shape, distinct)
    counts = grid.counts()
    wrong = counts == 0
    if wrong.any():
        return f"no shard has elements {grid.shown(wrong)}"
    if (counts == 1).all():
        return None
    copied = set(grid.copy_with(None, ()) or ())
    for number, region in enumerate(distinct):
        if number not in copied:
            found = grid.copy_with(number, copied)
            if found is None:
                inside = np.zeros_like(wrong)
                inside[grid.cells(region)] = True
                return f"several shards have elements {grid.shown((counts > 1) & inside)}"
            copied |= set(found)
    return None


def one_copy(shape: Sequence[int], regions: Sequence[Region]) -> list[int] | None:
    """Return which of `regions` hold each element of a tensor of `shape` once; None: none do."""
    return _Grid(shape, regions).copy_with(None, ()) if math.prod(shape) else []


class _Grid:
    """All edges of some regions: each cell is within a region as a whole, or not at all."""

    def __init__(self, shape: Sequence[int], regions: Sequence[Region]) -> None:
        self._regions = regions
        self._edges = [
            np.unique([0, size, *(e for r in regions for e in _ends(r, d))]).tolist()
            for d, size in enumerate(shape)
        ]
        self._places = [{edge: n for n, edge in enumerate(row)} for row in self._edges]
        self._sizes = [len(row) - 1 for row in self._edges]

    def cells(self, region: Region) -> tuple[slice, ...]:
        """Return the cells of a region."""
        pairs = (map(place.__getitem__, _ends(region, d)) for d, place in enumerate(self._places))
        return tuple(slice(*pair) for pair in pairs)

    def counts(self) -> NDArray[np.uint32]:
        """Return how many regions have each cell."""
        counts = np.zeros(self._sizes, np.uint32)
        for region in self._regions:
            counts[self.cells(region)] += 1
        return counts

    def shown(self, cells: NDArray[np.bool_]) -> str:
        """Return the first of some cells in words: "[0:2, 4:8]"."""
        first = np.unravel_index(int(np.argmax(cells)), cells.shape)
        spans = [(row[n], row[n + 1]) for row, n in zip(self._edges, first, strict=True)]
        return f"[{', '.join(f'{a}:{b}' for a, b in spans)}]"

    def copy_with(self, first: int | None, known: Collection[int]) -> list[int] | None:
        """Return regions that have each cell once, `first` among them; None if none are found.

        Whatever has the first cell that is still free begins there, so few regions come into
        question, those that are not `known` first, and the largest; after `_MAX_TRIES` steps that
        led nowhere the search ends.
        """
        starts: dict[tuple[int, ...], list[int]] = {}
        every = range(len(self._regions))
        order = sorted(every, key=lambda n: (n not in known, self._regions[n].numel))
        for number in order:
            if self._regions[number].numel:
                starts.setdefault(self._regions[number].offsets, []).append(number)
        taken = np.zeros(self._sizes, np.bool_)
        chosen: list[int] = []
        if first is not None:
            taken[self.cells(self._regions[first])] = True
        trials = [list(starts.get(self._corner(taken), ()))]
        for _ in range(_MAX_TRIES + 2 * len(self._regions)):
            if taken.all():
                return chosen if first is None else [first, *chosen]
            if not trials:
                return None
            if not trials[-1]:  # a dead end
                trials.pop()
                if chosen:
                    taken[self.cells(self._regions[chosen.pop()])] = False
                continue
            number = trials[-1].pop()
            cells = self.cells(self._regions[number])
            if not taken[cells].any():
                taken[cells] = True
                chosen.append(number)
                trials.append(list(starts.get(self._corner(taken), ())))
        return None

    def _corner(self, taken: NDArray[np.bool_]) -> tuple[int, ...]:
        """Return the offsets of the first cell that is free."""
        first = np.unravel_index(int(np.argmin(taken)), taken.shape)
        return tuple(row[n] for row, n in zip(self._edges, first, strict=True))


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

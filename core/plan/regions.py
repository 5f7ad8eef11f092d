"""Finds the bytes of a rectangle in the row-major bytes of a tensor, and copies them. Sans-IO.

Tested in `tests/core/plan/test_reads.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.types import ByteRange, Region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

_PRIME = 2**61 - 1
_random = Random()  # noqa: S311 - not the global one: its state is part of what users save

# The most regions that a search for copies checks, so that it ends after a second or two. The bound
# is lower for few regions and dimensions, since a manifest may list many tensors with a few each.
# Each step counts as 1,024 checks, since it takes at least as long.
_MAX_CHECKS = 1 << 27
_CHECKS_FOR_EACH = 1 << 15
_CHECKS_PER_STEP = 1 << 10

_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def common_region(region: Region, other: Region) -> Region | None:
    """Return the elements that two regions of a tensor have in common; None if there are none."""
    starts, sizes = [], []
    # Dimension by dimension: most pairs of shards do not overlap in the first one.
    for start, size, other_start, other_size in zip(
        region.offsets, region.sizes, other.offsets, other.sizes, strict=True
    ):
        first = max(start, other_start)
        count = min(start + size, other_start + other_size) - first
        if count <= 0:
            return None
        starts.append(first)
        sizes.append(count)
    return Region(tuple(starts), tuple(sizes))


def is_partition(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Return whether `regions` hold each element of a tensor of `shape` exactly once.

    Compares the sum of the weights of the elements in all regions with that of the whole tensor.
    The weight of an element is the product of one random number per coordinate, modulo a prime, so
    the sum over a region is a product of one difference per dimension. Comparing each pair of
    regions would take quadratic time, and a map of the elements unbounded memory.

    A partition always passes. Other regions pass with a probability below `len(shape) / 2**60`
    (Schwartz-Zippel lemma). For comparison: a wrong chunk passes its checksum with probability
    `1 / 2**64`.
    """
    whole = Region.whole(tuple(shape))
    if len(regions) == 1 and regions[0] == whole:  # nearly every read
        return True
    # By dimension: the sum of the random numbers of all coordinates below an edge.
    sums = [defaultdict[int, int](lambda: _random.getrandbits(61)) for _ in shape]

    def weight(region: Region) -> int:
        product = 1
        for row, start, size in zip(sums, region.offsets, region.sizes, strict=True):
            product *= row[start + size] - row[start]
        return product

    return (weight(whole) - sum(map(weight, regions))) % _PRIME == 0


def relative(region: Region, origin: Region) -> Region:
    """Return `region` with offsets relative to those of `origin`."""
    offsets = tuple(o - p for o, p in zip(region.offsets, origin.offsets, strict=True))
    return Region(offsets, region.sizes)


def flaw_of_cover(shape: Sequence[int], regions: Iterable[Region]) -> str | None:
    """Return how `regions` fail to cover a tensor of `shape`, as a clause; None if they cover it.

    The regions may hold several copies, cut differently. Each region must belong to a copy that has
    each element exactly once.
    """
    distinct = list(dict.fromkeys(region for region in regions if region.numel))
    if is_partition(shape, distinct):
        return None
    try:
        return _Search(shape, distinct).flaw()
    except _TooLongError:
        return f"its {len(distinct)} shards overlap in too many ways to tell copies of it apart"


def one_copy(shape: Sequence[int], regions: Sequence[Region]) -> list[int] | None:
    """Return the numbers of regions that hold each element of a tensor exactly once, or None."""
    if is_partition(shape, regions):
        return list(range(len(regions)))
    try:
        return _Search(shape, regions).copy_with(None, ())
    except _TooLongError:
        return None


class _TooLongError(Exception):
    """A search has reached its limit of regions."""


class _Search:
    """A search for copies among overlapping regions, bounded in time and memory.

    All known algorithms to find a copy, or an element that no region has, take exponential time in
    the worst case, and a forged manifest can list any regions.
    """

    def __init__(self, shape: Sequence[int], regions: Sequence[Region]) -> None:
        self._shape = tuple(shape)
        self._regions = regions
        size = len(regions), len(self._shape)
        self._starts = np.array([r.offsets for r in regions], np.int64).reshape(size)
        sizes = np.array([r.sizes for r in regions], np.int64).reshape(size)
        self._stops = self._starts + sizes
        self._checks_left = min(_MAX_CHECKS, _CHECKS_FOR_EACH * (sum(size) + 1))

    def flaw(self) -> str | None:
        """Return why non-empty regions do not form complete copies, as a clause, or None."""
        copied = set(self.copy_with(None, ()) or ())
        if not copied:
            hole = self._free(np.arange(len(self._regions)), (0,) * len(self._shape))
            if hole is not None:
                return f"no shard has elements {self._shown(hole)}"
        for number, region in enumerate(self._regions):
            if number in copied:
                continue
            copy = self.copy_with(number, copied)
            if copy is None:
                common = (common_region(region, r) for r in self._regions if r is not region)
                twice = min((c.offsets for c in common if c is not None), default=None)
                if twice is None:
                    return (
                        f"the shard with elements {self._shown(region.offsets)} "
                        "is in no complete copy"
                    )
                return f"several shards have elements {self._shown(twice)}"
            copied |= set(copy)
        return None

    def copy_with(self, first: int | None, known: Collection[int]) -> list[int] | None:
        """Return regions, including `first`, that have each element exactly once, or None.

        Some region must begin at the first free element, so there are few candidates. Tries those
        not in `known` first, the largest first.

        Raises:
            _TooLongError: All searches together take too long.
        """
        starts: dict[tuple[int, ...] | None, list[int]] = {}
        every = range(len(self._regions))
        for number in sorted(every, key=lambda n: (n not in known, self._regions[n].numel)):
            if self._regions[number].numel:
                starts.setdefault(self._regions[number].offsets, []).append(number)
        is_used = np.zeros(len(self._regions), np.bool_)
        if first is not None:
            is_used[first] = True
        free = self._free(np.flatnonzero(is_used), (0,) * len(self._shape))
        chosen: list[int] = []
        trials = [list(starts.get(free, ()))]
        while trials:
            if free is None:
                return [int(number) for number in np.flatnonzero(is_used)]
            if not trials[-1]:  # a dead end
                trials.pop()
                if chosen:
                    is_used[chosen.pop()] = False
                continue
            number = trials[-1].pop()
            self._count(len(is_used) // 16)  # one pass over booleans
            start, stop = self._starts[number], self._stops[number]
            # All elements before this region are used, so regions that end before it do not matter.
            near = np.flatnonzero(is_used & (self._stops[:, :1] > start[:1]).all(axis=1))
            if not ((self._starts[near] < stop) & (self._stops[near] > start)).all(axis=1).any():
                is_used[number] = True
                chosen.append(number)
                free = self._free(np.append(near, number), self._regions[number].offsets)
                trials.append(list(starts.get(free, ())))
        return None

    def _free(self, numbers: NDArray[np.intp], start: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the first element from `start` on that none of the regions has.

        Args:
            numbers: The regions; along all dimensions before those of `start`, they contain the
                place where the search is.
            start: Where to begin along the last `len(start)` dimensions.
        """
        if not start:
            return None if len(numbers) else ()
        dimension = len(self._shape) - len(start)
        starts, stops = self._starts[numbers, dimension], self._stops[numbers, dimension]
        place, rest = start[0], start[1:]
        while place < self._shape[dimension]:
            self._count(len(numbers))
            here = (starts <= place) & (stops > place)
            inner = self._free(numbers[here], rest)
            if inner is not None:
                return place, *inner
            place = int(stops[here].min() if rest else stops[here].max())
            rest = (0,) * len(rest)
        return None

    def _shown(self, start: tuple[int, ...]) -> str:
        """Return the elements from `start` to the next edges of regions as text: "[0:2, 4:8]"."""
        edges = np.concatenate((self._starts, self._stops)).T
        spans = (
            f"{at}:{row[row > at].min(initial=size)}"
            for at, size, row in zip(start, self._shape, edges, strict=True)
        )
        return f"[{', '.join(spans)}]"

    def _count(self, checks: int) -> None:
        self._checks_left -= _CHECKS_PER_STEP + checks
        if self._checks_left < 0:
            raise _TooLongError


def region_runs(
    shape: Sequence[int], region: Region, itemsize: int, *, merge_gap_bytes: int = 0
) -> list[ByteRange]:
    """Return the contiguous runs of bytes that hold `region` of a tensor of `shape`, ascending.

    Args:
        shape: Shape of the tensor, which contains `region`.
        region: The region.
        itemsize: Bytes per element.
        merge_gap_bytes: The largest gap across which runs are joined. A gap below the block size
            never makes a reader fetch another block.
    """
    if not region.numel:
        return []
    strides = _strides(shape, itemsize)
    inner = len(shape)  # later dimensions are whole, so they are one run
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
    """Copy a piece of a region from the tensor's bytes into the region's own bytes.

    Args:
        source: Bytes `cover` of the tensor; those outside `batch` may be anything.
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

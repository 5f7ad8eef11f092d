"""Splits requests for regions of objects into requests for the shards that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import ByteSink
from penstock.core.errors import FormatError
from penstock.core.plan.regions import (
    common_region,
    copy_region,
    flaw_of_cover,
    one_copy,
    region_runs,
    relative,
    run_of,
)
from penstock.core.plan.restore import ShardRequest
from penstock.core.types import ByteRange, Region, regions_of_range, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.format.records import ShardRecord
    from penstock.core.plan.restore import Located, ObjectRequest


def shard_requests(
    request: ObjectRequest,
    stored: Sequence[tuple[Located, ShardRecord]],
    block_bytes: Callable[[int], int],
) -> Iterator[ShardRequest]:
    """Yield the requests for the shards that hold the region of a request.

    A shard that several ranks have stored is read once.

    Args:
        request: The request, for an object that is neither tied nor derived.
        stored: The shards of the object, at least those that meet the region.
        block_bytes: Returns the distance of checksum cuts in a part.

    Raises:
        FormatError: The shards do not hold each element of the region once.
    """
    record, sink = request.located.record, request.sink
    if sink is None:
        for located, shard in stored:
            yield ShardRequest(located, shard, None, path=request.path)
        return
    region = Region.whole(record.spec.shape) if request.region is None else request.region
    held = stored[0][1].region if len(stored) == 1 else None
    if held is region or held == region:  # as of nearly all, and mostly the very same
        yield ShardRequest(*stored[0], sink, request.at, None, request.path)
        return
    distinct = {shard.region: (located, shard) for located, shard in stored}.values()
    meeting = [
        (one, common)
        for one in distinct
        if (common := common_region(one[1].region, region)) is not None
    ]
    inside = [relative(common, region) for _, common in meeting]
    chosen = one_copy(region.sizes, inside)  # there may be copies that are not cut alike
    if chosen is None:
        shown = show_path(record.path)
        msg = f"{shown} from {region.offsets} on: {flaw_of_cover(region.sizes, inside)}"
        raise FormatError(msg, [shown])
    for one, common in (meeting[number] for number in chosen):
        gap = block_bytes(one[0].part) - 1  # a gap below that has no block to itself
        yield _request(request._replace(region=region), one, common, gap)


def _request(
    request: ObjectRequest, stored: tuple[Located, ShardRecord], common: Region, gap: int
) -> ShardRequest:
    """Return the request for the elements `common` of a shard."""
    (located, shard), sink, region = stored, request.sink, request.region
    itemsize = located.record.spec.itemsize
    assert sink is not None
    assert region is not None
    inside = relative(common, shard.region)
    run = run_of(shard.region.sizes, inside, itemsize)
    place = run_of(region.sizes, relative(common, region), itemsize)
    if run is not None and place is not None:
        base = request.at + place.start - run.start
        ranges = None if common == shard.region else [run]
        return ShardRequest(located, shard, sink, base, ranges, request.path)
    runs = region_runs(shard.region.sizes, inside, itemsize, merge_gap_bytes=gap)
    scattered = RegionSink(sink, request.at, region, shard.region, itemsize)
    return ShardRequest(located, shard, scattered, 0, runs, request.path)


class RegionSink(ByteSink):
    """Takes the bytes of a shard, and hands those on that lie in a region of the same tensor."""

    __slots__ = (
        "_at",
        "_inner",
        "_itemsize",
        "_region",
        "_shard",
        "address",
        "device",
        "memory",
        "nbytes",
    )

    def __init__(
        self, inner: ByteSink, at: int, region: Region, shard: Region, itemsize: int
    ) -> None:
        """Make a sink for the bytes of `shard`; `inner` takes `region` from its byte `at` on."""
        self._inner = inner
        self._at = at
        self._region = relative(region, shard)
        self._shard = Region.whole(shard.sizes)
        self._itemsize = itemsize
        self.nbytes = shard.numel * itemsize
        self.device = inner.device
        self.address = None
        self.memory = inner.memory

    def view(self) -> memoryview | None:
        """Return None: no memory holds the shard's bytes as they come."""
        return None

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Copy the elements that lie in the region, without those that are cut off."""
        size = self._itemsize
        first, stop = start // size, (start + data.nbytes) // size
        view = self._inner.view()
        for rectangle in regions_of_range(self._shard.sizes, first, stop):
            common = common_region(rectangle, self._region)
            if common is None:
                continue
            span = ByteRange(start, start + data.nbytes)
            if view is not None:
                self._copy(data, span, common, view[self._at :], self._region)
            else:
                self._hand_on(data, span, common)

    def _hand_on(self, data: memoryview, span: ByteRange, common: Region) -> None:
        """Give `common` to a sink without memory in sight, as few runs of its bytes."""
        piece = memoryview(bytearray(common.numel * self._itemsize))
        self._copy(data, span, common, piece, common)
        done = 0
        for run in region_runs(self._region.sizes, relative(common, self._region), self._itemsize):
            self._inner.copy_in(self._at + run.start, piece[done : done + run.length])
            done += run.length

    def _copy(
        self, data: memoryview, span: ByteRange, common: Region, out: memoryview, held: Region
    ) -> None:
        copy_region(data, span, common, out, held, shape=self._shard.sizes, itemsize=self._itemsize)

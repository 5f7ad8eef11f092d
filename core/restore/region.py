"""Reading a region of a tensor: only the blocks that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import SelectionError
from penstock.core.plan.regions import copy_region, region_batches, region_runs
from penstock.core.plan.restore import ObjectRequest
from penstock.core.restore.fill import SliceSink, raise_damaged, room
from penstock.core.types import PAGE_BYTES, Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.plan.restore import Located
    from penstock.core.restore.fill import Opened
    from penstock.core.types import ByteRange

_BATCH_BYTES = 64 << 20


def as_region(
    region: Region | slice | Sequence[slice], shape: tuple[int, ...], path: str
) -> Region:
    """`region` as offsets and sizes within `shape`.

    Raises:
        SelectionError: It does not lie there.
    """
    if not isinstance(region, Region):
        slices = (region,) if isinstance(region, slice) else tuple(region)
        if len(slices) > len(shape) or any(s.step not in (None, 1) for s in slices):
            msg = f"{path} has shape {list(shape)}: give at most {len(shape)} slices of step 1"
            raise SelectionError(msg)
        padded = slices + (slice(None),) * (len(shape) - len(slices))
        spans = [s.indices(n) for s, n in zip(padded, shape, strict=True)]
        region = Region(
            tuple(start for start, _, _ in spans),
            tuple(max(0, stop - start) for start, stop, _ in spans),
        )
    inside = len(region.sizes) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= n
        for o, s, n in zip(region.offsets, region.sizes, shape, strict=True)
    )
    if not inside:
        msg = f"{path} has shape {list(shape)}; the region {region} does not lie within it"
        raise SelectionError(msg)
    return region


def read_region(checkpoint: Opened, located: Located, region: Region) -> memoryview:
    """The bytes of `region` of a tensor, row-major.

    Raises:
        DamagedError: Stored bytes are not what was written.
    """
    spec = located.record.spec
    out = memoryview(room(region.numel * spec.itemsize))
    runs = region_runs(spec.shape, region, spec.itemsize, merge_gap_bytes=PAGE_BYTES)
    if len(runs) == 1 and runs[0].length == out.nbytes:
        _read_ranges(checkpoint, located, out, runs[0], runs)
    elif runs:
        for batch in region_batches(spec.shape, region, spec.itemsize, _BATCH_BYTES):
            cover = memoryview(room(batch.cover.length))
            within = region_runs(
                spec.shape, batch.region, spec.itemsize, merge_gap_bytes=PAGE_BYTES
            )
            _read_ranges(checkpoint, located, cover, batch.cover, within)
            copy_region(
                cover,
                batch.cover,
                batch.region,
                out,
                region,
                shape=spec.shape,
                itemsize=spec.itemsize,
            )
    return out


def _read_ranges(
    checkpoint: Opened,
    located: Located,
    out: memoryview,
    cover: ByteRange,
    ranges: Sequence[ByteRange],
) -> None:
    """Read `ranges` of an object into `out`, which holds its bytes `cover`."""
    jobs, _ = checkpoint.contents.jobs(
        [ObjectRequest(located, SliceSink(out, cover.start), ranges)]
    )
    stats = checkpoint.loader.run(jobs)
    if stats.damaged:
        raise_damaged(checkpoint, stats.damaged, missing_blob=stats.missing_blob)

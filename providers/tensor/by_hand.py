"""Manually sharded tensors: `penstock.Shard`, and Megatron's `ShardedTensor`.

A `ShardedTensor` of Megatron's `dist_checkpointing` is recognized by its fields, without an import.
It records the position of its local tensor in the whole tensor. The axes that Megatron prepends
enumerate tensors, such as the layers of a pipeline. Each tensor is a separate object below the
path, under its number.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.abc import ByteSource, Node, PendingCopy, Placement, StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Region, Replica, TensorSpec, regions_of_range, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.core.abc import DescribeContext, PlaceContext
    from penstock.core.markers import Shard, Shards
    from penstock.core.types import ObjectPath

T = TypeVar("T")

_FIELDS = frozenset(
    {
        "key",
        "data",
        "local_shape",
        "global_shape",
        "global_offset",
        "replica_id",
        "prepend_axis_num",
    }
)


def describe_shard(value: Shard, path: ObjectPath, *, context: DescribeContext) -> StateObject:
    """Describe the tensor of `value` as a rectangle of the whole tensor.

    Raises:
        UnsupportedStateError: The tensor is stored as several objects, or cannot be stored.
    """
    entry = _described_piece(value.tensor, path, value.global_shape, context=context)
    return entry._replace(regions=value.regions, replica=value.place)


def place_shard(value: Shard, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of the rectangle into the tensor of `value`.

    Raises:
        UnsupportedStateError: The tensor is stored as several objects, or cannot be written in
            place.
    """
    flags = getattr(value.tensor, "flags", None)
    if flags is not None and not flags.writeable:
        msg = f"{show_path(path)} is a Shard with a read-only array: give it one that is writable"
        raise UnsupportedStateError(msg)
    placed = _placed_piece(value.tensor, path, value.global_shape, value.regions, context=context)
    placed.finish = lambda: value
    return placed


def describe_shards(value: Shards, path: ObjectPath, *, context: DescribeContext) -> StateObject:
    """Describe the pieces of `value` as one object of several rectangles, ordered by offset.

    Raises:
        UnsupportedStateError: A piece is stored as several objects, or cannot be stored.
    """
    entries = [describe_shard(piece, path, context=context) for piece in value.pieces]
    # Pieces without elements are left out. If the tensor itself has no elements, every piece has
    # the same region, the whole tensor.
    held = {entry.regions: entry for entry in entries if entry.regions}
    held = dict(sorted(held.items(), key=lambda item: item[0][0].offsets))
    if len(held) < 2:  # noqa: PLR2004 - one piece is a Shard
        return next(iter(held.values()), entries[0])
    regions = _stacked(region for regions_of_piece in held for region in regions_of_piece)
    source = PiecesSource([entry.source for entry in held.values()])
    return entries[0]._replace(regions=regions, source=source)


def place_shards(value: Shards, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of each piece of `value` into its tensor.

    Raises:
        UnsupportedStateError: A piece is stored as several objects, or cannot be written in place.
    """
    result = Placement(finish=lambda: value)
    for piece in value.pieces:
        result.absorb(place_shard(piece, path, context=context))
    return result


def _stacked(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Join regions that are adjacent along the first dimension.

    A process that saves alone must store a tensor as one rectangle, the whole tensor.
    """
    joined: list[Region] = []
    for region in regions:
        last = joined[-1] if joined else region
        below = (last.offsets[0] + last.sizes[0], *last.offsets[1:])
        if joined and region.offsets == below and region.sizes[1:] == last.sizes[1:]:
            rows = last.sizes[0] + region.sizes[0]
            joined[-1] = Region(last.offsets, (rows, *last.sizes[1:]))
        else:
            joined.append(region)
    return tuple(joined)


def _described_piece(
    tensor: object, path: ObjectPath, shape: Sequence[int], *, context: DescribeContext
) -> StateObject:
    """Describe a piece of a tensor of `shape`; raise if it is stored as several objects."""
    entries = list(context.describe(tensor, path))
    if len(entries) != 1 or isinstance(entries[0], Node):
        raise _of_parts(tensor, path)
    return entries[0]._replace(spec=_of_shape(entries[0].spec, shape))


def _placed_piece(
    tensor: object,
    path: ObjectPath,
    shape: Sequence[int],
    regions: tuple[Region, ...],
    *,
    context: PlaceContext,
) -> Placement:
    """Plan the restore of `regions` into a piece; raise if it is stored as several objects."""
    placed = context.place(tensor, path)
    if any(target.path != path for target in placed.targets):
        raise _of_parts(tensor, path)
    placed.targets = [
        target._replace(spec=_of_shape(target.spec, shape), regions=regions)
        for target in placed.targets
    ]
    return placed


def _of_shape(spec: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(spec.dtype, spec.itemsize, tuple(shape))


def _of_parts(tensor: object, path: ObjectPath) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{show_path(path)} is a piece of a {type(tensor).__name__}, which is stored as several "
        "tensors: put a Shard of each of them into the state"
    )


class PiecesSource(ByteSource):
    """Concatenates the bytes of several sources on one device."""

    __slots__ = ("_pieces", "address", "device", "memory", "nbytes")

    def __init__(self, pieces: Sequence[ByteSource]) -> None:
        """Join `pieces`, at least one."""
        self._pieces = tuple(pieces)
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.device = pieces[0].device
        self.address = None
        self.memory = None

    def pieces(self) -> Sequence[ByteSource]:
        return self._pieces

    def view(self) -> memoryview | None:
        return None

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        copies: list[PendingCopy] = []
        at = 0
        for piece in self._pieces:
            first, stop = max(start, at), min(start + out.nbytes, at + piece.nbytes)
            if first < stop:
                copy = piece.copy_out(first - at, out[first - start : stop - start])
                copies += [] if copy is None else [copy]
            at += piece.nbytes
        return _Copies(copies) if copies else None

    def version(self) -> int | None:
        versions = [piece.version() for piece in self._pieces]
        known = [version for version in versions if version is not None]
        return sum(known) if len(known) == len(versions) else None

    def steady(self) -> bool:
        return all(piece.steady() for piece in self._pieces)

    def is_rounded(self, other: ByteSource, /) -> bool:
        pairs = list(zip(self._pieces, other.pieces(), strict=False))
        alike = len(self._pieces) == len(other.pieces()) and all(
            one.nbytes * other.nbytes == master.nbytes * self.nbytes for one, master in pairs
        )
        return alike and all(one.is_rounded(master) for one, master in pairs)

    def keep(self) -> None:
        for piece in self._pieces:
            piece.keep()

    @staticmethod
    def hold(sources: Sequence[ByteSource], /) -> Callable[[], None]:
        with ExitStack() as held:
            for kind, pieces in _by_kind(sources).items():
                held.callback(kind.hold(pieces))
            return held.pop_all().close

    @staticmethod
    def still(sources: Sequence[ByteSource], action: Callable[[], T], /) -> T:
        for kind, pieces in _by_kind(sources).items():
            action = partial(kind.still, pieces, action)
        return action()


class _Copies(PendingCopy):
    __slots__ = ("_copies",)

    def __init__(self, copies: Sequence[PendingCopy]) -> None:
        self._copies = copies

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait()

    def order(self) -> None:
        for copy in self._copies:
            copy.order()


def _by_kind(sources: Sequence[ByteSource]) -> dict[type[ByteSource], list[ByteSource]]:
    pieces: dict[type[ByteSource], list[ByteSource]] = {}
    for source in sources:
        for piece in source.pieces():
            pieces.setdefault(type(piece), []).append(piece)
    return pieces


def is_megatron(kind: type) -> bool:
    """Return whether `kind` has the fields of Megatron's `ShardedTensor`."""
    if kind.__name__ != "ShardedTensor" or not dataclasses.is_dataclass(kind):
        return False
    return _FIELDS.issubset(field.name for field in dataclasses.fields(kind))


def describe_megatron(
    value: Any, path: ObjectPath, *, context: DescribeContext
) -> tuple[StateObject, tuple[Node, ...]]:
    """Return the object of this rank's part of the whole tensor, and the nodes above the object.

    The part is empty unless this rank holds the main replica. There is a node only if the tensor is
    one of several that Megatron enumerates.

    Raises:
        UnsupportedStateError: The local tensor is missing, cannot be stored, or does not lie
            within the whole tensor.
    """
    here, shape, regions = _place(value, path)
    # Megatron identifies replicas by coordinates, and does not give their number.
    is_main = not any(_numbers(value.replica_id))
    local = value.data if is_main else value.data.new_empty(0)
    entry = _described_piece(local, path, shape, context=context)
    regions = regions if is_main else ()
    nodes = () if here == path else (Node(path, "dict"),)
    return entry._replace(path=here, regions=regions, replica=Replica()), nodes


def place_megatron(value: Any, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of the local tensor, on every replica.

    Raises:
        UnsupportedStateError: The local tensor is missing, or cannot be written in place.
    """
    here, shape, regions = _place(value, path)
    placed = _placed_piece(value.data, here, shape, regions, context=context)
    placed.finish = lambda: value
    return placed


def _place(value: Any, path: ObjectPath) -> tuple[ObjectPath, tuple[int, ...], tuple[Region, ...]]:
    """Return the path and shape of the whole tensor, and the rectangles that `value` holds."""
    if value.data is None:
        raise _refusal(path, "has no data: call its init_data() first")
    count = value.prepend_axis_num
    # Each pipeline stage numbers its layers and parameters from 0. Without this check, one path
    # could name different tensors on different ranks, and no rank would notice.
    if not count and not f".{'.'.join(path)}".endswith(f".{value.key}"):
        raise _refusal(
            path,
            f"has the key {value.key!r}, which is not its path: put it under its key, since "
            "objects are found again by their path (`{t.key: t for t in tensors}`)",
        )
    front, offsets = tuple(value.global_offset[:count]), tuple(value.global_offset[count:])
    shape, sizes = tuple(value.global_shape[count:]), tuple(value.local_shape)
    inside = len(shape) == len(sizes) == len(offsets) and all(
        0 <= a <= a + n <= whole for a, n, whole in zip(offsets, sizes, shape, strict=True)
    )
    flat = getattr(value, "flattened_range", None)  # of older releases
    held = [Region((0,) * len(sizes), sizes)] if flat is None else []
    if flat is not None and inside:
        inside = 0 <= flat.start <= flat.stop <= Region((0,) * len(sizes), sizes).numel
        held = regions_of_range(sizes, flat.start, flat.stop) if inside else []
    if not inside or sum(region.numel for region in held) != value.data.numel():
        raise _refusal(
            path,
            f"has data of shape {list(value.data.shape)}, which does not fit local_shape "
            f"{list(sizes)} at offset {list(offsets)} in a tensor of shape {list(shape)}: make "
            "the fields agree",
        )
    regions = tuple(
        Region(tuple(a + b for a, b in zip(offsets, region.offsets, strict=True)), region.sizes)
        for region in held
        if region.numel or region.sizes == shape
    )
    return (*path, *map(str, front)), shape, regions


def _numbers(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    return (replica_id,) if isinstance(replica_id, int) else tuple(replica_id)


def _refusal(path: ObjectPath, reason: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{show_path(path)} is a ShardedTensor of Megatron and {reason}")

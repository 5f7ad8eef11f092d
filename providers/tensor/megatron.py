"""The `ShardedTensor` of Megatron's `dist_checkpointing`, known by its fields: nothing is imported.

It says where its local tensor stands in the whole one. Axes that Megatron puts in front of it
number tensors, as layers of a pipeline: each number is an object of its own, below the path.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.core.abc import Node, Placement, StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Region, Replica, regions_of_range, show_path
from penstock.providers.tensor.by_hand import described_piece, placed_piece

if TYPE_CHECKING:
    from penstock.core.abc import DescribeContext, PlaceContext
    from penstock.core.types import ObjectPath

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


def is_megatron(kind: type) -> bool:
    """Return whether `kind` has the fields of Megatron's `ShardedTensor`."""
    if kind.__name__ != "ShardedTensor" or not dataclasses.is_dataclass(kind):
        return False
    return _FIELDS.issubset(field.name for field in dataclasses.fields(kind))


def describe_megatron(
    value: Any, path: ObjectPath, *, context: DescribeContext
) -> tuple[StateObject, tuple[Node, ...]]:
    """Return what this rank stores of the whole tensor: nothing, unless it is the main replica.

    The nodes are those above it.

    Raises:
        UnsupportedStateError: There is no local tensor, it cannot be stored, or it does not lie
            within the whole one.
    """
    here, shape, regions = _place(value, path)
    # Megatron counts replicas by coordinates, and does not say how many there are.
    is_main = not any(_numbers(value.replica_id))
    local = value.data if is_main else value.data.new_empty(0)
    entry = described_piece(local, path, shape, context=context)
    if entry is None:
        raise _refusal(path, f"holds a {type(local).__name__}, which is stored as several tensors")
    regions = regions if is_main else ()
    nodes = () if here == path else (Node(path, "dict"),)
    return entry._replace(path=here, regions=regions, replica=Replica()), nodes


def place_megatron(value: Any, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of the local tensor, whichever replica it is.

    Raises:
        UnsupportedStateError: There is no local tensor, or it cannot be written in place.
    """
    here, shape, regions = _place(value, path)
    placed = placed_piece(value.data, here, shape, regions, context=context)
    if placed is None:
        raise _refusal(path, f"holds a {type(value.data).__name__}, stored as several tensors")
    placed.finish = lambda: value
    return placed


def _place(value: Any, path: ObjectPath) -> tuple[ObjectPath, tuple[int, ...], tuple[Region, ...]]:
    """Return path and shape of the whole tensor, and the rectangles of it that are held."""
    if value.data is None:
        raise _refusal(path, "has no data: call its init_data() first")
    count = value.prepend_axis_num
    # Each stage of a pipeline numbers its layers and parameters from 0, so one path would be one
    # tensor here and another one there, cut perhaps in another way, so that no rank could tell.
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
    if not inside or sum(one.numel for one in held) != value.data.numel():
        raise _refusal(
            path,
            f"has data of shape {list(value.data.shape)} for local_shape {list(sizes)} at "
            f"{list(offsets)} of {list(shape)}: they do not fit together",
        )
    regions = tuple(
        Region(tuple(a + b for a, b in zip(offsets, one.offsets, strict=True)), one.sizes)
        for one in held
        if one.numel or one.sizes == shape
    )
    return (*path, *map(str, front)), shape, regions


def _numbers(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    return (replica_id,) if isinstance(replica_id, int) else tuple(replica_id)


def _refusal(path: ObjectPath, reason: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{show_path(path)} is a ShardedTensor of Megatron and {reason}")

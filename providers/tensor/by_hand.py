"""Rectangles of tensors that users cut by hand: what `penstock.Shard` stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import Node, Placement, StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import TensorSpec, show_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import DescribeContext, PlaceContext
    from penstock.core.markers import Shard
    from penstock.core.types import ObjectPath, Region


def describe_shard(value: Shard, path: ObjectPath, *, context: DescribeContext) -> StateObject:
    """Return the tensor of `value` as a rectangle of the whole one.

    Raises:
        UnsupportedStateError: The tensor is not one object, or cannot be stored.
    """
    entry = described_piece(value.tensor, path, value.global_shape, context=context)
    if entry is None:
        raise _of_parts(value, path)
    return entry._replace(regions=value.regions, replica=value.place)


def place_shard(value: Shard, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of the rectangle into the tensor of `value`.

    Raises:
        UnsupportedStateError: The tensor is not one object, or cannot be written in place.
    """
    flags = getattr(value.tensor, "flags", None)
    if flags is not None and not flags.writeable:
        msg = f"{show_path(path)} is a Shard with a read-only array: give it one that is writable"
        raise UnsupportedStateError(msg)
    placed = placed_piece(value.tensor, path, value.global_shape, value.regions, context=context)
    if placed is None:
        raise _of_parts(value, path)
    placed.finish = lambda: value
    return placed


def described_piece(
    tensor: object, path: ObjectPath, shape: Sequence[int], *, context: DescribeContext
) -> StateObject | None:
    """Describe a piece of a tensor of that shape; None if it is stored as several objects."""
    entries = list(context.describe(tensor, path))
    if len(entries) != 1 or isinstance(entries[0], Node):
        return None
    return entries[0]._replace(spec=_of_shape(entries[0].spec, shape))


def placed_piece(
    tensor: object,
    path: ObjectPath,
    shape: Sequence[int],
    regions: tuple[Region, ...],
    *,
    context: PlaceContext,
) -> Placement | None:
    """Plan the restore of the regions into a piece of a tensor of that shape.

    None: the piece is stored as several objects.
    """
    placed = context.place(tensor, path)
    if any(target.path != path for target in placed.targets):
        return None
    placed.targets = [
        target._replace(spec=_of_shape(target.spec, shape), regions=regions)
        for target in placed.targets
    ]
    return placed


def _of_shape(spec: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(spec.dtype, spec.itemsize, tuple(shape))


def _of_parts(value: Shard, path: ObjectPath) -> UnsupportedStateError:
    kind = type(value.tensor).__name__
    return UnsupportedStateError(
        f"{show_path(path)} is a Shard of a {kind}, which is stored as several tensors: put a "
        "Shard of each of them into the state"
    )

"""Rectangles of tensors that users cut by hand: what `penstock.Shard` stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.abc import Node, Placement, StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import TensorSpec, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import DescribeContext, PlaceContext
    from penstock.core.markers import Shard
    from penstock.core.types import ObjectPath


def describe_shard(
    value: Shard, path: ObjectPath, *, context: DescribeContext
) -> Iterator[StateObject | Node]:
    """Yield the tensor of `value` as a rectangle of the whole one.

    Raises:
        UnsupportedStateError: The tensor is not one object, or cannot be stored.
    """
    entries = list(context.describe(value.tensor, path))
    if len(entries) != 1 or isinstance(entries[0], Node):
        raise _of_parts(value, path)
    spec = _whole(entries[0].spec, value)
    yield replace(entries[0], spec=spec, regions=value.regions, replica=value.place)


def place_shard(value: Shard, path: ObjectPath, *, context: PlaceContext) -> Placement:
    """Plan the restore of the rectangle into the tensor of `value`.

    Raises:
        UnsupportedStateError: The tensor is not one object, or cannot be written in place.
    """
    flags = getattr(value.tensor, "flags", None)
    if flags is not None and not flags.writeable:
        msg = f"{show_path(path)} is a Shard with a read-only array: give it one that is writable"
        raise UnsupportedStateError(msg)
    placed = context.place(value.tensor, path)
    if any(target.path != path for target in placed.targets):
        raise _of_parts(value, path)
    placed.targets = [
        replace(target, spec=_whole(target.spec, value), regions=value.regions)
        for target in placed.targets
    ]
    placed.finish = lambda: value
    return placed


def _whole(spec: TensorSpec, value: Shard) -> TensorSpec:
    return TensorSpec(spec.dtype, spec.itemsize, tuple(value.global_shape))


def _of_parts(value: Shard, path: ObjectPath) -> UnsupportedStateError:
    kind = type(value.tensor).__name__
    return UnsupportedStateError(
        f"{show_path(path)} is a Shard of a {kind}, which is stored as several tensors: put a "
        "Shard of each of them into the state"
    )

"""The elements of a `DTensor` that this rank holds.

This module does not communicate. It does not use torch's own offsets either: those of torch 2.13
omit rows where `fully_shard` and tensor parallelism cut the same dimension unevenly.

Each mesh dimension that shards a dimension of the tensor is a cut. The cuts of a dimension are
applied one after the other: those of `distribute_tensor` in mesh order, then that of `fully_shard`,
wherever its mesh dimension is. If the sizes divide evenly, applying all cuts in mesh order gives
the same result; otherwise it assigns some rows to the wrong rank.
"""

from __future__ import annotations

import itertools
import math
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Region, Replica, show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from penstock.core.types import ObjectPath

MAX_REGIONS = 1 << 16
"""The most rectangles of a local tensor. A strided cut of an inner dimension makes many per row."""


class Cut(NamedTuple):
    """How one mesh dimension cuts a dimension of a tensor.

    The tensor's dimension is cut into `factor` pieces, and each piece into one share per rank. A
    rank takes its own share of every piece, in order. Pieces and shares have the smallest size that
    suffices; the last ones may be smaller or empty.

    Attributes:
        mesh_dimension: The index of the mesh dimension.
        ranks: The size of the mesh dimension.
        factor: 1 for `Shard`; the `split_factor` of `_StridedShard`.
    """

    mesh_dimension: int
    ranks: int
    factor: int = 1


Order: TypeAlias = tuple[Cut, ...]
Spans: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The elements of a tensor that this rank holds.

    Attributes:
        global_shape: Shape of the whole tensor.
        regions: Rectangles of the whole tensor. Their row-major elements, concatenated, are the
            local tensor's row-major elements. Empty if this rank holds no element.
        replica: This rank's place among the ranks with the same elements; None for a rank outside
            the mesh.
    """

    global_shape: tuple[int, ...]
    regions: tuple[Region, ...]
    replica: Replica | None


def local_shard(tensor: DTensor, path: ObjectPath, *, last_cut: int | None = None) -> LocalShard:
    """Return the elements of `tensor` that this rank holds, derived from its mesh and placements.

    Args:
        tensor: The tensor; only the shape of its local tensor is read.
        path: Its path in the state, for messages.
        last_cut: The mesh dimension over which `fully_shard` shards the tensor. For a gradient or
            optimizer state, that is `last_cut_of` its parameter. If None (not known), a rank's
            elements must be the same under all orders of cuts that the placements allow.

    Raises:
        UnsupportedStateError: The tensor is a pending sum, or the elements that each rank of the
            mesh holds cannot be determined or described.
    """
    shape = tuple(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalShard(shape, (), None)
    cuts = _cuts(tensor, path)
    spans: list[Spans] = []
    for dimension, size in enumerate(shape):
        held = _held(size, cuts[dimension], last_cut, tuple(coordinate))
        if held is None:
            _refuse(
                tensor,
                path,
                f"which elements a rank holds depends on the order in which dimension {dimension} "
                f"of size {size} was cut, which is not known. Pad the dimension to a multiple of "
                f"{_ranks(cuts[dimension])}, or use the module's parameter instead of a copy",
            )
        spans.append(held)
    _check_local_shape(tensor, path, spans)
    cut = {each.mesh_dimension for order in cuts for each in order}
    replica = _replica(mesh, tuple(coordinate), frozenset(cut))
    regions = _rectangles(tuple(spans))
    if regions is None:
        _refuse(
            tensor,
            path,
            f"an inner dimension is cut by strides, so its local tensor consists of more than "
            f"{MAX_REGIONS} rectangles of the whole tensor. Call its `.redistribute` on every "
            "rank, with placements without strides, and use the result",
        )
    return LocalShard(shape, regions, replica)


def sharded_parameters(module: torch.nn.Module) -> dict[int, DTensor]:
    """Map the id of each tensor that stands in for a sharded parameter to that parameter.

    Between forward and backward, the module shows such tensors, while optimizers hold the sharded
    parameters. The same is true after a forward that did not reshard, or only partly
    (`reshard_after_forward=4`). This function does not reshard.
    """
    sharded = {}
    for record in _fully_sharded(module):
        for name in ("_unsharded_param", "_sharded_post_forward_param"):
            shown = getattr(record, name, None)  # there is none before the first forward
            if shown is not None:
                sharded[id(shown)] = record.sharded_param
    return sharded


def _fully_sharded(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the record that `fully_shard` keeps of each parameter below `module`."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    # Not imported at the top, because it is slow to load; here it is loaded already.
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()  # noqa: SLF001 - torch has no other name for it
        # Earlier versions of torch have one group, or None, instead of a list.
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if groups is None else groups  # noqa: SLF001
        yield from itertools.chain.from_iterable(group.fsdp_params for group in groups if group)


def note_fully_shard(module: torch.nn.Module) -> None:
    """Record the parameters of `module` that `fully_shard` shards, for `last_cut_of`."""
    for record in _fully_sharded(module):
        _of_fully_shard[id(record.sharded_param)] = record


def last_cut_of(tensor: DTensor) -> int | None:
    """Return the mesh dimension over which `fully_shard` shards `tensor`; None if not known.

    It is known for parameters that `note_fully_shard` recorded, and within `cut_like` for their
    state.
    """
    parameter = _like.get().get(id(tensor), tensor)
    record = _of_fully_shard.get(id(parameter))
    if (
        record is None
        or record.sharded_param is not parameter
        or not is_cut_like(tensor, parameter)
    ):
        return None
    return _cut_of(record)


@contextmanager
def cut_like(pairs: Iterable[tuple[DTensor, DTensor]]) -> Iterator[None]:
    """In this context, let `last_cut_of` treat the first of each pair as state of the second."""
    token = _like.set({id(tensor): parameter for tensor, parameter in pairs})
    try:
        yield
    finally:
        _like.reset(token)


def is_cut_like(tensor: DTensor, parameter: DTensor) -> bool:
    """Return whether a tensor has the shape and the placements of a parameter."""
    alike = tensor.shape == parameter.shape and tensor.placements == parameter.placements
    return alike and tensor.device_mesh == parameter.device_mesh


# By identity: an optimizer has the parameters, but not the module that knows how they were cut.
# Never by weak references to tensors: torch refuses to move or cast a module of DTensors then.
_of_fully_shard: WeakValueDictionary[int, Any] = WeakValueDictionary()
_like: ContextVar[Mapping[int, DTensor]] = ContextVar("_like", default=MappingProxyType({}))


_cuts_of: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()


def _cut_of(record: Any) -> int | None:
    """Return the mesh dimension over which `fully_shard` shards, from its record of a parameter."""
    # Cached: called for each tensor of an optimizer's state too, and lists the ranks of a mesh.
    if record not in _cuts_of:
        _cuts_of[record] = _find_cut(record)
    return _cuts_of[record]


def _find_cut(record: Any) -> int | None:
    group = getattr(record.mesh_info, "shard_process_group", None)
    if group is None:  # replicated only
        return None
    from torch.distributed import get_process_group_ranks  # noqa: PLC0415 - see above

    tensor = record.sharded_param
    ranks = get_process_group_ranks(group)
    return next(iter(_dimension_over(tensor, record.fsdp_placement.dim, ranks)), None)


def _dimension_over(tensor: DTensor, dimension: int, ranks: list[int]) -> list[int]:
    """Return the mesh dimension that shards `dimension` over `ranks`, in a list of at most one."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    every = frozenset(range(mesh.ndim))
    dimensions = [
        m
        for m, placement in enumerate(tensor.placements)
        if getattr(placement, "dim", None) == dimension
        and list(_replica(mesh, tuple(coordinate), every - {m}).ranks) == ranks
    ]
    return dimensions[:1]  # several only if they have one rank, and cut nothing


# -- cuts -----------------------------------------------------------------------------------------


def _cuts(tensor: DTensor, path: ObjectPath) -> list[Order]:
    """Return the cuts of each dimension of the tensor, in mesh order.

    Raises:
        UnsupportedStateError: A placement's elements are not known, or the order of cuts is not
            the default.
    """
    # Loaded already, since there is a DTensor. `import torch` alone does not load it.
    from torch.distributed.tensor.placement_types import (  # noqa: PLC0415
        Partial,
        Replicate,
        Shard,
        _StridedShard,
    )

    cuts: list[list[Cut]] = [[] for _ in tensor.shape]
    for m, placement in enumerate(tensor.placements):
        # Exact types: a subclass of Shard may hold other elements.
        if type(placement) is Shard:
            cuts[placement.dim].append(Cut(m, tensor.device_mesh.size(m)))
        elif type(placement) is _StridedShard:
            factor = int(placement.split_factor)
            cuts[placement.dim].append(Cut(m, tensor.device_mesh.size(m), factor))
        elif isinstance(placement, Partial):
            _refuse(
                tensor,
                path,
                f"each rank of mesh dimension {m} holds a pending summand of it. Call its "
                "`.redistribute` on every rank, with Replicate() or Shard() in place of Partial(), "
                "and use the result",
            )
        elif type(placement) is not Replicate:
            _refuse(
                tensor,
                path,
                f"Penstock does not know which elements a {type(placement).__qualname__} holds. "
                "Call its `.redistribute` on every rank, with Replicate() or Shard(), and use the "
                "result",
            )
    orders = getattr(tensor._spec, "shard_order", None) or ()  # noqa: SLF001 - no other name
    if any(list(each.mesh_dims) != sorted(each.mesh_dims) for each in orders):
        _refuse(
            tensor,
            path,
            "its dimensions are not cut in the default order. Call its `.redistribute` on every "
            "rank to get that order, and use the result",
        )
    return [tuple(each) for each in cuts]


@lru_cache(maxsize=4096)
def _held(
    size: int, cuts: Order, last_cut: int | None, coordinate: tuple[int, ...]
) -> Spans | None:
    """Return a rank's indices in one dimension; None if the possible cut orders disagree."""
    orders = _orders(cuts, last_cut)
    return _spans(size, orders[0], coordinate) if _agree(size, orders) else None


def _orders(cuts: Order, last_cut: int | None) -> tuple[Order, ...]:
    """Return the possible orders of a dimension's cuts, likeliest first."""
    tail = tuple(Cut(m, n) for m, n, _ in cuts if m == last_cut)
    rest = tuple(cut for cut in cuts if cut.mesh_dimension != last_cut)
    orders = [rest + tail]
    for n, (m, ranks, factor) in enumerate(rest):
        # `fully_shard` marks its cut this way: the factor is the number of shards that were cut
        # before, by later mesh dimensions.
        if factor > 1 and factor == math.prod(later.ranks for later in rest[n + 1 :]):
            orders.append((*rest[:n], *rest[n + 1 :], Cut(m, ranks), *tail))
    return tuple(orders)


def _agree(size: int, orders: tuple[Order, ...]) -> bool:
    """Return whether each rank's indices are the same under all orders."""
    if len(orders) == 1:
        return True
    first = orders[0]
    strided = [cut for cut in first if cut.factor > 1]
    if len(strided) == 1 and size % math.prod(cut.ranks for cut in first) == 0:
        return True  # known without comparing, which takes a second for 10,000 ranks
    coordinate = [0] * (1 + max(cut.mesh_dimension for cut in first))
    for place in itertools.product(*(range(cut.ranks) for cut in first)):
        for cut, index in zip(first, place, strict=True):
            coordinate[cut.mesh_dimension] = index
        if len({_spans(size, order, tuple(coordinate)) for order in orders}) > 1:
            return False
    return True


def _spans(size: int, order: Order, coordinate: tuple[int, ...]) -> Spans:
    """Return the indices that the rank at `coordinate` holds, in the order of its local tensor."""
    held: Spans = ((0, size),) if size else ()
    for m, ranks, factor in order:
        total = sum(stop - start for start, stop in held)
        piece = -(-total // factor)
        indices: list[tuple[int, int]] = []
        for start in range(0, total, max(piece, 1)):
            stop = min(start + piece, total)
            share = -(-(stop - start) // ranks)
            first = min(start + coordinate[m] * share, stop)
            indices += _part(held, first, min(first + share, stop))
        held = _joined(indices)
    return held


def _part(held: Spans, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of elements `[first, stop)`, counted along `held`."""
    position = 0
    for a, b in held:
        start, end = max(first - position, 0), min(stop - position, b - a)
        if start < end:
            yield a + start, a + end
        position += b - a


def _joined(spans: list[tuple[int, int]]) -> Spans:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


# -- regions and replicas -------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _rectangles(spans: tuple[Spans, ...]) -> tuple[Region, ...] | None:
    """Return the rectangles that `spans` form, in row-major order; None if there are too many."""
    if not all(spans):
        return ()
    # Up to the last dimension with several spans, each row starts a rectangle.
    broken = max((d for d, held in enumerate(spans) if len(held) > 1), default=0)
    rows = [
        [(n, n + 1) for start, stop in held for n in range(start, stop)] for held in spans[:broken]
    ]
    if math.prod(map(len, [*rows, *spans[broken:]])) > MAX_REGIONS:
        return None
    boxes = itertools.product(*rows, *spans[broken:])
    return tuple(Region(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes)


_replicas: WeakKeyDictionary[DeviceMesh, dict[Any, Replica]] = WeakKeyDictionary()


def _replica(mesh: DeviceMesh, coordinate: tuple[int, ...], cut: frozenset[int]) -> Replica:
    known = _replicas.setdefault(mesh, {})
    key = (coordinate, cut)
    replica = known.get(key)
    if replica is None:
        line = mesh.mesh[tuple(c if m in cut else slice(None) for m, c in enumerate(coordinate))]
        index = 0
        for m, place in enumerate(coordinate):
            if m not in cut:
                index = index * mesh.size(m) + place
        ranks = tuple(line.flatten().tolist())
        replica = known[key] = Replica(index, len(ranks), ranks)
    return replica


# -- refusals -------------------------------------------------------------------------------------


def _check_local_shape(tensor: DTensor, path: ObjectPath, spans: Sequence[Spans]) -> None:
    expected = tuple(sum(stop - start for start, stop in held) for held in spans)
    # Not `to_local`, which waits for collectives and takes part in autograd.
    shape = tuple(tensor._local_tensor.shape)  # noqa: SLF001
    if shape != expected and not (0 in shape and 0 in expected):  # else both are empty
        multiples = [
            f"dimension {d} to a multiple of {_ranks(cuts)}"
            for d, cuts in enumerate(_cuts(tensor, path))
            if cuts
        ]
        _refuse(
            tensor,
            path,
            f"this rank's local tensor has shape {list(shape)}, but its share has shape "
            f"{list(expected)}. Pad {' and '.join(multiples) or 'the tensor'}, or make the tensor "
            "with `distribute_tensor`",
        )


def _ranks(cuts: Order) -> str:
    sizes = [cut.ranks for cut in cuts]
    product = str(math.prod(sizes))
    return f"{product} ({' x '.join(map(str, sizes))})" if len(sizes) > 1 else product


def _refuse(tensor: DTensor, path: ObjectPath, reason: str) -> NoReturn:
    placements = ", ".join(map(repr, tensor.placements))
    mesh = " x ".join(str(n) for n in tensor.device_mesh.shape)
    msg = (
        f"{show_path(path)} is a DTensor of shape {list(tensor.shape)}, placed by [{placements}] "
        f"on a mesh of {mesh} ranks, and {reason}"
    )
    raise UnsupportedStateError(msg)

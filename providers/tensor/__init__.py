"""The provider of tensors, alone or inside modules, optimizers and other values."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.core.abc import (
    ByteSource,
    MemoryKey,
    Node,
    Placement,
    StateObject,
    StateProvider,
    Target,
)
from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.markers import Shard, Shards, Streamed
from penstock.core.types import Kind, Region, Replica, Role, TensorSpec, show_path
from penstock.providers.tensor.by_hand import (
    describe_megatron,
    describe_shard,
    describe_shards,
    is_megatron,
    place_megatron,
    place_shard,
    place_shards,
)
from penstock.providers.tensor.flat_ranges import is_piece
from penstock.providers.tensor.parts import FORM as PARTS_FORM
from penstock.providers.tensor.parts import (
    describe_parts,
    has_parts,
    place_parts,
    plain_parts,
    rebuild_parts,
)
from penstock.providers.tensor.sharding import is_cut_like, last_cut_of, local_shard
from penstock.providers.tensor.sources import (
    CudaSource,
    ShardSink,
    TensorSink,
    TensorSource,
    device_name,
    dtype_name,
    lacks_memory,
    make_sink,
    overlaps_itself,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed.tensor import DTensor

    from penstock.core.abc import DescribeContext, PendingCopy, PlaceContext, StoredObject
    from penstock.core.types import ObjectPath

EXACT = 50
SUBCLASS = 20

_KNOWN = frozenset({torch.Tensor, torch.nn.Parameter})


class TensorProvider(StateProvider):
    """Stores tensors and parameters, plain or sharded, and tensor classes made of other tensors."""

    name = "tensor"
    forms = ("tensor", PARTS_FORM)

    def __init__(self) -> None:
        # One event per device and save is enough. It is recorded again for each tensor, and the
        # copies that wait for it begin after the last tensor was described.
        self._moments: WeakKeyDictionary[DescribeContext, dict[torch.device, torch.cuda.Event]]
        self._moments = WeakKeyDictionary()
        self._empty: WeakKeyDictionary[DescribeContext, dict[object, tuple[ObjectPath, object]]]
        self._empty = WeakKeyDictionary()

    def claims(self, kind: type, /) -> int | None:
        if kind in _KNOWN or kind in {Shard, Shards, Streamed} or is_megatron(kind):
            return EXACT
        return SUBCLASS if issubclass(kind, torch.Tensor) else None

    def describe(
        self,
        value: torch.Tensor | Shard | Shards | Streamed,
        path: ObjectPath,
        /,
        *,
        context: DescribeContext,
    ) -> Iterable[StateObject | Node]:
        kind = type(value)
        if kind in _KNOWN:
            # Not `isinstance`: with Parameter it looks up an attribute, ten times as slow.
            role = Role.OTHER if kind is torch.Tensor else Role.PARAMETER
            return (self._plain(value, path, role, context),)  # type: ignore[arg-type]  # see `kind`
        if isinstance(value, Shard | Streamed) or is_megatron(kind):
            return self._piece(value, path, context)
        if isinstance(value, Shards):
            return (describe_shards(value, path, context=context),)
        role = Role.PARAMETER if isinstance(value, torch.nn.Parameter) else Role.OTHER
        if has_parts(kind):
            return describe_parts(value, path, role=role, context=context)
        if is_sharded(value):
            return (self._sharded(value, path, role, context),)
        return (self._plain(value, path, role, context),)

    def describe_all(
        self,
        values: Sequence[torch.Tensor | Shard | Shards | Streamed],
        paths: Sequence[ObjectPath],
        /,
        *,
        context: DescribeContext,
    ) -> Iterable[StateObject | Node]:
        kind = type(values[0])
        if kind not in _KNOWN:
            return super().describe_all(values, paths, context=context)
        role = Role.OTHER if kind is torch.Tensor else Role.PARAMETER
        tensors: Sequence[torch.Tensor] = values  # type: ignore[assignment]  # see `kind`
        on_host = [tensor.is_cpu for tensor in tensors]
        host = [*compress(zip(tensors, paths, strict=True), on_host)]
        try:
            sources, refused = TensorSource.of_host([tensor for tensor, _ in host])
        except RuntimeError:  # one is nested or sparse; `_plain` names it
            sources, refused, on_host = [], [], [False] * len(tensors)
        for number in refused:
            refuse_unsupported(*host[number])
        objects = _whole_objects(compress(paths, on_host), context.role or role, sources)
        if len(objects) == len(tensors):
            return objects
        ready = iter(objects)
        return [
            next(ready) if is_ready else self._plain(tensor, path, role, context)
            for tensor, path, is_ready in zip(tensors, paths, on_host, strict=True)
        ]

    def place(
        self,
        value: torch.Tensor | Shard | Shards | Streamed,
        path: ObjectPath,
        /,
        *,
        context: PlaceContext,
    ) -> Placement:
        if isinstance(value, Streamed):
            refuse_place(path)
        if isinstance(value, Shard):
            return place_shard(value, path, context=context)
        if isinstance(value, Shards):
            return place_shards(value, path, context=context)
        kind = type(value)
        if kind not in _KNOWN:
            if is_megatron(kind):
                return place_megatron(value, path, context=context)
            if has_parts(kind):
                return place_parts(value, path, context=context)
        if not context.selected(path):
            return Placement(finish=lambda: value)
        return Placement([_checked_target(value, path)], finish=lambda: value)

    def place_all(
        self,
        values: Sequence[torch.Tensor | Shard | Shards | Streamed],
        paths: Sequence[ObjectPath],
        /,
        *,
        context: PlaceContext,
    ) -> list[Target] | None:
        if type(values[0]) not in _KNOWN:
            return None
        tensors: Sequence[torch.Tensor] = values  # type: ignore[assignment]  # all are of one type
        chosen = [pair for pair in zip(tensors, paths, strict=True) if context.selected(pair[1])]
        if not all([tensor.is_cpu for tensor, _ in chosen]):  # noqa: C419 - a list is faster
            return None
        try:
            sinks, refused = TensorSink.of_host([tensor for tensor, _ in chosen])
        except RuntimeError:  # one is nested or sparse; `place` names it
            return None
        if refused:
            return None
        return [
            Target(path, sink.layout.spec, sink.layout.regions, sink)
            if sink.layout.is_flat
            else _checked_target(tensor, path)
            for (tensor, path), sink in zip(chosen, sinks, strict=True)
        ]

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        if isinstance(stored, Node):
            return rebuild_parts(stored, device=device, context=context)
        tensor = empty_tensor(stored, device)
        return Placement([tensor_target(tensor, stored.path)], finish=lambda: tensor)

    def parameters(self, value: Any, /) -> Iterable[tuple[str, object]]:
        if isinstance(value, Shard | Shards | Streamed) or is_megatron(type(value)):
            return ()  # its state would be local too, cut in an unknown way
        return [("", value)] if value.requires_grad and value.is_leaf else ()

    def _plain(
        self, tensor: torch.Tensor, path: ObjectPath, role: Role, context: DescribeContext
    ) -> StateObject:
        if type(tensor) not in _KNOWN or not has_plain_memory(tensor):
            refuse_unsupported(tensor, path)
        source = self._source(tensor, context)
        if source.is_lost():
            refuse_unsupported(tensor, path)
        return _whole_objects([path], role, [source])[0]

    def _sharded(
        self, tensor: DTensor, path: ObjectPath, role: Role, context: DescribeContext
    ) -> StateObject:
        shard = local_shard(tensor, path, last_cut=last_cut_of(tensor))
        local = local_of(tensor)
        _refuse_local(local, path)
        spec, _ = _whole(tensor.dtype, tensor.shape)
        replica = shard.replica or Replica()
        if tensor.device_mesh.size() < context.world_size:
            replica = replace(replica, submesh=True)
        entry = StateObject(
            path, Kind.TENSOR, spec, shard.regions, role, "tensor", self._source(local, context),
            replica=replica,
        )  # fmt: skip
        if shard.regions:
            return entry
        # A state dict may show a separate tensor for each name of a parameter.
        storage = local.untyped_storage()
        if storage.nbytes():
            key = storage._cdata, tensor.shape  # noqa: SLF001 - it may have no address
            return self._tied(entry, storage, key, context)
        return self._tied(entry, tensor, id(tensor), context)

    def _piece(
        self, value: Any, path: ObjectPath, context: DescribeContext
    ) -> tuple[StateObject | Node, ...]:
        """Describe a `Streamed`, a `Shard` or a Megatron `ShardedTensor`."""
        if isinstance(value, Streamed):
            return (describe_streamed(value, path),)
        if isinstance(value, Shard):
            entry = describe_shard(value, path, context=context)
            if is_piece(value.tensor):  # else one empty tensor may stand for several
                entry = self._tied(entry, value.tensor, id(value.tensor), context)
            return (entry,)
        entry, nodes = describe_megatron(value, path, context=context)
        key = id(value.data), value.key
        return (*nodes, self._tied(entry, value.data, key, context))

    def _tied(
        self, entry: StateObject, owner: object, key: object, context: DescribeContext
    ) -> StateObject:
        """Tie a piece without elements to an earlier one of the same tensor.

        Core recognizes tied tensors by their memory, and a piece without elements has none. But
        ranks whose pieces have elements do tie them, and all ranks must describe an object alike.
        `owner` is kept alive as long as the context, so that no other object gets its key.
        """
        if entry.regions:
            return entry
        first, _ = self._empty.setdefault(context, {}).setdefault(key, (entry.path, owner))
        return entry if first == entry.path else entry._replace(same_as=first)

    def _source(self, tensor: torch.Tensor, context: DescribeContext) -> TensorSource:
        return self._cuda(tensor, context) if tensor.is_cuda else TensorSource(tensor)

    def _cuda(self, tensor: torch.Tensor, context: DescribeContext) -> TensorSource:
        moments = self._moments.setdefault(context, {})
        event = moments.get(tensor.device)
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
            moments[tensor.device] = event
        event.record(torch.cuda.current_stream(tensor.device))
        return CudaSource(tensor, event)


def _whole_objects(
    paths: Iterable[ObjectPath], role: Role, sources: Sequence[TensorSource]
) -> list[StateObject]:
    kind, form, new = Kind.TENSOR, "tensor", tuple.__new__
    layouts = [source.layout for source in sources]
    return [  # by `tuple.__new__`, which takes half as long as the class
        new(StateObject, (path, kind, layout.spec, layout.regions, role, form, source, None, None))
        for path, layout, source in zip(paths, layouts, sources, strict=True)
    ]


@lru_cache(maxsize=1024)
def _whole(dtype: torch.dtype, shape: torch.Size) -> tuple[TensorSpec, Region]:
    """Return the spec and region of a whole tensor; cached, since thousands share few shapes."""
    name, itemsize = dtype_name(dtype)
    return TensorSpec(name, itemsize, tuple(shape)), Region.whole(shape)


def _checked_target(tensor: torch.Tensor, path: ObjectPath) -> Target:
    """Return the memory of a tensor as a target; queries a plain tensor for each fact only once.

    Raises:
        UnsupportedStateError: The tensor has no plain memory, or its memory was freed.
    """
    if type(tensor) not in _KNOWN or not has_plain_memory(tensor):
        if is_sharded(tensor):
            _refuse_local(local_of(tensor), path)
        else:
            refuse_unsupported(tensor, path)
        return tensor_target(tensor, path)
    sink = TensorSink(tensor)
    if sink.is_lost():
        refuse_unsupported(tensor, path)
    if not sink.layout.is_flat and overlaps_itself(tensor):
        sink = make_sink(tensor, path)
    layout = sink.layout
    return Target(path, layout.spec, layout.regions, sink)


def tensor_target(
    tensor: torch.Tensor, path: ObjectPath, *, like: torch.Tensor | None = None
) -> Target:
    """Return the memory of `tensor` on this rank as a target for the object at `path`.

    Args:
        tensor: The tensor, which may be a DTensor.
        path: Where the object is in the template.
        like: The parameter, if `tensor` is its gradient or state.

    Raises:
        UnsupportedStateError: It is not certain which elements of a DTensor this rank holds.
    """
    spec, region = _whole(tensor.dtype, tensor.shape)
    if type(tensor) in _KNOWN or not is_sharded(tensor):
        return Target(path, spec, (region,), make_sink(tensor, path))
    local = local_of(tensor)
    shard = local_shard(tensor, path, last_cut=_last_cut(tensor, like))
    regions = (region,) if shard.regions == (region,) else shard.regions
    if overlaps_itself(local):
        return Target(path, spec, regions, make_sink(local, path))
    return Target(path, spec, regions, ShardSink(local, tensor))


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor."""
    # Looked up: a process without DTensors need not load their module, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself; `to_local` would wait for collectives and make a view."""
    return tensor._local_tensor  # noqa: SLF001 - see above


def _last_cut(tensor: DTensor, like: torch.Tensor | None) -> int | None:
    if like is None or like is tensor:
        return last_cut_of(tensor)
    return last_cut_of(like) if is_sharded(like) and is_cut_like(tensor, like) else None


def new_like(parameter: torch.Tensor, stored: StoredObject) -> torch.Tensor | None:
    """Return a new DTensor with the placement of `parameter`, to read the stored tensor into.

    Returns None if `parameter` is not a DTensor, or the stored tensor has another shape.
    """
    if not is_sharded(parameter) or stored.spec.shape != tuple(parameter.shape):
        return None
    local = local_of(parameter)
    spec = replace(stored.spec, shape=tuple(local.shape))
    made = empty_tensor(stored._replace(spec=spec), device_name(local.device))
    with torch.inference_mode(mode=False):
        return type(parameter).from_local(
            made,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,  # it would communicate
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def empty_tensor(stored: Any, device: str | None) -> torch.Tensor:
    """Return a new tensor to read a stored object into.

    Raises:
        FormatError: This torch has no such dtype.
    """
    # Not `getattr`, which imports the modules that torch loads lazily: a checkpoint would run code.
    dtype = vars(torch).get(stored.spec.dtype)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != stored.spec.itemsize:
        shown = show_path(stored.path)
        msg = (
            f"{shown} is stored as {stored.spec.dtype}, which torch {torch.__version__} lacks: "
            "restore it with a torch that has this dtype"
        )
        raise FormatError(msg, [shown])
    # A tensor made in inference mode would stay an inference tensor, which no optimizer can step.
    with torch.inference_mode(mode=False):
        return torch.empty(stored.spec.shape, dtype=dtype, device=device or "cpu")


def same_kind(
    tensor: object, stored: StoredObject | None, device: torch.device, context: PlaceContext
) -> bool:
    """Return whether `tensor` is on `device` and can be filled from the stored tensor."""
    local = local_of(tensor) if is_sharded(tensor) else tensor
    return (
        stored is not None
        and stored.kind is Kind.TENSOR
        and type(local) in _KNOWN
        and isinstance(tensor, torch.Tensor)
        and isinstance(local, torch.Tensor)
        and local.layout is torch.strided
        and local.device == device
        and context.takes(_whole(tensor.dtype, tensor.shape)[0], stored.spec)
        and not lacks_memory(local)
    )


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of `tensor` on this rank whose bytes can be stored."""
    return filter(is_plain, plain_parts(local_of(tensor) if is_sharded(tensor) else tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes can be stored."""
    return type(tensor) in _KNOWN and has_plain_memory(tensor)


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes are plain strided memory, even if it has been freed."""
    return (
        not tensor.is_nested
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def refuse_unsupported(tensor: torch.Tensor, path: ObjectPath) -> None:
    """Refuse tensors whose bytes are not plain strided memory.

    Raises:
        UnsupportedStateError: The tensor cannot be stored; the message says what to do instead.
    """
    kind = type(tensor)
    if tensor.is_nested:
        _refuse(path, "is a nested tensor: save the tensors that its `.unbind()` returns")
    if kind not in _KNOWN:
        _refuse(path, _subclass_reason(kind))
    if tensor.is_meta:
        _refuse(path, "is on the meta device and has no values: materialize it first")
    if tensor.is_mkldnn:
        _refuse(path, "has the mkldnn layout: save `.to_dense()`")
    if tensor.layout is not torch.strided:
        _refuse(
            path,
            f"is sparse ({str(tensor.layout).removeprefix('torch.')}): save `.to_dense()`, or its "
            "indices and values as tensors",
        )
    if tensor.is_quantized:
        _refuse(path, "is quantized: save `.int_repr()` with its scale and zero point")
    if lacks_memory(tensor):
        _refuse(
            path,
            f"has a storage of {tensor.untyped_storage().nbytes()} bytes, too few for its shape "
            f"{list(tensor.shape)}: it was freed or shrunk, so resize it back first",
        )


def _refuse_local(local: torch.Tensor, path: ObjectPath) -> None:
    """Refuse a DTensor's local tensor that cannot be stored as a part of the whole tensor.

    Raises:
        UnsupportedStateError: It cannot be stored; the message says what to do instead.
    """
    if has_parts(type(local)):
        _refuse(
            path,
            f"is a DTensor whose local tensor is a {type(local).__name__}. That consists of "
            "several tensors, which cannot be joined with those of other ranks: shard plain "
            "tensors, and use an optimizer whose state is not quantized",
        )
    refuse_unsupported(local, path)


def _subclass_reason(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, UninitializedParameter | UninitializedBuffer):
        return (
            f"is uninitialized ({kind.__name__}): run one forward pass of its lazy module before "
            "saving it"
        )
    if any(base.__module__.startswith("torch.distributed") for base in kind.__mro__):
        return (
            f"is a {kind.__name__}, and Penstock does not know which part of it is on this rank: "
            "put `penstock.Shard(piece, global_shape, offsets)` of each local piece into the state"
        )
    dispatch = "__torch_dispatch__"
    if getattr(kind, dispatch, None) is not getattr(torch.Tensor, dispatch):
        return (
            f"is a {name}, a tensor subclass that Penstock does not know: give it the methods "
            "`__tensor_flatten__` and `__tensor_unflatten__`, or install a state provider for it"
        )
    return (
        f"is a {name}, a tensor subclass that Penstock does not know: save "
        "`.as_subclass(torch.Tensor)`, or install a state provider for it"
    )


def _refuse(path: ObjectPath, reason: str) -> None:
    msg = f"{show_path(path)} {reason}"
    raise UnsupportedStateError(msg)


class StreamedSource(ByteSource):
    """Reads the bytes of a streamed tensor from the user's function."""

    __slots__ = ("_read", "address", "device", "memory", "nbytes")

    def __init__(self, value: Streamed, nbytes: int) -> None:
        self._read = value.read
        self.nbytes = nbytes
        self.device = "cpu"
        self.address = None
        # It has no memory, but the same object at two paths must count as tied: stored once.
        shape = tuple(value.shape)
        self.memory = MemoryKey("streamed", id(value), 0, shape, (), value.dtype)

    def view(self) -> memoryview | None:
        return None

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        if out.nbytes:
            self._read(start, out)
        return None


def describe_streamed(value: Streamed, path: ObjectPath) -> StateObject:
    """Describe a streamed tensor, as if it were in memory.

    Raises:
        UnsupportedStateError: torch has no such dtype.
    """
    dtype = vars(torch).get(value.dtype)
    if not isinstance(dtype, torch.dtype):
        msg = f"{show_path(path)} is a Streamed of {value.dtype!r}, which is not a torch dtype"
        raise UnsupportedStateError(msg)
    shape = tuple(value.shape)
    spec = TensorSpec(str(dtype).removeprefix("torch."), dtype.itemsize, shape)
    source = StreamedSource(value, spec.nbytes)
    return StateObject(
        path, Kind.TENSOR, spec, (Region.whole(shape),), Role.OTHER, "tensor", source
    )


def refuse_place(path: ObjectPath) -> NoReturn:
    """Refuse a streamed tensor in the template of a restore.

    Raises:
        UnsupportedStateError: Always.
    """
    msg = f"{show_path(path)} is a Streamed, which can only be saved: put a tensor there to restore"
    raise UnsupportedStateError(msg)

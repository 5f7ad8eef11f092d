"""Tensors: loose ones, and the leaves of every composite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.core.abc import Placement, StateObject, StateProvider, Target
from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import Kind, Region, Role, TensorSpec, show_path
from penstock.providers.cuda import CudaSource
from penstock.providers.memory import TensorSource, dtype_name, make_sink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.core.abc import DescribeContext, Node, PlaceContext, StoredObject
    from penstock.core.types import ObjectPath

EXACT = 50
SUBCLASS = 20

_KNOWN = frozenset({torch.Tensor, torch.nn.Parameter})
_CUDA = "cuda"


class TensorProvider(StateProvider):
    """Plain tensors and parameters; every other subclass is refused with its path."""

    name = "tensor"
    forms = ("tensor",)

    def __init__(self) -> None:
        # One event per device and save, recorded again for each tensor: waits come later.
        self._moments: WeakKeyDictionary[DescribeContext, dict[torch.device, torch.cuda.Event]]
        self._moments = WeakKeyDictionary()

    def claims(self, kind: type, /) -> int | None:
        if kind in _KNOWN:
            return EXACT
        return SUBCLASS if issubclass(kind, torch.Tensor) else None

    def describe(
        self, value: torch.Tensor, path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        refuse_unsupported(value, path)
        source = TensorSource(value) if value.device.type != _CUDA else self._cuda(value, context)
        name, itemsize = dtype_name(value.dtype)
        shape = tuple(value.shape)
        role = Role.PARAMETER if isinstance(value, torch.nn.Parameter) else Role.OTHER
        yield StateObject(
            path, Kind.TENSOR, TensorSpec(name, itemsize, shape), Region((0,) * len(shape), shape),
            role, "tensor", source,
        )  # fmt: skip

    def place(
        self, value: torch.Tensor, path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        if not context.selected(path):
            return Placement(finish=lambda: value)
        refuse_unsupported(value, path)
        return Placement([tensor_target(value, path)], finish=lambda: value)

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        del context
        tensor = empty_tensor(stored, device)
        return Placement([tensor_target(tensor, stored.path)], finish=lambda: tensor)

    def parameters(self, value: Any, /) -> Iterable[tuple[str, object]]:
        return [("", value)] if value.requires_grad and value.is_leaf else ()

    def _cuda(self, tensor: torch.Tensor, context: DescribeContext) -> TensorSource:
        moments = self._moments.setdefault(context, {})
        event = moments.get(tensor.device)
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
            moments[tensor.device] = event
        event.record(torch.cuda.current_stream(tensor.device))
        return CudaSource(tensor, event)


def tensor_target(tensor: torch.Tensor, path: ObjectPath) -> Target:
    """The whole memory of `tensor` as a target for the object at `path`."""
    name, itemsize = dtype_name(tensor.dtype)
    shape = tuple(tensor.shape)
    return Target(
        path, TensorSpec(name, itemsize, shape), Region.whole(shape), make_sink(tensor, path)
    )


def empty_tensor(stored: Any, device: str | None) -> torch.Tensor:
    """A tensor for a stored object to be read into.

    Raises:
        FormatError: This torch has no such dtype.
    """
    dtype = vars(torch).get(stored.spec.dtype)  # getattr would import what torch loads lazily
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != stored.spec.itemsize:
        shown = show_path(stored.path)
        msg = f"{shown} is stored as {stored.spec.dtype}, which torch {torch.__version__} lacks"
        raise FormatError(msg, [shown])
    return torch.empty(stored.spec.shape, dtype=dtype, device=device or "cpu")


def same_kind(tensor: object, stored: StoredObject | None, device: torch.device) -> bool:
    """Whether `tensor` can take the stored tensor in place, on `device`."""
    return (
        stored is not None
        and stored.kind is Kind.TENSOR
        and type(tensor) in _KNOWN
        and isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device == device
        and tuple(tensor.shape) == stored.spec.shape
        and dtype_name(tensor.dtype)[0] == stored.spec.dtype
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is of a kind that can be stored."""
    return (
        type(tensor) in _KNOWN
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def refuse_unsupported(tensor: torch.Tensor, path: ObjectPath) -> None:
    """Let only tensors pass whose bytes are plain strided memory.

    Raises:
        UnsupportedStateError: It is something else; says what to do instead.
    """
    kind = type(tensor)
    if kind not in _KNOWN:
        _refuse(path, _subclass_reason(kind))
    if tensor.device.type == "meta":
        _refuse(path, "is on the meta device and has no values: materialise it first")
    if tensor.is_nested:
        _refuse(path, "is a nested tensor: save its values and offsets as tensors")
    if tensor.layout is not torch.strided:
        _refuse(
            path,
            f"is sparse ({str(tensor.layout).removeprefix('torch.')}): save `.to_dense()`, or its "
            "indices and values as tensors",
        )
    if tensor.is_quantized:
        _refuse(path, "is quantized: save `.int_repr()` with its scale and zero point")


def _subclass_reason(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, UninitializedParameter | UninitializedBuffer):
        return f"is a {kind.__name__}: run one forward of the lazy module before saving it"
    if kind.__module__.startswith("torch.distributed"):
        return (
            f"is a {kind.__name__}, and sharded tensors are not supported yet: save "
            "`.full_tensor()` on one rank"
        )
    return (
        f"is a {name}, a tensor subclass that Penstock does not know: save "
        "`.as_subclass(torch.Tensor)`, or install a state provider for it"
    )


def _refuse(path: ObjectPath, reason: str) -> None:
    msg = f"{show_path(path)} {reason}"
    raise UnsupportedStateError(msg)

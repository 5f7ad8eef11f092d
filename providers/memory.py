"""Memory of tensors as byte sources and sinks. `cuda.py` holds the asynchronous half."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.core.abc import ByteSink, ByteSource, MemoryKey
from penstock.core.errors import RestoreMismatchError
from penstock.core.types import show_path
from penstock.providers.blocks import blocks, may_overlap

if TYPE_CHECKING:
    from penstock.core.abc import PendingCopy
    from penstock.core.types import ObjectPath

# Bits are moved as integers of the same size: exact for every dtype, and some dtypes have no copy.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_DTYPES: dict[torch.dtype, tuple[str, int]] = {}
_DEVICES: dict[torch.device, str] = {}


def dtype_name(dtype: torch.dtype) -> tuple[str, int]:
    """Name without prefix, and bytes per element."""
    known = _DTYPES.get(dtype)
    if known is None:
        known = (str(dtype).removeprefix("torch."), dtype.itemsize)
        _DTYPES[dtype] = known
    return known


def device_name(device: torch.device) -> str:
    """`"cpu"`, `"cuda:0"`, ..."""
    known = _DEVICES.get(device)
    if known is None:
        known = _DEVICES[device] = str(device)
    return known


def memory_key(tensor: torch.Tensor) -> MemoryKey:
    """The identity of the memory of a strided tensor."""
    name, itemsize = dtype_name(tensor.dtype)
    if tensor.is_conj():
        name += " conj"
    if tensor.is_neg():
        name += " neg"
    return MemoryKey(
        device_name(tensor.device),
        tensor.untyped_storage().data_ptr(),
        int(tensor.storage_offset()) * itemsize,
        tuple(tensor.shape),
        tuple([st * itemsize for st in tensor.stride()]),
        name,
    )


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the bytes of the tensor's values lie row-major in host memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def carrier(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements copy bit by bit; the tensor itself where none is needed or allowed."""
    dtype = _CARRIERS.get(tensor.dtype.itemsize)
    return tensor if dtype is None or tensor.is_conj() or tensor.is_neg() else tensor.view(dtype)


def host_tensor(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A 1-dim tensor over `buffer` without copying; a read-only buffer must only be read."""
    if buffer.readonly:
        # torch warns of read-only buffers, whatever it is going to do with them.
        address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        raw = (ctypes.c_char * buffer.nbytes).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype)


def flat_memory(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """The bytes of a flat tensor (see `is_flat`) without copying; keeps its storage alive."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    offset = tensor.storage_offset() * tensor.dtype.itemsize
    flat.set_(tensor.untyped_storage(), offset, (nbytes,), (1,))
    data: memoryview = flat.numpy().data
    return data


class _TensorMemory:
    __slots__ = ("address", "device", "memory", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An alias of its own: it stays with this memory if someone assigns `.data` later, and any
        # thread may write it, whatever autograd or inference mode think of that.
        alias = tensor.detach()
        self.tensor = alias
        self.nbytes = alias.numel() * alias.dtype.itemsize
        self.memory = memory_key(alias) if self.nbytes else None
        self.device = device_name(alias.device)
        self.address = alias.data_ptr() if self.nbytes and is_flat(alias) else None

    def view(self) -> memoryview | None:
        return None if self.address is None else flat_memory(self.tensor, self.nbytes)


class TensorSource(_TensorMemory, ByteSource):
    """The bytes of a tensor; copies from devices block."""

    __slots__ = ()

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        if not out.nbytes:
            return None
        if self.address is not None:
            flat = torch.frombuffer(flat_memory(self.tensor, self.nbytes), dtype=torch.uint8)
            host_tensor(out, torch.uint8).copy_(flat[start : start + out.nbytes])
            return None
        copy_range(self.tensor, start, out)
        return None

    def steady(self) -> bool:
        shared = self.tensor.is_shared()  # type: ignore[no-untyped-call]  # torch has no type
        return self.version() is not None and not shared

    def version(self) -> int | None:
        return None if self.tensor.is_inference() else self.tensor._version  # noqa: SLF001 - torch has no other name


def copy_range(
    tensor: torch.Tensor, start: int, out: memoryview, *, non_blocking: bool = False
) -> None:
    """Copy row-major bytes from `start` on to host memory, without a copy of the whole tensor."""
    source = carrier(tensor)
    target = host_tensor(out, source.dtype)
    first = start // tensor.dtype.itemsize
    for index, position in blocks(tuple(tensor.shape), first, first + target.numel()):
        # Resolved where the tensor is: torch would otherwise flip the signs on the host, right
        # behind a copy that may not have arrived.
        block = source[index].resolve_conj().resolve_neg()
        part = target[position : position + block.numel()]
        part.view(block.shape).copy_(block, non_blocking=non_blocking)


class TensorSink(_TensorMemory, ByteSink):
    """The memory of a tensor, to be filled in place."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        if self.tensor.device.type == "cuda":
            # What the caller has queued may still write here.
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def copy_in(self, start: int, data: memoryview, /) -> None:
        if not data.nbytes:
            return
        if self.address is not None:
            flat = torch.frombuffer(flat_memory(self.tensor, self.nbytes), dtype=torch.uint8)
            flat[start : start + data.nbytes].copy_(host_tensor(data, torch.uint8))
            return
        target = carrier(self.tensor)
        source = host_tensor(data, target.dtype)
        first = start // self.tensor.dtype.itemsize
        for index, position in blocks(tuple(target.shape), first, first + source.numel()):
            block = target[index]
            block.copy_(source[position : position + block.numel()].view(block.shape))

    def opened(self) -> None:
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)

    def written(self) -> None:
        if self.tensor.device.type == "cuda":
            # Strided targets are scattered by a kernel that follows the copy.
            torch.cuda.synchronize(self.tensor.device)
        if not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)


class OverlapSink(TensorSink):
    """A tensor that has elements of its own in the same place (`expand`): filled by way of scratch.

    `written` raises RestoreMismatchError where the stored values disagree about one place.
    """

    __slots__ = ("_live", "_path")

    def __init__(self, tensor: torch.Tensor, path: ObjectPath) -> None:
        super().__init__(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))
        self._live = tensor.detach()
        self._path = path
        self.memory = memory_key(tensor)

    def opened(self) -> None:
        if not self._live.is_inference():
            torch.autograd.graph.increment_version(self._live)

    def written(self) -> None:
        strides = self._live.stride()
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        carrier(self._live)[once].copy_(_as(self.tensor, self._live)[once])
        if not torch.equal(_bits(self._live), _bits(self.tensor)):
            msg = (
                f"{show_path(self._path)} is an expanded or overlapping tensor, and what is "
                "stored has different values for one place of its memory: restore into a "
                "contiguous tensor"
            )
            raise RestoreMismatchError(msg, [msg])
        self.tensor = self._live  # the scratch is free


def _as(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return carrier(source) if carrier(like).dtype != like.dtype else source


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    if plain.dtype.itemsize not in _CARRIERS:
        plain = torch.view_as_real(plain)
    return plain.view(_CARRIERS[plain.dtype.itemsize])


def make_sink(tensor: torch.Tensor, path: ObjectPath) -> TensorSink:
    """The sink that fits the layout of `tensor`."""
    return OverlapSink(tensor, path) if overlaps_itself(tensor) else TensorSink(tensor)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory; never wrong when it says no."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    return may_overlap(tensor.shape, tensor.stride(), 1)

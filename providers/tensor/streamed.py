"""Tensors whose bytes a function gives while they are saved: what `penstock.Streamed` is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from penstock.core.abc import ByteSource, MemoryKey, StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.types import Kind, Region, Role, TensorSpec, show_path

if TYPE_CHECKING:
    from penstock.core.abc import PendingCopy
    from penstock.core.markers import Streamed
    from penstock.core.types import ObjectPath


class StreamedSource(ByteSource):
    """The source that asks a function for the bytes."""

    __slots__ = ("_read", "address", "device", "memory", "nbytes")

    def __init__(self, value: Streamed, nbytes: int) -> None:
        self._read = value.read
        self.nbytes = nbytes
        self.device = "cpu"
        self.address = None
        # No memory, but one object at two paths is one tensor: it is stored once, as tied.
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
        msg = f"{show_path(path)} is a Streamed of {value.dtype!r}, which is no dtype of torch"
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
    msg = f"{show_path(path)} is a Streamed, which can be saved only: put a tensor there to restore"
    raise UnsupportedStateError(msg)

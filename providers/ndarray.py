"""numpy arrays, in place where they are writeable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.abc import (
    ByteSink,
    ByteSource,
    MemoryKey,
    Placement,
    StateObject,
    StateProvider,
    Target,
)
from penstock.core.errors import FormatError, RestoreMismatchError, UnsupportedStateError
from penstock.core.types import Kind, Region, Role, TensorSpec, show_path
from penstock.providers.blocks import blocks, may_overlap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import DescribeContext, Node, PendingCopy, PlaceContext, StoredObject
    from penstock.core.types import ObjectPath

EXACT = 50
SUBCLASS = 20
_KINDS = frozenset("biufcmMSUV")


class ArraySource(ByteSource):
    """The bytes of an array."""

    __slots__ = ("_array", "address", "device", "memory", "nbytes")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.nbytes = array.nbytes
        self.device = "cpu"
        flat = array.nbytes > 0 and array.flags.c_contiguous
        self.address = address_of(array) if flat else None
        self.memory = array_key(array)

    def view(self) -> memoryview | None:
        return None if self.address is None else _as_bytes(self._array).data

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        if not out.nbytes:
            return None
        target = np.frombuffer(out, np.uint8)
        if self.address is not None:
            np.copyto(target, _as_bytes(self._array)[start : start + out.nbytes])
            return None
        itemsize = self._array.itemsize
        typed = target.view(_carrier(self._array.dtype))
        first = start // itemsize
        for index, at in blocks(self._array.shape, first, first + len(typed)):
            block = self._array[(*index, ...)].view(typed.dtype)
            np.copyto(typed[at : at + block.size].reshape(block.shape), block)
        return None


class ArraySink(ByteSink):
    """The memory of a writeable array."""

    __slots__ = ("_array", "_live", "_path", "address", "device", "memory", "nbytes")

    def __init__(self, array: np.ndarray[Any, Any], path: ObjectPath) -> None:
        self._live = array
        self._path = path
        flat = array.flags.c_contiguous or not array.size
        overlaps = not flat and may_overlap(array.shape, array.strides, array.itemsize)
        self._array = np.empty(array.shape, array.dtype) if overlaps else array
        self.nbytes = array.nbytes
        self.device = "cpu"
        flat = array.nbytes > 0 and self._array.flags.c_contiguous
        self.address = address_of(self._array) if flat else None
        self.memory = array_key(array)

    def view(self) -> memoryview | None:
        return None if self.address is None else _as_bytes(self._array).data

    def copy_in(self, start: int, data: memoryview, /) -> None:
        if not data.nbytes:
            return
        source = np.frombuffer(data, np.uint8)
        if self.address is not None:
            np.copyto(_as_bytes(self._array)[start : start + data.nbytes], source)
            return
        typed = source.view(_carrier(self._array.dtype))
        first = start // self._array.itemsize
        for index, at in blocks(self._array.shape, first, first + len(typed)):
            block = self._array[(*index, ...)].view(typed.dtype)
            np.copyto(block, typed[at : at + block.size].reshape(block.shape))

    def written(self) -> None:
        if self._array is self._live:
            return
        np.copyto(self._live, self._array)
        if self._live.tobytes() != self._array.tobytes():
            msg = (
                f"{show_path(self._path)} is a broadcast or overlapping array, and what is stored "
                "has different values for one place of its memory: restore into a contiguous array"
            )
            raise RestoreMismatchError(msg, [msg])


class NdarrayProvider(StateProvider):
    """Arrays of fixed-size elements; Python objects and records are refused."""

    name = "ndarray"
    forms = ("ndarray",)

    def claims(self, kind: type, /) -> int | None:
        if kind in (np.ndarray, np.memmap):
            return EXACT
        return SUBCLASS if issubclass(kind, np.ndarray) else None

    def describe(
        self, value: np.ndarray[Any, Any], path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        del context
        refuse_unsupported(value, path)
        yield StateObject(
            path, Kind.TENSOR, _spec(value), Region.whole(value.shape), Role.OTHER, "ndarray",
            ArraySource(value),
        )  # fmt: skip

    def place(
        self, value: np.ndarray[Any, Any], path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        if not context.selected(path):
            return Placement(finish=lambda: value)
        refuse_unsupported(value, path)
        array = value if value.flags.writeable else np.empty(value.shape, value.dtype)
        return Placement([_target(array, path)], finish=lambda: array)

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        del device, context
        array = _empty(stored)
        return Placement([_target(array, stored.path)], finish=lambda: array)


def dtype_text(dtype: np.dtype[Any]) -> str:
    """`float32` where numpy knows the dtype by that name, else as `dtype.str` (`>f4`, `<U5`)."""
    try:
        return dtype.name if np.dtype(dtype.name) == dtype else dtype.str
    except TypeError:
        return dtype.str


def refuse_unsupported(array: np.ndarray[Any, Any], path: ObjectPath) -> None:
    """Let only arrays pass whose elements are their bytes.

    Raises:
        UnsupportedStateError: It is something else; says what to do instead.
    """
    kind, dtype = type(array), array.dtype
    reason = None
    if kind not in (np.ndarray, np.memmap):
        reason = (
            f"is a {kind.__module__}.{kind.__qualname__}, an array subclass that Penstock does "
            "not know: save numpy.asarray() of it"
        )
    elif dtype.hasobject or dtype.kind not in _KINDS:
        reason = f"is an array of dtype {dtype}, which holds Python objects: save a list of it"
    elif dtype.fields is not None:
        reason = "is a structured array: save a dict of its fields"
    elif np.dtype(dtype_text(dtype)) != dtype:
        reason = f"is an array of dtype {dtype}, which numpy does not know: save `.view('uint8')`"
    if reason is not None:
        msg = f"{show_path(path)} {reason}"
        raise UnsupportedStateError(msg)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where the first element is."""
    return int(array.__array_interface__["data"][0])


def array_key(array: np.ndarray[Any, Any]) -> MemoryKey | None:
    """The identity of the memory of an array; None where there is none."""
    if not array.nbytes:
        return None
    place = address_of(array)
    return MemoryKey("cpu", place, 0, array.shape, array.strides, f"numpy {array.dtype.str}")


def _spec(array: np.ndarray[Any, Any]) -> TensorSpec:
    return TensorSpec(dtype_text(array.dtype), array.itemsize, array.shape)


def _target(array: np.ndarray[Any, Any], path: ObjectPath) -> Target:
    return Target(path, _spec(array), Region.whole(array.shape), ArraySink(array, path))


def _empty(stored: Any) -> np.ndarray[Any, Any]:
    shown = show_path(stored.path)
    msg = f"{shown} is stored as an array of {stored.spec.dtype}, which this numpy lacks"
    try:
        dtype = np.dtype(stored.spec.dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses what has commas
        raise FormatError(msg, [shown]) from error
    if dtype.kind not in _KINDS or dtype.hasobject or dtype.itemsize != stored.spec.itemsize:
        raise FormatError(msg, [shown])
    return np.empty(stored.spec.shape, dtype)


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return array.reshape(-1).view(np.uint8)


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Moved as opaque bytes: exact for every dtype (`np.copyto` of strings would pad)."""
    return np.dtype(f"V{dtype.itemsize}")

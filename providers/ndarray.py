"""The provider of numpy arrays, restored in place where they are writeable."""

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
    copy_bytes,
)
from penstock.core.errors import FormatError, RestoreError, UnsupportedStateError
from penstock.core.types import Kind, Region, Role, TensorSpec, show_path
from penstock.providers.tensor.elements import blocks, may_overlap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import DescribeContext, Node, PendingCopy, PlaceContext, StoredObject
    from penstock.core.types import ObjectPath

EXACT = 50
SUBCLASS = 20
_KINDS = frozenset("biufcmMSUV")


class _ArrayMemory:
    """The memory of an array, as row-major bytes."""

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

    def _pairs(self, start: int, data: memoryview) -> Iterator[tuple[Any, Any]]:
        """Yield each block of the array with its part of `data`, which begins at byte `start`."""
        typed = np.frombuffer(data, np.uint8).view(_carrier(self._array.dtype))
        first = start // self._array.itemsize
        for index, at in blocks(self._array.shape, first, first + len(typed)):
            block = self._array[(*index, ...)].view(typed.dtype)
            yield block, typed[at : at + block.size].reshape(block.shape)


class ArraySource(_ArrayMemory, ByteSource):
    """The source of an array's bytes, in row-major order."""

    __slots__ = ()

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        if not out.nbytes:
            return None
        if self.address is not None:
            copy_bytes(out, _as_bytes(self._array)[start : start + out.nbytes].data)
            return None
        for block, part in self._pairs(start, out):
            np.copyto(part, block)
        return None


class ArraySink(_ArrayMemory, ByteSink):
    """The sink that fills the memory of a writeable array.

    An array with overlapping elements is filled through scratch memory. `written` then raises
    RestoreError if two stored values for the same memory differ.
    """

    __slots__ = ("_live", "_path")

    def __init__(self, array: np.ndarray[Any, Any], path: ObjectPath) -> None:
        self._live = array
        self._path = path
        flat = array.flags.c_contiguous or not array.size
        overlaps = not flat and may_overlap(array.shape, array.strides, array.itemsize)
        super().__init__(np.empty(array.shape, array.dtype) if overlaps else array)
        self.memory = array_key(array)
        if overlaps:
            self.address = None  # the scratch address would hide which memory is shared

    def copy_in(self, start: int, data: memoryview, /) -> None:
        if not data.nbytes:
            return
        if self.address is not None:
            copy_bytes(_as_bytes(self._array)[start:].data, data)
            return
        for block, part in self._pairs(start, data):
            np.copyto(block, part)

    def written(self) -> None:
        if self._array is self._live:
            return
        np.copyto(self._live, self._array)
        if self._live.tobytes() != self._array.tobytes():
            msg = (
                f"{show_path(self._path)} is a broadcast or overlapping array, but the checkpoint "
                "has different values for one place in its memory: restore into a contiguous array"
            )
            raise RestoreError(msg)


class NdarrayProvider(StateProvider):
    """Stores arrays of fixed-size elements; refuses object and structured dtypes."""

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
            path, Kind.TENSOR, _spec(value), (Region.whole(value.shape),), Role.OTHER, "ndarray",
            ArraySource(value),
        )  # fmt: skip

    def place(
        self, value: np.ndarray[Any, Any], path: ObjectPath, /, *, context: PlaceContext
    ) -> Placement:
        if not context.selected(path):
            return Placement(finish=lambda: value)
        refuse_unsupported(value, path)
        if value.flags.writeable:
            return Placement([_target(value, path)], finish=lambda: value)
        array = np.empty(value.shape, value.dtype)
        stored = context.stored(path)
        # Replaced only if filled: with `strict=False` the stored array may not fit, and the new
        # array would be unwritten memory.
        fits = (
            stored is not None
            and stored.kind is Kind.TENSOR
            and context.takes(_spec(value), stored.spec)
        )
        new = array if fits else value
        return Placement([_target(array, path)], finish=lambda: new, replaces=fits)

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        del device, context
        array = _empty(stored)
        return Placement([_target(array, stored.path)], finish=lambda: array)


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a name such as `float32` if numpy finds the dtype by it, else its `str` (`>f4`)."""
    try:
        return dtype.name if np.dtype(dtype.name) == dtype else dtype.str
    except TypeError:
        return dtype.str


def refuse_unsupported(array: np.ndarray[Any, Any], path: ObjectPath) -> None:
    """Refuse arrays whose elements are not plain bytes.

    Raises:
        UnsupportedStateError: The array cannot be stored; the message says what to do instead.
    """
    kind, dtype = type(array), array.dtype
    reason = None
    if kind not in (np.ndarray, np.memmap):
        reason = (
            f"is a {kind.__module__}.{kind.__qualname__}, an array subclass that Penstock does "
            "not know: save numpy.asarray() of it"
        )
    elif dtype.hasobject or dtype.kind not in _KINDS:
        reason = f"is an array of dtype {dtype}, which holds Python objects: save it as a list"
    elif dtype.fields is not None:
        reason = "is a structured array: save a dict of its fields"
    elif np.dtype(dtype_text(dtype)) != dtype:
        reason = f"is an array of dtype {dtype}, which numpy has no name for: save `.view('uint8')`"
    if reason is not None:
        msg = f"{show_path(path)} {reason}"
        raise UnsupportedStateError(msg)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the first element."""
    return int(array.__array_interface__["data"][0])


def array_key(array: np.ndarray[Any, Any]) -> MemoryKey | None:
    """Return the identity of an array's memory; None if it has no bytes."""
    if not array.nbytes:
        return None
    place = address_of(array)
    return MemoryKey("cpu", place, 0, array.shape, array.strides, f"numpy {array.dtype.str}")


def _spec(array: np.ndarray[Any, Any]) -> TensorSpec:
    return TensorSpec(dtype_text(array.dtype), array.itemsize, array.shape)


def _target(array: np.ndarray[Any, Any], path: ObjectPath) -> Target:
    return Target(path, _spec(array), (Region.whole(array.shape),), ArraySink(array, path))


def _empty(stored: Any) -> np.ndarray[Any, Any]:
    shown = show_path(stored.path)
    msg = (
        f"{shown} is stored as an array of {stored.spec.dtype}, which this numpy lacks: upgrade "
        "numpy"
    )
    try:
        dtype = np.dtype(stored.spec.dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses a text with commas
        raise FormatError(msg, [shown]) from error
    if dtype.kind not in _KINDS or dtype.hasobject or dtype.itemsize != stored.spec.itemsize:
        raise FormatError(msg, [shown])
    return np.empty(stored.spec.shape, dtype)


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return array.reshape(-1).view(np.uint8)


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return an opaque dtype of the same size, since `np.copyto` would pad strings."""
    return np.dtype(f"V{dtype.itemsize}")

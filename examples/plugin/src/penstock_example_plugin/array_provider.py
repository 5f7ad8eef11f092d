"""`array.array`: stored from its own memory, restored in place."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, ClassVar

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
from penstock.core.errors import FormatError, TornSnapshotError, UnsupportedStateError
from penstock.core.types import Kind, Region, Role, TensorSpec, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import (
        DescribeContext,
        Node,
        PendingCopy,
        PlaceContext,
        StoredObject,
    )
    from penstock.core.types import ObjectPath

# Penstock's kinds use 10 to 50. Only the exact type is claimed, so that a subclass is not restored
# as its base.
PRIORITY = 50
FORM = "array"

_SIGNED, _UNSIGNED, _REAL = "bhilq", "BHILQ", "fd"


class ArraySource(ByteSource):
    """The bytes of an array, by copies only.

    It has no `address`: core would copy from there later, and keep the source after the save. An
    array moves when it grows, so its address would have to stay pinned, and an `append` in the
    training loop would raise BufferError.
    """

    __slots__ = ("_value", "address", "device", "memory", "nbytes")

    def __init__(self, value: array[Any]) -> None:
        self._value = value
        self.nbytes = len(value) * value.itemsize
        self.device = "cpu"
        self.address: int | None = None
        self.memory = _memory(value)

    def view(self) -> memoryview | None:
        return None

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        with _bytes(self._value) as view:
            if view.nbytes != self.nbytes:
                msg = (
                    f"an array of {self.nbytes} bytes has {view.nbytes} now: another thread "
                    "changes it while it is saved; lock it around save()"
                )
                raise TornSnapshotError(msg)
            _copy(out, view[start : start + out.nbytes])
        return None


class ArraySink(ByteSink):
    """The memory of an array, filled in place.

    Core reads into the view and copies to `address`. The view pins that memory while core holds
    the sink: an `append` during a restore raises BufferError instead of moving it.
    """

    __slots__ = ("_view", "address", "device", "memory", "nbytes")

    def __init__(self, value: array[Any]) -> None:
        self._view = _bytes(value)
        self.nbytes = self._view.nbytes
        self.device = "cpu"
        self.address: int | None = value.buffer_info()[0] if value else None
        self.memory = _memory(value)

    def view(self) -> memoryview | None:
        return None if self.address is None else self._view

    def copy_in(self, start: int, data: memoryview, /) -> None:
        _copy(self._view[start : start + data.nbytes], data)


class ArrayProvider(StateProvider):
    """Numbers in `array.array`, as one-dimensional tensors of their dtype."""

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "array"
    version: ClassVar[int] = 1
    forms: ClassVar[tuple[str, ...]] = (FORM,)

    def claims(self, kind: type, /) -> int | None:
        return PRIORITY if kind is array else None

    def describe(
        self, value: array[Any], path: ObjectPath, /, *, context: DescribeContext
    ) -> Iterator[StateObject | Node]:
        del context
        spec = _spec(value, path)
        whole = Region.whole(spec.shape)
        yield StateObject(path, Kind.TENSOR, spec, (whole,), Role.OTHER, FORM, ArraySource(value))

    def place(self, value: array[Any], path: ObjectPath, /, *, context: PlaceContext) -> Placement:
        if not context.selected(path):
            return Placement(finish=lambda: value)
        # Core compares the target with the stored object, and reports another length or dtype.
        return Placement([_target(value, path)], finish=lambda: value)

    def rebuild(
        self, stored: StoredObject | Node, /, *, device: str | None, context: PlaceContext
    ) -> Placement:
        del device, context
        value = _empty(stored)
        return Placement([_target(value, stored.path)], finish=lambda: value)


def dtype_of(value: array[Any]) -> str | None:
    """Return the dtype of the elements, or None for text."""
    bits = 8 * value.itemsize
    if value.typecode in _SIGNED:
        return f"int{bits}"
    if value.typecode in _UNSIGNED:
        return f"uint{bits}"
    return f"float{bits}" if value.typecode in _REAL else None


# The widest typecode comes last and wins: `l` and `q` may have the same size.
_TYPECODES = {dtype_of(array(code)): code for code in _SIGNED + _UNSIGNED + _REAL}


def _spec(value: array[Any], path: ObjectPath) -> TensorSpec:
    dtype = dtype_of(value)
    if dtype is None:
        msg = f"{show_path(path)} is an array of text ({value.typecode!r}): save it as a str"
        raise UnsupportedStateError(msg)
    return TensorSpec(dtype, value.itemsize, (len(value),))


def _target(value: array[Any], path: ObjectPath) -> Target:
    spec = _spec(value, path)
    return Target(path, spec, (Region.whole(spec.shape),), ArraySink(value))


def _empty(stored: Any) -> array[Any]:
    spec, shown = stored.spec, show_path(stored.path)
    code = _TYPECODES.get(spec.dtype)
    # Read from a file, so it may be anything.
    if code is None or array(code).itemsize != spec.itemsize or len(spec.shape) != 1:
        msg = f"{shown} is stored as {spec.dtype} of shape {list(spec.shape)}: not an array.array"
        raise FormatError(msg, [shown])
    zeros: array[Any] = array(code, [0]) * spec.shape[0]
    return zeros


def _bytes(value: array[Any]) -> memoryview:
    # An empty view cannot be cast.
    return memoryview(value).cast("B") if value else memoryview(bytearray())


def _memory(value: array[Any]) -> MemoryKey | None:
    if not value:
        return None
    address, items = value.buffer_info()
    dtype = f"array {value.typecode}"
    return MemoryKey("cpu", address, 0, (items,), (value.itemsize,), dtype)


def _copy(target: memoryview, source: memoryview) -> None:
    # A slice assignment would hold the GIL for the whole copy; numpy releases it.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

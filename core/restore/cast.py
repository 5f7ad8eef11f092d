"""A sink for the elements of one float dtype that fills another sink with those of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import ByteSink, convert_floats

if TYPE_CHECKING:
    from penstock.core.types import TensorSpec

_PIECE_BYTES = 1 << 20  # of what is handed on to a sink that has no memory in sight


class CastSink(ByteSink):
    """Converts each element on its way into `inner`, rounded to nearest even."""

    __slots__ = ("_dtype", "_inner", "_into", "address", "device", "memory", "nbytes")

    def __init__(self, inner: ByteSink, dtype: TensorSpec, into: TensorSpec) -> None:
        """Make a sink for elements as in `dtype`; `inner` takes them as in `into`."""
        self._inner = inner
        self._dtype = dtype
        self._into = into
        self.nbytes = inner.nbytes // into.itemsize * dtype.itemsize
        self.device = inner.device
        self.address = None
        self.memory = inner.memory

    def view(self) -> memoryview | None:
        """Return None: no memory holds the elements as they come."""
        return None

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Convert whole elements into the inner sink."""
        one, other = self._dtype.itemsize, self._into.itemsize
        at, length = start // one * other, data.nbytes // one * other
        target = self._inner.view()
        if target is not None:
            self._convert(data, target[at : at + length])
            return
        step = _PIECE_BYTES // other
        scratch = memoryview(bytearray(min(length, step * other)))
        for first in range(0, length // other, step):
            count = min(step, length // other - first)
            piece = scratch[: count * other]
            self._convert(data[first * one : (first + count) * one], piece)
            self._inner.copy_in(at + first * other, piece)

    def _convert(self, source: memoryview, target: memoryview) -> None:
        convert_floats(source, self._dtype.dtype, target, self._into.dtype)

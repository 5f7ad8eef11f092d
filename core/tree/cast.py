"""The casts of a restore with `cast=`: which there are, and the sink that does them.

The elements of one float dtype go into a sink that takes another.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.core.abc import FLOAT_DTYPES, ByteSink, convert_floats

if TYPE_CHECKING:
    from penstock.core.types import TensorSpec

_PIECE_BYTES = 1 << 20  # of what is handed on to a sink that has no memory in sight


def may_cast(spec: TensorSpec, stored: TensorSpec) -> bool:
    """Return whether `cast=` converts: the two differ in the format of floats alone."""
    known = all(FLOAT_DTYPES.get(one.dtype) == one.itemsize for one in (spec, stored))
    return known and spec.dtype != stored.dtype and spec.shape == stored.shape


class CastSink(ByteSink):
    """Converts each element on its way into `inner`, rounded to nearest even.

    Each piece is converted on the thread that brings it, into the memory of `inner` where that is
    flat, else by way of 1 MiB of scratch. Pieces come in any order, from several threads, and may
    split an element: its bytes are kept until all are there.
    """

    __slots__ = (
        "_dtype",
        "_inner",
        "_into",
        "_lock",
        "_split",
        "address",
        "device",
        "memory",
        "nbytes",
    )

    def __init__(self, inner: ByteSink, dtype: TensorSpec, into: TensorSpec) -> None:
        """Make a sink for elements as in `dtype`; `inner` takes them as in `into`."""
        self._inner = inner
        self._dtype = dtype
        self._into = into
        self.nbytes = inner.nbytes // into.itemsize * dtype.itemsize
        self.device = inner.device
        self.address = None
        self.memory = inner.memory
        self._lock = threading.Lock()  # protects `_split`
        self._split: dict[int, tuple[bytearray, bytearray]] = {}

    def view(self) -> memoryview | None:
        """Return None: no memory holds the elements as they come."""
        return None

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Convert elements into the inner sink; the first and the last may be cut off."""
        size = self._dtype.itemsize
        stop = start + data.nbytes
        first, last = -(-start // size), stop // size
        if first > last:  # it begins and ends inside of one element
            self._collect(start, data)
            return
        if start < first * size:
            self._collect(start, data[: first * size - start])
        if last * size < stop:
            self._collect(last * size, data[last * size - start :])
        if first < last:
            self._place(first, data[first * size - start : last * size - start])

    def opened(self) -> None:
        """Open the inner sink."""
        self._inner.opened()

    def written(self) -> None:
        """Complete the inner sink."""
        self._inner.written()

    def _place(self, first: int, data: memoryview) -> None:
        """Convert whole elements, of which the first has the number `first`."""
        one, other = self._dtype.itemsize, self._into.itemsize
        at, length = first * other, data.nbytes // one * other
        target = self._inner.view()
        if target is not None:
            self._convert(data, target[at : at + length])
            return
        step = _PIECE_BYTES // other
        scratch = memoryview(bytearray(min(length, step * other)))
        for start in range(0, length // other, step):
            count = min(step, length // other - start)
            piece = scratch[: count * other]
            self._convert(data[start * one : (start + count) * one], piece)
            self._inner.copy_in(at + start * other, piece)

    def _collect(self, start: int, part: memoryview) -> None:
        """Keep some bytes of one element; convert the element when all of them are there."""
        size = self._dtype.itemsize
        number, at = divmod(start, size)
        with self._lock:
            element, there = self._split.setdefault(number, (bytearray(size), bytearray(size)))
            element[at : at + part.nbytes] = part
            there[at : at + part.nbytes] = b"\1" * part.nbytes
            whole = all(there)
            if whole:
                del self._split[number]
        if whole:
            self._place(number, memoryview(element))

    def _convert(self, source: memoryview, target: memoryview) -> None:
        convert_floats(source, self._dtype.dtype, target, self._into.dtype)

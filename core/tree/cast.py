"""The float casts of a restore with `cast=`, and the sink that performs them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.core.abc import FLOAT_DTYPES, ByteSink, convert_floats

if TYPE_CHECKING:
    from penstock.core.types import TensorSpec

_PIECE_BYTES = 1 << 20  # of scratch, for a sink without a view of its memory


def may_cast(spec: TensorSpec, stored: TensorSpec) -> bool:
    """Return whether `cast=` can convert `stored` to `spec`: only their float dtypes may differ."""
    known = all(FLOAT_DTYPES.get(each.dtype) == each.itemsize for each in (spec, stored))
    return known and spec.dtype != stored.dtype and spec.shape == stored.shape


class CastSink(ByteSink):
    """Converts each element on its way into `inner`, rounded to nearest even.

    The thread that delivers a piece converts it: directly into the memory of `inner` if `inner` has
    a view of it, otherwise through a scratch buffer of at most 1 MiB. Pieces come in any order,
    from several threads. A piece may end inside an element; the bytes of that element are kept
    until all have arrived.
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
        """Make a sink that takes elements of `dtype` and passes elements of `into` to `inner`."""
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
        """Return None, since no memory holds the unconverted elements."""
        return None

    def copy_in(self, start: int, data: memoryview, /) -> None:
        """Convert elements into the inner sink; the first and the last one may be incomplete."""
        size = self._dtype.itemsize
        stop = start + data.nbytes
        first, last = -(-start // size), stop // size
        if first > last:  # the data begins and ends inside one element
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
        """Convert whole elements, beginning with element number `first`."""
        size, into = self._dtype.itemsize, self._into.itemsize
        at, length = first * into, data.nbytes // size * into
        target = self._inner.view()
        if target is not None:
            self._convert(data, target[at : at + length])
            return
        step = _PIECE_BYTES // into
        scratch = memoryview(bytearray(min(length, step * into)))
        for start in range(0, length // into, step):
            count = min(step, length // into - start)
            piece = scratch[: count * into]
            self._convert(data[start * size : (start + count) * size], piece)
            self._inner.copy_in(at + start * into, piece)

    def _collect(self, start: int, part: memoryview) -> None:
        """Keep some bytes of one element; convert the element once it is complete."""
        size = self._dtype.itemsize
        number, at = divmod(start, size)
        with self._lock:
            element, filled = self._split.setdefault(number, (bytearray(size), bytearray(size)))
            element[at : at + part.nbytes] = part
            filled[at : at + part.nbytes] = b"\1" * part.nbytes
            whole = all(filled)
            if whole:
                del self._split[number]
        if whole:
            self._place(number, memoryview(element))

    def _convert(self, source: memoryview, target: memoryview) -> None:
        convert_floats(source, self._dtype.dtype, target, self._into.dtype)

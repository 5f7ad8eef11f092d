"""How far two tensors are apart, a piece at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Norms:
    """Of `a - b`, element by element; the figures are of finite differences alone.

    Attributes:
        elements: How many there are.
        differing: How many differ in value: of NaN and a number, yes; of NaN and NaN, or -0 and 0,
            no. None where only the bytes of it mean anything.
        max_abs: The greatest difference; None if there is no finite one.
        l2: Root of the sum of squares.
        relative_l2: The same over that of the finite values of `a`; None where those are all 0.
        nan: Elements that are NaN in either.
        inf: Elements that differ by infinity.
    """

    elements: int
    differing: int | None
    max_abs: float | None = None
    l2: float | None = None
    relative_l2: float | None = None
    nan: int = 0
    inf: int = 0


class NormSum:
    """Adds up pieces of two tensors of one dtype."""

    def __init__(self, dtype: str, itemsize: int) -> None:
        self._dtype = dtype
        self._itemsize = itemsize
        self._elements = 0
        self._differing = 0
        self._finite = 0
        self._max: float = 0
        self._squares = 0.0
        self._reference = 0.0
        self._nan = 0
        self._inf = 0
        self._opaque = False

    def add(self, a: memoryview, b: memoryview) -> None:
        """Take the same range of both, in whole elements."""
        self._elements += a.nbytes // self._itemsize
        x, y = _numbers(a, self._dtype), _numbers(b, self._dtype)
        if x is None or y is None:
            self._opaque = True
            return
        with np.errstate(all="ignore"):
            if x.dtype.kind in "iub":
                self._add_integers(x, y)
            else:
                self._add_floats(x, y)

    def result(self) -> Norms:
        """What came of it."""
        if self._opaque:
            return Norms(self._elements, None)
        if not self._finite:
            return Norms(self._elements, self._differing, nan=self._nan, inf=self._inf)
        l2, reference = math.sqrt(self._squares), math.sqrt(self._reference)
        relative = l2 / reference if reference else None
        return Norms(
            self._elements,
            self._differing,
            self._max if math.isfinite(self._max) else None,
            l2 if math.isfinite(l2) else None,  # squares of the largest doubles overflow
            relative if relative is not None and math.isfinite(relative) else None,
            self._nan,
            self._inf,
        )

    def _add_integers(self, x: Numbers, y: Numbers) -> None:
        # Modulo 2**64, so that not even the whole span of int64 overflows.
        wide = np.uint64 if x.dtype.kind == "u" else np.int64
        p, q = x.astype(wide), y.astype(wide)
        u, v = p.view(np.uint64), q.view(np.uint64)
        apart = np.where(p > q, u - v, v - u)
        self._differing += int(np.count_nonzero(apart))
        self._take(apart.astype(np.float64), p.astype(np.float64))
        if apart.size:
            self._max = max(self._max, int(apart.max()))

    def _add_floats(self, x: Numbers, y: Numbers) -> None:
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        p, q = x.astype(wide), y.astype(wide)
        nan = np.isnan(p) | np.isnan(q)
        equal = (p == q) | (np.isnan(p) & np.isnan(q))
        apart = np.where(equal, 0.0, np.abs(p - q))
        infinite = ~nan & ~np.isfinite(apart)
        self._nan += int(np.count_nonzero(nan))
        self._inf += int(np.count_nonzero(infinite))
        self._differing += equal.size - int(np.count_nonzero(equal))
        size = np.abs(p)
        finite = apart[~nan & ~infinite]
        self._take(finite, size[np.isfinite(size)])
        if finite.size:
            self._max = max(self._max, float(finite.max()))

    def _take(self, apart: NDArray[np.float64], reference: NDArray[np.float64]) -> None:
        self._finite += apart.size
        self._squares += float(np.square(apart).sum())
        self._reference += float(np.square(reference).sum())


def _numbers(data: memoryview, dtype: str) -> Numbers | None:
    """The elements as numpy knows them; None: they are no numbers (dates, text)."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return _exotic(data, dtype)
    if kind.kind == "b":
        kind = np.dtype(np.uint8)
    return np.frombuffer(data, kind) if kind.kind in "iufc" else None


def _exotic(data: memoryview, dtype: str) -> Numbers | None:
    import torch  # noqa: PLC0415 - numpy has no 8-bit floats

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not (kind.is_floating_point or kind.is_complex):
        return None
    if not data.nbytes:
        return np.empty(0, np.float32)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind)
    wide = flat.to(torch.complex64 if kind.is_complex else torch.float32)
    result: Numbers = wide.numpy()
    return result

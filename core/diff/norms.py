"""Norms of the difference of two tensors, computed a piece at a time."""

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
    """Norms of `a - b`, element by element, over the finite differences.

    Attributes:
        elements: The number of elements.
        differing: The number of elements that differ in value: NaN and a number differ, but two
            NaN, or -0 and 0, do not. None where the elements are no numbers.
        max_abs: The greatest difference; None if no difference is finite.
        l2: The root of the sum of squared differences.
        relative_l2: `l2` over the same root of the finite values of `a`; None where that is 0.
        nan: The number of elements that are NaN in either.
        inf: The number of elements that differ by infinity.
    """

    elements: int
    differing: int | None
    max_abs: float | None = None
    l2: float | None = None
    relative_l2: float | None = None
    nan: int = 0
    inf: int = 0


class NormSum:
    """Sums up the differences of two tensors of one dtype, piece by piece."""

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
        """Take the same range of both tensors, in whole elements."""
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
        """Return the norms of all pieces so far."""
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
        # As unsigned numbers, greater minus smaller: a difference of two int64 may overflow int64.
        wide = np.uint64 if x.dtype.kind == "u" else np.int64
        p, q = x.astype(wide), y.astype(wide)
        u, v = p.view(np.uint64), q.view(np.uint64)
        difference = np.where(p > q, u - v, v - u)
        self._differing += int(np.count_nonzero(difference))
        self._take(difference.astype(np.float64), p.astype(np.float64))
        if difference.size:  # from the integers: float64 holds 53 bits of the greatest one
            self._max = max(self._max, int(difference.max()))

    def _add_floats(self, x: Numbers, y: Numbers) -> None:
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        p, q = x.astype(wide), y.astype(wide)
        nan = np.isnan(p) | np.isnan(q)
        equal = (p == q) | (np.isnan(p) & np.isnan(q))
        difference = np.where(equal, 0.0, np.abs(p - q))  # inf - inf would be NaN
        infinite = ~nan & ~np.isfinite(difference)
        self._nan += int(np.count_nonzero(nan))
        self._inf += int(np.count_nonzero(infinite))
        self._differing += equal.size - int(np.count_nonzero(equal))
        size = np.abs(p)
        finite = difference[~nan & ~infinite]
        self._take(finite, size[np.isfinite(size)])
        if finite.size:
            self._max = max(self._max, float(finite.max()))

    def _take(self, differences: NDArray[np.float64], reference: NDArray[np.float64]) -> None:
        self._finite += differences.size
        self._squares += float(np.square(differences).sum())
        self._reference += float(np.square(reference).sum())


def _numbers(data: memoryview, dtype: str) -> Numbers | None:
    """Return the elements as a numpy array; None if they are no numbers (dates, text)."""
    if dtype == "bfloat16":  # numpy has none, but its bits are the upper half of a float32
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

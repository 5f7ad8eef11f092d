"""Figures over the values of stored tensors, a piece at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.types import Kind, Region, show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.checkpoint import Checkpoint
    from penstock.core.manifest import ObjectRecord

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one tensor. All but the counts are of its finite values, and None if there are none.

    Attributes:
        min: The least.
        max: The greatest.
        mean: In double precision.
        std: Of the whole population, not of a sample.
        nan: How many are not a number.
        inf: How many are infinite, of either sign.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int


def tensor_stats(checkpoint: Checkpoint, record: ObjectRecord) -> Stats | None:
    """Read a tensor and look at its values; None for what has no order: complex, dates, bytes.

    Raises:
        DamagedError: Stored bytes are not what was written.
    """
    if record.kind is not Kind.TENSOR or record.same_as is not None:
        return None
    total = _Running()
    limit = max(1, _PIECE_BYTES // max(1, record.spec.itemsize))
    for region in pieces(record.spec.shape, limit):
        values = _real(checkpoint.read(show_path(record.path), region), record.spec.dtype)
        if values is None:
            return None
        total.add(values)
    return total.stats()


def pieces(shape: tuple[int, ...], limit: int) -> Iterator[Region]:
    """Regions of at most `limit` (at least 1) elements, in row-major order, that cover all."""
    if 0 in shape:
        return
    if math.prod(shape) <= limit:
        yield Region.whole(shape)
        return
    dim = next(n for n, size in enumerate(shape) if size > 1)
    whole = Region.whole(shape[dim + 1 :])
    row = whole.numel
    rows = max(1, limit // row)
    for first in range(0, shape[dim], rows):
        count = min(rows, shape[dim] - first)
        for inner in pieces(shape[dim + 1 :], limit) if row > limit else [whole]:
            yield Region((0,) * dim + (first, *inner.offsets), (1,) * dim + (count, *inner.sizes))


class _Running:
    """Mean and squares of what came so far (Chan, Golub and LeVeque, 1979)."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._greatest: float | None = None
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._nan = 0
        self._inf = 0

    def add(self, values: Any) -> None:
        """Take a numpy array of integers, floats or booleans."""
        import numpy as np  # noqa: PLC0415 - only where values are read

        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            self._nan += int(np.isnan(values).sum())
            self._inf += values.size - int(finite.sum()) - int(np.isnan(values).sum())
            values = values[finite]
        if not values.size:
            return
        # `+` makes booleans integers
        least, greatest = +values.min().item(), +values.max().item()
        self._least = least if self._least is None else min(self._least, least)
        self._greatest = greatest if self._greatest is None else max(self._greatest, greatest)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean(dtype=np.float64))
            squares = float(np.square(values - np.float64(mean)).sum())
        count = self._count + values.size
        apart = mean - self._mean
        self._squares += squares + apart * apart * self._count * values.size / count
        self._mean += apart * values.size / count
        self._count = count

    def stats(self) -> Stats:
        """What came of it."""
        if not self._count:
            return Stats(None, None, None, None, self._nan, self._inf)
        std = math.sqrt(self._squares / self._count)
        # Squares of the largest doubles overflow: then there is no figure to print.
        return Stats(
            self._least,
            self._greatest,
            self._mean if math.isfinite(self._mean) else None,
            std if math.isfinite(std) else None,
            self._nan,
            self._inf,
        )


def _real(value: Any, dtype: str) -> Any:
    """`value`, a tensor or an array, as an array of numbers that can be compared; else None."""
    import numpy as np  # noqa: PLC0415 - only where values are read

    if isinstance(value, np.ndarray):
        array = value
    elif value.is_complex():
        return None
    else:
        try:
            np.dtype(dtype)
        except TypeError:
            value = value.float()  # bfloat16 and the 8-bit floats, exactly
        array = value.numpy()
    return array if array.dtype.kind in "fiub" else None

"""The prediction of elements from the means of their row and column.

The bit pattern of a positive float, read as an integer, grows like its logarithm. Adam's second
moments are near an outer product (Shazeer and Stern, 2018, "Adafactor", arXiv:1804.04235). For such
a matrix each pattern is near the sum of a row term and a column term. The residual after
subtracting both has few distinct exponents.

All arithmetic is on integers modulo 2**16, so that every machine gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.codecs.plain import Bytes, Words

SAMPLED_COLUMNS = 32
"""Elements averaged for a row's term; more would shrink the residual by less than 0.5 %."""
SAMPLED_ROWS = 64
"""Elements averaged for a column's term."""
STEP = 16
"""Terms are multiples of this, an eighth of an octave.

That is fine enough, since elements differ from their prediction by half an octave.
"""

_MAGNITUDE = np.uint16(0x7FFF)


@dataclass(frozen=True, slots=True)
class Grid:
    """Terms whose sum predicts the top 16 bits of consecutive elements.

    Attributes:
        rows: One term for each row that the chunk touches.
        columns: One term for each column of the matrix.
        cell: Index of the first predicted element, counted from the start of the first row.
    """

    rows: Words
    columns: Words
    cell: int

    def from_element(self, number: int) -> Grid:
        """Return the terms for elements from `number` on."""
        return Grid(self.rows, self.columns, self.cell + number)

    def terms(self, count: int, scratch: Words) -> Words:
        """Return the prediction of `count` elements.

        Args:
            count: The number of elements.
            scratch: Memory for all rows that the elements touch; the result is a view of it.
        """
        width = len(self.columns)
        first, last = self.cell // width, -(-(self.cell + count) // width)
        out = scratch[: (last - first) * width].reshape(-1, width)
        np.add(self.rows[first:last, None], self.columns[None, :], out=out)
        return scratch[self.cell - first * width :][:count]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The stored form of the row and column terms.

    Attributes:
        base: A number to add to each row's term.
        rows: Terms of the rows that the chunk touches, in steps of `STEP`.
        columns: Terms of the columns, in steps of `STEP`.
        first_column: Column of the first element of the chunk.
    """

    base: int
    rows: Bytes
    columns: Bytes
    first_column: int

    def grid(self) -> Grid:
        """Return the terms in the form that predicts elements."""
        rows = self.rows.astype(np.uint16) * np.uint16(STEP) + np.uint16(self.base)
        return Grid(rows, self.columns.astype(np.uint16) * np.uint16(STEP), self.first_column)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The rows of a matrix that a chunk contains whole.

    Attributes:
        top: The top 16 bits of their elements, possibly with a stride.
        first_column: Column of the first element of the chunk.
        touched: Number of rows that are wholly or partly in the chunk.
    """

    top: Words
    first_column: int
    touched: int

    def sample(self) -> Words:
        """Return a sample of columns and rows, spread over the matrix."""
        rows = self.top[_spread(len(self.top))]
        return np.concatenate([rows[:, run] for run in _runs(rows.shape[1])], axis=1)


def as_matrix(top: Words, shape: tuple[int, ...], start: int) -> Matrix | None:
    """Return the whole rows of a chunk; None if there are too few.

    Args:
        top: The top 16 bits of all elements of the chunk.
        shape: Shape of the region that contains the chunk.
        start: Index of the chunk's first element in that region.
    """
    width = 1
    for size in reversed(shape[1:]):
        width *= size
        if width >= SAMPLED_COLUMNS:
            break
    if width < SAMPLED_COLUMNS:
        return None
    first_column = start % width
    skipped = (width - first_column) % width
    whole = (len(top) - skipped) // width
    if whole < 4:  # noqa: PLR2004 - means of fewer are noisy
        return None
    rows = top[skipped : skipped + whole * width].reshape(whole, width)
    return Matrix(rows, first_column, -(-(first_column + len(top)) // width))


def residual(sample: Words) -> Words:
    """Return a sample minus its row means and column means."""
    values = (sample & _MAGNITUDE).astype(np.int32)
    rows = values.sum(axis=1, dtype=np.int32) // np.int32(values.shape[1])
    columns = (values - rows[:, None]).sum(axis=0, dtype=np.int32) // np.int32(len(values))
    left: Words = sample - (rows[:, None] + columns).astype(np.uint16)
    return left


def estimate(matrix: Matrix) -> Prediction:
    """Return a prediction whose terms are means over samples of each row and column."""
    whole, width = matrix.top.shape
    sums = np.zeros(whole, np.int32)
    for run in _runs(width):
        sums += (matrix.top[:, run] & _MAGNITUDE).astype(np.int32).sum(axis=1, dtype=np.int32)
    row_means = sums // np.int32(SAMPLED_COLUMNS)
    rows = _spread(whole)
    sample = (matrix.top[rows] & _MAGNITUDE).astype(np.int32) - row_means[rows, None]
    column_base, column_steps = _steps(sample.sum(axis=0, dtype=np.int32) // np.int32(len(sample)))
    row_base, row_steps = _steps(row_means)
    # Rows that the chunk has only in part take the term of their neighbor.
    lead = 1 if matrix.first_column else 0
    touched = np.empty(matrix.touched, np.uint8)
    touched[:lead], touched[lead + whole :] = row_steps[0], row_steps[-1]
    touched[lead : lead + whole] = row_steps
    base = (row_base + column_base) % (1 << 16)
    return Prediction(base, touched, column_steps, matrix.first_column)


def _spread(rows: int) -> slice:
    """Return at least `SAMPLED_ROWS` evenly spaced rows, or all rows if there are fewer."""
    return slice(None, None, max(1, rows // SAMPLED_ROWS))


def _runs(width: int) -> tuple[slice, slice]:
    """Return two runs of columns, since separate columns would load a cache line each."""
    half = SAMPLED_COLUMNS // 2
    second = half + (width - SAMPLED_COLUMNS) * 2 // 3
    return slice(half), slice(second, second + half)


def _steps(terms: NDArray[np.int32]) -> tuple[int, Bytes]:
    """Return terms as a base and multiples of `STEP`; clips terms far below the highest."""
    base = max(int(terms.min()), int(terms.max()) - 255 * STEP)
    steps = (np.maximum(terms, base) - base + STEP // 2) // STEP
    return base, np.minimum(steps, 255).astype(np.uint8)

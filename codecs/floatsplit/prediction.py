"""The prediction of elements from the means of their row and column.

The bit pattern of a positive float, read as an integer, grows like its logarithm. So where the
magnitudes of a matrix are near an outer product, as the second moments of Adam are (Shazeer and
Stern, 2018, "Adafactor", arXiv:1804.04235), the pattern is near the sum of a term of its row and a
term of its column, and what is left after subtracting both has few distinct exponents.

Everything is arithmetic of integers modulo 2**16, so that every machine gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint16]

SAMPLED = 32
"""Elements of a row, and of a column, whose mean is taken."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Terms whose sum predicts the top 16 bits of an element.

    Attributes:
        rows: One term for each row that the chunk touches.
        columns: One term for each column of the matrix.
        first_column: Column of the first element of the chunk.
    """

    rows: Words
    columns: Words
    first_column: int

    def terms(self, start: int, stop: int, scratch: Words) -> Words:
        """Return what is predicted of the elements `[start, stop)` of the chunk, in `scratch`."""
        width = len(self.columns)
        begin, end = start + self.first_column, stop + self.first_column
        first, last = begin // width, -(-end // width)
        grid = scratch[: (last - first) * width].reshape(-1, width)
        np.add(self.rows[first:last, None], self.columns[None, :], out=grid)
        return grid.reshape(-1)[begin - first * width :][: stop - start]


def matrix_width(shape: tuple[int, ...], most: int) -> int:
    """Return the number of columns under which a tensor is seen as a matrix; 0: it is none."""
    width = 1
    for size in reversed(shape[1:]):
        width *= size
        if width >= SAMPLED:
            break
    return width if SAMPLED <= width <= most else 0


def estimate(top: Words, width: int, first_column: int) -> Prediction | None:
    """Return row and column terms of a chunk from a sample of it; None: it has too few rows.

    Args:
        top: The top 16 bits of all elements, possibly with gaps between them in memory.
        width: Columns of the matrix.
        first_column: Column of the first element.
    """
    skipped = (width - first_column) % width
    whole = (len(top) - skipped) // width  # rows of which the chunk has all elements
    if whole < 2:  # noqa: PLR2004 - one row is its own mean
        return None
    grid = top[skipped : skipped + whole * width].reshape(whole, width)
    columns = np.linspace(0, width - 1, SAMPLED).astype(np.intp)
    rows = np.unique(np.linspace(0, whole - 1, min(whole, 2 * SAMPLED)).astype(np.intp))
    row_terms = _mean(grid[:, columns] & np.uint16(0x7FFF), 1)
    sample = (grid[rows] & np.uint16(0x7FFF)).astype(np.int32)
    column_terms = _mean(sample - row_terms[rows, None], 0)
    touched = -(-(first_column + len(top)) // width)
    terms = np.zeros(touched, np.int32)
    lead = 1 if skipped else 0
    terms[lead : lead + whole] = row_terms
    # Rows of which the chunk has only a part take the term of their neighbour.
    terms[:lead] = row_terms[0]
    terms[lead + whole :] = row_terms[-1]
    return Prediction(terms.astype(np.uint16), column_terms.astype(np.uint16), first_column)


def _mean(values: NDArray[np.int32] | Words, axis: int) -> NDArray[np.int32]:
    """Return the mean along `axis`, rounded down."""
    total: NDArray[np.int32] = values.sum(axis=axis, dtype=np.int32)
    return total // np.int32(values.shape[axis])

"""Says where the lines lie by which memory is compared, without reading all of it. Sans-IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Count = TypeVar("Count", int, NDArray[np.int64])

LINE_BYTES = 64

LINES = 8
"""Lines of an object, the first and the last among them; of a large one there may be more."""


def line_offset(length: Count, width: Count, number: Count, count: Count) -> Count:
    """Return where line `number` of `count` lines of `width` bytes begins: they lie evenly spread.

    Args:
        length: Bytes of what is compared; at least `width`.
        width: Bytes of a line.
        number: Which line, from 0.
        count: How many lines there are; at least 2.
    """
    return (length - width) * number // (count - 1)

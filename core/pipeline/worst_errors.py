"""How far the floats that a lossy codec gives back are from those that were saved."""

from __future__ import annotations

import math

from penstock.core.abc import FLOAT_DTYPES, convert_floats
from penstock.core.types import WorstErrors

_BLOCK = 64 << 10  # elements that are compared at once, so that they stay in the cache


def worst_errors(saved: memoryview, given: memoryview, dtype: str) -> WorstErrors | None:
    """Compare two arrays of floats of one dtype; None for what `convert_floats` does not know.

    An equal number has no error, and NaN in the place of NaN has none. NaN or an infinity in the
    place of anything else has infinite ones, and so has anything else in their place. Any number in
    the place of zero has an infinite relative error. Errors are computed in float32, those of
    float64 in float64.
    """
    import numpy as np  # noqa: PLC0415 - `penstock verify` does without it

    size = FLOAT_DTYPES.get(dtype)
    if size is None:
        return None
    wide = "float64" if dtype == "float64" else "float32"
    count = saved.nbytes // size
    blocks = np.empty((2, min(count, _BLOCK)), wide)
    absolute = relative = 0.0
    for start in range(0, count, _BLOCK):
        number = min(_BLOCK, count - start)
        here = slice(start * size, (start + number) * size)
        one, two = blocks[0, :number], blocks[1, :number]
        convert_floats(saved[here], dtype, one.view(np.uint8).data, wide)
        convert_floats(given[here], dtype, two.view(np.uint8).data, wide)
        with np.errstate(all="ignore"):
            np.subtract(two, one, out=two)
            np.abs(two, out=two)
            if np.isnan(np.maximum.reduce(two)):  # by NaN, or by two equal infinities
                if _nan_moved(saved[here], given[here], dtype):
                    return WorstErrors(math.inf, math.inf)
                two[np.isnan(two)] = 0
            absolute = max(absolute, float(np.maximum.reduce(two)))
            if math.isinf(absolute):
                return WorstErrors(math.inf, math.inf)
            np.abs(one, out=one)
            np.divide(two, one, out=two)
            ratio = float(np.fmax.reduce(two))  # which passes over 0 / 0
            relative = max(relative, 0.0 if math.isnan(ratio) else ratio)
    return WorstErrors(absolute, relative)


def _nan_moved(saved: memoryview, given: memoryview, dtype: str) -> bool:
    """Return whether NaN stands in one of two arrays where it does not in the other."""
    import numpy as np  # noqa: PLC0415 - as above

    masks: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for data in (saved, given):
        numbers = np.empty(data.nbytes // FLOAT_DTYPES[dtype])
        convert_floats(data, dtype, numbers.view(np.uint8).data, "float64")
        masks.append(np.isnan(numbers))
    return not np.array_equal(masks[0], masks[1])

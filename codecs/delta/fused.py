"""The comparison of elements with those of their base, in one pass, by numba.

Like `comparison`, where numpy takes four or five passes. A frame is the same whichever wrote it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types  # pyright: ignore[reportMissingImports]  # an extra

from penstock.codecs.compiled import compiled, filled, given
from penstock.codecs.delta import comparison as plain
from penstock.codecs.delta.comparison import Comparison

if TYPE_CHECKING:
    from penstock.codecs.delta.comparison import Words

_SIGNATURES = [
    (given(word), given(word), filled(word))
    for word in (types.uint8, types.uint16, types.uint32, types.uint64)
]
_ONE, _TWO = np.uint64(1), np.uint64(2)


@compiled(*_SIGNATURES)
def _subtract(new: Any, old: Any, out: Any) -> None:
    top = np.uint64(8 * out.itemsize - 1)
    mask = (_TWO << top) - _ONE
    for i in range(out.size):
        difference = (np.uint64(new[i]) - np.uint64(old[i])) & mask
        out[i] = (difference << _ONE) ^ (-(difference >> top))


@compiled(*_SIGNATURES)
def _add(differences: Any, old: Any, out: Any) -> None:
    for i in range(out.size):
        zigzag = differences[i]
        out[i] = old[i] + ((zigzag >> _ONE) ^ (-(zigzag & _ONE)))


def compare(new: Words, old: Words, how: Comparison, out: Words) -> None:
    """Write the differences of `new` from `old` into `out`; all have one length and type."""
    if how is Comparison.SUBTRACT:
        _subtract(new, old, out)
    else:
        plain.compare(new, old, how, out)


def apply(differences: Words, old: Words, how: Comparison, out: Words) -> None:
    """Write into `out` the elements that differ so from `old`."""
    if how is Comparison.SUBTRACT:
        _add(differences, old, out)
    else:
        plain.apply(differences, old, how, out)

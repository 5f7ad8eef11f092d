"""The comparison of elements with those of their base, and the way back, by numpy."""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[np.unsignedinteger]

_BLOCK_ELEMENTS = 64 << 10  # stays in the L2 cache with its scratch memory


class Comparison(IntEnum):
    """How elements are compared with those of the base."""

    SUBTRACT = 0
    """As integers, the difference in zigzag order: 0, -1, 1, -2, ..."""
    XOR = 1
    """Bit by bit."""


class _CompareMemory(threading.local):
    """Memory of one thread, for one block."""

    def __init__(self) -> None:
        self.one = np.empty(_BLOCK_ELEMENTS, np.uint64)


_scratch = _CompareMemory()


def compare(new: Words, old: Words, how: Comparison, out: Words) -> None:
    """Write the differences of `new` from `old` into `out`; all have one length and type."""
    if how is Comparison.XOR:
        np.bitwise_xor(new, old, out=out)
        return
    signed, bits = f"<i{new.itemsize}", 8 * new.itemsize
    for at in range(0, new.size, _BLOCK_ELEMENTS):
        part = out[at : at + _BLOCK_ELEMENTS]
        sign = _scratch.one.view(new.dtype)[: part.size]
        np.subtract(new[at : at + part.size], old[at : at + part.size], out=part)
        # Zigzag: all bits move up by one and are inverted below a negative sign.
        np.right_shift(part.view(signed), bits - 1, out=sign.view(signed))
        np.left_shift(part, 1, out=part)
        np.bitwise_xor(part, sign, out=part)


def apply(differences: Words, old: Words, how: Comparison, out: Words) -> None:
    """Write into `out` the elements that differ so from `old`."""
    if how is Comparison.XOR:
        np.bitwise_xor(differences, old, out=out)
        return
    for at in range(0, old.size, _BLOCK_ELEMENTS):
        part = out[at : at + _BLOCK_ELEMENTS]
        difference = differences[at : at + part.size]
        sign = _scratch.one.view(old.dtype)[: part.size]
        np.bitwise_and(difference, 1, out=sign)
        np.negative(sign, out=sign)
        np.right_shift(difference, 1, out=part)
        np.bitwise_xor(part, sign, out=part)
        np.add(part, old[at : at + part.size], out=part)

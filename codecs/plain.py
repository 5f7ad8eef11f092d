"""The inner loops of codecs in numpy.

They work on blocks that fit into the L2 cache, and write into memory that their thread reuses:
numpy splits 256 Ki elements at three times the speed of 4 Mi elements.

The top 16 bits of an element become two planes of bytes. For floats the first plane holds the 8
bits below the sign. They are the exponent, which compresses well. (In float16 the last three of
them are mantissa bits; in float64 the last three bits of the exponent are in the second plane.) The
second plane holds the next 7 bits and the sign, which seldom compress. The lower bits become one
plane, or one plane per byte.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.codecs.floatsplit.prediction import Grid

    Bytes: TypeAlias = NDArray[np.uint8]
    Words: TypeAlias = NDArray[np.uint16]
    Elements: TypeAlias = NDArray[np.unsignedinteger]

BLOCK_ELEMENTS = 256 << 10
"""Maximum elements per block."""

_SUBTRACTED = 64 << 10  # elements that are compared at once


class Halves(IntEnum):
    """How to split the top 16 bits of a block's elements, minus the prediction, into two planes."""

    SIGNED = 0
    """Floats of both signs: the 8 bits below the sign, then the sign and the next 7 bits."""
    UNSIGNED = 1
    """Floats whose sign bit is zero: the second plane has the next 7 bits."""
    INTEGER = 2
    """Two plain bytes, without a prediction."""
    NEAR = 3
    """Differences of -2**13 to 2**13 - 1 from the prediction: the upper 8 bits, then the lowest 6.

    Such differences have few distinct exponents. Huffman codes take whole bits, so they waste less
    on symbols with one more bit: 8.7 instead of 9.0 bits for second moments.
    """


UNUSED_BITS = {Halves.UNSIGNED: 1, Halves.NEAR: 2}
"""Number of zero top bits in each byte of the second plane."""


class _PlaneMemory(threading.local):
    """Memory of one thread for the planes of one block, and for intermediate results."""

    def __init__(self) -> None:
        n = BLOCK_ELEMENTS  # small chunks do not touch the pages that they do not need
        self.word = np.empty(n, np.uint64)
        self.top = np.empty(n, np.uint16)
        self.one = np.empty(n, np.uint16)
        self.two = np.empty(n, np.uint16)
        self.first = np.empty(n, np.uint8)
        self.second = np.empty(n, np.uint8)
        self.low = np.empty(6 * n, np.uint8)


scratch = _PlaneMemory()


def subtract(new: Elements, old: Elements, out: Elements) -> None:
    """Write the differences of `new` from `old` into `out`, in zigzag order: 0, -1, 1, -2, ..."""
    signed, bits = f"<i{new.itemsize}", 8 * new.itemsize
    for at in range(0, new.size, _SUBTRACTED):
        part = out[at : at + _SUBTRACTED]
        sign = scratch.word.view(new.dtype)[: part.size]
        np.subtract(new[at : at + part.size], old[at : at + part.size], out=part)
        # Zigzag: all bits move up by one, and are inverted if the sign is negative.
        np.right_shift(part.view(signed), bits - 1, out=sign.view(signed))
        np.left_shift(part, 1, out=part)
        np.bitwise_xor(part, sign, out=part)


def add(differences: Elements, old: Elements, out: Elements) -> None:
    """Reverse `subtract`: write `old` plus the zigzag `differences` into `out`."""
    for at in range(0, old.size, _SUBTRACTED):
        part = out[at : at + _SUBTRACTED]
        difference = differences[at : at + part.size]
        sign = scratch.word.view(old.dtype)[: part.size]
        np.bitwise_and(difference, 1, out=sign)
        np.negative(sign, out=sign)
        np.right_shift(difference, 1, out=part)
        np.bitwise_xor(part, sign, out=part)
        np.add(part, old[at : at + part.size], out=part)


def split_block(block: Elements, planes: list[Elements], kind: Halves, grid: Grid | None) -> bool:
    """Write the planes of `block`.

    Args:
        block: Elements of 2, 4 or 8 bytes; not changed.
        planes: Receive the parts of each element, from the top. They have the length of `block`,
            and may begin at any address; none is `top`, `one`, `two` or `word` of `scratch`.
        kind: How to split the top 16 bits.
        grid: The prediction to subtract from the top 16 bits, starting at the block's first
            element; None for no prediction.

    Returns:
        Whether `kind` can split the elements. If not, the contents of `planes` are undefined.
    """
    n, shift = len(block), 8 * block.itemsize - 16
    word = scratch.word.view(block.dtype)[:n]
    top: Words = block
    if shift:
        np.right_shift(block, shift, out=word)
        top = scratch.top[:n]
        np.copyto(top, word, casting="unsafe")
    if not _split_top(top, planes, kind, grid):
        return False
    for plane in planes[2:]:
        shift -= 8 * plane.itemsize
        if shift:
            np.right_shift(block, shift, out=word)
        np.copyto(plane, word if shift else block, casting="unsafe")
    return True


def _split_top(top: Words, planes: list[Elements], kind: Halves, grid: Grid | None) -> bool:
    n, first, second = len(top), planes[0], planes[1]
    one, two = scratch.one[:n], scratch.two[:n]
    if kind is Halves.UNSIGNED and int(top.max()) >> 15:
        return False
    if grid is not None and kind is not Halves.INTEGER:
        top = np.subtract(top, grid.terms(n, scratch.one), out=scratch.top[:n])
    if kind is Halves.NEAR:
        signed = top.view(np.int16)
        if int(signed.max()) >> 13 or int(signed.min()) >> 13 < -1:
            return False
    np.right_shift(top, {Halves.INTEGER: 8, Halves.NEAR: 6}.get(kind, 7), out=one)
    np.copyto(first, one, casting="unsafe")
    if kind is Halves.SIGNED:
        np.bitwise_and(top, 0x807F, out=one)
        np.right_shift(one, 8, out=two)
        np.bitwise_or(one, two, out=one)
        top = one
    np.copyto(second, top, casting="unsafe")
    if kind in UNUSED_BITS:
        np.bitwise_and(second, 0xFF >> UNUSED_BITS[kind], out=second)
    return True


def join_block(planes: list[Elements], kind: Halves, grid: Grid | None, block: Elements) -> None:
    """Reverse `split_block` into `block`."""
    n, shift = len(block), 8 * block.itemsize - 16
    if not shift:
        _join_top(planes, kind, grid, block)
        return
    top = scratch.top[:n]
    _join_top(planes, kind, grid, top)
    # The lowest plane goes straight to its place, which saves one pass over a mask.
    np.copyto(block, planes[-1])
    word = scratch.word.view(block.dtype)[:n]
    for plane in (top, *planes[2:-1]):
        np.copyto(word, plane)
        np.left_shift(word, shift, out=word)
        np.bitwise_or(block, word, out=block)
        shift -= 8 * planes[2].itemsize


def _join_top(planes: list[Elements], kind: Halves, grid: Grid | None, top: Elements) -> None:
    n, first, second = len(top), planes[0], planes[1]
    one = scratch.one[:n]
    if kind is Halves.SIGNED:
        # Sign extension puts the sign into bit 15 too, which saves one pass.
        np.copyto(one.view(np.int16), second.view(np.int8))
        np.bitwise_and(one, 0x807F, out=one)
    else:
        np.copyto(one, second, casting="unsafe")
    if kind is Halves.NEAR:
        np.copyto(top.view(np.int16), first.view(np.int8))
    else:
        np.copyto(top, first)
    np.left_shift(top, {Halves.INTEGER: 8, Halves.NEAR: 6}.get(kind, 7), out=top)
    np.bitwise_or(top, one, out=top)
    if grid is not None and kind is not Halves.INTEGER:
        np.add(top, grid.terms(n, scratch.one), out=top)
        if kind is Halves.UNSIGNED:
            np.bitwise_and(top, 0x7FFF, out=top)


def scatter(used: Bytes, values: Bytes, plane: Bytes) -> None:
    """Write `values` to the bytes of `plane` whose bit in `used` is set, and zeros elsewhere.

    Args:
        used: One bit for each byte of `plane`, the highest bit first.
        values: One byte for each set bit, and one more byte.
        plane: Receives the bytes.
    """
    plane.fill(0)
    plane[np.unpackbits(used)[: plane.size].view(np.bool_)] = values[:-1]


def store_codes(plane: Bytes, out: Bytes) -> int:
    """Return 0 and write no frame, so that zstd writes it."""
    del plane, out
    return 0

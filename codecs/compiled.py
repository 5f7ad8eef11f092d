"""The loops of `plain`, compiled by numba, with one pass over the data instead of several.

Importing this module needs numba, which is an extra, and takes 0.4 s. It takes a few seconds if
numba has no cached code, or no folder to write to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numba  # pyright: ignore[reportMissingImports]
import numpy as np
from numba import types  # pyright: ignore[reportMissingImports]

from penstock.codecs import plain
from penstock.codecs.plain import Halves

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.codecs.floatsplit.prediction import Grid
    from penstock.codecs.plain import Bytes, Elements, Words

    Function: TypeAlias = Callable[..., Any]


def given(element: Any) -> Any:
    """Return the type of an input array, unaligned since frames and chunks begin anywhere."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)


def filled(element: Any) -> Any:
    """Return the type of an output array."""
    return types.Array(element, 1, "C", aligned=False)


def compiled(*signatures: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles for `signatures`, and caches on disk if possible."""

    def compile_(function: Function) -> Function:
        try:
            jitted: Function = numba.njit(list(signatures), nogil=True, cache=True)(function)
        except RuntimeError:  # numba has no folder to write to
            jitted = numba.njit(list(signatures), nogil=True)(function)
        return jitted

    return compile_


_U1, _U2, _U4, _U8 = types.uint8, types.uint16, types.uint32, types.uint64
_COMPARED = [(given(word), given(word), filled(word)) for word in (_U1, _U2, _U4, _U8)]
_ONE, _TWO = np.uint64(1), np.uint64(2)


@compiled(*_COMPARED)
def subtract(new: Any, old: Any, out: Any) -> None:
    """See `plain.subtract`."""
    top = np.uint64(8 * out.itemsize - 1)
    mask = (_TWO << top) - _ONE
    for i in range(out.size):
        difference = (np.uint64(new[i]) - np.uint64(old[i])) & mask
        out[i] = (difference << _ONE) ^ (-(difference >> top))


@compiled(*_COMPARED)
def add(differences: Any, old: Any, out: Any) -> None:
    """See `plain.add`."""
    for i in range(out.size):
        zigzag = differences[i]
        out[i] = old[i] + ((zigzag >> _ONE) ^ (-(zigzag & _ONE)))


# Each kind of split as numbers, so that the loops have no branches; the columns are the `Halves`.
# The first plane is `d >> shift`, the second `d & low | d >> 8 & sign`, where `d` is the top of an
# element minus its prediction. `extended` is the top bit of the first plane if `d` may be
# negative. No bit of `unsigned` may be set in the top, none of `near` in `d + 2**13`. `kept` masks
# the sum of `d` and the prediction.
_SHIFT = np.array([7, 7, 8, 6], np.uint16)
_LOW = np.array([0x7F, 0x7F, 0xFF, 0x3F], np.uint16)
_SIGN = np.array([0x80, 0, 0, 0], np.uint16)
_EXTENDED = np.array([0, 0, 0, 0x80], np.uint16)
_UNSIGNED = np.array([0, 0x8000, 0, 0], np.uint16)
_NEAR = np.array([0, 0, 0, 0xC000], np.uint16)
_KEPT = np.array([0xFFFF, 0x7FFF, 0xFFFF, 0xFFFF], np.uint16)
_EIGHT, _REACH = np.uint16(8), np.uint16(1 << 13)
_GRID = (types.int64, given(_U2), given(_U2), types.int64)  # kind; terms, and the first cell

_NOTHING: Words = np.empty(0, np.uint16)
_ROW = 4096  # elements at once without prediction


# LLVM makes a separate loop for each value of `predicted`; numba drops branches that `below` rules
# out.
def _splitter(word: Any, below: Any) -> Function:
    """Compile the split of elements that have `below` (0 or 16) bits below their top 16 bits."""

    @compiled((given(word), *_GRID, filled(_U1), filled(_U1), filled(_U2)))
    def split(
        block: Any, kind: Any, rows: Any, columns: Any, cell: Any, first: Any, second: Any, low: Any
    ) -> Any:
        shift, keep, sign = _SHIFT[kind], _LOW[kind], _SIGN[kind]
        unsigned, near = _UNSIGNED[kind], _NEAR[kind]
        bad, at, n, width = np.uint16(0), 0, block.size, columns.size
        predicted = width > 0
        while at < n:
            row, column, end = np.uint16(0), 0, min(at + _ROW, n)
            if predicted:
                number, column = divmod(cell + at, width)
                row, end = rows[number], min(at + width - column, n)
            part, terms, rest = block[at:end], columns[column:], low[at:end]
            one, two = first[at:end], second[at:end]
            for i in range(part.size):
                top = d = np.uint16(part[i] >> below)
                if predicted:
                    d = np.uint16(top - row - terms[i])
                bad |= (top & unsigned) | ((d + _REACH) & near)
                one[i] = d >> shift
                two[i] = (d & keep) | ((d >> _EIGHT) & sign)
                if below:
                    rest[i] = np.uint16(part[i])
            at = end
        return bad == 0

    return split


def _joiner(word: Any, below: Any) -> Function:
    """Compile the inverse of the split."""

    @compiled((given(_U1), given(_U1), given(_U2), *_GRID, filled(word)))
    def join(
        first: Any, second: Any, low: Any, kind: Any, rows: Any, columns: Any, cell: Any, block: Any
    ) -> None:
        shift, keep, sign, extended = _SHIFT[kind], _LOW[kind], _SIGN[kind], _EXTENDED[kind]
        kept, at, n, width = _KEPT[kind], 0, block.size, columns.size
        predicted = width > 0
        while at < n:
            row, column, end = np.uint16(0), 0, min(at + _ROW, n)
            if predicted:
                number, column = divmod(cell + at, width)
                row, end = rows[number], min(at + width - column, n)
            part, terms, rest = block[at:end], columns[column:], low[at:end]
            one, two = first[at:end], second[at:end]
            for i in range(part.size):
                high = np.uint16((np.uint16(one[i]) ^ extended) - extended) << shift
                both = np.uint16(two[i])
                d = np.uint16(high | (both & keep) | ((both & sign) << _EIGHT))
                if predicted:
                    d = np.uint16(d + row + terms[i]) & kept
                if below:
                    part[i] = (np.uint32(d) << below) | np.uint32(rest[i])
                else:
                    part[i] = d
            at = end

    return join


_SPLIT = {2: _splitter(_U2, np.uint32(0)), 4: _splitter(_U4, np.uint32(16))}
_JOIN = {2: _joiner(_U2, np.uint32(0)), 4: _joiner(_U4, np.uint32(16))}


@compiled((given(_U4), *(filled(_U1) for _ in range(4))))
def _split_bytes(block: Any, first: Any, second: Any, third: Any, fourth: Any) -> None:
    for i in range(block.size):
        first[i] = block[i] >> np.uint32(24)
        second[i] = block[i] >> np.uint32(16)
        third[i] = block[i] >> np.uint32(8)
        fourth[i] = block[i]


@compiled((*(given(_U1) for _ in range(4)), filled(_U4)))
def _join_bytes(first: Any, second: Any, third: Any, fourth: Any, block: Any) -> None:
    for i in range(block.size):
        high = (np.uint32(first[i]) << np.uint32(24)) | (np.uint32(second[i]) << np.uint32(16))
        block[i] = high | (np.uint32(third[i]) << np.uint32(8)) | np.uint32(fourth[i])


def split_block(block: Elements, planes: list[Elements], kind: Halves, grid: Grid | None) -> bool:
    """See `plain.split_block`.

    Falls back to it for 8-byte elements, and for 4-byte floats whose bytes each have their own
    plane.
    """
    if 2 * (len(planes) - 1) == block.itemsize:
        low = planes[2] if planes[2:] else _NOTHING
        return bool(_SPLIT[block.itemsize](block, *_place(kind, grid), *planes[:2], low))
    if block.itemsize == 4 and kind is Halves.INTEGER:  # noqa: PLR2004 - each byte apart
        _split_bytes(block, *planes)
        return True
    return plain.split_block(block, planes, kind, grid)


def join_block(planes: list[Elements], kind: Halves, grid: Grid | None, block: Elements) -> None:
    """See `plain.join_block`.

    Falls back to it for 8-byte elements, and for 4-byte floats whose bytes each have their own
    plane.
    """
    if 2 * (len(planes) - 1) == block.itemsize:
        low = planes[2] if planes[2:] else _NOTHING
        _JOIN[block.itemsize](*planes[:2], low, *_place(kind, grid), block)
    elif block.itemsize == 4 and kind is Halves.INTEGER:  # noqa: PLR2004
        _join_bytes(*planes, block)
    else:
        plain.join_block(planes, kind, grid, block)


def _place(kind: Halves, grid: Grid | None) -> tuple[int, Words, Words, int]:
    if grid is None or kind is Halves.INTEGER:
        return int(kind), _NOTHING, _NOTHING, 0
    return int(kind), grid.rows, grid.columns, grid.cell


@compiled((given(_U1), given(_U1), filled(_U1)))
def _scatter(used: Any, values: Any, plane: Any) -> None:
    next_value, whole = np.uint32(0), plane.size // 8
    for number in range(whole):
        byte = np.uint32(used[number])
        if byte:
            for i in range(8):
                bit = (byte >> np.uint32(7 - i)) & np.uint32(1)
                plane[8 * number + i] = values[next_value] * np.uint8(bit)
                next_value += bit
    for i in range(8 * whole, plane.size):
        bit = (np.uint32(used[whole]) >> np.uint32(7 - i % 8)) & np.uint32(1)
        plane[i] = values[next_value] * np.uint8(bit)
        next_value += bit


def scatter(used: Bytes, values: Bytes, plane: Bytes) -> None:
    """See `plain.scatter`."""
    plane.fill(0)
    _scatter(used, values, plane)

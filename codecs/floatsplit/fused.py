"""The split of elements into planes, and the way back, in one pass over each block, by numba.

Like `planes`, whose arithmetic it repeats for elements of 2 and 4 bytes: numpy writes the result of
each operation to memory, compiled loops only the planes. A frame is the same whichever wrote it.

Importing this module takes numba, and 0.4 s; or a few seconds if numba has not kept what it
compiled, or cannot write to a folder of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numba  # pyright: ignore[reportMissingImports]  # an extra
import numpy as np
from numba import types  # pyright: ignore[reportMissingImports]

from penstock.codecs.floatsplit import planes as plain
from penstock.codecs.floatsplit.planes import Halves

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.codecs.floatsplit.planes import Elements, Scratch, Words
    from penstock.codecs.floatsplit.prediction import Grid

    Function: TypeAlias = Callable[..., Any]


# A kind of split as numbers, so that the loops have no branches; the columns are those of `Halves`.
# The first plane is `d >> shift`, the second `d & low | d >> 8 & sign`, where `d` is the top of an
# element less what is predicted. `extended` is the top bit of the first plane if `d` may be
# negative. No bit of `unsigned` may be set in the top, none of `near` in `d + 2**13`. `kept` are
# the bits of an element that was predicted.
_SHIFT = np.array([7, 7, 8, 6], np.uint16)
_LOW = np.array([0x7F, 0x7F, 0xFF, 0x3F], np.uint16)
_SIGN = np.array([0x80, 0, 0, 0], np.uint16)
_EXTENDED = np.array([0, 0, 0, 0x80], np.uint16)
_UNSIGNED = np.array([0, 0x8000, 0, 0], np.uint16)
_NEAR = np.array([0, 0, 0, 0xC000], np.uint16)
_KEPT = np.array([0xFFFF, 0x7FFF, 0xFFFF, 0xFFFF], np.uint16)
_EIGHT, _SIXTEEN, _REACH = np.uint16(8), np.uint32(16), np.uint16(1 << 13)
_NONE: Words = np.empty(0, np.uint16)


def given(element: Any) -> Any:
    """Return the type of arrays that are read; frames and chunks begin at any address."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)


def filled(element: Any) -> Any:
    """Return the type of arrays that are written."""
    return types.Array(element, 1, "C", aligned=False)


_KIND = types.int64
_U1, _U2, _U4 = types.uint8, types.uint16, types.uint32
_GRID = (given(_U2), given(_U2), types.int64)  # terms of rows and columns, and the first cell


_inlined: Callable[[Function], Function] = numba.njit(nogil=True, inline="always")


def compiled(*signature: Any) -> Callable[[Function], Function]:
    """Compile a function for one signature, and keep it on disk where that is possible."""

    def compiled(function: Function) -> Function:
        try:
            made: Function = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # there is no folder that numba may write to
            made = numba.njit(signature, nogil=True)(function)
        return made

    return compiled


@_inlined
def _split_row_2(block: Any, kind: Any, row: Any, columns: Any, first: Any, second: Any) -> Any:
    shift, keep, sign = _SHIFT[kind], _LOW[kind], _SIGN[kind]
    unsigned, near = _UNSIGNED[kind], _NEAR[kind]
    bad = np.uint16(0)
    if columns.size:
        for i in range(block.size):
            top = block[i]
            d = np.uint16(top - row - columns[i])
            bad |= (top & unsigned) | ((d + _REACH) & near)
            first[i] = d >> shift
            second[i] = (d & keep) | ((d >> _EIGHT) & sign)
    else:
        for i in range(block.size):
            top = d = block[i]
            bad |= (top & unsigned) | ((d + _REACH) & near)
            first[i] = d >> shift
            second[i] = (d & keep) | ((d >> _EIGHT) & sign)
    return bad == 0


@compiled(given(_U2), _KIND, *_GRID, filled(_U1), filled(_U1))
def _split_2(
    block: Any, kind: Any, rows: Any, columns: Any, cell: Any, first: Any, second: Any
) -> Any:
    n, width = block.size, columns.size
    if width == 0:
        return _split_row_2(block, kind, np.uint16(0), columns, first, second)
    fits, i = True, 0
    while i < n:
        row, column = divmod(cell + i, width)
        j = min(i + width - column, n)
        fits &= _split_row_2(block[i:j], kind, rows[row], columns[column:], first[i:j], second[i:j])
        i = j
    return fits


@_inlined
def _split_row_4(
    block: Any, kind: Any, row: Any, columns: Any, first: Any, second: Any, low: Any
) -> Any:
    shift, keep, sign = _SHIFT[kind], _LOW[kind], _SIGN[kind]
    unsigned, near = _UNSIGNED[kind], _NEAR[kind]
    bad = np.uint16(0)
    if columns.size:
        for i in range(block.size):
            top = np.uint16(block[i] >> _SIXTEEN)
            d = np.uint16(top - row - columns[i])
            bad |= (top & unsigned) | ((d + _REACH) & near)
            first[i] = d >> shift
            second[i] = (d & keep) | ((d >> _EIGHT) & sign)
            low[i] = np.uint16(block[i])
    else:
        for i in range(block.size):
            top = d = np.uint16(block[i] >> _SIXTEEN)
            bad |= (top & unsigned) | ((d + _REACH) & near)
            first[i] = d >> shift
            second[i] = (d & keep) | ((d >> _EIGHT) & sign)
            low[i] = np.uint16(block[i])
    return bad == 0


@compiled(given(_U4), _KIND, *_GRID, filled(_U1), filled(_U1), filled(_U2))
def _split_4(
    block: Any, kind: Any, rows: Any, columns: Any, cell: Any, first: Any, second: Any, low: Any
) -> Any:
    n, width = block.size, columns.size
    if width == 0:
        return _split_row_4(block, kind, np.uint16(0), columns, first, second, low)
    fits, i = True, 0
    while i < n:
        row, column = divmod(cell + i, width)
        j = min(i + width - column, n)
        fits &= _split_row_4(
            block[i:j], kind, rows[row], columns[column:], first[i:j], second[i:j], low[i:j]
        )
        i = j
    return fits


@_inlined
def _join_row_2(first: Any, second: Any, kind: Any, row: Any, columns: Any, block: Any) -> Any:
    shift, keep, sign, extended = _SHIFT[kind], _LOW[kind], _SIGN[kind], _EXTENDED[kind]
    kept = _KEPT[kind]
    if columns.size:
        for i in range(block.size):
            high = np.uint16((np.uint16(first[i]) ^ extended) - extended) << shift
            both = np.uint16(second[i])
            d = np.uint16(high | (both & keep) | ((both & sign) << _EIGHT))
            d = np.uint16(d + row + columns[i]) & kept
            block[i] = d
    else:
        for i in range(block.size):
            high = np.uint16((np.uint16(first[i]) ^ extended) - extended) << shift
            both = np.uint16(second[i])
            d = np.uint16(high | (both & keep) | ((both & sign) << _EIGHT))
            block[i] = d


@compiled(given(_U1), given(_U1), _KIND, *_GRID, filled(_U2))
def _join_2(
    first: Any, second: Any, kind: Any, rows: Any, columns: Any, cell: Any, block: Any
) -> Any:
    n, width = block.size, columns.size
    if width == 0:
        _join_row_2(first, second, kind, np.uint16(0), columns, block)
        return
    i = 0
    while i < n:
        row, column = divmod(cell + i, width)
        j = min(i + width - column, n)
        _join_row_2(first[i:j], second[i:j], kind, rows[row], columns[column:], block[i:j])
        i = j


@_inlined
def _join_row_4(
    first: Any, second: Any, low: Any, kind: Any, row: Any, columns: Any, block: Any
) -> Any:
    shift, keep, sign, extended = _SHIFT[kind], _LOW[kind], _SIGN[kind], _EXTENDED[kind]
    kept = _KEPT[kind]
    if columns.size:
        for i in range(block.size):
            high = np.uint16((np.uint16(first[i]) ^ extended) - extended) << shift
            both = np.uint16(second[i])
            d = np.uint16(high | (both & keep) | ((both & sign) << _EIGHT))
            d = np.uint16(d + row + columns[i]) & kept
            block[i] = (np.uint32(d) << _SIXTEEN) | np.uint32(low[i])
    else:
        for i in range(block.size):
            high = np.uint16((np.uint16(first[i]) ^ extended) - extended) << shift
            both = np.uint16(second[i])
            d = np.uint16(high | (both & keep) | ((both & sign) << _EIGHT))
            block[i] = (np.uint32(d) << _SIXTEEN) | np.uint32(low[i])


@compiled(given(_U1), given(_U1), given(_U2), _KIND, *_GRID, filled(_U4))
def _join_4(
    first: Any, second: Any, low: Any, kind: Any, rows: Any, columns: Any, cell: Any, block: Any
) -> Any:
    n, width = block.size, columns.size
    if width == 0:
        _join_row_4(first, second, low, kind, np.uint16(0), columns, block)
        return
    i = 0
    while i < n:
        row, column = divmod(cell + i, width)
        j = min(i + width - column, n)
        _join_row_4(
            first[i:j], second[i:j], low[i:j], kind, rows[row], columns[column:], block[i:j]
        )
        i = j


def split_block(
    block: Elements,
    planes: list[Elements],
    kind: Halves,
    grid: Grid | None,
    scratch: Scratch,
) -> bool:
    """Write the planes of `block`, as `planes.split_block` does."""
    place = _place(kind, grid)
    if block.itemsize == 2 and len(planes) == 2:  # noqa: PLR2004 - top bytes alone
        return bool(_split_2(block, int(kind), *place, *planes))
    if block.itemsize == 4 and len(planes) == 3:  # noqa: PLR2004 - and the 16 bits below
        return bool(_split_4(block, int(kind), *place, *planes))
    return plain.split_block(block, planes, kind, grid, scratch)


def join_block(
    planes: list[Elements],
    kind: Halves,
    grid: Grid | None,
    block: Elements,
    scratch: Scratch,
) -> None:
    """Write into `block` what `split_block` took apart."""
    place = _place(kind, grid)
    if block.itemsize == 2 and len(planes) == 2:  # noqa: PLR2004
        _join_2(*planes, int(kind), *place, block)
    elif block.itemsize == 4 and len(planes) == 3:  # noqa: PLR2004
        _join_4(*planes, int(kind), *place, block)
    else:
        plain.join_block(planes, kind, grid, block, scratch)


def _place(kind: Halves, grid: Grid | None) -> tuple[Words, Words, int]:
    if grid is None or kind is Halves.INTEGER:
        return _NONE, _NONE, 0
    return grid.rows, grid.columns, grid.cell

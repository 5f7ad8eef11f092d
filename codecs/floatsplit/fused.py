"""The split of elements into planes, and the way back, in one pass over each block, by numba.

Like `planes`, whose arithmetic it repeats for elements of 2 and 4 bytes: numpy writes the result of
each operation to memory, compiled loops only the planes. A frame is the same whichever wrote it.

Importing this module takes numba, and 0.4 s; or a few seconds if numba has not kept what it
compiled, or cannot write to a folder of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types  # pyright: ignore[reportMissingImports]  # an extra

from penstock.codecs.compiled import compiled, filled, given, inlined
from penstock.codecs.floatsplit import planes as plain
from penstock.codecs.floatsplit.planes import Halves

if TYPE_CHECKING:
    from penstock.codecs.floatsplit.planes import Bytes, Elements, Scratch, Words
    from penstock.codecs.floatsplit.prediction import Grid


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
_ONE_BYTE, _THREE_BYTES = np.uint32(8), np.uint32(24)
_PAIRS, _FOURS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_EIGHTS, _ONES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
_NONE: Words = np.empty(0, np.uint16)


_KIND = types.int64
_U1, _U2, _U4, _U8 = types.uint8, types.uint16, types.uint32, types.uint64
_GRID = (given(_U2), given(_U2), types.int64)  # terms of rows and columns, and the first cell


@inlined
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


@compiled((given(_U2), _KIND, *_GRID, filled(_U1), filled(_U1)))
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


@inlined
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


@compiled((given(_U4), _KIND, *_GRID, filled(_U1), filled(_U1), filled(_U2)))
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


@inlined
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


@compiled((given(_U1), given(_U1), _KIND, *_GRID, filled(_U2)))
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


@inlined
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


@compiled((given(_U1), given(_U1), given(_U2), _KIND, *_GRID, filled(_U4)))
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


@compiled((given(_U4), *(filled(_U1) for _ in range(4))))
def _split_bytes_4(block: Any, first: Any, second: Any, third: Any, fourth: Any) -> None:
    for i in range(block.size):
        first[i] = block[i] >> _THREE_BYTES
        second[i] = block[i] >> _SIXTEEN
        third[i] = block[i] >> _ONE_BYTE
        fourth[i] = block[i]


@compiled((*(given(_U1) for _ in range(4)), filled(_U4)))
def _join_bytes_4(first: Any, second: Any, third: Any, fourth: Any, block: Any) -> None:
    for i in range(block.size):
        high = (np.uint32(first[i]) << _THREE_BYTES) | (np.uint32(second[i]) << _SIXTEEN)
        block[i] = high | (np.uint32(third[i]) << _ONE_BYTE) | np.uint32(fourth[i])


@compiled((given(_U8),))
def _count_bits(words: Any) -> Any:
    total = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        word -= (word >> np.uint64(1)) & _PAIRS
        word = (word & _FOURS) + ((word >> np.uint64(2)) & _FOURS)
        word = (word + (word >> np.uint64(4))) & _EIGHTS
        total += (word * _ONES) >> np.uint64(56)
    return total


@compiled((given(_U1), given(_U1), filled(_U1)))
def _scatter(used: Any, values: Any, plane: Any) -> None:
    taken, whole = np.uint32(0), plane.size // 8
    for number in range(whole):
        byte = np.uint32(used[number])
        if byte:
            for i in range(8):
                bit = (byte >> np.uint32(7 - i)) & np.uint32(1)
                plane[8 * number + i] = values[taken] * np.uint8(bit)
                taken += bit
    for i in range(8 * whole, plane.size):
        bit = (np.uint32(used[whole]) >> np.uint32(7 - i % 8)) & np.uint32(1)
        plane[i] = values[taken] * np.uint8(bit)
        taken += bit


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
    if block.itemsize == 4 and kind is Halves.INTEGER:  # noqa: PLR2004
        _split_bytes_4(block, *planes)
        return True
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
    elif block.itemsize == 4 and kind is Halves.INTEGER:  # noqa: PLR2004
        _join_bytes_4(*planes, block)
    else:
        plain.join_block(planes, kind, grid, block, scratch)


def count_bits(used: Bytes) -> int:
    """Return how many bits are set; `used` has a multiple of 8 bytes."""
    return int(_count_bits(used.view(np.uint64)))


def scatter(used: Bytes, values: Bytes, plane: Bytes) -> None:
    """Write `values` to those bytes of `plane` whose bits are set in `used`, and zero elsewhere.

    Args:
        used: One bit for each byte, the highest of a byte first.
        values: One for each bit that is set, and one more.
        plane: Receives the bytes.
    """
    plane.fill(0)
    _scatter(used, values, plane)


def _place(kind: Halves, grid: Grid | None) -> tuple[Words, Words, int]:
    if grid is None or kind is Halves.INTEGER:
        return _NONE, _NONE, 0
    return grid.rows, grid.columns, grid.cell

"""The `log8` codec, which stores positive floats as 8-bit logarithms relative to a block. Lossy.

It is made for second moments (Adam's `exp_avg_sq`). For them the relative error counts, and they
must not become zero, since an update is divided by their root.

A frame stores the smallest and largest nonzero numbers of each block of 256 elements, and each
element as one of 255 evenly spaced logarithms between these. Only zero has the code 0. The
logarithm is a fixed-point number: the exponent's bits, then 23 bits from a table. For the upper
bits of the mantissa, the table gives one of 4096 cells of equal size, as the middle of the cell.
Decoding uses integers only, even for the square roots in the table, so a frame decodes to the same
bits on every machine.

A frame of n elements (as float32) in b = ceil(n / 256) blocks has:

    4 b bytes   bits of the smallest nonzero number of each block, little-endian; 0: all are zero
    4 b bytes   bits of its largest number
    n bytes     codes

An element of code q > 0 has the logarithm log(low) + (q - 1) step. It decodes to low if its cell is
that of low or below, to high if its cell is that of high or above, else to the number in the middle
of its cell. With R = log(high) - log(low), step is max(1, ceil(R / 254)); but if that is 2048, the
size of a cell, step is 2049.

A second pass does not change rounded numbers: the step nearest to the middle of a cell is either
the step that the number had before, or is in the same cell.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.core.abc import (
    DECLINED,
    Codec,
    CodecContext,
    Declined,
    convert_floats,
)
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

_BLOCK = 256
_STEPS = 254
_BATCH = 256  # blocks that are coded at once, so that they stay in the cache
_INFINITY = 0x7F80_0000
_MANTISSA = 0x7F_FFFF
_CELL_BITS = 12
_SHIFT = 23 - _CELL_BITS
_MIDDLE = (1 << _SHIFT - 1) - 1
_FINE_BITS = 14  # of a mantissa: enough for each cell to get an entry
_PRECISION = 96  # fractional bits in the computation of the table
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


class _BatchMemory(threading.local):
    """Memory of one thread, for one batch of blocks."""

    def __init__(self) -> None:
        self.bits = np.empty((_BATCH, _BLOCK), np.uint32)
        self.less = np.empty((_BATCH, _BLOCK), np.uint32)
        self.floats = np.empty((_BATCH, _BLOCK), np.float32)
        self.indices = np.empty((_BATCH, _BLOCK), np.intp)
        self.codes = np.empty((_BATCH, _BLOCK), np.uint8)


_memory = _BatchMemory()


class Log8Codec(Codec):
    """Stores positive floats in 8 bits, with about the same relative error across a block.

    Denormal numbers are less exact. Zero stays zero, and no other number becomes zero. A second
    pass does not change rounded numbers. The codec declines a chunk with a negative number (even
    -0.0), an infinity or NaN, since it cannot be a second moment.
    """

    name: ClassVar[str] = "log8"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = False

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the frame length for two-byte elements, since larger elements need less."""
        return _frame_length(raw_length // 2)

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """See `Codec.encode`. Declines a chunk that cannot be a second moment."""
        source, target = flat_view(chunk), flat_view(out)
        itemsize = _DTYPES.get(context.dtype)
        if itemsize is None or itemsize != context.itemsize or source.nbytes % itemsize:
            return DECLINED
        count = source.nbytes // itemsize
        length = _frame_length(count)
        if length > target.nbytes:
            msg = f"log8: {length} bytes do not fit into an output of {target.nbytes}"
            raise CodecError(msg)
        lows, highs, codes = _parts(target[:length], count)
        for first in range(0, len(lows), _BATCH):
            at, stop = first * _BLOCK, min((first + _BATCH) * _BLOCK, count)
            blocks = slice(first, min(first + _BATCH, len(lows)))
            bits = _memory.bits[: blocks.stop - first]
            flat = bits.reshape(-1)
            piece = source[at * itemsize : stop * itemsize]
            convert_floats(piece, context.dtype, flat[: stop - at].view(np.uint8).data, "float32")
            # The last block is padded with its last element.
            flat[stop - at :] = flat[stop - at - 1]
            if flat.max() >= _INFINITY:  # or has a sign, which is the top bit
                return DECLINED
            _encode(bits, lows[blocks], highs[blocks], codes[at:stop])
        return length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        source, target = flat_view(frame), flat_view(out)
        itemsize = _DTYPES.get(context.dtype)
        if itemsize is None or itemsize != context.itemsize or target.nbytes % itemsize:
            msg = f"log8: a frame cannot hold {target.nbytes} bytes of {context.dtype}"
            raise CodecError(msg)
        count = target.nbytes // itemsize
        if source.nbytes != _frame_length(count):
            msg = f"log8: {source.nbytes} bytes are not a frame of {count} elements"
            raise CodecError(msg)
        lows, highs, codes = _parts(source, count)
        if np.any(lows > highs) or (len(highs) and highs.max() >= _INFINITY):
            msg = (
                f"log8: a frame of {source.nbytes} bytes has a block whose smallest and largest "
                "numbers are not valid"
            )
            raise CodecError(msg)
        for first in range(0, len(lows), _BATCH):
            at, stop = first * _BLOCK, min((first + _BATCH) * _BLOCK, count)
            blocks = slice(first, min(first + _BATCH, len(lows)))
            bits = _memory.bits[: blocks.stop - first]
            _decode(codes[at:stop], lows[blocks], highs[blocks], bits)
            piece = target[at * itemsize : stop * itemsize]
            flat = bits.reshape(-1)[: stop - at]
            convert_floats(flat.view(np.uint8).data, "float32", piece, context.dtype)


def _frame_length(count: int) -> int:
    return 8 * -(-count // _BLOCK) + count


def _parts(frame: memoryview, count: int) -> tuple[Words, Words, NDArray[np.uint8]]:
    """Return a frame's smallest and largest bit patterns, one per block, and its codes."""
    blocks = -(-count // _BLOCK)
    heads = np.frombuffer(frame[: 8 * blocks], "<u4")
    return heads[:blocks], heads[blocks:], np.frombuffer(frame[8 * blocks :], np.uint8)


@lru_cache(maxsize=1)
def _tables() -> tuple[Words, Words]:
    """Return two tables: the logarithm of a mantissa by its top bits, and the mantissa by cell.

    Entries have 23 bits. Each is computed for the middle of the inputs that share it. A logarithm
    is always the middle of its cell.
    """
    one = 1 << _PRECISION
    root = 2 * one
    for _ in range(_CELL_BITS + 1):
        root = isqrt(root * one)
    power, edge, mantissas, edges = root, root * root >> _PRECISION, [], []
    for _ in range(1 << _CELL_BITS):
        mantissas.append((power - one) >> (_PRECISION - 23))
        edges.append((edge - one) >> (_PRECISION - 23))
        power = power * root * root >> 2 * _PRECISION
        edge = edge * root * root >> 2 * _PRECISION
    fine = 23 - _FINE_BITS
    middles = (np.arange(1 << _FINE_BITS) << fine) + (1 << fine - 1)
    cells = np.searchsorted(np.array(edges), middles, side="right")
    return (
        ((cells << _SHIFT) + _MIDDLE).astype(np.uint32),
        np.array(mantissas, np.uint32),
    )


def _through(
    table: Words, shift: int, numbers: Words, indices: NDArray[np.intp], out: Words
) -> None:
    """Write `numbers` to `out`, with each mantissa looked up in `table`; overwrites `numbers`."""
    np.bitwise_and(numbers, np.uint32(_MANTISSA), out=out)
    np.right_shift(out, np.uint32(shift), out=out)
    np.copyto(indices, out)
    np.take(table, indices, out=out, mode="clip")  # "raise", the default, copies once more
    np.right_shift(numbers, np.uint32(23), out=numbers)
    np.left_shift(numbers, np.uint32(23), out=numbers)
    np.bitwise_or(out, numbers, out=out)


def _logarithms(bits: Words, indices: NDArray[np.intp], out: Words) -> None:
    _through(_tables()[0], 23 - _FINE_BITS, bits, indices, out)


def _scale(lows: Words, highs: Words) -> tuple[Words, Words, Words]:
    """Return the logarithms of each block's smallest and largest number, and its step."""
    ends = []
    for bits in (lows, highs):
        ends.append(np.empty(len(bits), np.uint32))
        _logarithms(bits.copy(), np.empty(len(bits), np.intp), ends[-1])
    steps = np.maximum((ends[1] - ends[0] + np.uint32(_STEPS - 1)) // np.uint32(_STEPS), 1)
    # With steps of 2048, the middle of a cell would be as near to the next step.
    return ends[0], ends[1], (steps + (steps == 1 << _SHIFT)).astype(np.uint32)


def _encode(bits: Words, lows: Words, highs: Words, codes: NDArray[np.uint8]) -> None:
    """Encode whole blocks; writes no codes for the padding of the last block."""
    count = len(bits)
    less, floats, whole = _memory.less[:count], _memory.floats[:count], _memory.codes[:count]
    np.subtract(bits, np.uint32(1), out=less)  # zero becomes the largest number
    np.copyto(highs, bits.max(axis=1))
    np.copyto(lows, np.minimum(less.min(axis=1), highs - np.minimum(highs, 1)))
    np.add(lows, np.minimum(highs, 1), out=lows)
    zero = bits == 0
    first, last, steps = _scale(lows, highs)
    _logarithms(bits, _memory.indices[:count], less)
    top = less == last[:, None]
    np.subtract(less, first[:, None], out=less)
    np.copyto(floats, less)
    np.multiply(floats, np.float32(1) / steps.astype(np.float32)[:, None], out=floats)
    np.rint(floats, out=floats)
    np.copyto(floats, -(-(last - first).astype(np.int64) // steps)[:, None], where=top)
    np.minimum(floats, np.float32(_STEPS), out=floats)
    np.add(floats, np.float32(1), out=floats)
    np.copyto(whole, floats, casting="unsafe")
    np.copyto(whole, 0, where=zero)
    np.copyto(codes, whole.reshape(-1)[: len(codes)])


def _decode(codes: NDArray[np.uint8], lows: Words, highs: Words, bits: Words) -> None:
    """Decode whole blocks into `bits`; the bits after the last code are undefined."""
    count = len(bits)
    less = _memory.less[:count]
    flat = less.reshape(-1)
    np.copyto(flat[: len(codes)], codes)
    flat[len(codes) :] = 0
    zero = less == 0
    first, last, steps = _scale(lows, highs)
    np.multiply(less, steps[:, None], out=less)
    np.add(less, (first - steps)[:, None], out=less)
    high = less >= (last - np.uint32(_MIDDLE))[:, None]
    low = less <= (first + np.uint32(_MIDDLE + 1))[:, None]
    np.minimum(less, last[:, None], out=less)
    _through(_tables()[1], _SHIFT, less, _memory.indices[:count], bits)
    np.copyto(bits, highs[:, None], where=high)
    np.copyto(bits, lows[:, None], where=low)
    np.copyto(bits, 0, where=zero)

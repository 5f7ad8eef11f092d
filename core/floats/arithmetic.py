"""The conversion of floats with integer arithmetic and tables, block by block.

Every conversion goes through float32, which represents each narrower format exactly. numpy's own
casts are used only between float32 and float64, and not for subnormal numbers. numpy's casts to and
from float16 are slower than this arithmetic, and give different bits for a NaN on processors
without an instruction for these casts.

Tested in `tests/core/floats/test_conversion.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Words = NDArray[np.uint32]
    Array = NDArray[Any]

_BLOCK = 64 << 10
"""Elements per block, chosen so that a block and its scratch arrays fit into the L2 cache."""

_SIGN = 0x8000_0000
_MAGNITUDE = 0x7FFF_FFFF
_EXPONENT = 0x7F80_0000
_QUIET_NAN = 0x7FC0_0000
_BFLOAT16_NAN = 0xFFFF
_UNSIGNED_NAN = 0x7F80_0001
"""The bits of the float32 for the NaN of a `fnuz` format. `_BFLOAT16_NAN` has the bits that torch's
vectorized code writes for a NaN; torch's other code writes 0x7FC0."""


class _BlockScratch(threading.local):
    """Scratch arrays of one thread, each with room for one block."""

    def __init__(self) -> None:
        self.floats = np.empty(_BLOCK, np.float32)
        self.words = np.empty(_BLOCK, np.uint32)
        self.more = np.empty(_BLOCK, np.uint32)
        self.flags = np.empty(_BLOCK, np.bool_)
        self.indices = np.empty(_BLOCK, np.intp)


_scratch = _BlockScratch()


def convert(source: memoryview, source_dtype: str, target: memoryview, target_dtype: str) -> None:
    """Convert floats like `conversion.convert_floats`, without its checks."""
    if source_dtype == target_dtype:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        return
    read, widen = _FORMATS[source_dtype].stored, _FORMATS[source_dtype].widen
    written, narrow = _FORMATS[target_dtype].stored, _FORMATS[target_dtype].narrow
    if not source.nbytes:
        return
    elements, results = np.frombuffer(source, read), np.frombuffer(target, written)
    # Overflow is part of the result, not a reason to warn.
    with np.errstate(all="ignore"):
        for start in range(0, len(elements), _BLOCK):
            block, into = elements[start : start + _BLOCK], results[start : start + _BLOCK]
            if narrow is _same:
                widen(block, into)
            elif widen is _same:
                narrow(block, into)
            else:
                wide = _scratch.floats[: len(block)]
                widen(block, wide)
                narrow(wide, into)


# -- float64 --------------------------------------------------------------------------------------


_SMALLEST = 2.0**-149
"""The smallest positive float32. A subnormal float32 is this times its bits, read as an integer.

After `torch.set_flush_denormal(True)` the processor reads and writes zero for a subnormal number,
in the calling thread and in all threads that it starts. So subnormals are converted as integers.
"""
_LARGEST_SUBNORMAL = 0x7F_FFFF


def _float64_to_float32(block: Array, into: Floats) -> None:
    np.copyto(into, block, casting="unsafe")
    bits, words = into.view(np.uint32), _scratch.words[: len(block)]
    np.bitwise_and(bits, _MAGNITUDE, out=words)
    flags = np.less_equal(words, _LARGEST_SUBNORMAL, out=_scratch.flags[: len(block)])
    if flags.any():
        np.logical_and(flags, block != 0, out=flags)
    if flags.any():
        wide = block[flags]
        multiples = np.rint(np.abs(wide) / _SMALLEST).astype(np.uint32)
        bits[flags] = np.signbit(wide) * np.uint32(_SIGN) | multiples


def _float32_to_float64(block: Floats, into: Array) -> None:
    np.copyto(into, block)
    bits, words = block.view(np.uint32), _scratch.words[: len(block)]
    np.bitwise_and(bits, _MAGNITUDE, out=words)
    np.subtract(words, 1, out=words)  # zero becomes the largest word
    flags = np.less(words, _LARGEST_SUBNORMAL, out=_scratch.flags[: len(block)])
    if flags.any():
        multiples = bits[flags] & _MAGNITUDE
        into[flags] = np.copysign(multiples * _SMALLEST, block[flags])


# -- bfloat16 -------------------------------------------------------------------------------------


def _bfloat16_to_float32(block: Array, into: Floats) -> None:
    words = into.view(np.uint32)
    np.copyto(words, block)
    np.left_shift(words, 16, out=words)


def _float32_to_bfloat16(block: Floats, into: Array) -> None:
    bits, words = block.view(np.uint32), _scratch.words[: len(block)]
    # Add half a unit of the last place, minus one bit if the unit is even.
    np.right_shift(bits, 16, out=words)
    np.bitwise_and(words, 1, out=words)
    np.add(words, 0x7FFF, out=words)
    np.add(words, bits, out=words)
    np.right_shift(words, 16, out=words)
    np.copyto(into, words, casting="unsafe")
    if _holds_nan(block):  # the carry may have turned a NaN into zero
        flags = _scratch.flags[: len(block)]
        np.isnan(block, out=flags)
        np.putmask(into, flags, _BFLOAT16_NAN)


def _holds_nan(block: Floats) -> bool:
    # One pass that stays in registers: a maximum with a NaN is NaN.
    return bool(np.isnan(np.maximum.reduce(block)))


# -- float16 --------------------------------------------------------------------------------------

_HALF_SMALLEST = 113 << 23
"""Bits of the float32 2^-14, the smallest normal float16."""
_HALF_OVERFLOW = (127 + 16) << 23
"""Bits of the float32 2^16, which is beyond float16."""


def _float32_to_float16(block: Floats, into: Array) -> None:
    count = len(block)
    bits, words, more = block.view(np.uint32), _scratch.words[:count], _scratch.more[:count]
    np.bitwise_and(bits, _MAGNITUDE, out=words)
    np.minimum(words, _HALF_OVERFLOW, out=words)
    # Adding a power of two that is 13 bits above a number (more bits for a subnormal one) makes the
    # processor round the number to ten bits, to nearest even.
    np.bitwise_and(words, _EXPONENT, out=more)
    np.maximum(more, _HALF_SMALLEST, out=more)
    np.add(more, 13 << 23, out=more)
    total = words.view(np.float32)
    np.add(total, more.view(np.float32), out=total)
    np.subtract(words, more, out=words)
    np.subtract(more, _HALF_SMALLEST + (13 << 23), out=more)
    np.right_shift(more, 13, out=more)
    np.add(words, more, out=words)
    np.right_shift(bits, 16, out=more)
    np.bitwise_and(more, 0x8000, out=more)
    np.bitwise_or(words, more, out=words)
    np.copyto(into, words, casting="unsafe")
    if _holds_nan(block):
        flags = np.isnan(block)
        nans = bits[flags]
        into[flags] = ((nans >> 16) & 0x8000) | 0x7E00 | ((nans >> 13) & 0x3FF)


# -- by tables -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Small:
    """A format of 8 or 16 bits with a table of all its numbers.

    Attributes:
        mantissa: Number of mantissa bits.
        bias: Bias of the exponent.
        largest: Bit pattern of the largest finite number.
        overflow: Bit pattern for overflow, without the sign.
        nan: Bit pattern of NaN, without the sign.
        infinite: Whether the format has infinities; if so, `overflow` is infinity.
        unsigned_nan: Whether the only NaN has the bits of -0.0, so that zero and NaN have no sign.
        sign: Mask of the sign bit.
    """

    mantissa: int
    bias: int
    largest: int
    overflow: int
    nan: int
    infinite: bool = False
    unsigned_nan: bool = False
    sign: int = 0x80

    def magnitudes(self) -> NDArray[np.float64]:
        """Return the finite numbers in ascending order from zero, and one beyond the largest."""
        bits = np.arange(self.largest + 2)
        exponent, mantissa = bits >> self.mantissa, bits & ((1 << self.mantissa) - 1)
        significand = np.where(exponent == 0, mantissa, mantissa + (1 << self.mantissa))
        scale = np.maximum(exponent, 1) - self.bias - self.mantissa
        numbers: NDArray[np.float64] = np.ldexp(significand.astype(np.float64), scale)
        return numbers


_SMALL = {
    "float16": _Small(
        10, 15, largest=0x7BFF, overflow=0x7C00, nan=0x7E00, infinite=True, sign=0x8000
    ),
    "float8_e4m3fn": _Small(3, 7, largest=0x7E, overflow=0x7E, nan=0x7F),
    "float8_e5m2": _Small(2, 15, largest=0x7B, overflow=0x7C, nan=0x7F, infinite=True),
    "float8_e4m3fnuz": _Small(3, 8, largest=0x7F, overflow=0x80, nan=0x80, unsigned_nan=True),
    "float8_e5m2fnuz": _Small(2, 16, largest=0x7F, overflow=0x80, nan=0x80, unsigned_nan=True),
}


@lru_cache(maxsize=len(_SMALL))
def _small_values(dtype: str) -> Floats:
    """Return a table from a number's bits in the format to its float32."""
    small = _SMALL[dtype]
    codes = np.arange(small.sign, dtype=np.uint32)
    mantissa = codes & ((1 << small.mantissa) - 1)
    bits = _QUIET_NAN | (mantissa << (23 - small.mantissa))
    finite = small.magnitudes()[:-1].astype(np.float32).view(np.uint32)
    bits[: len(finite)] = finite
    if small.infinite:
        bits[small.overflow] = _EXPONENT
    both = np.concatenate([bits, bits | _SIGN]).astype(np.uint32)
    if small.unsigned_nan:
        both[small.nan] = _UNSIGNED_NAN
    return both.view(np.float32)


@lru_cache(maxsize=len(_SMALL))
def _small_codes(dtype: str) -> NDArray[np.uint8]:
    """Return a table from the top 16 bits of a float32 to a number's bits in the format.

    The caller also sets bit 0 of the index if any lower bit is set. So the index is on the same
    side of each rounding boundary as the float32.
    """
    small = _SMALL[dtype]
    tops = np.arange(1 << 15, dtype=np.uint32)
    values = (tops << 16).view(np.float32).astype(np.float64)
    numbers = small.magnitudes()
    boundaries = (numbers[:-1] + numbers[1:]) / 2
    below = np.searchsorted(boundaries, values, side="left")
    tie = values == boundaries[np.minimum(below, small.largest)]
    codes = np.where(tie, below + (below & 1), below)
    codes = np.where(codes > small.largest, small.overflow, codes)
    codes = np.where(np.isnan(values), small.nan, codes).astype(np.uint8)
    if small.unsigned_nan:
        negative = np.where((codes == 0) | (codes == small.nan), codes, codes | 0x80)
    else:
        negative = codes | 0x80
    return np.concatenate([codes, negative]).astype(np.uint8)


def _widen_small(dtype: str) -> Callable[[Array, Floats], None]:
    def widen(block: Array, into: Floats) -> None:
        _look_up(_small_values(dtype), block, into)

    return widen


def _narrow_small(dtype: str) -> Callable[[Floats, Array], None]:
    def narrow(block: Floats, into: Array) -> None:
        bits, words = block.view(np.uint32), _scratch.words[: len(block)]
        np.bitwise_and(bits, 0xFFFF, out=words)
        np.add(words, 0xFFFF, out=words)  # carries if any of these bits is set
        np.bitwise_or(words, bits, out=words)
        np.right_shift(words, 16, out=words)
        _look_up(_small_codes(dtype), words, into)

    return narrow


def _look_up(table: Array, codes: Array, into: Array) -> None:
    indices = _scratch.indices[: len(codes)]
    np.copyto(indices, codes)
    # Every code is in the table; "raise", the default, would copy the result once more.
    np.take(table, indices, out=into, mode="clip")


# -- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Format:
    """A format: the numpy dtype of its bits, and its conversions to and from float32."""

    stored: type[Any]
    widen: Callable[[Array, Floats], None]
    narrow: Callable[[Floats, Array], None]


def _same(block: Floats, into: Floats) -> None:
    np.copyto(into, block)


_FORMATS = {
    "float64": _Format(np.float64, _float64_to_float32, _float32_to_float64),
    "float32": _Format(np.float32, _same, _same),
    "bfloat16": _Format(np.uint16, _bfloat16_to_float32, _float32_to_bfloat16),
    **{dtype: _Format(np.uint8, _widen_small(dtype), _narrow_small(dtype)) for dtype in _SMALL},
    "float16": _Format(np.uint16, _widen_small("float16"), _float32_to_float16),
}

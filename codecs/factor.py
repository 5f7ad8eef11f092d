"""The `factor` codec stores float32 elements that are bfloat16 numbers times one float32.

The gradients of one backward pass under bfloat16 autocast are bfloat16 numbers in float32. Clipping
multiplies all of them by one coefficient, which fills their lower bits. The codec finds the
coefficient in the bytes of each chunk, and outputs the bfloat16 numbers for the next codec. It
declines chunks that have none: gradients of float32 training, and sums over micro-batches.

A power of two moves only exponents, so the stored factor is at least 1 and below 2. Products are
rounded to nearest even. They come from a table that integer arithmetic fills: floating point would
depend on whether the thread flushes subnormal numbers.

Elements to which no code decodes are exceptions. A frame of n elements in b = ceil(n / 32768)
blocks, with e exceptions in r runs, is little-endian:

    2 n bytes   a code for each element: its bfloat16 number; of an exception, its top 16 bits
    4 bytes     the factor, as float32
    2 b bytes   the number of runs in each block
    2 r bytes   the place of each run in its block
    2 r bytes   the number of exceptions in each run
    2 e bytes   the lower 16 bits of each exception

Exceptions come in runs where another layer adds to the gradient of some rows, such as an embedding
that shares its weight with the output layer.

A code is not multiplied if its exponent has only zeros or only ones (zeros, subnormal numbers,
infinities, NaNs): it is the top half of an element whose lower half is zero.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from penstock.codecs.sampling import sampled
from penstock.core.abc import DECLINED, Codec, CodecContext, CodecOutput, Declined
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits: TypeAlias = NDArray[np.uint32]
    Codes: TypeAlias = NDArray[np.uint16]
    Floats: TypeAlias = NDArray[np.float32]

_BLOCK = 32 << 10
_MOST_EXCEPTIONS = 1 / 4  # of the elements; each takes 2 to 6 bytes more than others
_RUN = 16  # consecutive elements of a sample
_TRIED = 12  # elements that show which candidates are worth the whole sample
_ANCHORS = slice(None, None, 3)  # 4 of them give candidates; rarely (0.4 %) all are exceptions
_BEST = 4  # candidates to try on the sample; neighbors of the factor fit some elements too
_ONE, _MANTISSA, _INFINITY, _SIGN = 0x3F80_0000, 0x7F_FFFF, 0x7F80_0000, 0x8000_0000
_MANTISSAS = np.arange(128, 256, dtype=np.float32) / np.float32(128)


class _BlockMemory(threading.local):
    """Memory of one thread for one block."""

    def __init__(self) -> None:
        self.quotients = np.empty(_BLOCK, np.float32)
        self.products = np.empty(_BLOCK, np.uint32)
        self.indices = np.empty(_BLOCK, np.intp)


_memory = _BlockMemory()


class FactorCodec(Codec):
    """Divides float32 elements by the factor that makes them bfloat16 numbers, if there is one."""

    name: ClassVar[str] = "factor"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the raw length: a chunk that would not get shorter is declined."""
        return raw_length

    def output(self, context: CodecContext, /) -> CodecOutput:
        """Describe the bfloat16 numbers, one for each element, and the tail with the rest."""
        del context
        return CodecOutput("bfloat16", 2, elementwise=True, tail=True)

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """See `Codec.encode`. Declines a chunk whose elements have no common factor."""
        source, target = flat_view(chunk), flat_view(out)
        if context.dtype != "float32" or not source.nbytes or source.nbytes % 4:
            return DECLINED
        bits: Bits = np.frombuffer(source, "<u4")
        factor = _find(bits)
        if factor is None:
            return DECLINED
        if target.nbytes < source.nbytes:
            msg = f"factor: {source.nbytes} bytes need an output of as many, not {target.nbytes}"
            raise CodecError(msg)
        words: Codes = np.frombuffer(target[: source.nbytes], "<u2")
        places = _divide(bits, factor, words[: bits.size])
        if places is None:
            return DECLINED
        begins = (np.diff(places, prepend=-2) != 1) | (places % _BLOCK == 0)
        starts = places[begins]
        tail = np.concatenate(
            [
                [factor & 0xFFFF, factor >> 16],
                np.bincount(starts // _BLOCK, minlength=-(-bits.size // _BLOCK)),
                starts % _BLOCK,
                np.diff(np.flatnonzero(begins), append=places.size),
                bits[places] & 0xFFFF,
            ]
        )
        length = bits.size + tail.size
        if length >= words.size:
            return DECLINED
        words[bits.size : length] = tail
        return 2 * length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        source, target = flat_view(frame), flat_view(out)
        count = target.nbytes // 4
        at = count + 2
        blocks = -(-count // _BLOCK)
        whole = context.dtype == "float32" and not target.nbytes % 4 and not source.nbytes % 2
        if not whole or source.nbytes < 2 * (at + blocks):
            raise _wrong(source, target, context)
        words: Codes = np.frombuffer(source, "<u2")
        counts = words[at : at + blocks].astype(np.intp)
        runs = int(counts.sum())
        starts, lengths, lows = np.split(words[at + blocks :], [runs, 2 * runs])
        if lengths.size != runs or lows.size != lengths.sum(dtype=np.intp):
            raise _wrong(source, target, context)
        # The place of an exception is its number among all exceptions, plus the start of its run,
        # minus the number of exceptions before that run.
        shifts = np.repeat(np.arange(blocks) * _BLOCK, counts) + starts
        shifts -= np.cumsum(lengths, dtype=np.intp) - lengths
        places = np.repeat(shifts, lengths) + np.arange(lows.size)
        if places.size and int(places.max()) >= count:
            raise _wrong(source, target, context)
        factor = int(words[count]) | int(words[count + 1]) << 16
        if not _ONE <= factor <= _ONE | _MANTISSA:
            msg = f"factor: the factor, a float32 of bits {factor:#x}, is not in [1, 2)"
            raise CodecError(msg)
        bits: Bits = np.frombuffer(target, "<u4")
        for start in range(0, count, _BLOCK):
            block = bits[start : start + _BLOCK]
            _multiply(words[start : start + block.size], factor, block)
        bits[places] = words[places].astype(np.uint32) << np.uint32(16) | lows


def _wrong(frame: memoryview, out: memoryview, context: CodecContext) -> CodecError:
    return CodecError(
        f"factor: a frame of {frame.nbytes} bytes does not decode to {out.nbytes} bytes of "
        f"{context.dtype}"
    )


def _find(bits: Bits) -> int | None:
    """Return the bits of the factor of most elements of a sample, or None."""
    sample = bits[sampled(bits.size, _RUN)] & np.uint32(_SIGN - 1)
    sample = sample[(sample > _MANTISSA) & (sample < _INFINITY)]
    if np.count_nonzero(sample & 0xFFFF) <= _MOST_EXCEPTIONS * sample.size:
        return _ONE
    # Powers of two do not matter, so all numbers may be in [1, 2).
    numbers: Floats = (sample & _MANTISSA | _ONE).view(np.float32)
    few = numbers[np.linspace(0, numbers.size - 1, _TRIED).astype(np.intp)]
    factors = _candidates(few[_ANCHORS])
    fitting = _fits(few[:, None], factors).sum(axis=0)
    best = np.argsort(fitting)[-_BEST:]
    if fitting[best[-1]] < _TRIED / 4:
        return None
    shares = [np.mean(_fits(numbers, factor)) for factor in factors[best]]
    found = int(np.argmax(shares))
    if shares[found] < 1 - _MOST_EXCEPTIONS:
        return None
    return int(factors[best].view(np.uint32)[found])


def _candidates(anchors: Floats) -> Floats:
    """Return all factors in [1, 2) with which a bfloat16 number becomes one of `anchors`.

    A bfloat16 number has one of 128 mantissas. Each has at most three factors whose rounded product
    is the anchor.
    """
    quotients = anchors[:, None] / _MANTISSAS
    quotients[quotients < 1] *= np.float32(2)
    bits = quotients.view(np.uint32).reshape(-1)
    near = np.concatenate([bits - np.uint32(1), bits, bits + np.uint32(1)])
    return near.clip(_ONE, _ONE | _MANTISSA).view(np.float32)


def _fits(numbers: Floats, factors: Floats) -> NDArray[np.bool_]:
    """Return which numbers are the product of a bfloat16 number and the factor."""
    bits = (numbers / factors).view(np.uint32)
    rounded = bits + np.uint32(0x8000) & np.uint32(0xFFFF_0000)
    fits: NDArray[np.bool_] = rounded.view(np.float32) * factors == numbers
    return fits


def _divide(bits: Bits, factor: int, codes: Codes) -> NDArray[np.intp] | None:
    """Write the codes of the elements; return the exceptions, or None if there are too many."""
    reciprocal = 1 / np.array(factor, np.uint32).view(np.float32)
    exceptions: list[NDArray[np.intp]] = []
    left = _MOST_EXCEPTIONS * bits.size
    for start in range(0, bits.size, _BLOCK):
        block, code = bits[start : start + _BLOCK], codes[start : start + _BLOCK]
        quotients = _memory.quotients[: block.size]
        with np.errstate(all="ignore"):
            np.multiply(block.view(np.float32), reciprocal, out=quotients)
        rounded = quotients.view(np.uint32)
        # The quotient of a product differs from its bfloat16 number by 2**-22 at most, so an
        # element whose quotient is a tie is an exception anyway.
        np.add(rounded, 0x8000, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(code, rounded, casting="unsafe")
        products = _memory.products[: block.size]
        _multiply(code, factor, products)
        places = np.flatnonzero(products != block)
        left -= places.size
        if left < 0:
            return None
        code[places] = block[places] >> np.uint32(16)
        exceptions.append(places + start)
    return np.concatenate(exceptions)


def _multiply(codes: Codes, factor: int, out: Bits) -> None:
    """Write the bits of the product of each code with the factor; takes at most one block."""
    indices = _memory.indices[: codes.size]
    np.copyto(indices, codes)
    # Every code is in the table; "raise", the default, would copy the result once more.
    np.take(_products(factor), indices, out=out, mode="clip")


@lru_cache(maxsize=4)  # the chunks of a step have one factor
def _products(factor: int) -> Bits:
    """Return a table with the bits of the product of every possible code with the factor."""
    exact = np.arange(128, 256) * (factor & _MANTISSA | 1 << 23)
    shift = np.where(exact >> 31, 8, 7)
    rounded = exact + (1 << shift - 1) - 1 + (exact >> shift & 1) >> shift
    # Minus the leading bit, which is not stored. In a product of at least 2, that bit stays, and
    # raises the exponent by one.
    mantissas = rounded - np.where(exact >> 31, 0, 1 << 23)
    table = (np.arange(256)[:, None] << 23) + mantissas
    table[[0, 255]] = (np.array([[0], [255]]) << 23) + (np.arange(128) << 16)
    positive = table.astype(np.uint32).reshape(-1)
    return np.concatenate([positive, positive | np.uint32(_SIGN)])

"""The `delta` codec: stores elements as their differences from an earlier checkpoint.

Bits of elements are compared as integers. Neighbouring floats have neighbouring bits, so a small
step of training gives small differences; zigzag coding makes those of both signs small unsigned
numbers, which the next codec of the chain stores in a few bits.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.core.abc import DECLINED, Codec, CodecContext, CodecOutput, Declined, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.unsignedinteger]

_BLOCK_ELEMENTS = 64 << 10  # stays in the L2 cache with its scratch memory
_RUNS, _RUN = 64, 256  # a sample: so many runs of so many elements
_LEAST_SAVED = 0.1  # of the bits that the elements take by themselves
_WORDS = (1, 2, 4, 8)


class Comparison(IntEnum):
    """How elements are compared with those of the base."""

    SUBTRACT = 0
    """As integers, the difference in zigzag order: 0, -1, 1, -2, ..."""
    XOR = 1
    """Bit by bit."""


class DeltaConfig(PluginConfig):
    """The `delta` codec has no options; `deltas` of the configuration says how long chains get."""


class _DeltaMemory(threading.local):
    """Memory of one thread, for one block."""

    def __init__(self) -> None:
        self.one = np.empty(_BLOCK_ELEMENTS, np.uint64)


_scratch = _DeltaMemory()


class DeltaCodec(Codec):
    """Replaces the elements of a chunk by their differences from the same chunk saved earlier.

    A frame has the elements, then one more, whose number says how they were compared.
    """

    name: ClassVar[str] = "delta"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    needs_base: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = DeltaConfig

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the length of the chunk, and of the longest element."""
        return raw_length + _WORDS[-1]

    def output(self, context: CodecContext, /) -> CodecOutput:
        """Return that a frame is a row of unsigned integers as long as the elements."""
        size = _word_size(context)
        return CodecOutput(f"uint{8 * size}", size)

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """Encode a chunk as `Codec.encode`.

        Declines a chunk without a base, and one whose differences would take nearly as many bits as
        the chunk itself: each link of a chain has to be read again by every restore.
        """
        size = _word_size(context)
        if context.base is None or not chunk.nbytes or chunk.nbytes % size:
            return DECLINED
        new, old = _words(chunk, size), _words(context.base, size)
        if new.size != old.size:
            return DECLINED
        how = _chosen(new, old)
        if how is None:
            return DECLINED
        if out.nbytes < chunk.nbytes + size:
            msg = f"delta: {chunk.nbytes} bytes need {chunk.nbytes + size} bytes, not {out.nbytes}"
            raise CodecError(msg)
        target = _words(flat_view(out)[: chunk.nbytes + size], size)
        for at in range(0, new.size, _BLOCK_ELEMENTS):
            stop = at + _BLOCK_ELEMENTS
            _compare(new[at:stop], old[at:stop], how, target[at : min(stop, new.size)])
        target[new.size] = how
        return chunk.nbytes + size

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Decode a frame as `Codec.decode`."""
        size = _word_size(context)
        if context.base is None:
            msg = "delta: the frame was encoded against an earlier chunk, and none is recorded"
            raise CodecError(msg)
        if frame.nbytes != out.nbytes + size or context.base.nbytes != out.nbytes:
            msg = (
                f"delta: a frame of {frame.nbytes} bytes on a base of {context.base.nbytes} is no "
                f"chunk of {out.nbytes} bytes of {context.dtype}"
            )
            raise CodecError(msg)
        source, old, target = _words(frame, size), _words(context.base, size), _words(out, size)
        try:
            how = Comparison(int(source[-1]))
        except ValueError:
            msg = f"delta: elements were compared in an unknown way, {int(source[-1])}"
            raise CodecError(msg) from None
        for at in range(0, target.size, _BLOCK_ELEMENTS):
            stop = min(at + _BLOCK_ELEMENTS, target.size)
            _apply(source[at:stop], old[at:stop], how, target[at:stop])


def _word_size(context: CodecContext) -> int:
    """Return the bytes that are compared at once: an element, or less if it is no machine word."""
    size = context.itemsize
    return size if size in _WORDS else 1


def _words(view: memoryview, size: int) -> Words:
    return np.frombuffer(flat_view(view), f"<u{size}")


def _compare(new: Words, old: Words, how: Comparison, out: Words) -> None:
    """Write the differences of `new` from `old` into `out`."""
    if how is Comparison.XOR:
        np.bitwise_xor(new, old, out=out)
        return
    bits = 8 * new.itemsize
    sign = _scratch.one.view(new.dtype)[: new.size]
    np.subtract(new, old, out=out)
    # Zigzag: all bits move up by one and are inverted below a negative sign.
    np.right_shift(out.view(f"<i{new.itemsize}"), bits - 1, out=sign.view(f"<i{new.itemsize}"))
    np.left_shift(out, 1, out=out)
    np.bitwise_xor(out, sign, out=out)


def _apply(difference: Words, old: Words, how: Comparison, out: Words) -> None:
    """Write into `out` the elements that differ so from `old`."""
    if how is Comparison.XOR:
        np.bitwise_xor(difference, old, out=out)
        return
    sign = _scratch.one.view(old.dtype)[: old.size]
    np.bitwise_and(difference, 1, out=sign)
    np.negative(sign, out=sign)
    np.right_shift(difference, 1, out=out)
    np.bitwise_xor(out, sign, out=out)
    np.add(out, old, out=out)


def _chosen(new: Words, old: Words) -> Comparison | None:
    """Return the comparison whose result takes the fewest bits in a sample; None: none pays."""
    at = _sampled(new.size)
    some, before = new[at], old[at]
    itself = _bits(_exponent_first(some))
    taken = {}
    for how in Comparison:
        found = np.empty_like(some)
        for start in range(0, some.size, _BLOCK_ELEMENTS):
            stop = start + _BLOCK_ELEMENTS
            _compare(some[start:stop], before[start:stop], how, found[start:stop])
        taken[how] = _bits(found)
    best = min(taken, key=lambda how: taken[how])
    return best if taken[best] < (1 - _LEAST_SAVED) * itself else None


def _sampled(elements: int) -> NDArray[np.intp]:
    """Return the numbers of sampled elements: all of few, runs of many."""
    if elements <= _RUNS * _RUN:
        return np.arange(elements)
    starts = np.linspace(0, elements - _RUN, _RUNS).astype(np.intp)
    return (starts[:, None] + np.arange(_RUN)).reshape(-1)


def _exponent_first(words: Words) -> Words:
    """Return the bits of floats with the sign moved below, so that one byte is the exponent."""
    if words.itemsize == 1:
        return words
    return (words << np.uint8(1)) | (words >> np.uint8(8 * words.itemsize - 1))


def _bits(words: Words) -> float:
    """Return the order-0 entropy of the bytes of an element, in bits."""
    planes = words.view(np.uint8).reshape(words.size, -1)
    total = 0.0
    for number in range(words.itemsize):
        counts = np.bincount(planes[:, number], minlength=256)
        shares = counts[counts > 0] / words.size
        total -= float((shares * np.log2(shares)).sum())
    return total

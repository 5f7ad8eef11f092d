"""The `delta` codec, which stores elements as differences from an earlier checkpoint.

The codec compares bit patterns as integers. Nearby floats have nearby bit patterns, so a small
training step gives small differences. Zigzag coding turns them into small unsigned numbers, which
the next codec of the chain stores in a few bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.codecs.kernels import kernels
from penstock.codecs.sampling import entropy_bits, sampled
from penstock.core.abc import DECLINED, Codec, CodecContext, CodecOutput, Declined, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from penstock.codecs.plain import Elements

_RUN = 256  # consecutive elements of a sample
_LEAST_SAVED = 0.1  # of the bits that the elements take without a base
_WORDS = (1, 2, 4, 8)


class DeltaConfig(PluginConfig):
    """The (empty) options of `delta`; `deltas` in the configuration limits the chain length."""


class Comparison(IntEnum):
    """How a frame compares elements with those of the base."""

    SUBTRACT = 0
    """The integer difference in zigzag order: 0, -1, 1, -2, ..."""
    XOR = 1
    """The bitwise difference."""


class DeltaCodec(Codec):
    """Replaces the elements of a chunk with differences from the same chunk of an earlier save.

    A frame has the differences, then one more element with the `Comparison`.
    """

    name: ClassVar[str] = "delta"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    needs_base: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = DeltaConfig

    def load(self) -> None:
        """Compile the loops if numba has not cached them on disk; takes seconds."""
        kernels()

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return `raw_length` plus one element of the maximum size."""
        return raw_length + _WORDS[-1]

    def output(self, context: CodecContext, /) -> CodecOutput:
        """Describe the output as unsigned integers of the element size."""
        size = _word_size(context)
        return CodecOutput(f"uint{8 * size}", size)

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """See `Codec.encode`. Declines a chunk without a base, or with too small a gain.

        A small gain does not pay, since every restore has to read each link of a chain.
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
            msg = (
                f"delta: {chunk.nbytes} bytes need an output of {chunk.nbytes + size} bytes, not "
                f"{out.nbytes}"
            )
            raise CodecError(msg)
        target = _words(flat_view(out)[: chunk.nbytes + size], size)
        _compare(new, old, how, target[:-1])
        target[new.size] = how
        return chunk.nbytes + size

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        size = _word_size(context)
        if context.base is None:
            msg = "delta: the frame was encoded against a base, but none is recorded"
            raise CodecError(msg)
        if frame.nbytes != out.nbytes + size or context.base.nbytes != out.nbytes:
            msg = (
                f"delta: a frame of {frame.nbytes} bytes on a base of {context.base.nbytes} does "
                f"not decode to {out.nbytes} bytes of {context.dtype}"
            )
            raise CodecError(msg)
        source, old, target = _words(frame, size), _words(context.base, size), _words(out, size)
        try:
            how = Comparison(int(source[-1]))
        except ValueError:
            msg = f"delta: the frame names an unknown comparison, {int(source[-1])}"
            raise CodecError(msg) from None
        if how is Comparison.XOR:
            np.bitwise_xor(source[:-1], old, out=target)
        else:
            kernels().add(source[:-1], old, target)


def _word_size(context: CodecContext) -> int:
    """Return the byte size of the compared words: the itemsize if it is 1, 2, 4 or 8, else 1."""
    size = context.itemsize
    return size if size in _WORDS else 1


def _words(view: memoryview, size: int) -> Elements:
    return np.frombuffer(flat_view(view), f"<u{size}")


def _compare(new: Elements, old: Elements, how: Comparison, out: Elements) -> None:
    if how is Comparison.XOR:
        np.bitwise_xor(new, old, out=out)
    else:
        kernels().subtract(new, old, out)


def _chosen(new: Elements, old: Elements) -> Comparison | None:
    """Return the comparison with the lowest entropy in a sample; None if the gain is too small."""
    at = sampled(new.size, _RUN)
    sample, base = new[at], old[at]
    own_bits = _bits(_exponent_first(sample))
    bits = {}
    for how in Comparison:
        result = np.empty_like(sample)
        _compare(sample, base, how, result)
        bits[how] = _bits(result)
    best = min(bits, key=lambda how: bits[how])
    return best if bits[best] < (1 - _LEAST_SAVED) * own_bits else None


def _exponent_first(words: Elements) -> Elements:
    """Rotate the sign bit of floats to the end, so that the top byte holds the exponent."""
    if words.itemsize == 1:
        return words
    return (words << np.uint8(1)) | (words >> np.uint8(8 * words.itemsize - 1))


def _bits(words: Elements) -> float:
    """Return the summed order-0 entropies of an element's bytes, in bits."""
    planes = words.view(np.uint8).reshape(words.size, -1)
    return sum(entropy_bits(plane, biased=True) for plane in planes.T)

"""The decision how a chunk is split, from a sample of its elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.codecs.floatsplit.entropy import MAX_BITS, entropy_bits
from penstock.codecs.floatsplit.layout import FrameLayout
from penstock.codecs.floatsplit.planes import BLOCK_ELEMENTS, Halves
from penstock.codecs.floatsplit.prediction import Prediction, as_matrix, estimate, residual

if TYPE_CHECKING:
    from penstock.codecs.floatsplit.planes import Elements, Words
    from penstock.core.abc import CodecContext

FLOATS = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of the elements, by dtype."""
INTEGERS = {"uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
"""Bytes of the elements, by dtype."""
LEAST_ELEMENTS = 256

_RUNS, _RUN = 64, 64  # a sample: so many runs of so many elements
_LEAST_GAIN = 0.01  # of the chunk's bytes; less is not worth decoding
_LEAST_PREDICTED_BITS = 0.15  # of an element; predicting costs a tenth of the speed
_RANDOM_BITS = 6.8  # of the seven of a mantissa
_MOST_TERMS = 1 / 64  # bytes of rows and columns, as a share of the chunk's


@dataclass(frozen=True, slots=True)
class Decision:
    """How a chunk is split and coded.

    Attributes:
        layout: How it is split.
        bits: Entropy of each plane in bits per byte.
        kinds: How blocks may be split, the preferred way first. The last one is always possible.
    """

    layout: FrameLayout
    bits: list[float]
    kinds: tuple[Halves, ...]


def decide(words: Elements, context: CodecContext, *, predict: bool) -> Decision | None:
    """Return how a chunk is split; None: that would not make it smaller."""
    size = words.itemsize
    floats = context.dtype in FLOATS
    sample = words[_sampled(len(words))]
    if size == 1:
        bits = [entropy_bits(sample.view(np.uint8))]
        small = bits[0] < 8 * (1 - _LEAST_GAIN)
        return Decision(FrameLayout(1), bits, (Halves.INTEGER,)) if small else None
    top: Words = sample.view("<u2")[size // 2 - 1 :: size // 2]
    low = [entropy_bits(sample.view(np.uint8)[n::size]) for n in reversed(range(size - 2))]
    apart = any(bits < MAX_BITS for bits in low)
    kinds: tuple[Halves, ...]
    if not floats:
        head, kinds = _bits(top, 8, 0xFF), (Halves.INTEGER,)
        prediction, left = None, 0.0
    else:
        unsigned = int(top.max()) < 1 << 15
        head, kinds = _bits(top, 7, 0x7F), (Halves.SIGNED,)
        if unsigned:
            kinds = (Halves.UNSIGNED, *kinds)
        else:
            head[1] = min(8.0, head[1] + 1)  # the sign
        # What is left after a prediction has random mantissas, even where these were not.
        random = head[1] > _RANDOM_BITS + (not unsigned)
        prediction, left = _predict(words, context) if predict and random else (None, 0.0)
        if prediction is not None and unsigned:
            kinds = (Halves.NEAR, *kinds)
    block = BLOCK_ELEMENTS
    if prediction is not None:
        # What is left has other bits than the sample: its first plane compresses, no other does.
        head = [left, 8.0]
        block = BLOCK_ELEMENTS // len(prediction.columns) * len(prediction.columns)
    if sum(head) + sum(low) > 8 * size * (1 - _LEAST_GAIN):
        return None
    layout = FrameLayout(size, apart, prediction, block)
    lower = low if apart else [8.0] * (len(layout.widths()) - 2)
    return Decision(layout, head + lower, kinds)


def _sampled(elements: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the numbers of sampled elements: all of few, runs of many."""
    if elements <= _RUNS * _RUN:
        return np.arange(elements)
    starts = np.linspace(0, elements - _RUN, _RUNS).astype(np.intp)
    return (starts[:, None] + np.arange(_RUN)).reshape(-1)


def _bits(top: Words, shift: int, below: int) -> list[float]:
    """Return the entropies of the 8 bits from `shift` on, and of those that the mask gives."""
    planes = np.right_shift(top, shift), np.bitwise_and(top, below)
    return [entropy_bits(plane.astype(np.uint8)) for plane in planes]


def _exponent_bits(top: Words) -> float:
    return entropy_bits(np.right_shift(top, 7).astype(np.uint8))


def _predict(words: Elements, context: CodecContext) -> tuple[Prediction | None, float]:
    """Return terms of rows and columns, if a sample says that they make the chunk smaller.

    Returns:
        The terms or None, and the bits that are left in the first plane.
    """
    step = words.itemsize // 2
    tops = words.view("<u2")[step - 1 :: step]
    matrix = as_matrix(tops, context.shape, context.start // words.itemsize)
    if matrix is None:
        return None, 0.0
    width = matrix.top.shape[1]
    terms = matrix.touched + width
    if width > BLOCK_ELEMENTS // 2 or terms > _MOST_TERMS * words.nbytes:
        return None, 0.0
    # Both sides from the same cells, so that a small sample errs the same way for both.
    sample = matrix.sample()
    left = _exponent_bits(residual(sample))
    if _exponent_bits(sample) - left < _LEAST_PREDICTED_BITS + 8 * terms / len(words):
        return None, 0.0
    return estimate(matrix), left

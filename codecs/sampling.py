"""Samples of chunks, which codecs use to decide how to encode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_RUNS = 64


def sampled(elements: int, run: int) -> NDArray[np.intp]:
    """Return the indices of 64 evenly spaced runs of `run` elements, or of all elements."""
    if elements <= _RUNS * run:
        return np.arange(elements)
    starts = np.linspace(0, elements - run, _RUNS).astype(np.intp)
    return (starts[:, None] + np.arange(run)).reshape(-1)


def entropy_bits(sample: NDArray[np.uint8], *, biased: bool = False) -> float:
    """Return the order-0 entropy of the data from which `sample` was taken, in bits per byte.

    A small sample looks less random than its source (Miller and Madow, 1954). The result corrects
    this unless `biased`; a comparison of two samples of the same size needs no correction.
    """
    counts = np.bincount(sample.reshape(-1), minlength=256)
    counts = counts[counts > 0]
    size = sample.size
    bias = 0.0 if biased else (len(counts) - 1) / (2 * np.log(2) * size)
    return float(bias + np.log2(size) - counts @ np.log2(counts) / size)

"""The `delta` codec: stores elements as their differences from an earlier checkpoint.

Bits of elements are compared as integers. Neighbouring floats have neighbouring bits, so a small
step of training gives small differences; zigzag coding makes those of both signs small unsigned
numbers, which the next codec of the chain stores in a few bits.

Here: the frame, and the decision how elements are compared (`codec`), and the comparison
(`comparison`, and `fused` where numba is installed).
"""

from penstock.codecs.delta.codec import DeltaCodec, DeltaConfig
from penstock.codecs.delta.comparison import Comparison

__all__ = ["Comparison", "DeltaCodec", "DeltaConfig"]

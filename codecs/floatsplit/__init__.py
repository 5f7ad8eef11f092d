"""The `floatsplit` codec: exponents apart from mantissas, so that only exponents are compressed.

Here: the stored frame (`layout`), the decision how a chunk is split (`codec`), the prediction of
elements by row and column means (`prediction`), and the coding of one plane (`entropy`, and
`huffman` where numba is installed). The split into planes is one of `kernels`.
"""

from penstock.codecs.floatsplit.codec import FloatsplitCodec, FloatsplitConfig

__all__ = ["FloatsplitCodec", "FloatsplitConfig"]

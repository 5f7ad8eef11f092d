"""The `floatsplit` codec: exponents apart from mantissas, so that only exponents are compressed.

Here: the stored frame (`frame`), the split of elements into byte planes (`planes`), the prediction
of elements by row and column means (`prediction`), and the coding of one plane (`entropy`).
"""

from penstock.codecs.floatsplit.codec import FloatsplitCodec, FloatsplitConfig

__all__ = ["FloatsplitCodec", "FloatsplitConfig"]

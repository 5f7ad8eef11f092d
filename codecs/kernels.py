"""The inner loops of codecs, compiled by numba if it is installed, else in numpy.

`kernels` returns one of two tables. Both give the same results, except that the numpy table leaves
the Huffman codes to zstd.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from penstock.codecs import plain
from penstock.core.distributions import installed_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.codecs.floatsplit.prediction import Grid
    from penstock.codecs.plain import Bytes, Elements, Halves


@dataclass(frozen=True, slots=True)
class Kernels:
    """A table of the loops. `PLAIN` has the numpy loops.

    Attributes:
        subtract: Writes the differences between new and old elements, in zigzag order.
        add: Reverses `subtract`.
        split_block: Splits a block into planes; see `plain.split_block`.
        join_block: Reverses `split_block`.
        scatter: Writes values to selected bytes, and zeros elsewhere; see `plain.scatter`.
        store_codes: Writes a zstd frame of Huffman codes; returns its length, or 0 if zstd must
            write the frame.
    """

    subtract: Callable[[Elements, Elements, Elements], None]
    add: Callable[[Elements, Elements, Elements], None]
    split_block: Callable[[Elements, list[Elements], Halves, Grid | None], bool]
    join_block: Callable[[list[Elements], Halves, Grid | None, Elements], None]
    scatter: Callable[[Bytes, Bytes, Bytes], None]
    store_codes: Callable[[Bytes, Bytes], int]


PLAIN = Kernels(
    plain.subtract,
    plain.add,
    plain.split_block,
    plain.join_block,
    plain.scatter,
    plain.store_codes,
)


@cache
@installed_only()
def kernels() -> Kernels:
    """Return the compiled loops if numba is installed, else the numpy loops."""
    try:
        from penstock.codecs import compiled  # noqa: PLC0415 - numba is an extra
    except ImportError:
        return PLAIN
    return Kernels(
        compiled.subtract,
        compiled.add,
        compiled.split_block,
        compiled.join_block,
        compiled.scatter,
        _store_codes,
    )


def _store_codes(plane: Bytes, out: Bytes) -> int:
    # Imported late: the loop takes seconds to compile, and decoding does not need it.
    from penstock.codecs.huffman import store_codes  # noqa: PLC0415

    return store_codes(plane, out)

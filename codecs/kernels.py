"""The loops of codecs: compiled by numba where it is installed, else in numpy.

`kernels` returns one of two tables. Both give the same results, except that numpy leaves Huffman
codes to zstd.
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
    """The loops, by name; `PLAIN` has them in numpy.

    Attributes:
        subtract: Writes the differences of elements from older ones, in zigzag order.
        add: Reverses `subtract`.
        split_block: Writes the planes of a block, as `plain.split_block`.
        join_block: Writes a block from its planes.
        scatter: Writes values to some places, and zero elsewhere, as `plain.scatter`.
        store_codes: Writes a zstd frame of Huffman codes; returns its length, or 0 to leave the
            frame to zstd.
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
    """Return the compiled loops if numba is installed, else those of numpy."""
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

"""The head of a frame: how its elements are split.

A frame is little-endian, and decodes alone:

| bytes | |
|---|---|
| 20 | head: version, itemsize, flags, zero; elements of a block, columns, first column, base |
| rows + columns | terms of the rows and of the columns, where elements are predicted |
| (1 + 4 planes) blocks | of each block its kind, and of each plane its length and method |
| ... | the planes, block by block one behind the other, in each block the lowest first |

Of elements of one byte there is one plane. Others have two planes of their top bytes as `kernels`
splits them, then what is left: planes of 2 and 4 bytes of each element, or one for each byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.codecs.floatsplit.prediction import Prediction
from penstock.codecs.plain import BLOCK_ELEMENTS
from penstock.core.errors import CodecError

if TYPE_CHECKING:
    from penstock.codecs.plain import Bytes

HEAD = struct.Struct("<BBBBIIII")
_LAYOUT = 1
_PREDICTED, _BYTES_APART = 1, 2  # flags
_TERMS = 1 << 16


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """How the elements of a chunk are split.

    Attributes:
        itemsize: Bytes of an element.
        apart: Whether each byte below the top two has a plane of its own.
        prediction: What is subtracted from the top 16 bits; None: nothing.
        block: Elements of a block; whole rows where elements are predicted.
    """

    itemsize: int
    apart: bool = False
    prediction: Prediction | None = None
    block: int = BLOCK_ELEMENTS

    def widths(self) -> tuple[int, ...]:
        """Return the bytes of an element in each plane, from the top."""
        if self.apart:
            return (1,) * self.itemsize
        return {1: (1,), 2: (1, 1), 4: (1, 1, 2), 8: (1, 1, 2, 4)}[self.itemsize]

    def bounds(self, elements: int) -> list[tuple[int, int]]:
        """Return the blocks of a chunk as `(start, stop)`; predicted ones end with a row."""
        lead = self.prediction.first_column if self.prediction else 0
        stops = [*range(self.block - lead, elements, self.block), elements]
        return list(zip([0, *stops], stops, strict=False))


def write_head(layout: FrameLayout, out: Bytes) -> int:
    """Write the head and the terms, and return their length."""
    flags = _BYTES_APART * layout.apart
    columns = first = base = 0
    end = HEAD.size
    prediction = layout.prediction
    if prediction is not None:
        flags |= _PREDICTED
        columns, first, base = len(prediction.columns), prediction.first_column, prediction.base
        for terms in (prediction.rows, prediction.columns):
            out[end : end + terms.size] = terms
            end += terms.size
    HEAD.pack_into(
        out.data, 0, _LAYOUT, layout.itemsize, flags, 0, layout.block, columns, first, base
    )
    return end


def read_head(frame: Bytes, raw_length: int) -> tuple[FrameLayout, int]:
    """Return how a frame is split, and where its table of blocks begins.

    Raises:
        CodecError: No frame of a chunk of `raw_length` bytes begins so.
    """
    if frame.size < HEAD.size:
        raise cut_off(frame)
    version, size, flags, zero, block, columns, first, base = HEAD.unpack_from(frame.data)
    predicted = bool(flags & _PREDICTED)
    if (
        version != _LAYOUT
        or size not in {1, 2, 4, 8}
        or zero
        or flags > (_PREDICTED | _BYTES_APART)
        or not 0 < block <= BLOCK_ELEMENTS
        or raw_length % size
        or base >= _TERMS
        or (predicted and not (0 < columns <= block and block % columns == 0 and first < columns))
        or (not predicted and (columns or first or base))
    ):
        msg = f"floatsplit: the head of a frame of {frame.size} bytes is not valid"
        raise CodecError(msg)
    apart, at = bool(flags & _BYTES_APART), HEAD.size
    if not predicted:
        return FrameLayout(size, apart, None, block), at
    rows = -(-(first + raw_length // size) // columns)
    end = at + rows + columns
    if end > frame.size:
        raise cut_off(frame)
    prediction = Prediction(base, frame[at : at + rows], frame[at + rows : end], first)
    return FrameLayout(size, apart, prediction, block), end


def cut_off(frame: Bytes) -> CodecError:
    """Return the error of a frame that ends too early."""
    return CodecError(f"floatsplit: a frame of {frame.size} bytes is cut off")

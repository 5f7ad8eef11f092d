"""The `floatsplit` codec splits exponents from mantissas, and compresses what shrinks.

The codec samples a chunk to decide how to split it, then splits and encodes its blocks one by one.
`prediction` has the means of rows and columns, `entropy` encodes one plane, and
`penstock.codecs.kernels` splits elements into planes.

A frame is little-endian and self-contained:

| bytes | |
|---|---|
| 20 | head: version, itemsize, flags, zero; elements of a block, columns, first column, base |
| rows + columns | terms of the rows and of the columns, if elements are predicted |
| (1 + 4 * planes) * blocks | the kind of each block, and the length and method of each plane |
| ... | the planes, block after block, in each block the lowest first |

One-byte elements have one plane. Larger elements have two planes for their top bytes (see
`plain`), then planes for 2 and 4 lower bytes of each element, or one plane for each lower byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.codecs.floatsplit.entropy import (
    MAX_BITS,
    Method,
    decode_plane,
    encode_plane,
    method_for,
)
from penstock.codecs.floatsplit.prediction import Prediction, as_matrix, estimate, residual
from penstock.codecs.kernels import kernels
from penstock.codecs.plain import BLOCK_ELEMENTS, UNUSED_BITS, Halves, scratch
from penstock.codecs.sampling import entropy_bits, sampled
from penstock.core.abc import (
    DECLINED,
    FLOAT_DTYPES,
    Codec,
    CodecContext,
    Declined,
    PluginConfig,
)
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from penstock.codecs.floatsplit.prediction import Grid
    from penstock.codecs.plain import Bytes, Elements, Words

HEAD = struct.Struct("<BBBBIIII")
_LAYOUT = 1
_PREDICTED, _BYTES_APART = 1, 2  # flags
_TERMS = 1 << 16
_LENGTH_BITS = 28  # of a table entry; the method is above them
INTEGERS = {"uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
"""The itemsize of each integer dtype."""
LEAST_ELEMENTS = 256

_RUN = 64  # consecutive elements of a sample
_LEAST_GAIN = 0.01  # of the chunk's bytes; less is not worth decoding
_LEAST_PREDICTED_BITS = 0.15  # of an element; predicting costs a tenth of the speed
_RANDOM_BITS = 6.8  # of the seven of a mantissa
_MOST_TERMS = 1 / 64  # bytes of rows and columns, as a share of the chunk's


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """How a frame splits the elements of a chunk.

    Attributes:
        itemsize: Bytes per element.
        apart: Whether each byte below the top two has its own plane.
        prediction: The prediction to subtract from the top 16 bits; may be None.
        block: Elements per block; a block of predicted elements has whole rows.
    """

    itemsize: int
    apart: bool = False
    prediction: Prediction | None = None
    block: int = BLOCK_ELEMENTS

    def widths(self) -> tuple[int, ...]:
        """Return the number of bytes per element in each plane, from the top."""
        if self.apart:
            return (1,) * self.itemsize
        return {1: (1,), 2: (1, 1), 4: (1, 1, 2), 8: (1, 1, 2, 4)}[self.itemsize]

    def bounds(self, elements: int) -> list[tuple[int, int]]:
        """Return each block's `(start, stop)`; predicted blocks end at the end of a row."""
        lead = self.prediction.first_column if self.prediction else 0
        stops = [*range(self.block - lead, elements, self.block), elements]
        return list(zip([0, *stops], stops, strict=False))


@dataclass(frozen=True, slots=True)
class Decision:
    """How to split and encode a chunk.

    Attributes:
        layout: How to split the chunk.
        bits: Entropy of each plane in bits per byte.
        kinds: The splits to try for each block, in order. The last split always works.
    """

    layout: FrameLayout
    bits: list[float]
    kinds: tuple[Halves, ...]


def decide(words: Elements, context: CodecContext, *, predict: bool) -> Decision | None:
    """Return how to split a chunk; None if splitting would not shrink it."""
    size = words.itemsize
    floats = context.dtype in FLOAT_DTYPES
    sample = words[sampled(len(words), _RUN)]
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
        # Residuals have random mantissas, even if the elements' own mantissas are not random.
        random = head[1] > _RANDOM_BITS + (not unsigned)
        prediction, left = _predict(words, context) if predict and random else (None, 0.0)
        if prediction is not None and unsigned:
            kinds = (Halves.NEAR, *kinds)
    block = BLOCK_ELEMENTS
    if prediction is not None:
        # Residuals have other bits than the sample: only their first plane compresses.
        head = [left, 8.0]
        block = BLOCK_ELEMENTS // len(prediction.columns) * len(prediction.columns)
    if sum(head) + sum(low) > 8 * size * (1 - _LEAST_GAIN):
        return None
    layout = FrameLayout(size, apart, prediction, block)
    lower = low if apart else [8.0] * (len(layout.widths()) - 2)
    return Decision(layout, head + lower, kinds)


def _bits(top: Words, shift: int, below: int) -> list[float]:
    """Return the entropies of the 8 bits above the lowest `shift` bits, and of the mask `below`."""
    planes = np.right_shift(top, shift), np.bitwise_and(top, below)
    return [entropy_bits(plane.astype(np.uint8)) for plane in planes]


def _predict(words: Elements, context: CodecContext) -> tuple[Prediction | None, float]:
    """Predict elements from rows and columns, if a sample shows a gain.

    Returns:
        The prediction or None, and the entropy of the residuals' first plane in bits per byte.
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
    # Both entropies are of the same cells, so that a small sample biases both alike.
    sample = matrix.sample()
    before, left = (_bits(top, 7, 0x7F)[0] for top in (sample, residual(sample)))
    if before - left < _LEAST_PREDICTED_BITS + 8 * terms / len(words):
        return None, 0.0
    return estimate(matrix), left


class FloatsplitConfig(PluginConfig):
    """Options of the `floatsplit` codec.

    Attributes:
        predict: Whether to predict elements of matrices from row and column means.
    """

    predict: bool = True


class FloatsplitCodec(Codec):
    """Splits elements into planes of bytes, and encodes the planes that compress.

    Exponents of floats get Huffman codes. Most mantissas do not compress, and are stored unencoded.
    """

    name: ClassVar[str] = "floatsplit"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = FloatsplitConfig

    def __init__(self, config: FloatsplitConfig, /) -> None:
        """Create the codec from its options."""
        super().__init__(config)
        self._predict = config.predict

    def load(self) -> None:
        """Compile the loops if numba has not cached them on disk; takes seconds."""
        nothing = np.empty(0, np.uint8)
        kernels().store_codes(nothing, nothing)

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the raw length plus the largest tables, since a plane never grows."""
        blocks = 2 * raw_length // BLOCK_ELEMENTS + 3
        return raw_length + raw_length // 64 + 33 * blocks + HEAD.size

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """See `Codec.encode`. Declines other dtypes, and chunks that would not shrink."""
        size = context.itemsize
        if {**FLOAT_DTYPES, **INTEGERS}.get(context.dtype) != size:
            return DECLINED
        source = np.frombuffer(flat_view(chunk), np.uint8)
        if source.size % size or source.size < LEAST_ELEMENTS * size:
            return DECLINED
        words = source.view(f"<u{size}")
        decision = decide(words, context, predict=self._predict)
        if decision is None:
            return DECLINED
        needed = self.max_encoded_size(source.size)
        target = np.frombuffer(flat_view(out), np.uint8)
        if target.size < needed:
            msg = f"floatsplit: {source.size} bytes may need {needed} of output, not {target.size}"
            raise CodecError(msg)
        length = _write(words, target, decision)
        return length if length < source.size else DECLINED

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        source = np.frombuffer(flat_view(frame), np.uint8)
        target = np.frombuffer(flat_view(out), np.uint8)
        layout, at = read_head(source, target.size)
        if layout.itemsize != context.itemsize:
            msg = f"floatsplit: a frame of {layout.itemsize}-byte elements holds no {context.dtype}"
            raise CodecError(msg)
        _read(source, at, target.view(f"<u{layout.itemsize}"), layout)


def _write(words: Elements, out: Bytes, decision: Decision) -> int:
    layout = decision.layout
    bounds = layout.bounds(len(words))
    kinds = np.zeros(len(bounds), np.uint8)
    entries = np.zeros((len(bounds), len(decision.bits)), "<u4")
    table = write_head(layout, out)
    at = table + kinds.nbytes + entries.nbytes
    grid = layout.prediction.grid() if layout.prediction else None
    for number, (start, stop) in enumerate(bounds):
        here = grid.from_element(start) if grid else None
        kind, stored = _write_block(words[start:stop], out[at:], decision, here)
        kinds[number] = kind
        entries[number] = [method << _LENGTH_BITS | length for method, length in stored]
        at += sum(length for _, length in stored)
    out[table : table + kinds.nbytes] = kinds
    out[table + kinds.nbytes :][: entries.nbytes] = entries.reshape(-1).view(np.uint8)
    return at


def _write_block(
    block: Elements, out: Bytes, decision: Decision, grid: Grid | None
) -> tuple[Halves, list[tuple[Method, int]]]:
    """Write the planes of a block to the start of `out`.

    Returns:
        The block's kind, and each plane's method and length, from the top.
    """
    is_byte = block.itemsize == 1
    for kind in decision.kinds:
        planes = _planes(decision.layout, block)
        methods = [
            method_for(bits, unused=_unused(kind, number))
            for number, bits in enumerate(decision.bits)
        ]
        placed = 1 if is_byte else _place(planes, methods, out)
        if is_byte or kernels().split_block(block, planes, kind, grid):
            break
    else:
        msg = f"none of {decision.kinds} splits all elements"
        raise AssertionError(msg)
    at, stored = 0, []
    for number in reversed(range(len(planes))):
        plane, method, length = planes[number].view(np.uint8), methods[number], 0
        if number >= placed:
            length = plane.size
        else:
            method, length = encode_plane(plane, method, _unused(kind, number), out[at:])
        stored.append((method, length))
        at += length
    return kind, stored[::-1]


def _unused(kind: Halves, plane: int) -> int:
    """Return how many top bits are zero in each byte of a plane."""
    return UNUSED_BITS.get(kind, 0) if plane == 1 else 0


def _place(planes: list[Elements], methods: list[Method], out: Bytes) -> int:
    """Replace the lowest planes with views of `out`, up to the first plane that is encoded.

    The split then writes unencoded planes directly to `out`.

    Returns:
        The number of the first replaced plane; earlier planes stay in scratch memory.
    """
    at = 0
    for number in reversed(range(len(planes))):
        plane = planes[number]
        if methods[number] is not Method.RAW:
            return number + 1
        planes[number] = out[at : at + plane.nbytes].view(plane.dtype)
        at += plane.nbytes
    return 0


def _read(frame: Bytes, at: int, words: Elements, layout: FrameLayout) -> None:
    """Fill `words` from the blocks of `frame`, whose table begins at `at`."""
    bounds = layout.bounds(len(words))
    count = len(bounds)
    end = at + count * (1 + 4 * len(layout.widths()))
    if end > frame.size:
        raise cut_off(frame)
    kinds = frame[at : at + count].tolist()
    table = frame[at + count : end].copy().view("<u4").reshape(count, -1)
    lengths = (table & ((1 << _LENGTH_BITS) - 1)).tolist()
    methods = (table >> _LENGTH_BITS).tolist()
    at = end
    if at + sum(map(sum, lengths)) != frame.size:
        msg = f"floatsplit: a frame of {frame.size} bytes does not match its planes"
        raise CodecError(msg)
    grid = layout.prediction.grid() if layout.prediction else None
    for number, (start, stop) in enumerate(bounds):
        block, length = words[start:stop], sum(lengths[number])
        try:
            kind, how = Halves(kinds[number]), [Method(method) for method in methods[number]]
        except ValueError as error:
            msg = f"floatsplit: a block has an unknown kind or method: {error}"
            raise CodecError(msg) from None
        planes = _planes(layout, block)
        _read_planes(frame[at : at + length], lengths[number], how, kind, planes)
        if block.itemsize == 1:
            np.copyto(block, planes[0])
        else:
            here = grid.from_element(start) if grid else None
            kernels().join_block(planes, kind, here, block)
        at += length


def _read_planes(
    stored: Bytes, lengths: list[int], methods: list[Method], kind: Halves, planes: list[Elements]
) -> None:
    """Decode a block's planes into `planes`; replaces unencoded planes with views of `stored`."""
    at = 0
    for number in reversed(range(len(planes))):
        plane, method = planes[number], methods[number]
        source = stored[at : at + lengths[number]]
        at += lengths[number]
        if method is Method.RAW and source.size == plane.nbytes:
            planes[number] = source.view(plane.dtype)
            continue
        decode_plane(source, method, _unused(kind, number), plane.view(np.uint8))


def _planes(layout: FrameLayout, block: Elements) -> list[Elements]:
    """Return this thread's memory for the planes of a block; one-byte elements need none."""
    if block.itemsize == 1:
        return [block]
    elements = len(block)
    planes: list[Elements] = [scratch.first[:elements], scratch.second[:elements]]
    at = 0
    for width in layout.widths()[2:]:
        planes.append(scratch.low[at : at + elements * width].view(f"<u{width}"))
        at += elements * width
    return planes


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
    """Return the layout of a frame, and the offset of its table of blocks.

    Raises:
        CodecError: The head does not fit a chunk of `raw_length` bytes.
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
    """Return the error for a truncated frame."""
    return CodecError(f"floatsplit: a frame of {frame.size} bytes is truncated")

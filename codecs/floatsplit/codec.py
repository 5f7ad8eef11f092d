"""The codec: a sample decides how a chunk is split, then blocks are split and coded one by one.

A frame is little-endian, and decodes alone:

| bytes | |
|---|---|
| 16 | head: layout version, itemsize, flags, zero, elements of a block, columns, first column |
| 2 rows + 2 columns | row terms and column terms, where elements are predicted |
| (1 + 4 planes) blocks | of each block its kind, and of each plane its length and method |
| ... | the planes, block by block, one behind the other |

Of elements of one byte there is one plane. Others have two planes of their top bytes as `planes`
splits them, then what is left: planes of 2 and 4 bytes of each element, or one for each byte.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.codecs.floatsplit.entropy import (
    MAX_BITS,
    Method,
    decode_plane,
    encode_plane,
    entropy_bits,
    method_for,
)
from penstock.codecs.floatsplit.planes import Halves, join_top, split_top
from penstock.codecs.floatsplit.prediction import Prediction, estimate, matrix_width
from penstock.core.abc import DECLINED, Codec, CodecContext, Declined, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint16]

BLOCK_ELEMENTS = 128 << 10
"""Elements of a block where nothing is predicted; else the whole rows that fit."""

_HEAD = struct.Struct("<BBBBIII")
_LAYOUT = 1
_PREDICTED, _BYTES_APART = 1, 2  # flags

_LENGTH_BITS = 28  # of a table entry; the method stands above them
_FLOATS = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
_INTEGERS = {"uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
_RUNS, _RUN = 64, 256  # a sample: so many runs of so many elements
_LEAST_ELEMENTS = 256
_LEAST_GAIN = 0.01  # of the chunk's bytes; less is not worth decoding
_LEAST_PREDICTED_BITS = 0.15  # of an element; predicting costs a fifth of the speed


class FloatsplitConfig(PluginConfig):
    """Options of the `floatsplit` codec.

    Attributes:
        predict: Whether elements of matrices may be predicted from row and column means.
    """

    predict: bool = True


@dataclass(frozen=True, slots=True)
class _Split:
    """How the elements of a chunk are split.

    Attributes:
        itemsize: Bytes of an element.
        apart: Whether each byte below the top two has a plane of its own.
        prediction: What is subtracted from the top 16 bits; None: nothing.
        block: Elements of a block.
    """

    itemsize: int
    apart: bool
    prediction: Prediction | None
    block: int

    def widths(self) -> tuple[int, ...]:
        """Return the bytes of an element in each plane."""
        if self.apart:
            return (1,) * self.itemsize
        return {1: (1,), 2: (1, 1), 4: (1, 1, 2), 8: (1, 1, 2, 4)}[self.itemsize]

    def bounds(self, elements: int) -> list[tuple[int, int]]:
        """Return the blocks of a chunk as `(start, stop)`; predicted ones end with a row."""
        lead = self.prediction.first_column if self.prediction else 0
        stops = [*range(self.block - lead, elements, self.block), elements]
        return list(zip([0, *stops], stops, strict=False))


class _BlockMemory(threading.local):
    """Memory of one thread, for one block."""

    def __init__(self) -> None:
        n = BLOCK_ELEMENTS
        self.word = np.empty(n, np.uint64)
        self.top = np.empty(n, np.uint16)
        self.one = np.empty(n, np.uint16)
        self.two = np.empty(n, np.uint16)
        self.first = np.empty(n, np.uint8)
        self.second = np.empty(n, np.uint8)
        self.low = np.empty(6 * n, np.uint8)
        self.part = np.empty(n, np.uint64)
        self.eighth = np.empty(n // 8, np.uint8)


_scratch = _BlockMemory()


class FloatsplitCodec(Codec):
    """Encodes exponents of floats by Huffman codes, and mantissas as they are."""

    name: ClassVar[str] = "floatsplit"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = FloatsplitConfig

    def __init__(self, config: FloatsplitConfig, /) -> None:
        """Create the codec from its options."""
        super().__init__(config)
        self._predict = config.predict

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the raw length and the largest tables: a plane never gets longer."""
        blocks = 2 * raw_length // BLOCK_ELEMENTS + 3
        return raw_length + raw_length // 64 + 33 * blocks + _HEAD.size

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """Encode a chunk as `Codec.encode`; declines what is no float and what would not shrink."""
        dtype, size = context.dtype, context.itemsize
        floats = dtype in _FLOATS
        if (_FLOATS if floats else _INTEGERS).get(dtype) != size:
            return DECLINED
        source = np.frombuffer(flat_view(chunk), np.uint8)
        if source.size % size or source.size < _LEAST_ELEMENTS * size:
            return DECLINED
        words = source.view(f"<u{size}")
        decided = _decide(words, context, floats=floats, predict=self._predict)
        if decided is None:
            return DECLINED
        split, methods, unsigned = decided
        needed = self.max_encoded_size(source.size)
        target = np.frombuffer(flat_view(out), np.uint8)
        if target.size < needed:
            msg = f"floatsplit: {source.size} bytes may need {needed} bytes, not {target.size}"
            raise CodecError(msg)
        length = _write(words, target, split, methods, _kinds(floats=floats, unsigned=unsigned))
        return length if length < source.size else DECLINED

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Decode a frame as `Codec.decode`."""
        source = np.frombuffer(flat_view(frame), np.uint8)
        target = np.frombuffer(flat_view(out), np.uint8)
        split, at = _read_head(source, target.size)
        if split.itemsize != context.itemsize:
            msg = f"floatsplit: a frame of {split.itemsize}-byte elements is no {context.dtype}"
            raise CodecError(msg)
        _read(source, at, target.view(f"<u{split.itemsize}"), split)


def _kinds(*, floats: bool, unsigned: bool) -> tuple[Halves, ...]:
    """Return how blocks may be split, the preferred way first."""
    if not floats:
        return (Halves.INTEGER,)
    return (Halves.UNSIGNED, Halves.SIGNED) if unsigned else (Halves.SIGNED,)


def _decide(
    words: NDArray[np.unsignedinteger], context: CodecContext, *, floats: bool, predict: bool
) -> tuple[_Split, list[float], bool] | None:
    """Sample a chunk, and say how it is split: None where that would not make it smaller.

    Returns:
        The split, the entropy of each plane in bits per byte, and whether all signs are zero.
    """
    size = words.itemsize
    at = _sampled(len(words))
    if size == 1:
        bits = [entropy_bits(words[at].view(np.uint8))]
        split = _Split(1, apart=False, prediction=None, block=BLOCK_ELEMENTS)
        return (split, bits, False) if bits[0] < 8 * (1 - _LEAST_GAIN) else None
    step = size // 2
    tops = words.view("<u2")[step - 1 :: step]
    sample = words[at]
    top = (sample >> np.uint64(8 * size - 16)).astype(np.uint16) if step > 1 else sample
    unsigned = floats and int(top.max()) < 1 << 15
    head = _top_bits(top, floats=floats)
    prediction, block = None, BLOCK_ELEMENTS
    width = matrix_width(context.shape, BLOCK_ELEMENTS // 2)
    if predict and floats and width and len(words) >= 4 * width:
        first = context.start // size % width
        guess = estimate(tops, width, first)
        if guess is not None:
            cells = at + first
            terms = guess.rows[cells // width] + guess.columns[cells % width]
            better = _top_bits(top - terms, floats=True)
            tables = 16 * (len(guess.rows) + width) / len(words)
            if head[0] - better[0] > _LEAST_PREDICTED_BITS + tables and tables < size / 16:
                head, prediction = better, guess
                block = BLOCK_ELEMENTS // width * width
    if unsigned:
        head[1] = min(head[1], 7.0)
    low = [entropy_bits(sample.view(np.uint8).reshape(-1, size)[:, n]) for n in range(size - 2)]
    low.reverse()  # from the top
    apart = any(bits < MAX_BITS for bits in low)
    if sum(head) + sum(low) > 8 * size * (1 - _LEAST_GAIN):
        return None
    split = _Split(size, apart, prediction, block)
    return split, head + (low if apart else [8.0] * (len(split.widths()) - 2)), unsigned


def _sampled(elements: int) -> NDArray[np.intp]:
    """Return the numbers of sampled elements: all of few, runs of many."""
    if elements <= _RUNS * _RUN:
        return np.arange(elements)
    starts = np.linspace(0, elements - _RUN, _RUNS).astype(np.intp)
    return (starts[:, None] + np.arange(_RUN)).reshape(-1)


def _top_bits(top: Words, *, floats: bool) -> list[float]:
    """Return the entropies of the two planes of `top`."""
    first, second = np.empty((2, len(top)), np.uint8)
    scratch = np.empty((2, len(top)), np.uint16)
    split_top(
        top, Halves.SIGNED if floats else Halves.INTEGER, first, second, (scratch[0], scratch[1])
    )
    return [entropy_bits(first), entropy_bits(second)]


def _write(
    words: NDArray[np.unsignedinteger],
    out: Bytes,
    split: _Split,
    bits: list[float],
    kinds: tuple[Halves, ...],
) -> int:
    """Write the frame into `out`, and return its length."""
    prediction = split.prediction
    flags = _PREDICTED * (prediction is not None) + _BYTES_APART * split.apart
    columns = first = 0
    at = _HEAD.size
    if prediction is not None:
        columns, first = len(prediction.columns), prediction.first_column
        for terms in (prediction.rows, prediction.columns):
            stored = terms.astype("<u2").view(np.uint8)
            out[at : at + stored.size] = stored
            at += stored.size
    _HEAD.pack_into(out.data, 0, _LAYOUT, split.itemsize, flags, 0, split.block, columns, first)
    bounds = split.bounds(len(words))
    kinds_used = np.zeros(len(bounds), np.uint8)
    entries = np.zeros((len(bounds), len(bits)), "<u4")
    table = at
    at += kinds_used.nbytes + entries.nbytes
    for number, (start, stop) in enumerate(bounds):
        kind, planes = _split_block(words[start:stop], start, split, kinds)
        kinds_used[number] = kind
        for which, plane in enumerate(planes):
            method = method_for(bits[which], seven=which == 1 and kind is Halves.UNSIGNED)
            raw = plane.view(np.uint8)
            method, length = encode_plane(raw, method, out[at:], _scratch.eighth)
            entries[number, which] = method << _LENGTH_BITS | length
            at += length
    out[table : table + kinds_used.nbytes] = kinds_used
    out[table + kinds_used.nbytes :][: entries.nbytes] = entries.reshape(-1).view(np.uint8)
    return at


def _split_block(
    block: NDArray[np.unsignedinteger], start: int, split: _Split, kinds: tuple[Halves, ...]
) -> tuple[Halves, list[NDArray[np.unsignedinteger]]]:
    """Split a block that begins with element `start` into planes in scratch memory."""
    n, size, scratch = len(block), split.itemsize, _scratch
    if size == 1:
        return Halves.INTEGER, [block]
    word = scratch.word.view(block.dtype)[:n]
    top = block
    if size > 2:  # noqa: PLR2004 - the top two bytes
        np.right_shift(block, 8 * size - 16, out=word)
        top = scratch.top[:n]
        np.copyto(top, word, casting="unsafe")
    kind = kinds[0]
    if kind is Halves.UNSIGNED and int(top.max()) >> 15:
        kind = kinds[1]  # the sample saw none of the signs
    if split.prediction is not None:
        terms = split.prediction.terms(start, start + n, scratch.one)
        np.subtract(top, terms, out=scratch.top[:n])
        top = scratch.top[:n]
    planes = _planes(split, block)
    split_top(top, kind, planes[0], planes[1], (scratch.one[:n], scratch.two[:n]))
    shift = 8 * size - 16
    for plane in planes[2:]:
        shift -= 8 * plane.itemsize
        if shift:
            np.right_shift(block, shift, out=word)
        np.copyto(plane, word if shift else block, casting="unsafe")
    return kind, planes


def _read_head(frame: Bytes, raw_length: int) -> tuple[_Split, int]:
    """Return how a frame is split, and where its table of blocks begins."""
    if frame.size < _HEAD.size:
        msg = f"floatsplit: a frame of {frame.size} bytes is cut off"
        raise CodecError(msg)
    layout, size, flags, zero, block, columns, first = _HEAD.unpack_from(frame.data)
    predicted = bool(flags & _PREDICTED)
    if (
        layout != _LAYOUT
        or size not in {1, 2, 4, 8}
        or zero
        or flags > (_PREDICTED | _BYTES_APART)
        or not 0 < block <= BLOCK_ELEMENTS
        or raw_length % size
        or (predicted and not (0 < columns <= block and block % columns == 0 and first < columns))
        or (not predicted and (columns or first))
    ):
        msg = f"floatsplit: the head of a frame of {frame.size} bytes is not valid"
        raise CodecError(msg)
    at = _HEAD.size
    prediction = None
    if predicted:
        rows = -(-(first + raw_length // size) // columns)
        stored = frame[at : at + 2 * (rows + columns)]
        at += 2 * (rows + columns)
        if at > frame.size:
            msg = f"floatsplit: a frame of {frame.size} bytes is cut off"
            raise CodecError(msg)
        terms = stored.copy().view("<u2").astype(np.uint16, copy=False)
        prediction = Prediction(terms[:rows], terms[rows:], first)
    return _Split(size, bool(flags & _BYTES_APART), prediction, block), at


def _read(frame: Bytes, at: int, words: NDArray[np.unsignedinteger], split: _Split) -> None:
    """Fill `words` from the blocks of `frame`, whose table begins at `at`."""
    bounds = split.bounds(len(words))
    count = len(bounds)
    end = at + count * (1 + 4 * len(split.widths()))
    if end > frame.size:
        msg = f"floatsplit: a frame of {frame.size} bytes is cut off"
        raise CodecError(msg)
    kinds = frame[at : at + count].tolist()
    table = frame[at + count : end].copy().view("<u4").reshape(count, -1)
    lengths = (table & ((1 << _LENGTH_BITS) - 1)).tolist()
    methods = (table >> _LENGTH_BITS).tolist()
    at = end
    if at + sum(map(sum, lengths)) != frame.size:
        msg = f"floatsplit: a frame of {frame.size} bytes has more or less than its planes"
        raise CodecError(msg)
    for number, (start, stop) in enumerate(bounds):
        planes = _planes(split, words[start:stop])
        for plane, length, method in zip(planes, lengths[number], methods[number], strict=True):
            try:
                how = Method(method)
            except ValueError:
                msg = f"floatsplit: a plane is stored by the unknown method {method}"
                raise CodecError(msg) from None
            decode_plane(frame[at : at + length], how, plane.view(np.uint8), _scratch.eighth)
            at += length
        try:
            kind = Halves(kinds[number])
        except ValueError:
            msg = f"floatsplit: a block is of the unknown kind {kinds[number]}"
            raise CodecError(msg) from None
        if split.itemsize > 1:
            _join_block(planes, kind, start, words[start:stop], split)


def _planes(split: _Split, block: NDArray[np.unsignedinteger]) -> list[NDArray[np.unsignedinteger]]:
    """Return scratch memory for the planes of `block`; of one-byte elements, the block itself."""
    if split.itemsize == 1:
        return [block]
    n = len(block)
    planes: list[NDArray[np.unsignedinteger]] = [_scratch.first[:n], _scratch.second[:n]]
    at = 0
    for width in split.widths()[2:]:
        planes.append(_scratch.low[at : at + n * width].view(f"<u{width}"))
        at += n * width
    return planes


def _join_block(
    planes: list[NDArray[np.unsignedinteger]],
    kind: Halves,
    start: int,
    block: NDArray[np.unsignedinteger],
    split: _Split,
) -> None:
    """Fill `block`, which begins with element `start`, from its planes."""
    n, size, scratch = len(block), split.itemsize, _scratch
    top = scratch.top[:n] if size > 2 else block  # noqa: PLR2004 - the top two bytes
    join_top(planes[0], planes[1], kind, top, scratch.one[:n])
    if split.prediction is not None:
        np.add(top, split.prediction.terms(start, start + n, scratch.two), out=top)
        if kind is Halves.UNSIGNED:
            np.bitwise_and(top, 0x7FFF, out=top)
    if size == 2:  # noqa: PLR2004 - there is nothing below
        return
    word = scratch.word.view(block.dtype)[:n]
    shift = 8 * size - 16
    np.copyto(word, top)
    np.left_shift(word, shift, out=word)
    low = planes[2:]
    for plane in low[:-1]:
        shift -= 8 * plane.itemsize
        part = scratch.part.view(block.dtype)[:n]
        np.copyto(part, plane)
        np.left_shift(part, shift, out=part)
        np.bitwise_or(word, part, out=word)
    np.bitwise_or(word, low[-1], out=block)

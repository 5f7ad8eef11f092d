"""The codec: a sample decides how a chunk is split, then blocks are split and coded one by one."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from penstock.codecs.floatsplit import planes as plain
from penstock.codecs.floatsplit.entropy import (
    Method,
    decode_plane,
    encode_plane,
    load_coder,
    method_for,
)
from penstock.codecs.floatsplit.layout import HEAD, FrameLayout, cut_off, read_head, write_head
from penstock.codecs.floatsplit.planes import BLOCK_ELEMENTS, UNUSED_BITS, Halves, Scratch
from penstock.codecs.floatsplit.sampling import (
    FLOATS,
    INTEGERS,
    LEAST_ELEMENTS,
    Decision,
    decide,
)
from penstock.core.abc import DECLINED, Codec, CodecContext, Declined, PluginConfig
from penstock.core.distributions import installed_only
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from penstock.codecs.floatsplit.planes import Bytes, Elements
    from penstock.codecs.floatsplit.prediction import Grid

_LENGTH_BITS = 28  # of a table entry; the method stands above them


class FloatsplitConfig(PluginConfig):
    """Options of the `floatsplit` codec.

    Attributes:
        predict: Whether elements of matrices may be predicted from row and column means.
    """

    predict: bool = True


class _Splitter(Protocol):
    """The two functions that `planes` has, and `fused`."""

    def split_block(
        self,
        block: Elements,
        planes: list[Elements],
        kind: Halves,
        grid: Grid | None,
        scratch: Scratch,
    ) -> bool: ...

    def join_block(
        self,
        planes: list[Elements],
        kind: Halves,
        grid: Grid | None,
        block: Elements,
        scratch: Scratch,
    ) -> None: ...


@cache
@installed_only()
def _splitter() -> _Splitter:
    """Return the faster of two equal ways."""
    try:
        from penstock.codecs.floatsplit import fused  # noqa: PLC0415 - numba is an extra
    except ImportError:
        return plain
    return fused


class _BlockMemory(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


_local = _BlockMemory()


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

    def load(self) -> None:
        """Have numba compile the loops, where it has not kept them on disk: seconds."""
        _splitter()
        load_coder()

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the raw length and the largest tables: a plane never gets longer."""
        blocks = 2 * raw_length // BLOCK_ELEMENTS + 3
        return raw_length + raw_length // 64 + 33 * blocks + HEAD.size

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> int | Declined:
        """Encode a chunk as `Codec.encode`; declines what is no float and what would not shrink."""
        size = context.itemsize
        if {**FLOATS, **INTEGERS}.get(context.dtype) != size:
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
            msg = f"floatsplit: {source.size} bytes may need {needed} bytes, not {target.size}"
            raise CodecError(msg)
        length = _write(words, target, decision)
        return length if length < source.size else DECLINED

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """Decode a frame as `Codec.decode`."""
        source = np.frombuffer(flat_view(frame), np.uint8)
        target = np.frombuffer(flat_view(out), np.uint8)
        layout, at = read_head(source, target.size)
        if layout.itemsize != context.itemsize:
            msg = f"floatsplit: a frame of {layout.itemsize}-byte elements is no {context.dtype}"
            raise CodecError(msg)
        _read(source, at, target.view(f"<u{layout.itemsize}"), layout)


def _write(words: Elements, out: Bytes, decision: Decision) -> int:
    """Write the frame into `out`, and return its length."""
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
    """Write the planes of a block into the beginning of `out`.

    Returns:
        The block's kind, and of each plane, from the top, its method and length.
    """
    kind, methods, planes, placed = _split(block, out, decision, grid)
    scratch = _local.scratch.one.view(np.uint8)
    at = 0
    stored = []
    for number in reversed(range(len(planes))):
        plane, method, length = planes[number].view(np.uint8), methods[number], 0
        if number >= placed:
            length = plane.size
        else:
            method, length = encode_plane(plane, method, _unused(kind, number), out[at:], scratch)
        stored.append((method, length))
        at += length
    return kind, stored[::-1]


def _split(
    block: Elements, out: Bytes, decision: Decision, grid: Grid | None
) -> tuple[Halves, list[Method], list[Elements], int]:
    """Split a block in the first way that is possible.

    Returns:
        The block's kind; of each plane the method that it shall be stored by, and itself; and the
        number of the first plane that stands in `out` already.
    """
    if block.itemsize == 1:
        return Halves.INTEGER, [method_for(decision.bits[0], unused=0)], [block], 1
    scratch = _local.scratch
    for kind in decision.kinds:
        methods = [
            method_for(bits, unused=_unused(kind, number))
            for number, bits in enumerate(decision.bits)
        ]
        planes = _planes(decision.layout, len(block), scratch)
        placed = _place(planes, methods, out)
        if _splitter().split_block(block, planes, kind, grid, scratch):
            return kind, methods, planes, placed
    msg = f"none of {decision.kinds} splits all elements"
    raise AssertionError(msg)


def _unused(kind: Halves, plane: int) -> int:
    """Return how many top bits are zero in each byte of a plane."""
    return UNUSED_BITS.get(kind, 0) if plane == 1 else 0


def _place(planes: list[Elements], methods: list[Method], out: Bytes) -> int:
    """Let the lowest planes, which are stored as they are, stand where they are stored.

    Returns:
        The number of the first of them: the planes before it stay in scratch memory.
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
        msg = f"floatsplit: a frame of {frame.size} bytes has more or less than its planes"
        raise CodecError(msg)
    grid = layout.prediction.grid() if layout.prediction else None
    scratch = _local.scratch
    for number, (start, stop) in enumerate(bounds):
        block, length = words[start:stop], sum(lengths[number])
        try:
            kind, how = Halves(kinds[number]), [Method(method) for method in methods[number]]
        except ValueError as error:
            msg = f"floatsplit: a block is stored in an unknown way: {error}"
            raise CodecError(msg) from None
        planes = [block] if block.itemsize == 1 else _planes(layout, len(block), scratch)
        _read_planes(frame[at : at + length], lengths[number], how, kind, planes)
        if block.itemsize == 1:
            np.copyto(block, planes[0])
        else:
            here = grid.from_element(start) if grid else None
            _splitter().join_block(planes, kind, here, block, scratch)
        at += length


def _read_planes(
    stored: Bytes, lengths: list[int], methods: list[Method], kind: Halves, planes: list[Elements]
) -> None:
    """Fill `planes`; those that are stored as they are become views of `stored`."""
    scratch = _local.scratch.one.view(np.uint8)
    at = 0
    for number in reversed(range(len(planes))):
        plane, method = planes[number], methods[number]
        source = stored[at : at + lengths[number]]
        at += lengths[number]
        if method is Method.RAW and source.size == plane.nbytes:
            planes[number] = source.view(plane.dtype)
            continue
        decode_plane(source, method, _unused(kind, number), plane.view(np.uint8), scratch)


def _planes(layout: FrameLayout, elements: int, scratch: Scratch) -> list[Elements]:
    """Return scratch memory for the planes of a block."""
    planes: list[Elements] = [scratch.first[:elements], scratch.second[:elements]]
    at = 0
    for width in layout.widths()[2:]:
        planes.append(scratch.low[at : at + elements * width].view(f"<u{width}"))
        at += elements * width
    return planes

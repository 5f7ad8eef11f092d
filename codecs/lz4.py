"""The `lz4` codec, which stores LZ4 blocks of at most 4 MiB raw data.

For each 4 MiB of the chunk, in order, a frame has the block's stored length as a little-endian
32-bit number, then the block (LZ4 block format, without the size that some libraries prepend).
The frame of an empty chunk is empty.
"""

from __future__ import annotations

import struct
from typing import ClassVar, Self

import lz4.block
from pydantic import Field, model_validator

from penstock.core.abc import Codec, CodecContext, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

# The library copies its results under the GIL: 0.4 ms for 4 MiB, but 1.3 ms for 16 MiB, more than
# the 1 ms that the contract allows.
PIECE_BYTES = 4 << 20

_HEAD = struct.Struct("<I")


class Lz4Config(PluginConfig):
    """Options of the `lz4` codec.

    Attributes:
        acceleration: 1 gives the smallest frames; higher values are faster and compress less.
        level: 1 to 12 use the slow "high compression" mode instead; decoding stays as fast.
    """

    acceleration: int = Field(default=1, ge=1, le=65537)
    level: int | None = Field(default=None, ge=1, le=12)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.level is not None and self.acceleration != 1:
            msg = "takes either level or acceleration, not both"
            raise ValueError(msg)
        return self


class Lz4Codec(Codec):
    """Encodes a chunk into LZ4 blocks. Fast, and useful for repetitive data."""

    name: ClassVar[str] = "lz4"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = Lz4Config

    def __init__(self, config: Lz4Config, /) -> None:
        """Create the codec from its options."""
        super().__init__(config)
        if config.level is None:
            self._options = {"mode": "fast", "acceleration": config.acceleration}
        else:
            self._options = {"mode": "high_compression", "compression": config.level}

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return `LZ4_COMPRESSBOUND` plus the length field, summed over all blocks."""
        pieces = -(-raw_length // PIECE_BYTES)
        return raw_length + raw_length // 255 + (16 + _HEAD.size) * pieces

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        """See `Codec.encode`."""
        del context
        source, target = flat_view(chunk), flat_view(out)
        length = 0
        for start in range(0, source.nbytes, PIECE_BYTES):
            piece = source[start : start + PIECE_BYTES]
            block = lz4.block.compress(piece, store_size=False, **self._options)
            stop = length + _HEAD.size + len(block)
            if stop > target.nbytes:
                msg = f"lz4: {source.nbytes} bytes do not fit into an output of {target.nbytes}"
                raise CodecError(msg)
            _HEAD.pack_into(target, length, len(block))
            target[length + _HEAD.size : stop] = block
            length = stop
        return length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        del context
        source, target = flat_view(frame), flat_view(out)
        at = 0
        for start in range(0, target.nbytes, PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            if at + _HEAD.size > source.nbytes:
                msg = f"lz4: a frame of {source.nbytes} bytes is truncated"
                raise CodecError(msg)
            (length,) = _HEAD.unpack_from(source, at)
            block = source[at + _HEAD.size : at + _HEAD.size + length]
            at += _HEAD.size + length
            if at > source.nbytes:
                msg = f"lz4: a frame of {source.nbytes} bytes is truncated"
                raise CodecError(msg)
            _decode_block(block, piece)
        if at != source.nbytes:
            msg = f"lz4: a frame of {source.nbytes} bytes is {source.nbytes - at} too long"
            raise CodecError(msg)


def _decode_block(block: memoryview, target: memoryview) -> None:
    try:
        data = lz4.block.decompress(block, uncompressed_size=target.nbytes)
    except lz4.block.LZ4BlockError as error:
        msg = f"lz4: a block of {block.nbytes} bytes is not valid: {error}"
        raise CodecError(msg) from error
    if len(data) != target.nbytes:
        msg = f"lz4: a block holds {len(data)} bytes instead of {target.nbytes}"
        raise CodecError(msg)
    target[:] = data

"""The `lzma` codec: one raw LZMA2 stream for each chunk.

A frame has no header: nothing in it can ask for memory. Both sides derive the size of the
dictionary from the length of the chunk. That rule is part of the stored format: to change it takes
a new `version` that still reads old frames.
"""

from __future__ import annotations

import lzma
from typing import Any, ClassVar

import numpy as np
from penstock.core.abc import Codec, CodecContext, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view
from pydantic import Field

# An encoder takes up to 12 times as much, in each of Penstock's worker threads.
DICTIONARY_BYTES = 4 << 20
SMALLEST_DICTIONARY_BYTES = 4096  # of liblzma


class LzmaConfig(PluginConfig):
    """Options of the `lzma` codec.

    Attributes:
        preset: 0 (fast) to 9 (small).
    """

    preset: int = Field(default=1, ge=0, le=9)


class LzmaCodec(Codec):
    """Encodes a chunk into an LZMA2 stream; small, and slow to write."""

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "lzma"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = LzmaConfig

    def __init__(self, config: LzmaConfig, /) -> None:
        """Store the options."""
        super().__init__(config)
        self._preset = config.preset

    def max_encoded_size(self, raw_length: int, /) -> int:
        """LZMA2 stores incompressible bytes in pieces of nearly 64 KiB, with 6 more bytes each."""
        return raw_length + 6 * (raw_length // (32 << 10) + 2)

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        """See `Codec.encode`."""
        del context
        source = flat_view(chunk)
        encoded = lzma.compress(
            source, format=lzma.FORMAT_RAW, filters=self._filters(source.nbytes)
        )
        if len(encoded) > out.nbytes:
            msg = (
                f"lzma: {source.nbytes} bytes take {len(encoded)}, the output has only {out.nbytes}"
            )
            raise CodecError(msg)
        _copy(out[: len(encoded)], encoded)
        return len(encoded)

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        del context
        decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=self._filters(out.nbytes))
        try:
            # One byte more than allowed: this detects a frame that holds too much, and a small
            # frame of a huge chunk takes no more memory than the requested chunk.
            raw = decoder.decompress(frame, out.nbytes + 1)
        except lzma.LZMAError as error:
            msg = f"lzma: a frame of {frame.nbytes} bytes is not valid: {error}"
            raise CodecError(msg) from error
        if len(raw) != out.nbytes or not decoder.eof or decoder.unused_data:
            msg = f"lzma: a frame of {frame.nbytes} bytes does not hold exactly {out.nbytes}"
            raise CodecError(msg)
        _copy(out, raw)

    def _filters(self, raw_length: int) -> list[dict[str, Any]]:
        dictionary = min(max(raw_length, SMALLEST_DICTIONARY_BYTES), DICTIONARY_BYTES)
        return [{"id": lzma.FILTER_LZMA2, "preset": self._preset, "dict_size": dictionary}]


def _copy(target: memoryview, data: bytes) -> None:
    # A slice assignment would hold the GIL for the whole copy; numpy releases it.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))

"""The `zstd` codec: one ordinary zstd frame per chunk, with its content size, no dictionary."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from penstock.core.abc import Codec, CodecContext, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING or sys.version_info < (3, 14):
    from backports import zstd
else:
    from compression import zstd

# The library copies what it returns, and input that it has not used up yet, while it holds the
# GIL. Pieces of 4 MiB keep such stalls at 0.4 ms (whole chunks of 16 MiB: 1.3 to 6.6 ms) and spare
# a second buffer of the chunk's size; encoding this way is not slower either.
PIECE_BYTES = 4 << 20

_MIN_WINDOW_LOG = 10


class ZstdConfig(PluginConfig):
    """Options of the `zstd` codec.

    Attributes:
        level: 1 (fast) to 22 (small); negative levels are faster still.
    """

    level: int = Field(default=3, ge=-131072, le=22)


class _PerThread(threading.local):
    compressor: zstd.ZstdCompressor | None = None


class ZstdCodec(Codec):
    """Encodes a chunk into one zstd frame that any zstd decoder reads."""

    name: ClassVar[str] = "zstd"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = ZstdConfig

    def __init__(self, config: ZstdConfig, /) -> None:
        """Take the options; compressors come into being per thread."""
        super().__init__(config)
        self._level = config.level
        self._local = _PerThread()  # a compressor's tables cost more than a small chunk

    def max_encoded_size(self, raw_length: int, /) -> int:
        """`ZSTD_COMPRESSBOUND`."""
        small = max(0, (128 << 10) - raw_length)
        return raw_length + (raw_length >> 8) + (small >> 11)

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        """See `Codec.encode`."""
        del context
        source, target = flat_view(chunk), flat_view(out)
        compressor = self._local.compressor or zstd.ZstdCompressor(self._level)
        self._local.compressor = None  # one that fails half-way is not used again
        length = 0
        try:
            compressor.set_pledged_input_size(source.nbytes)
            for start in range(0, max(source.nbytes, 1), PIECE_BYTES):
                last = start + PIECE_BYTES >= source.nbytes
                piece = compressor.compress(
                    source[start : start + PIECE_BYTES],
                    zstd.ZstdCompressor.FLUSH_FRAME if last else zstd.ZstdCompressor.CONTINUE,
                )
                if length + len(piece) > target.nbytes:
                    msg = (
                        f"zstd: {source.nbytes} bytes do not fit into an output of "
                        f"{target.nbytes} bytes"
                    )
                    raise CodecError(msg)
                target[length : length + len(piece)] = piece
                length += len(piece)
        except zstd.ZstdError as error:
            msg = f"zstd cannot encode {source.nbytes} bytes at level {self._level}: {error}"
            raise CodecError(msg) from error
        self._local.compressor = compressor
        return length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        del context
        source, target = flat_view(frame), flat_view(out)
        try:
            self._decode(source, target)
        except (zstd.ZstdError, EOFError) as error:
            msg = f"zstd: a frame of {source.nbytes} bytes is not valid: {error}"
            raise CodecError(msg) from error

    def _decode(self, source: memoryview, target: memoryview) -> None:
        info = zstd.get_frame_info(source)
        if info.decompressed_size != target.nbytes or info.dictionary_id:
            msg = (
                f"zstd: a frame says it holds {info.decompressed_size} bytes "
                f"(dictionary {info.dictionary_id}) where {target.nbytes} belong"
            )
            raise CodecError(msg)
        # A frame may ask for any window; one larger than the chunk is never needed.
        window_log = max(_MIN_WINDOW_LOG, target.nbytes.bit_length())
        decompressor = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: min(window_log, 31)}
        )
        read = written = 0
        while not decompressor.eof:
            feed: memoryview | bytes = b""
            if decompressor.needs_input:
                feed = source[read : read + PIECE_BYTES]
                if not feed:
                    msg = f"zstd: a frame of {source.nbytes} bytes is cut off"
                    raise CodecError(msg)
                read += len(feed)
            # When all is written the frame's end may still be to come, in calls that yield nothing.
            limit = min(PIECE_BYTES, target.nbytes - written)
            piece = decompressor.decompress(feed, limit)
            target[written : written + len(piece)] = piece
            written += len(piece)
            if not piece and not decompressor.needs_input and not decompressor.eof:
                msg = f"zstd: a frame holds more than the {target.nbytes} bytes that belong"
                raise CodecError(msg)
        if written != target.nbytes or read != source.nbytes or decompressor.unused_data:
            msg = (
                f"zstd: a frame of {source.nbytes} bytes holds {written} bytes where "
                f"{target.nbytes} belong, or ends early"
            )
            raise CodecError(msg)

"""The `zstd` codec: one standard zstd frame per chunk, with content size, without dictionary."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

import zstandard
from pydantic import Field

from penstock.core.abc import Codec, CodecContext, PluginConfig
from penstock.core.errors import CodecError
from penstock.core.types import flat_view

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIN_WINDOW_LOG = 10

# The library copies its results under the GIL. Pieces of 4 MiB keep such stalls at 0.4 ms.
# `ZstdCompressor.stream_reader` would write into the caller's buffer, but it compresses the
# last 128 KiB under the GIL (zstandard 0.25): 0.1 s at level 22. `ZstdCompressor.compress` is up to
# a third faster, but needs a second buffer of the chunk's size for each worker: only small chunks
# use it.
PIECE_BYTES = 4 << 20

# If zstd cannot allocate memory, the library's error has zstd's text but no number.
_NO_MEMORY = "Allocation error"

# RFC 8878, section 3.1.1.2: a block header has three bytes; a block of this type stores one byte.
_BLOCK_HEADER_BYTES = 3
_REPEATED_BYTE = 1
_CHECKSUM_BYTES = 4


class ZstdConfig(PluginConfig):
    """Options of the `zstd` codec.

    Attributes:
        level: 1 (fast) to 22 (small); negative levels are even faster.
    """

    level: int = Field(default=3, ge=-131072, le=22)


class _PerThread(threading.local):
    compressor: zstandard.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None


class ZstdCodec(Codec):
    """Encodes a chunk into one zstd frame that any zstd decoder reads."""

    name: ClassVar[str] = "zstd"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    Config: ClassVar[type[PluginConfig]] = ZstdConfig

    def __init__(self, config: ZstdConfig, /) -> None:
        """Create the codec from its options. Each thread creates its own zstd contexts."""
        super().__init__(config)
        self._level = config.level
        # A context serves one thread at a time. To create one takes longer than to encode a small
        # chunk: with a new context for each call, chunks of 64 KiB decode at 0.8 of the speed.
        self._local = _PerThread()

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return `ZSTD_COMPRESSBOUND` of `raw_length`."""
        small = max(0, (128 << 10) - raw_length)
        return raw_length + (raw_length >> 8) + (small >> 11)

    def encode(self, chunk: memoryview, out: memoryview, /, *, context: CodecContext) -> int:
        """See `Codec.encode`."""
        del context
        source, target = flat_view(chunk), flat_view(out)
        compressor = self._local.compressor or zstandard.ZstdCompressor(self._level)
        self._local.compressor = None  # not used again after a failure half-way through a frame
        try:
            length = _encode(compressor, source, target)
        except zstandard.ZstdError as error:
            msg = f"zstd cannot encode {source.nbytes} bytes at level {self._level}: {error}"
            raise CodecError(msg) from error
        self._local.compressor = compressor
        return length

    def decode(self, frame: memoryview, out: memoryview, /, *, context: CodecContext) -> None:
        """See `Codec.decode`."""
        del context
        source, target = flat_view(frame), flat_view(out)
        decompressor = self._local.decompressor or zstandard.ZstdDecompressor()
        self._local.decompressor = None  # not used again after a failure half-way through a frame
        decode_frame(decompressor, source, target)
        self._local.decompressor = decompressor


def decode_frame(
    decompressor: zstandard.ZstdDecompressor, source: memoryview, target: memoryview, /
) -> None:
    """Fill `target` from `source`, which is one frame with its content size.

    Raises:
        CodecError: `source` is not such a frame, or has another content size. Do not use
            `decompressor` again.
        MemoryError: zstd could not allocate memory; the frame may be valid.
    """
    try:
        _check_frame(source, target.nbytes)
        _decode(decompressor, source, target)
    except zstandard.ZstdError as error:
        # Not damage: it would make a restore skip a whole checkpoint for an older one.
        if _NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        msg = f"zstd: a frame of {source.nbytes} bytes is not valid: {error}"
        raise CodecError(msg) from error


def _encode(compressor: zstandard.ZstdCompressor, source: memoryview, target: memoryview) -> int:
    length = 0
    for piece in _pieces(compressor, source):
        if length + len(piece) > target.nbytes:
            msg = f"zstd: {source.nbytes} bytes do not fit into an output of {target.nbytes} bytes"
            raise CodecError(msg)
        target[length : length + len(piece)] = piece
        length += len(piece)
    return length


def _pieces(compressor: zstandard.ZstdCompressor, source: memoryview) -> Iterator[bytes]:
    if source.nbytes <= PIECE_BYTES:
        yield compressor.compress(source)
        return
    chunker = compressor.chunker(source.nbytes, PIECE_BYTES)
    yield from chunker.compress(source)
    yield from chunker.finish()  # type: ignore[no-untyped-call]  # the stub has no type


def _decode(
    decompressor: zstandard.ZstdDecompressor, source: memoryview, target: memoryview
) -> None:
    """Decode a frame that `_check_frame` accepted.

    zstd decodes a complete frame directly into an output of sufficient size. It allocates no
    window, and refuses a frame whose content disagrees with the content size in its header.
    """
    with decompressor.stream_reader(source) as reader:
        length = reader.readinto(target or bytearray(1))
    if length != target.nbytes:
        msg = (
            f"zstd: a frame of {source.nbytes} bytes holds {length} bytes instead "
            f"of {target.nbytes}"
        )
        raise CodecError(msg)


def _check_frame(source: memoryview, raw_length: int) -> None:
    """Check that the frame's header agrees with the chunk, and that the frame fills `source`.

    Raises:
        CodecError: The frame has another content size, a dictionary, or a window that the chunk
            does not need. Or it is truncated, or bytes follow it.
        ZstdError: `source` does not begin with a frame.
    """
    parameters = zstandard.get_frame_parameters(source)
    if parameters.content_size != raw_length or parameters.dict_id:
        size: int | None = parameters.content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            size = None
        msg = (
            f"zstd: a frame says it holds {size} bytes "
            f"(dictionary {parameters.dict_id}) instead of {raw_length}"
        )
        raise CodecError(msg)
    # A forged frame may ask for a window of gigabytes; one larger than the chunk is never needed.
    if parameters.window_size > 1 << max(_MIN_WINDOW_LOG, raw_length.bit_length()):
        msg = (
            f"zstd: a frame that holds {raw_length} bytes asks for too much memory: a window of "
            f"{parameters.window_size} bytes"
        )
        raise CodecError(msg)
    end = _frame_end(source, parameters)
    if end > source.nbytes:
        msg = f"zstd: a frame of {source.nbytes} bytes is truncated"
        raise CodecError(msg)
    if end < source.nbytes:
        msg = (
            f"zstd: {source.nbytes - end} further bytes follow the frame that holds the "
            f"{raw_length} bytes of the chunk"
        )
        raise CodecError(msg)


def _frame_end(source: memoryview, parameters: zstandard.FrameParameters) -> int:
    """Return the frame's end offset from its block headers; past `source` if it is truncated.

    The library's reader does not report how much of its input it read, so it accepts bytes after
    the frame. 16 MiB have 130 to 260 blocks, which take less than 0.1 ms.
    """
    position = zstandard.frame_header_size(source)
    last = False
    while not last and position < source.nbytes:
        header = int.from_bytes(source[position : position + _BLOCK_HEADER_BYTES], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        position += _BLOCK_HEADER_BYTES + (1 if kind == _REPEATED_BYTE else size)
    if not last:
        return source.nbytes + 1
    return position + (_CHECKSUM_BYTES if parameters.has_checksum else 0)

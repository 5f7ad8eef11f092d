"""The encoding of one plane: unencoded, in fewer bits, or as a zstd frame of Huffman codes."""

from __future__ import annotations

import struct
import sys
import threading
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from penstock.codecs.kernels import kernels
from penstock.codecs.plain import scratch
from penstock.codecs.zstd import decode_frame
from penstock.core.errors import CodecError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from penstock.codecs.plain import Bytes

MAX_BITS = 7.85
"""Entropy, in bits per byte, above which a plane is stored unencoded."""

_SPARSE_BITS = 1.6  # below this, so few bytes may be nonzero that a map pays
_MOST_USED = 0.4  # of the bytes of such a plane
_MAP_LENGTH = struct.Struct("<I")

_PACKED_BITS = 6.9  # below this, Huffman codes take less than seven bits per byte

# ZSTD_c_literalCompressionMode, an experimental parameter of zstd's own header (1.5): 1 is "always
# Huffman", which levels below zero skip by default. The lowest level does not search for matches:
# in exponents, matches are chance and cost more than they save. Compared to level 1, zstd without
# matches is 4 times as fast, and its frames are 6 % smaller.
_LITERALS = 1002
_HUFFMAN_ONLY = {int(zstd.CompressionParameter.compression_level): -131072, _LITERALS: 1}
# For a library that refuses these options. A search for matches of seven bytes in a table of 64
# entries finds almost none in exponents. It has 0.6 of the speed of Huffman codes alone, and its
# frames are up to 4 % larger.
_NEARLY_HUFFMAN_ONLY = {
    int(zstd.CompressionParameter.compression_level): 1,
    int(zstd.CompressionParameter.strategy): int(zstd.Strategy.fast),
    int(zstd.CompressionParameter.min_match): 7,
    int(zstd.CompressionParameter.hash_log): 6,
    int(zstd.CompressionParameter.target_length): 0,
}


class Method(IntEnum):
    """How a plane is stored."""

    RAW = 0
    PACKED = 1
    ZSTD = 2
    SPARSE = 3
    """A bitmap of the nonzero bytes, then these bytes, each as a zstd frame. A Huffman code takes
    at least a bit per byte, but most differences between late checkpoints are zero."""


class _Contexts(threading.local):
    compressor: zstd.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None


_contexts = _Contexts()


def method_for(bits: float, *, unused: int) -> Method:
    """Return how to store a plane with this entropy per byte and `unused` zero top bits."""
    if unused:
        return Method.ZSTD if bits < _PACKED_BITS - unused + 1 else Method.PACKED
    if bits < _SPARSE_BITS:
        return Method.SPARSE
    return Method.ZSTD if bits < MAX_BITS else Method.RAW


def encode_plane(plane: Bytes, method: Method, unused: int, out: Bytes) -> tuple[Method, int]:
    """Write `plane` to the start of `out`, which is at least as long.

    Returns:
        The method used and the stored length. A plane that does not shrink is stored unencoded.
    """
    size = plane.size
    if method is Method.SPARSE:
        length = _encode_sparse(plane, out)
        if length is not None:
            return method, length
        method = Method.ZSTD
    if method is Method.ZSTD:
        length = _compress_into(plane, out)
        if length is not None:
            return method, length
    if method is Method.PACKED:
        length = packed_size(size, unused)
        pack(plane, unused, out[:length])
        return method, length
    out[:size] = plane
    return Method.RAW, size


def decode_plane(source: Bytes, method: Method, unused: int, plane: Bytes) -> None:
    """Decode all stored bytes of a plane into `plane`; the caller copies `RAW` planes itself.

    Raises:
        CodecError: `source` does not hold a plane of this size.
    """
    if method is Method.ZSTD:
        _decompress(source, plane)
        return
    if method is Method.SPARSE:
        _decode_sparse(source, plane)
        return
    if not unused or source.size != packed_size(plane.size, unused):
        msg = (
            f"floatsplit: {source.size} is a wrong number of stored bytes for a plane of "
            f"{plane.size} bytes"
        )
        raise CodecError(msg)
    unpack(source, unused, plane)


def _encode_sparse(plane: Bytes, out: Bytes) -> int | None:
    """Write a plane by the method `SPARSE`; return None if too many bytes are nonzero."""
    used = plane != 0
    count = int(np.count_nonzero(used))
    if count > _MOST_USED * plane.size:
        return None
    frames = [_compress(np.packbits(used)), _compress(plane[used]) if count else b""]
    length = _MAP_LENGTH.size + sum(map(len, frames))
    if length >= plane.size:
        return None
    stored = _MAP_LENGTH.pack(len(frames[0])) + b"".join(frames)
    out[:length] = np.frombuffer(stored, np.uint8)
    return length


def _decode_sparse(source: Bytes, plane: Bytes) -> None:
    if source.size < _MAP_LENGTH.size:
        msg = f"floatsplit: a plane of {plane.size} bytes is truncated"
        raise CodecError(msg)
    (length,) = _MAP_LENGTH.unpack_from(source.data)
    stored = source[_MAP_LENGTH.size :]
    used = np.zeros(-(-plane.size // 64) * 8, np.uint8)
    _decompress(stored[:length], used[: -(-plane.size // 8)])
    count, beyond = _count_bits(used), -plane.size % 8
    if (beyond and used[plane.size // 8] & ((1 << beyond) - 1)) or (
        not count and stored.size > length
    ):
        msg = f"floatsplit: a plane of {plane.size} bytes does not match its map"
        raise CodecError(msg)
    values = np.zeros(count + 1, np.uint8)
    if count:
        _decompress(stored[length:], values[:count])
    kernels().scatter(used, values, plane)


def _count_bits(used: Bytes) -> int:
    if hasattr(np, "bitwise_count"):  # from numpy 2 on
        return int(np.bitwise_count(used).sum(dtype=np.int64))
    return int(np.count_nonzero(np.unpackbits(used)))


def _decompress(source: Bytes, out: Bytes) -> None:
    decompressor = _contexts.decompressor or zstandard.ZstdDecompressor()
    _contexts.decompressor = None  # not used again after a failure
    decode_frame(decompressor, source.data, out.data)
    _contexts.decompressor = decompressor


def _compress_into(plane: Bytes, out: Bytes) -> int | None:
    """Write a zstd frame to the start of `out`; return its length, None if not smaller."""
    length = kernels().store_codes(plane, out)
    if length:
        return length
    frame = _compress(plane)
    if len(frame) >= plane.size:
        return None
    out[: len(frame)] = np.frombuffer(frame, np.uint8)
    return len(frame)


def _compress(plane: Bytes) -> bytes:
    """Return a zstd frame of Huffman codes."""
    try:
        compressor = _contexts.compressor or zstd.ZstdCompressor(options=_options())
        _contexts.compressor = None  # not used again after a failure
        frame = compressor.compress(plane.data, zstd.ZstdCompressor.FLUSH_FRAME)
    except zstd.ZstdError as error:
        msg = f"floatsplit cannot encode a plane of {plane.size} bytes: {error}"
        raise CodecError(msg) from error
    _contexts.compressor = compressor
    return frame


@cache
def _options() -> dict[int, int]:
    """Return the zstd options for Huffman codes only, or the nearest that the library accepts."""
    sample = np.random.default_rng(0).integers(0, 8, 4096, np.uint8)
    try:
        frame = zstd.compress(sample.data, options=_HUFFMAN_ONLY)
    except (zstd.ZstdError, ValueError):
        return _NEARLY_HUFFMAN_ONLY
    return _HUFFMAN_ONLY if len(frame) < sample.size // 2 else _NEARLY_HUFFMAN_ONLY


def packed_size(size: int, unused: int) -> int:
    """Return the size of the output of `pack` for `size` bytes with `unused` zero top bits."""
    parts = 8 // unused
    eighths = size // (8 * parts)
    return size - 8 * eighths


def pack(plane: Bytes, unused: int, packed: Bytes) -> None:
    """Pack bytes whose top bits are zero.

    Divides the start of the plane into 8 (one unused bit) or 4 (two) parts of equal size, a
    multiple of 8 bytes. Spreads each byte of the last part over the unused bits of the other parts,
    its lowest bits in the first part. The bytes after the parts follow unchanged.

    Args:
        plane: Bytes whose `unused` top bits are zero, at an address that is a multiple of 8.
        unused: 1 or 2.
        packed: Receives `packed_size(len(plane), unused)` bytes.
    """
    parts = 8 // unused
    size = len(plane) // (8 * parts) * 8
    last = plane[(parts - 1) * size : parts * size].view(np.uint64)
    spread = scratch.word[: size // 8]
    # Shifts words of 64 bits, since numpy shifts bytes one by one; the mask removes bits that
    # cross into the next byte.
    mask = np.uint64(0x0101010101010101 * (0xFF >> 8 - unused << 8 - unused))
    for number in range(parts - 1):
        part = slice(number * size, (number + 1) * size)
        np.left_shift(last, np.uint64(8 - unused - number * unused), out=spread)
        np.bitwise_and(spread, mask, out=spread)
        np.bitwise_or(plane[part], spread.view(np.uint8), out=packed[part])
    packed[(parts - 1) * size :] = plane[parts * size :]


def unpack(packed: Bytes, unused: int, plane: Bytes) -> None:
    """Reverse `pack` into `plane`."""
    parts = 8 // unused
    size = len(plane) // (8 * parts) * 8
    last = plane[(parts - 1) * size : parts * size]
    spread = scratch.word[: size // 8]
    used = np.uint8(0xFF >> unused)
    last[:] = 0
    for number in range(parts - 1):
        part = slice(number * size, (number + 1) * size)
        np.bitwise_and(packed[part], ~used, out=spread.view(np.uint8))
        np.right_shift(spread, np.uint64(8 - unused - number * unused), out=spread)
        np.bitwise_or(last, spread.view(np.uint8), out=last)
        np.bitwise_and(packed[part], used, out=plane[part])
    plane[parts * size :] = packed[(parts - 1) * size :]

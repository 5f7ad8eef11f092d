"""The coding of one plane: as it is, in fewer bits, or as a zstd frame of Huffman codes."""

from __future__ import annotations

import struct
import sys
import threading
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import zstandard

from penstock.codecs.floatsplit import planes
from penstock.codecs.floatsplit.planes import pack, packed_size, unpack
from penstock.codecs.zstd import decode_frame
from penstock.core.distributions import installed_only
from penstock.core.errors import CodecError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MAX_BITS = 7.85
"""Entropy, in bits per byte, above which a plane is stored as it is."""

_SPARSE_BITS = 1.6  # below this many bits, so few bytes may differ from zero that a map pays
_MOST_USED = 0.4  # of the bytes of such a plane
_MAP_LENGTH = struct.Struct("<I")

_PACKED_BITS = 6.9  # below this many bits, Huffman codes take less than seven bits for each byte

# ZSTD_c_literalCompressionMode, an experimental parameter of zstd's own header (1.5): 1 is "always
# Huffman", which levels below zero else leave out. At the lowest level nothing is searched for
# matches, which are chance in exponents, and cost more than they save. Against level 1: 4 times as
# fast, and 6 % smaller.
_LITERALS = 1002
_HUFFMAN_ONLY = {int(zstd.CompressionParameter.compression_level): -131072, _LITERALS: 1}


class Method(IntEnum):
    """How a plane is stored."""

    RAW = 0
    PACKED = 1
    ZSTD = 2
    SPARSE = 3
    """A map of the bytes that are not zero, then these, each a zstd frame: a Huffman code takes a
    bit for each byte at least, and most differences between late checkpoints are zero."""


class _Contexts(threading.local):
    huffman: zstd.ZstdCompressor | None = None
    compressor: zstandard.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None


_contexts = _Contexts()


def entropy_bits(sample: Bytes) -> float:
    """Return the order-0 entropy of what `sample` was drawn from, in bits per byte."""
    counts = np.bincount(sample.reshape(-1), minlength=256)
    counts = counts[counts > 0]
    size = sample.size
    # Miller and Madow, 1954: a small sample looks less random than its source.
    bias = (len(counts) - 1) / (2 * np.log(2) * size)
    return float(bias + np.log2(size) - counts @ np.log2(counts) / size)


def method_for(bits: float, *, unused: int) -> Method:
    """Return how a plane of so many bits per byte is stored, whose `unused` top bits are zero."""
    if unused:
        return Method.ZSTD if bits < _PACKED_BITS - unused + 1 else Method.PACKED
    if bits < _SPARSE_BITS:
        return Method.SPARSE
    return Method.ZSTD if bits < MAX_BITS else Method.RAW


def encode_plane(
    plane: Bytes, method: Method, unused: int, out: Bytes, scratch: Bytes
) -> tuple[Method, int]:
    """Write `plane` into the beginning of `out` (at least as long as it).

    Returns:
        How it was stored in the end, and the bytes that it takes: a plane that does not get
        smaller is stored as it is.
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
        pack(plane, unused, out[:length], scratch)
        return method, length
    out[:size] = plane
    return Method.RAW, size


def decode_plane(source: Bytes, method: Method, unused: int, plane: Bytes, scratch: Bytes) -> None:
    """Fill `plane` from `source`, all of the stored bytes, by another method than `RAW`.

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
        msg = f"floatsplit: a plane of {plane.size} bytes has {source.size} stored bytes"
        raise CodecError(msg)
    unpack(source, unused, plane, scratch)


def _encode_sparse(plane: Bytes, out: Bytes) -> int | None:
    """Write a plane by its bytes that are not zero; None if there are too many of them."""
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
        msg = f"floatsplit: a plane of {plane.size} bytes is cut off"
        raise CodecError(msg)
    (length,) = _MAP_LENGTH.unpack_from(source.data)
    stored = source[_MAP_LENGTH.size :]
    used = np.zeros(-(-plane.size // 64) * 8, np.uint8)
    _decompress(stored[:length], used[: -(-plane.size // 8)])
    count, beyond = _sparse().count_bits(used), -plane.size % 8
    if (beyond and used[plane.size // 8] & ((1 << beyond) - 1)) or (
        not count and stored.size > length
    ):
        msg = f"floatsplit: a plane of {plane.size} bytes has more than its map says"
        raise CodecError(msg)
    values = np.zeros(count + 1, np.uint8)
    if count:
        _decompress(stored[length:], values[:count])
    _sparse().scatter(used, values, plane)


class _Sparse(Protocol):
    """The two functions for planes that are mostly zero, which `planes` has, and `fused`."""

    def count_bits(self, used: Bytes) -> int: ...

    def scatter(self, used: Bytes, values: Bytes, plane: Bytes) -> None: ...


@cache
@installed_only()
def _sparse() -> _Sparse:
    """Return the faster of two equal ways."""
    try:
        from penstock.codecs.floatsplit import fused  # noqa: PLC0415 - numba is an extra
    except ImportError:
        return planes
    return fused


def _decompress(source: Bytes, out: Bytes) -> None:
    decompressor = _contexts.decompressor or zstandard.ZstdDecompressor()
    _contexts.decompressor = None  # not used again after a failure
    decode_frame(decompressor, source.data, out.data)
    _contexts.decompressor = decompressor


def _compress_into(plane: Bytes, out: Bytes) -> int | None:
    """Write a zstd frame into the beginning of `out`; None: it would not be smaller."""
    coder = _pair_coder()
    if coder is not None:
        length = coder(plane, out)
        if length:
            return length
    frame = _compress(plane)
    if len(frame) >= plane.size:
        return None
    out[: len(frame)] = np.frombuffer(frame, np.uint8)
    return len(frame)


@cache
@installed_only()
def _pair_coder() -> Callable[[Bytes, Bytes], int] | None:
    """Return the faster way to write a frame, if numba is installed."""
    try:
        from penstock.codecs.floatsplit import huffman  # noqa: PLC0415 - numba is an extra
    except ImportError:
        return None
    return huffman.store_codes


def _compress(plane: Bytes) -> bytes:
    """Return a zstd frame of Huffman codes."""
    try:
        if _has_huffman_only():
            huffman = _contexts.huffman or zstd.ZstdCompressor(options=_HUFFMAN_ONLY)
            _contexts.huffman = None  # not used again after a failure
            frame = huffman.compress(plane.data, zstd.ZstdCompressor.FLUSH_FRAME)
            _contexts.huffman = huffman
            return frame
        compressor = _contexts.compressor or _nearly_huffman_only()
        _contexts.compressor = None
        frame = compressor.compress(plane.data)
    except (zstd.ZstdError, zstandard.ZstdError) as error:
        msg = f"floatsplit cannot encode a plane of {plane.size} bytes: {error}"
        raise CodecError(msg) from error
    _contexts.compressor = compressor
    return frame


def load_coder() -> None:
    """Load what writes planes."""
    _sparse()
    _pair_coder()


@cache
def _has_huffman_only() -> bool:
    """Return whether the library takes the experimental parameter, and makes Huffman codes."""
    sample = np.random.default_rng(0).integers(0, 8, 4096, np.uint8)
    try:
        compressor = zstd.ZstdCompressor(options=_HUFFMAN_ONLY)
        frame = compressor.compress(sample.data, zstd.ZstdCompressor.FLUSH_FRAME)
    except (zstd.ZstdError, ValueError):
        return False
    return len(frame) < sample.size // 2


def _nearly_huffman_only() -> zstandard.ZstdCompressor:
    # Matches of seven bytes found through a table of 64 entries are almost never found in an
    # exponent plane: 0.6 of the speed of Huffman codes alone, and up to 4 % larger.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, target_length=0
    )
    return zstandard.ZstdCompressor(compression_params=parameters)

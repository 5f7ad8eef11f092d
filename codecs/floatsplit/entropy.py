"""The coding of one byte plane: as it is, in seven bits, or as a zstd frame of Huffman codes."""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from penstock.codecs.floatsplit.planes import pack_seven, unpack_seven
from penstock.codecs.zstd import decode_frame
from penstock.core.errors import CodecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

MAX_BITS = 7.85
"""Entropy, in bits per byte, above which a plane is stored as it is."""

_PACKED_BITS = 6.9  # below this many bits, Huffman codes take less than seven bits for each byte


class Method(IntEnum):
    """How a plane is stored."""

    RAW = 0
    SEVEN = 1
    ZSTD = 2


class _Contexts(threading.local):
    def __init__(self) -> None:
        # Matches of seven bytes found through a table of 64 entries are almost never found in an
        # exponent plane: what remains is Huffman coding, 4 times as fast as level 1 and smaller.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, target_length=0
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def entropy_bits(sample: Bytes) -> float:
    """Return the order-0 entropy of `sample` in bits per byte."""
    counts = np.bincount(sample.reshape(-1), minlength=256)
    shares = counts[counts > 0] / sample.size
    return float(-(shares * np.log2(shares)).sum())


def method_for(bits: float, *, seven: bool) -> Method:
    """Return how a plane of so many bits per byte is stored; `seven`: its top bits are zero."""
    if seven:
        return Method.ZSTD if bits < _PACKED_BITS else Method.SEVEN
    return Method.ZSTD if bits < MAX_BITS else Method.RAW


def encode_plane(plane: Bytes, method: Method, out: Bytes, scratch: Bytes) -> tuple[Method, int]:
    """Write `plane` into the beginning of `out` (at least as long as it).

    Returns:
        How it was stored in the end, and the bytes that it takes: a plane that does not get
        smaller is stored as it is.
    """
    size = plane.size
    if method is Method.ZSTD:
        try:
            frame = _contexts.compressor.compress(plane.data)
        except zstandard.ZstdError as error:
            _contexts.__init__()  # type: ignore[misc]  # not used again after a failure
            msg = f"floatsplit cannot encode a plane of {size} bytes: {error}"
            raise CodecError(msg) from error
        if len(frame) < size:
            out[: len(frame)] = np.frombuffer(frame, np.uint8)
            return method, len(frame)
    if method is Method.SEVEN:
        eighth = size // 8
        whole = 8 * eighth
        pack_seven(plane[:whole], out[: 7 * eighth], scratch[:eighth])
        out[7 * eighth : 7 * eighth + size - whole] = plane[whole:]
        return method, 7 * eighth + size - whole
    out[:size] = plane
    return Method.RAW, size


def decode_plane(source: Bytes, method: Method, plane: Bytes, scratch: Bytes) -> None:
    """Fill `plane` from `source`, all of the stored bytes.

    Raises:
        CodecError: `source` does not hold a plane of this size.
    """
    size = plane.size
    if method is Method.ZSTD:
        try:
            decode_frame(_contexts.decompressor, source.data, plane.data)
        except (CodecError, MemoryError):
            _contexts.__init__()  # type: ignore[misc]  # not used again after a failure
            raise
        return
    eighth = size // 8
    length = size if method is Method.RAW else size - eighth
    if source.size != length:
        msg = f"floatsplit: a plane of {size} bytes has {source.size} stored bytes"
        raise CodecError(msg)
    if method is Method.RAW:
        plane[:] = source
        return
    whole = 8 * eighth
    unpack_seven(source[: 7 * eighth], plane[:whole], scratch[:eighth])
    plane[whole:] = source[7 * eighth :]

"""Compressed frames of the manifest: zstd with declared and bounded sizes. Sans-IO."""

from __future__ import annotations

import sys
from hashlib import sha256

from penstock.core.fields import refuse

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_FRAME_BYTES = 1 << 28
"""Most bytes that any frame of a part may hold once decompressed: a reader holds one at a time."""

MAX_RATIO = 256
RATIO_FREE_BYTES = 16 << 20
"""Beyond this a frame may hold at most `MAX_RATIO` times its stored bytes.

Decoded JSON takes up to 24 times its text, so a few stored kilobytes could ask for gigabytes.
"""

_LEVEL = 1  # a million objects: 0.2 s; level 3 saves a further 5 % in twice the time


def compress(data: bytes) -> bytes:
    """One zstd frame that declares its content's size."""
    return zstd.compress(data, _LEVEL)


def decompress(data: bytes, name: str, *, raw_length: int | None = None) -> bytes:
    """The content of one zstd frame, in bounded memory whatever the bytes are.

    Args:
        data: Exactly one frame.
        name: The record, for complaints.
        raw_length: The size that another record declares, if one does.

    Raises:
        FormatError: It is no frame, or not of the declared size, or beyond `MAX_FRAME_BYTES`.
    """
    try:
        size = _declared_size(data)
        if size is None or size > MAX_FRAME_BYTES or raw_length not in {None, size}:
            refuse(name, f"declares {size} bytes once decompressed")
        if size > max(RATIO_FREE_BYTES, MAX_RATIO * len(data)):
            refuse(name, f"declares {size} bytes once decompressed, of {len(data)} stored")
        decoder = zstd.ZstdDecompressor()
        content = decoder.decompress(data, max_length=size + 1)
    except zstd.ZstdError as error:
        refuse(name, f"not a zstd frame: {error}")
    if not decoder.eof or decoder.unused_data or len(content) != size:
        refuse(name, f"does not decompress to the {size} bytes that it declares")
    return content


def _declared_size(data: bytes) -> int | None:
    return zstd.get_frame_info(data).decompressed_size


def digest(data: bytes | memoryview) -> str:
    """The sha256 of `data` in hex: what binds one record to the next."""
    return sha256(data).hexdigest()


def check_digest(data: bytes | memoryview, name: str, *, length: int, expected: str) -> None:
    """Compare bytes with what the record above says of them.

    Raises:
        FormatError: Length or digest differ.
    """
    if len(data) != length:
        refuse(name, f"has {len(data)} bytes instead of {length}")
    if digest(data) != expected:
        refuse(name, "its sha256 is not the one recorded: it is damaged")

"""Compresses the manifest in zstd frames of declared, bounded size; computes digests. Sans-IO.

Tested in `tests/core/pipeline/test_fuzz_frames.py`.
"""

from __future__ import annotations

from hashlib import sha256

import zstandard

from penstock.core.format.strict_json import refuse
from penstock.core.limits import MAX_FRAME_BYTES, max_decompressed

# If zstd cannot allocate memory, the library's error has zstd's text but no number.
_NO_MEMORY = "Allocation error"

_UNKNOWN = -1  # the size that the library returns for a frame that declares none

_LEVEL = 1  # a million objects: 0.2 s; level 3 saves a further 5 % in twice the time


def compress(data: bytes) -> bytes:
    """Return one zstd frame that declares its content's size."""
    return zstandard.compress(data, _LEVEL)


def decompress(data: bytes, name: str, *, raw_length: int | None = None) -> bytes:
    """Return the content of one zstd frame, in bounded memory even for hostile bytes.

    Args:
        data: Exactly one frame.
        name: Name of the record, for error messages.
        raw_length: The size that another record declares, if one does.

    Raises:
        FormatError: `data` is not a frame, or not of the declared size, or declares more than
            `MAX_FRAME_BYTES`.
        MemoryError: The machine has too little memory; the frame may be valid.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size < 1 or size > MAX_FRAME_BYTES or raw_length not in {None, size}:
            declared = "no size" if size == _UNKNOWN else f"{size} bytes"
            refuse(name, f"its frame declares {declared} of content: a wrong or forbidden size")
        if size > max_decompressed(len(data)):
            refuse(name, f"declares {size} bytes of content, too many for {len(data)} stored bytes")
        content = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        refuse(name, f"not a zstd frame: {error}")
    if len(content) != size:
        refuse(name, f"does not decompress to the {size} bytes that it declares")
    return content


def digest(data: bytes | memoryview) -> str:
    """Return the sha256 of `data` in hex, by which one record verifies another."""
    return sha256(data).hexdigest()


def check_digest(data: bytes | memoryview, name: str, *, length: int, expected: str) -> None:
    """Compare bytes with the length and the digest that another record has for them.

    Raises:
        FormatError: Length or digest differ.
    """
    if len(data) != length:
        refuse(name, f"has {len(data)} bytes instead of {length}")
    if digest(data) != expected:
        refuse(name, "its sha256 is not the one recorded: it is damaged")

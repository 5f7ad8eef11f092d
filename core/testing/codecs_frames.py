"""Checks of codecs: what they encode comes back, and what nobody encoded is refused."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from penstock.core.abc import CodecContext
from penstock.core.errors import CodecError
from penstock.core.testing.codecs_calls import (
    bound_of,
    chunks,
    compressible,
    context_of,
    encode,
    expect_decodes,
    expect_guarded,
    expect_length,
    expect_refused,
    guarded,
    in_words,
    random_bytes,
    try_decode,
    with_base,
)
from penstock.core.testing.expectations import finding

if TYPE_CHECKING:
    from penstock.core.abc import Codec

LARGE_BYTES = (9 << 20) + 3
ELEMENTS = (
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex128", 16),
    ("int64", 8),
    ("bool", 1),
)
"""Dtypes of tensors, some of which numpy does not know, with the bytes of an element."""

_SPARE_BYTES = 1000


@in_words
def check_round_trips(codec: Codec) -> None:
    """Every size and kind of data comes back; the input stays as it was; nothing overruns."""
    for chunk in chunks():
        expect_decodes(codec, encode(codec, chunk), chunk)


@in_words
def check_large_chunk(codec: Codec) -> None:
    """A chunk of an odd number of megabytes comes back, random or compressible."""
    for chunk in (random_bytes(LARGE_BYTES), compressible(LARGE_BYTES)):
        expect_decodes(codec, encode(codec, chunk), chunk)


@in_words
def check_elements_come_back(codec: Codec) -> None:
    """Chunks of typed regions come back: whole, cut inside a row, and with no dimensions at all.

    Lent as core lends them: the input can only be read, the output has room to spare.
    """
    for dtype, itemsize in ELEMENTS:
        whole = 96 * 50 * itemsize
        for shape, start, length in (
            ((96, 50), 0, whole),
            ((96, 50), 53 * itemsize, 1001 * itemsize),
            ((96, 50), whole - 7 * itemsize, 7 * itemsize),
            ((), 0, itemsize),
        ):
            context = CodecContext(dtype, itemsize, shape, start, length)
            for chunk in (random_bytes(length), compressible(length)):
                _comes_back(codec, chunk, with_base(codec, context))


def _comes_back(codec: Codec, chunk: bytes, context: CodecContext) -> None:
    what = (
        f"{len(chunk)} bytes of {context.dtype}, from byte {context.start} of a region of shape "
        f"{list(context.shape)}"
    )
    out = memoryview(bytearray(bound_of(codec, len(chunk)) + _SPARE_BYTES))
    with finding(f"encode of {what}"):
        try:
            length: object = codec.encode(memoryview(chunk), out, context=context)
        except CodecError:
            return  # it says that they do not suit it
    frame = out[: expect_length(length, len(out) - _SPARE_BYTES)].toreadonly()
    decoded = bytearray(len(chunk))
    with finding(f"decode of {what}"):
        codec.decode(frame, memoryview(decoded), context=context)
    assert decoded == chunk or not codec.lossless, f"{what} came back changed"


@in_words
def check_exact_output_suffices(codec: Codec) -> None:
    """An output of exactly `max_encoded_size` is enough, and its surroundings stay untouched."""
    for chunk in chunks():
        bound = bound_of(codec, len(chunk))
        memory, out = guarded(bound)
        context = context_of(codec, len(chunk))
        with finding(f"encode of {len(chunk)} bytes into the {bound} of max_encoded_size"):
            length: object = codec.encode(memoryview(chunk), out, context=context)
        expect_length(length, bound)
        expect_guarded(memory)


@in_words
def check_frames_stand_alone(codec: Codec) -> None:
    """Frames decode in any order, each without the others."""
    pairs = [(chunk, encode(codec, chunk)) for chunk in chunks()]
    for chunk, frame in reversed(pairs):
        expect_decodes(codec, frame, chunk)


@in_words
def check_short_output_is_refused(codec: Codec) -> None:
    """An output too small for the frame raises `CodecError`; what lies behind it is untouched."""
    chunk = random_bytes(10_000)
    needed = len(encode(codec, chunk))
    for size in (0, 1, needed // 2, needed - 1):
        memory, out = guarded(size)
        with finding(f"encode into {size} bytes, where it needs {needed}"):
            try:
                length = codec.encode(memoryview(chunk), out, context=context_of(codec, len(chunk)))
            except CodecError:
                expect_guarded(memory)
                continue
        msg = f"encode returned {length} for an output of {size} bytes; it needs {needed}"
        raise AssertionError(msg)
    # The failure left nothing behind in the codec.
    expect_decodes(codec, encode(codec, chunk), chunk)


@in_words
def check_truncated_frames_are_refused(codec: Codec) -> None:
    """A frame that is cut anywhere raises `CodecError`."""
    for chunk in (compressible(3000), random_bytes(500), b"x"):
        frame = encode(codec, chunk)
        for cut in {*range(min(len(frame), 40)), *range(0, len(frame), 97), len(frame) - 1}:
            expect_refused(codec, frame[:cut], len(chunk), f"a frame cut to {cut} bytes")


@in_words
def check_extended_frames_are_refused(codec: Codec) -> None:
    """Bytes behind a frame raise `CodecError`: they are not what `encode` makes."""
    for chunk in (compressible(3000), random_bytes(500), b""):
        frame = encode(codec, chunk)
        for more in (b"\0", frame or b"\0\0\0\0", b"\xff" * 9):
            expect_refused(codec, frame + more, len(chunk), f"{len(more)} bytes too many")


@in_words
def check_wrong_length_is_refused(codec: Codec) -> None:
    """A frame of a longer or shorter chunk than is asked for raises `CodecError`."""
    for chunk in (compressible(3000), random_bytes(500)):
        frame = encode(codec, chunk)
        for length in (0, 1, len(chunk) - 1, len(chunk) + 1, 2 * len(chunk)):
            expect_refused(codec, frame, length, f"a frame of {len(chunk)} bytes as {length}")


@in_words
def check_garbage_is_refused(codec: Codec) -> None:
    """Random bytes raise `CodecError`; a codec that must accept any bytes is not for storage."""
    for size in (0, 1, 4, 16, 100, 5000):
        expect_refused(codec, random_bytes(size), 4099, f"{size} random bytes")


@in_words
def check_flipped_bits_never_overrun(codec: Codec) -> None:
    """A frame with flipped bits decodes to something or raises `CodecError`, and stays in bounds.

    That the result is wrong is found by the checksums around every frame, not by the codec.
    """
    chunk = compressible(2000)
    frame = bytearray(encode(codec, chunk))
    for bit in random.Random(7).sample(range(8 * len(frame)), min(400, 8 * len(frame))):  # noqa: S311
        frame[bit // 8] ^= 1 << bit % 8
        try_decode(codec, bytes(frame), len(chunk))
        frame[bit // 8] ^= 1 << bit % 8

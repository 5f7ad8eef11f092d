"""Checks of frames: chunks come back unchanged, or rounded once; damaged frames are refused."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import CodecContext, CodecOutput, Declined
from penstock.core.errors import CodecError
from penstock.testing.codecs.calls import (
    ELEMENTS,
    DeclinedChunkError,
    as_given,
    bound_of,
    chunks,
    compressible,
    context_of,
    encode,
    encoded,
    expect_decodes,
    expect_guarded,
    expect_length,
    expect_refused,
    expect_unchanged,
    guarded,
    in_words,
    random_bytes,
    rare_floats,
    try_decode,
    whole,
)
from penstock.testing.expectations import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import Codec

LARGE_BYTES = (9 << 20) + 3
_SPARE_BYTES = 1000

_SIZES = {"uint8": 1, **dict(ELEMENTS)}


@in_words
def check_round_trips(codec: Codec) -> None:
    """Check that data of all sizes and kinds comes back, without overruns or changed inputs."""
    for chunk, frame in encoded(codec, chunks(codec)):
        expect_decodes(codec, frame, chunk)


@in_words
def check_large_chunk(codec: Codec) -> None:
    """Check that a random and a compressible chunk of 9 MiB come back."""
    size = whole(codec, LARGE_BYTES)
    for chunk, frame in encoded(codec, (random_bytes(size), compressible(size))):
        expect_decodes(codec, frame, chunk)


@in_words
def check_elements_come_back(codec: Codec) -> None:
    """Check that typed chunks come back: a whole region, a part cut inside a row, and a scalar.

    Arithmetic would change some of the elements: -0.0, denormals, NaNs with all their bits.
    Buffers are lent as core lends them: the output is larger than needed, and the input, read-only
    or writable, must not be written. Skips chunks that `encode` refuses with `CodecError`.
    """
    for chunk, context in _typed_chunks(codec):
        for read_only in (True, False):
            _comes_back(codec, chunk, context, read_only=read_only)


def _comes_back(codec: Codec, chunk: bytes, context: CodecContext, *, read_only: bool) -> None:
    what = (
        f"{len(chunk)} bytes of {context.dtype}, from byte {context.start} of a region of shape "
        f"{list(context.shape)}"
    )
    source = bytearray(chunk)
    out = memoryview(bytearray(bound_of(codec, len(chunk)) + _SPARE_BYTES))
    with finding(f"encode of {what}"):
        try:
            given = memoryview(source)
            given = given.toreadonly() if read_only else given
            length: object = codec.encode(given, out, context=context)
        except CodecError:
            return  # the codec may refuse such chunks
    # C code can write to a read-only view.
    assert source == chunk, f"encode of {what} changed its input"
    if isinstance(length, Declined):
        return
    frame = out[: expect_length(length, len(out) - _SPARE_BYTES)].toreadonly()
    decoded = bytearray(len(chunk))
    with finding(f"decode of {what}"):
        codec.decode(frame, memoryview(decoded), context=context)
    if codec.lossless:
        expect_unchanged(decoded, chunk, what, context.itemsize)


@in_words
def check_exact_output_suffices(codec: Codec) -> None:
    """Check that an output of `max_encoded_size` bytes suffices, and is never overrun."""
    for chunk in chunks(codec):
        bound = bound_of(codec, len(chunk))
        memory, out = guarded(bound)
        context = context_of(codec, len(chunk))
        with finding(f"encode of {len(chunk)} bytes into the {bound} of max_encoded_size"):
            length: object = codec.encode(memoryview(chunk), out, context=context)
        if not isinstance(length, Declined):
            expect_length(length, bound)
        expect_guarded(memory)


@in_words
def check_frames_stand_alone(codec: Codec) -> None:
    """Check that each frame decodes alone, in any order."""
    for chunk, frame in reversed(list(encoded(codec, chunks(codec)))):
        expect_decodes(codec, frame, chunk)


@in_words
def check_short_output_is_refused(codec: Codec) -> None:
    """Check that an output too small for the frame raises `CodecError`, and is never overrun."""
    chunk = compressible(whole(codec, 10_000))
    needed = len(encode(codec, chunk))
    for size in (0, 1, needed // 2, needed - 1):
        memory, out = guarded(size)
        with finding(f"encode into {size} bytes, where it needs {needed}"):
            try:
                length = codec.encode(memoryview(chunk), out, context=context_of(codec, len(chunk)))
            except CodecError:
                expect_guarded(memory)
                continue
        msg = f"encode needs {needed} bytes; for {size} it returned {length}, not CodecError"
        raise AssertionError(msg)
    # A failed call must leave no state in the codec.
    expect_decodes(codec, encode(codec, chunk), chunk)


def _few(codec: Codec) -> tuple[bytes, ...]:
    """Return a compressible chunk, a random chunk, and a single element."""
    sizes = [whole(codec, size) for size in (3000, 500, 1)]
    return compressible(sizes[0]), random_bytes(sizes[1]), random_bytes(sizes[2])


@in_words
def check_truncated_frames_are_refused(codec: Codec) -> None:
    """Check that a truncated frame raises `CodecError`, wherever it is cut."""
    for chunk, frame in encoded(codec, _few(codec)):
        for cut in {*range(min(len(frame), 40)), *range(0, len(frame), 97), len(frame) - 1}:
            expect_refused(codec, frame[:cut], len(chunk), f"a frame cut to {cut} bytes")


@in_words
def check_extended_frames_are_refused(codec: Codec) -> None:
    """Check that bytes after a frame raise `CodecError`, since `encode` never writes any."""
    for chunk, frame in encoded(codec, _few(codec)):
        for more in (b"\0", frame or b"\0\0\0\0", b"\xff" * 9):
            expect_refused(codec, frame + more, len(chunk), f"{len(more)} bytes too many")


@in_words
def check_wrong_length_is_refused(codec: Codec) -> None:
    """Check that a frame raises `CodecError` if its chunk is longer or shorter than requested."""
    for chunk, frame in encoded(codec, _few(codec)):
        size = whole(codec, 1)
        for length in {size, len(chunk) - size, len(chunk) + size, 2 * len(chunk)}:
            if length in {0, len(chunk)}:
                continue
            expect_refused(codec, frame, length, f"a frame of {len(chunk)} bytes as {length}")


@in_words
def check_garbage_is_refused(codec: Codec) -> None:
    """Check that random bytes raise `CodecError`: accepting them would hide damage."""
    for size in (0, 1, 4, 16, 100, 5000):
        expect_refused(codec, random_bytes(size), whole(codec, 4099), f"{size} random bytes")


@in_words
def check_flipped_bits_never_overrun(codec: Codec) -> None:
    """Check that a frame with flipped bits decodes within bounds or raises `CodecError`.

    A wrong result is no breach, since the checksum around every frame finds it.
    """
    for dtype, itemsize in ELEMENTS:
        length = 32 * 40 * itemsize
        context = as_given(codec, CodecContext(dtype, itemsize, (32, 40), 0, length))
        for chunk in (compressible(length), rare_floats(dtype, length)):
            with contextlib.suppress(DeclinedChunkError):
                _decode_damaged(codec, encode(codec, chunk, context), context)
    chunk = compressible(whole(codec, 2000))
    frame = bytearray(encode(codec, chunk))
    for bit in random.Random(7).sample(range(8 * len(frame)), min(400, 8 * len(frame))):  # noqa: S311
        frame[bit // 8] ^= 1 << bit % 8
        try_decode(codec, bytes(frame), len(chunk))
        frame[bit // 8] ^= 1 << bit % 8


def _decode_damaged(codec: Codec, frame: bytes, context: CodecContext) -> None:
    """Decode a frame with flipped bits, and with zero, random, missing or doubled pieces."""
    chance = random.Random(8)  # noqa: S311
    for turn in range(40):
        damaged = bytearray(frame)
        at = chance.randrange(len(frame)) if turn % 2 else chance.randrange(min(len(frame), 48))
        size = chance.choice((1, 2, 4, 40))
        match turn % 5:
            case 0:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                damaged[at : at + size] = bytes(len(damaged[at : at + size]))
            case 2:
                damaged[at : at + size] = chance.randbytes(len(damaged[at : at + size]))
            case 3:
                del damaged[at : at + size]
            case _:
                damaged[at:at] = damaged[at : at + size]
        try_decode(codec, bytes(damaged), context.raw_length, context)


def _typed_chunks(codec: Codec) -> Iterator[tuple[bytes, CodecContext]]:
    """Yield chunks of every dtype: a whole region, pieces of it, and a scalar."""
    for dtype, itemsize in _SIZES.items():
        rows = 96 * 50 * itemsize
        for shape, start, length in (
            ((96, 50), 0, rows),
            ((96, 50), 53 * itemsize, 1001 * itemsize),
            ((96, 50), rows - 7 * itemsize, 7 * itemsize),
            ((), 0, itemsize),
        ):
            context = as_given(codec, CodecContext(dtype, itemsize, shape, start, length))
            for chunk in (rare_floats(dtype, length), random_bytes(length), compressible(length)):
                yield chunk, context


@in_words
def check_output(codec: Codec) -> None:
    """Check that `output` is valid, fits `encode`'s frames, and never changes.

    It must not depend on encoded chunks, since a reader calls it on an instance without any.
    """
    stored = json.loads(json.dumps(codec.config.model_dump(mode="json")))
    reader = type(codec)(codec.Config.model_validate(stored))
    for chunk, context in _typed_chunks(codec):
        facts = replace(context, base=None)
        output = _output(codec, facts)
        with contextlib.suppress(DeclinedChunkError):
            _expect_true(output, len(encode(codec, chunk, context)), facts)
        assert _output(codec, facts) == output, (
            f"output() for {facts.dtype} returned a different result after a chunk was encoded: it "
            "must depend only on the options and the context"
        )
        assert _output(reader, facts) == output, (
            f"output() for {facts.dtype} returned a different result from another instance with "
            "the same options"
        )


def _output(codec: Codec, context: CodecContext) -> CodecOutput:
    with finding(f"output of {context.dtype}"):
        output: object = codec.output(context)
    assert isinstance(output, CodecOutput), f"output returned {output!r}, not a CodecOutput"
    dtype: object = output.dtype
    assert isinstance(dtype, str), f"output has the dtype {dtype!r}, not a name"
    assert type(output.itemsize) is int, f"output has the itemsize {output.itemsize!r}, not an int"
    assert output.itemsize > 0, f"output has the itemsize {output.itemsize}, not at least 1"
    assert type(output.elementwise) is bool, "elementwise must be a bool"
    assert type(output.tail) is bool, "tail must be a bool"
    size = _SIZES.get(dtype) or _size_in_numpy(dtype)
    assert size is not None, f"output has the unknown dtype {dtype!r}"
    assert size == output.itemsize, f"elements of {dtype} have {size} bytes, not {output.itemsize}"
    return output


def _size_in_numpy(dtype: str) -> int | None:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return None


def _expect_true(output: CodecOutput, length: int, context: CodecContext) -> None:
    count = context.raw_length // context.itemsize
    assert length % output.itemsize == 0, (
        f"encode of {context.dtype} made {length} bytes, not whole elements of "
        f"{output.dtype}, which output declares"
    )
    least = count * output.itemsize
    assert not output.elementwise or length == least or (output.tail and length > least), (
        f"encode of {count} elements of {context.dtype} made {length} bytes, not one element of "
        f"{output.dtype} for each, which output declares by elementwise=True"
    )


@in_words
def check_rounding_is_stable(codec: Codec) -> None:
    """Check that a lossy codec decodes a frame to the same bytes each time, and rounds only once.

    So a checkpoint that is restored and saved again, or copied, loses nothing more. A codec may
    decline rounded values.
    """
    if codec.lossless:
        return
    for chunk, context in _typed_chunks(codec):
        what = f"{len(chunk)} bytes of {context.dtype}"
        with contextlib.suppress(DeclinedChunkError):
            rounded = _rounded(codec, encode(codec, chunk, context), context, what)
            again = _rounded(codec, encode(codec, rounded, context), context, what)
            expect_unchanged(again, rounded, f"{what}, rounded before,", context.itemsize)


def _rounded(codec: Codec, frame: bytes, context: CodecContext, what: str) -> bytes:
    """Decode a frame twice, and return the common result."""
    tries = [try_decode(codec, frame, context.raw_length, context, fill) for fill in (0, 0xFF)]
    assert tries[0] == tries[1], f"the frame of {what} decodes to other bytes each time"
    assert isinstance(tries[0], bytes), f"decode refused the frame of {what}: {tries[0]}"
    return tries[0]

"""Calls of a codec as core makes them, and the data of the checks."""

from __future__ import annotations

import contextlib
import functools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.abc import CodecContext, Declined
from penstock.core.errors import CodecError
from penstock.core.foreign import said
from penstock.testing.expectations import finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.core.abc import Codec

    CodecCheck: TypeAlias = Callable[[Codec], None]

# One byte, odd sizes, and sizes around a page and around the 128 KiB blocks of codecs. No empty
# chunk: core never encodes one.
SIZES = (1, 2, 3, 7, 255, 4095, 4096, 4097, 65_537, 131_072, 300_001)

ELEMENTS = (
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex64", 8),
    ("complex128", 16),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("bool", 1),
)
"""Tensor dtypes with the bytes of an element; numpy lacks some."""

# As float32 they are bfloat16 numbers.
_COMPRESSIBLE = b"".join((n << 16).to_bytes(4, "little") for n in range(1000))
# For each dtype, the number of exponent bits and of mantissa bits.
_FLOATS = {
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
    "float8_e4m3fnuz": (4, 3),
    "float8_e5m2fnuz": (5, 2),
    "float16": (5, 10),
    "float32": (8, 23),
    "float64": (11, 52),
    "complex64": (8, 23),
    "complex128": (11, 52),
}
_TRIED_BYTES = 4096
_BASE_STEP = 61
_GUARD = 0xA5
_GUARD_BYTES = 64


def in_words(check: CodecCheck, /) -> CodecCheck:
    """Turn any exception in the check into an AssertionError that names the check."""

    @functools.wraps(check)
    def named(codec: Codec) -> None:
        with finding(check.__name__):
            try:
                check(codec)
            except DeclinedChunkError:
                return  # `elements_of` checks that the codec takes any chunk at all

    return named


class DeclinedChunkError(Exception):
    """The codec declined the chunk of a check, so there is no frame to check."""


# -- material -----------------------------------------------------------------------------------


def random_bytes(size: int, *, seed: int = 1) -> bytes:
    """Return reproducible bytes that no codec compresses."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - for comparing, not for secrets


def compressible(size: int) -> bytes:
    """Return bytes that every codec compresses."""
    return (_COMPRESSIBLE * (size // len(_COMPRESSIBLE) + 1))[:size]


def rare_floats(dtype: str, size: int) -> bytes:
    """Return floats that arithmetic changes: -0.0, denormals, infinities, NaNs with payloads.

    Args:
        dtype: The name of a dtype; if it is not a float, the elements have no meaning.
        size: The number of bytes.
    """
    exponent_bits, mantissa_bits = _FLOATS.get(dtype, (8, 23))
    exponent, sign = (1 << exponent_bits) - 1 << mantissa_bits, 1 << exponent_bits + mantissa_bits
    quiet = 1 << mantissa_bits - 1
    words = (0, 1, exponent, exponent | 1, exponent | quiet, exponent | quiet | 1, sign - 1)
    width = (1 + exponent_bits + mantissa_bits) // 8
    pattern = b"".join(word.to_bytes(width, "little") for w in words for word in (sign | w, w))
    return (pattern * (size // len(pattern) + 1))[:size]


def elements_of(codec: Codec) -> tuple[str, int]:
    """Return the dtype and itemsize of chunks that the codec takes: `uint8` if possible."""
    for dtype, itemsize in (("uint8", 1), *ELEMENTS):
        context = as_given(codec, _flat(dtype, itemsize, _TRIED_BYTES))
        with contextlib.suppress(DeclinedChunkError):
            encode(codec, compressible(_TRIED_BYTES), context)
            return dtype, itemsize
    names = ", ".join(name for name, _ in ELEMENTS)
    msg = f"it declines {_TRIED_BYTES} compressible bytes of uint8 and of each of {names}"
    raise AssertionError(msg)


def whole(codec: Codec, size: int) -> int:
    """Round `size` down to whole elements that the codec takes, at least one."""
    _, itemsize = elements_of(codec)
    return max(size - size % itemsize, itemsize)


def chunks(codec: Codec) -> Iterator[bytes]:
    """Yield random, compressible and zero chunks of every size."""
    for size in sorted({whole(codec, size) for size in SIZES}):
        yield random_bytes(size)
        yield compressible(size)
        yield bytes(size)


def encoded(codec: Codec, given: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks that the codec takes, each with its frame."""
    for chunk in given:
        with contextlib.suppress(DeclinedChunkError):
            yield chunk, encode(codec, chunk)


def context_of(codec: Codec, length: int) -> CodecContext:
    """Return core's context for a slab of elements that the codec takes."""
    dtype, itemsize = elements_of(codec) if length else ("uint8", 1)
    return as_given(codec, _flat(dtype, itemsize, length))


def _flat(dtype: str, itemsize: int, length: int) -> CodecContext:
    return CodecContext(dtype, itemsize, (length // itemsize,), 0, length)


def as_given(codec: Codec, context: CodecContext) -> CodecContext:
    """Return the context as core passes it: with the codec's version, and a base if needed.

    The base is close to the compressible bytes, as a codec may decline a chunk that differs too
    much from its base.
    """
    context = replace(context, version=codec.version)
    if not codec.needs_base:
        return context
    base = bytearray(compressible(context.raw_length))
    base[::_BASE_STEP] = bytes(byte ^ 1 for byte in base[::_BASE_STEP])
    return replace(context, base=memoryview(base).toreadonly())


# -- calls --------------------------------------------------------------------------------------


def bound_of(codec: Codec, raw_length: int) -> int:
    """Return the result of `max_encoded_size`, after checking that it is a size."""
    with finding(f"max_encoded_size({raw_length})"):
        bound: object = codec.max_encoded_size(raw_length)
    assert type(bound) is int, (
        f"max_encoded_size({raw_length}) returned {bound!r} of type {type(bound).__name__}, not "
        "an int"
    )
    assert bound >= 0, f"max_encoded_size({raw_length}) returned {bound}, a negative size"
    return bound


def expect_length(length: object, bound: int) -> int:
    """Return the result of `encode`, after checking that it is a length within `bound`."""
    assert type(length) is int, (
        f"encode returned {length!r} of type {type(length).__name__}: return the length of "
        "the frame, an int"
    )
    assert 0 <= length <= bound, f"encode returned {length}, not 0 to its bound, {bound}"
    return length


def encode(codec: Codec, chunk: bytes, context: CodecContext | None = None) -> bytes:
    """Encode a chunk, and return its frame. Fail on an exception, or if the chunk changes.

    Raises:
        DeclinedChunkError: The codec declined the chunk.
    """
    source = bytearray(chunk)
    out = bytearray(bound_of(codec, len(chunk)))
    context = context or context_of(codec, len(chunk))
    what = f"encode of {len(chunk)} bytes"
    with finding(what):
        try:
            length = codec.encode(memoryview(source), memoryview(out), context=context)
        except CodecError as error:
            msg = (
                f"{what} of {context.dtype}: {said(error)} (an unsuitable chunk is not an error: "
                "return penstock.core.abc.DECLINED, and the rest of the chain stores the chunk)"
            )
            raise AssertionError(msg) from error
    assert source == chunk, "encode changed its input"
    if isinstance(length, Declined):
        raise DeclinedChunkError
    return bytes(out[: expect_length(length, len(out))])


def try_decode(
    codec: Codec,
    frame: bytes,
    length: int,
    context: CodecContext | None = None,
    fill: int | None = None,
) -> bytes | CodecError:
    """Decode a frame within bounds; return the bytes, or the error that refused it.

    Args:
        codec: The codec.
        frame: Its frame, or bytes that it must refuse.
        length: The number of bytes of the chunk.
        context: The facts about the chunk; default: those of a slab.
        fill: The value of all output bytes before the call.
    """
    memory, out = guarded(length)
    if fill is not None:
        out[:] = bytes([fill]) * length
    source = bytearray(frame)
    try:
        with finding(f"decode of a frame of {len(frame)} bytes", CodecError):
            codec.decode(memoryview(source), out, context=context or context_of(codec, length))
    except CodecError as error:
        return error
    finally:
        expect_guarded(memory)
        assert source == frame, "decode changed its input"
    return bytes(out)


def expect_decodes(
    codec: Codec, frame: bytes, chunk: bytes, context: CodecContext | None = None
) -> None:
    """Fail unless a frame decodes; a lossless codec must decode it to `chunk`."""
    decoded = try_decode(codec, frame, len(chunk), context)
    if not isinstance(decoded, bytes):
        msg = (
            f"decode refused the frame of {len(frame)} bytes that encode made of a chunk of "
            f"{len(chunk)} bytes: {said(decoded)}"
        )
        raise AssertionError(msg) from decoded  # noqa: TRY004 - what a check finds
    if codec.lossless:
        expect_unchanged(decoded, chunk, f"a chunk of {len(chunk)} bytes")


def expect_unchanged(decoded: bytes | bytearray, chunk: bytes, what: str, unit: int = 1) -> None:
    """Fail unless the decoded bytes are the chunk; the message gives the first difference."""
    if decoded == chunk:
        return
    start, stop = 0, len(chunk)
    while stop - start > 1:  # bisects: a loop over megabytes takes a second
        middle = (start + stop) // 2
        if decoded[start:middle] != chunk[start:middle]:
            stop = middle
        else:
            start = middle
    start -= start % unit
    few = slice(start, start + max(unit, 8))
    msg = (
        f"{what} came back changed, from byte {start} on: {chunk[few].hex(' ')} became "
        f"{decoded[few].hex(' ')}"
    )
    raise AssertionError(msg)


def expect_refused(codec: Codec, frame: bytes, length: int, what: str) -> None:
    """Fail unless a frame is refused."""
    decoded = try_decode(codec, frame, length)
    assert isinstance(decoded, CodecError), f"decode accepted {what}"


def guarded(size: int) -> tuple[bytearray, memoryview]:
    """Return memory, and a view of `size` bytes inside it, for `expect_guarded`."""
    memory = bytearray([_GUARD]) * (size + 2 * _GUARD_BYTES)
    return memory, memoryview(memory)[_GUARD_BYTES : _GUARD_BYTES + size]


def expect_guarded(memory: bytearray) -> None:
    """Fail if a byte around the view was written."""
    guard = bytes([_GUARD]) * _GUARD_BYTES
    assert memory[:_GUARD_BYTES] == guard, "something was written before the output"
    assert memory[-_GUARD_BYTES:] == guard, "something was written after the output"

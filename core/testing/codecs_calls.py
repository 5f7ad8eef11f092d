"""Calls of a codec as core makes them, and the data that its checks use."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from penstock.core.abc import CodecContext
from penstock.core.errors import CodecError
from penstock.core.testing.expectations import finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Codec

    CodecCheck: TypeAlias = Callable[[Codec], None]

# Empty, one byte, odd ones, around a page, and around the 128 KiB blocks that codecs work in.
SIZES = (0, 1, 2, 3, 7, 255, 4095, 4096, 4097, 65_537, 131_072, 300_001)

_GUARD = 0xA5
_GUARD_BYTES = 64


def in_words(check: CodecCheck, /) -> CodecCheck:
    """Say in words what the check finds, whatever the codec raises meanwhile."""

    @functools.wraps(check)
    def said_in_words(codec: Codec) -> None:
        with finding(check.__name__):
            check(codec)

    return said_in_words


# -- material -----------------------------------------------------------------------------------


def random_bytes(size: int, *, seed: int = 1) -> bytes:
    """Reproducible bytes that nothing compresses."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - for comparing, not for secrets


def compressible(size: int) -> bytes:
    """Bytes that everything compresses."""
    pattern = b"".join(n.to_bytes(4, "little") for n in range(1000))
    return (pattern * (size // len(pattern) + 1))[:size]


def chunks() -> Iterator[bytes]:
    """Chunks of every size, each random, compressible and zero."""
    for size in SIZES:
        yield random_bytes(size)
        yield compressible(size)
        yield bytes(size)


def context_of(codec: Codec, length: int) -> CodecContext:
    """The context of untyped bytes, as for a slab; with a base for a codec that needs one."""
    context = CodecContext("uint8", 1, (length,), 0, length)
    return with_base(codec, context)


def with_base(codec: Codec, context: CodecContext) -> CodecContext:
    """The same context, with a base for a codec that needs one."""
    if not codec.needs_base:
        return context
    base = memoryview(random_bytes(context.raw_length, seed=3)).toreadonly()
    return replace(context, base=base)


# -- calls --------------------------------------------------------------------------------------


def bound_of(codec: Codec, raw_length: int) -> int:
    """What `max_encoded_size` says, looked at."""
    with finding(f"max_encoded_size({raw_length})"):
        bound: object = codec.max_encoded_size(raw_length)
    assert type(bound) is int, (
        f"max_encoded_size({raw_length}) returned {bound!r} of type {type(bound).__name__}: it is "
        "an int"
    )
    assert bound >= 0, f"max_encoded_size({raw_length}) returned {bound}: no size is negative"
    return bound


def expect_length(length: object, bound: int) -> int:
    """What `encode` returned, if it is a length within `bound`."""
    assert type(length) is int, (
        f"encode returned {length!r} of type {type(length).__name__}: it returns the length of "
        "the frame, an int"
    )
    assert 0 <= length <= bound, f"encode returned {length}, its bound is {bound}"
    return length


def encode(codec: Codec, chunk: bytes, context: CodecContext | None = None) -> bytes:
    """The frame of a chunk; whatever is raised is a breach, the chunk stays as it was."""
    source = bytearray(chunk)
    out = bytearray(bound_of(codec, len(chunk)))
    with finding(f"encode of {len(chunk)} bytes"):
        length = codec.encode(
            memoryview(source), memoryview(out), context=context or context_of(codec, len(chunk))
        )
    assert source == chunk, "encode changed its input"
    return bytes(out[: expect_length(length, len(out))])


def try_decode(
    codec: Codec, frame: bytes, length: int, context: CodecContext | None = None
) -> bytes | None:
    """What a frame decodes to, None: it is refused; nothing around it is touched."""
    memory, out = guarded(length)
    source = bytearray(frame)
    try:
        with finding(f"decode of a frame of {len(frame)} bytes", CodecError):
            codec.decode(memoryview(source), out, context=context or context_of(codec, length))
    except CodecError:
        return None
    finally:
        expect_guarded(memory)
        assert source == frame, "decode changed its input"
    return bytes(out)


def expect_decodes(codec: Codec, frame: bytes, chunk: bytes) -> None:
    """Fail unless a frame gives back the chunk that it was made of."""
    decoded = try_decode(codec, frame, len(chunk))
    assert decoded is not None, f"decode refused a frame of {len(chunk)} bytes that encode made"
    if codec.lossless:
        assert decoded == chunk, f"a chunk of {len(chunk)} bytes came back changed"


def expect_refused(codec: Codec, frame: bytes, length: int, what: str) -> None:
    """Fail unless a frame is refused."""
    decoded = try_decode(codec, frame, length)
    assert decoded is None, f"decode accepted {what}"


def guarded(size: int) -> tuple[bytearray, memoryview]:
    """Memory, and a view of that size in it, whose surroundings `expect_guarded` looks at."""
    memory = bytearray([_GUARD]) * (size + 2 * _GUARD_BYTES)
    return memory, memoryview(memory)[_GUARD_BYTES : _GUARD_BYTES + size]


def expect_guarded(memory: bytearray) -> None:
    """Fail if anything around the view was written."""
    guard = bytes([_GUARD]) * _GUARD_BYTES
    assert memory[:_GUARD_BYTES] == guard, "something was written before the output"
    assert memory[-_GUARD_BYTES:] == guard, "something was written behind the output"

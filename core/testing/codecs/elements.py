"""Checks of typed chunks: what a codec says of its output, and what a lossy one rounds."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import CodecContext, CodecOutput
from penstock.core.testing.codecs.calls import (
    ELEMENTS,
    DeclinedChunkError,
    as_given,
    compressible,
    encode,
    expect_unchanged,
    in_words,
    random_bytes,
    rare_floats,
    try_decode,
)
from penstock.core.testing.expectations import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.abc import Codec

_SIZES = {"uint8": 1, **dict(ELEMENTS)}


def _typed_chunks(codec: Codec) -> Iterator[tuple[bytes, CodecContext]]:
    """Yield chunks of every dtype: a whole region, a piece of one, and a scalar."""
    for dtype, itemsize in _SIZES.items():
        rows = 96 * 50 * itemsize
        for shape, start, length in (
            ((96, 50), 0, rows),
            ((96, 50), 53 * itemsize, 1001 * itemsize),
            ((), 0, itemsize),
        ):
            context = as_given(codec, CodecContext(dtype, itemsize, shape, start, length))
            for chunk in (rare_floats(dtype, length), random_bytes(length), compressible(length)):
                yield chunk, context


@in_words
def check_output(codec: Codec) -> None:
    """Check that `output` is a valid answer, is true of what `encode` makes, and never changes.

    A reader asks an instance of its own, which has seen no chunk.
    """
    stored = json.loads(json.dumps(codec.config.model_dump(mode="json")))
    reader = type(codec)(codec.Config.model_validate(stored))
    for chunk, context in _typed_chunks(codec):
        told = replace(context, base=None)
        said = _output(codec, told)
        with contextlib.suppress(DeclinedChunkError):
            _expect_true(said, len(encode(codec, chunk, context)), told)
        assert _output(codec, told) == said, (
            f"output of {told.dtype} is another one once a chunk was encoded: it depends on the "
            "options and the context alone"
        )
        assert _output(reader, told) == said, (
            f"output of {told.dtype} is another one in an instance with the same options"
        )


def _output(codec: Codec, context: CodecContext) -> CodecOutput:
    with finding(f"output of {context.dtype}"):
        said: object = codec.output(context)
    assert isinstance(said, CodecOutput), f"output returned {said!r}: it returns a CodecOutput"
    dtype: object = said.dtype
    assert isinstance(dtype, str), f"output has the dtype {dtype!r}: it is a name"
    assert type(said.itemsize) is int, f"output has the itemsize {said.itemsize!r}: it is an int"
    assert said.itemsize > 0, f"output has the itemsize {said.itemsize}: it is at least 1"
    assert type(said.elementwise) is bool, "elementwise is True or False"
    size = _SIZES.get(dtype) or _size_in_numpy(dtype)
    assert size is not None, f"output has the dtype {dtype!r}, which is the name of none"
    assert size == said.itemsize, f"elements of {dtype} have {size} bytes, not {said.itemsize}"
    return said


def _size_in_numpy(dtype: str) -> int | None:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return None


def _expect_true(said: CodecOutput, length: int, context: CodecContext) -> None:
    count = context.raw_length // context.itemsize
    assert length % said.itemsize == 0, (
        f"encode of {context.dtype} made {length} bytes, which are no whole elements of "
        f"{said.dtype}, as output says"
    )
    assert not said.elementwise or length == count * said.itemsize, (
        f"encode of {context.dtype} made {length} bytes of {count} elements, which are not so "
        f"many of {said.dtype}, as output says with elementwise=True"
    )


@in_words
def check_rounding_is_stable(codec: Codec) -> None:
    """Check that a lossy codec decodes a frame to the same each time, and keeps what it rounded.

    So a checkpoint that is restored and saved again, or copied, loses nothing more. A codec may
    decline what it has rounded.
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
    """Decode a frame twice, and return the one result."""
    found = [try_decode(codec, frame, context.raw_length, context, fill) for fill in (0, 0xFF)]
    assert found[0] == found[1], f"the frame of {what} is decoded to other bytes each time"
    assert isinstance(found[0], bytes), f"decode refused the frame of {what}: {found[0]}"
    return found[0]

"""Calls one codec of a chain, and checks its results against the contract.

Tested in `tests/core/pipeline/test_codec_chain.py`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.abc.codec import CodecOutput, Declined
from penstock.core.errors import CodecError, PenstockError
from penstock.core.foreign import noting_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.abc import Codec, CodecContext


def context_for(codec: Codec, context: CodecContext, version: int) -> CodecContext:
    """Return `context` for `codec`: with its version, and with the base only if it needs one.

    If the codec that needs the base declines, the next codec must not get the base: no reader would
    know that the frame needs it.
    """
    base = context.base if codec.needs_base else None
    return replace(context, version=version, base=base)


def context_behind(codec: Codec, context: CodecContext, length: int) -> CodecContext:
    """Return the facts about the output of `codec`, for the next codec.

    Writers and readers get the same facts, since the facts depend only on options and lengths.

    Args:
        codec: A codec that has not declined the chunk.
        context: The facts about its chunk, from `context_for`.
        length: Bytes of its output.

    Raises:
        CodecError: The codec's description of its output is invalid, or contradicts `length`.
    """
    output = _output(codec, replace(context, base=None))
    if output.elementwise:
        count, rest = divmod(context.raw_length, context.itemsize)
        shape, first = context.shape, context.start // context.itemsize
        if output.tail:
            count = max(count, length // output.itemsize)
            shape = _with_rows(shape, first + count)
        start = first * output.itemsize
    else:
        count, rest = divmod(length, output.itemsize)
        shape, start = (count,), 0
    if rest or count * output.itemsize != length:
        whole = f"{count} elements" if output.elementwise else "whole elements"
        msg = (
            f"codec {codec.name} claims to make {whole} of {output.dtype} "
            f"({output.itemsize} bytes each) from {context.raw_length} bytes of {context.dtype}, "
            f"but wrote {length} bytes"
        )
        raise CodecError(msg)
    return replace(
        context,
        dtype=output.dtype,
        itemsize=output.itemsize,
        shape=shape,
        start=start,
        raw_length=length,
        base=None,
    )


def _with_rows(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """Return `shape` with enough rows for `elements`."""
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (0, 1)
    return (max(rows, -(-elements // max(row, 1))), *shape[1:])


@contextmanager
def _calling(
    codec: Codec, failure: Callable[[], str], *, passing: type[Exception] = PenstockError
) -> Iterator[None]:
    """Convert errors of `codec` to CodecError, except PenstockError and `passing`."""
    try:
        with noting_origin(lambda: f"in codec {codec.name}"):
            yield
    except (PenstockError, passing):
        raise
    except Exception as error:
        msg = f"codec {codec.name} {failure()}: {error!r}"
        raise CodecError(msg) from error


def _output(codec: Codec, context: CodecContext) -> CodecOutput:
    with _calling(codec, lambda: f"failed to describe its output for {context.dtype}"):
        output: object = codec.output(context)
    if not isinstance(output, CodecOutput) or not _is_valid(output):
        msg = (
            f"codec {codec.name} broke its contract: output is {output!r}, which is not a valid "
            "CodecOutput"
        )
        raise CodecError(msg)
    return output


def _is_valid(output: CodecOutput) -> bool:
    dtype: object = output.dtype  # a third party's codec may set anything
    return (
        isinstance(dtype, str)
        and dtype != ""
        and type(output.itemsize) is int
        and output.itemsize > 0
        and {type(output.elementwise), type(output.tail)} == {bool}
    )


def output_bound(codec: Codec, raw_length: int) -> int:
    """Return `Codec.max_encoded_size`; raise CodecError if it is not a size."""
    with _calling(codec, lambda: f"failed to bound the encoded size of {raw_length} bytes"):
        bound = codec.max_encoded_size(raw_length)
    if type(bound) is not int or bound < 0:
        msg = f"codec {codec.name} broke its contract: max_encoded_size is {bound!r}, not a size"
        raise CodecError(msg)
    return bound


def load_link(codec: Codec) -> None:
    """Call `Codec.load`; raise CodecError if it fails."""
    with _calling(codec, lambda: "failed to load"):
        codec.load()


def encode_link(
    codec: Codec, source: memoryview, target: memoryview, context: CodecContext
) -> int | Declined:
    """Call `Codec.encode`; raise CodecError if it fails, or its result does not fit `target`."""
    with _calling(codec, lambda: f"failed on {source.nbytes} bytes of {context.dtype}"):
        length = codec.encode(source, target, context=context)
    if isinstance(length, Declined):
        return length
    if type(length) is not int or not 0 <= length <= target.nbytes:
        msg = (
            f"codec {codec.name} broke its contract: encode reports {length!r} bytes written into "
            f"{target.nbytes}"
        )
        raise CodecError(msg)
    return length


def decode_link(
    codec: Codec, source: memoryview, target: memoryview, context: CodecContext
) -> None:
    """Call `Codec.decode`; raise CodecError if it fails, MemoryError if memory is short."""
    # Too little memory is not a flaw of the frame.
    with _calling(
        codec, lambda: f"failed on a frame of {source.nbytes} bytes", passing=MemoryError
    ):
        codec.decode(source, target, context=context)

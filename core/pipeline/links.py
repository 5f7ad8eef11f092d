"""Calls one codec of a chain, and checks each answer of the codec against its contract.

Tested in `tests/core/pipeline/test_codec_chain.py`.
"""

from __future__ import annotations

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
    """Return `context` as `codec` gets it: with the version of its frame, a base if it needs one.

    The codec that asked for the base may have declined; otherwise the next one would get the base
    then, and no reader knows that it needs one.
    """
    base = context.base if codec.needs_base else None
    return replace(context, version=version, base=base)


def context_behind(codec: Codec, context: CodecContext, length: int) -> CodecContext:
    """Return the facts about the output of `codec`, for the codec behind it.

    Writers and readers come to the same facts: they depend on options and lengths alone.

    Args:
        codec: The codec, which takes the chunk.
        context: The facts about the chunk that it takes, from `context_for`.
        length: Bytes of its output.

    Raises:
        CodecError: The codec says of its output what cannot be, or does not fit `length`.
    """
    output = _output(codec, replace(context, base=None))
    if output.elementwise:
        count, rest = divmod(context.raw_length, context.itemsize)
        shape, start = context.shape, context.start // context.itemsize * output.itemsize
    else:
        count, rest = divmod(length, output.itemsize)
        shape, start = (count,), 0
    if rest or count * output.itemsize != length:
        whole = f"{count} elements" if output.elementwise else "whole elements"
        msg = (
            f"codec {codec.name} says that it makes {whole} of {output.dtype} "
            f"({output.itemsize} bytes each) of {context.raw_length} bytes of {context.dtype}; "
            f"{length} bytes are none"
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


@contextmanager
def _calling(
    codec: Codec, failure: Callable[[], str], *, passing: type[Exception] = PenstockError
) -> Iterator[None]:
    """Turn what a call of `codec` raises into a CodecError, unless it is ours or of `passing`."""
    try:
        with noting_origin(lambda: f"in codec {codec.name}"):
            yield
    except (PenstockError, passing):
        raise
    except Exception as error:
        msg = f"codec {codec.name} {failure()}: {error!r}"
        raise CodecError(msg) from error


def _output(codec: Codec, context: CodecContext) -> CodecOutput:
    with _calling(codec, lambda: f"cannot say what it makes of {context.dtype}"):
        output: object = codec.output(context)
    if not isinstance(output, CodecOutput) or not _is_valid(output):
        msg = f"codec {codec.name} broke its contract: output is {output!r}, no valid CodecOutput"
        raise CodecError(msg)
    return output


def _is_valid(output: CodecOutput) -> bool:
    dtype: object = output.dtype  # whatever a third party's codec has put there
    return (
        isinstance(dtype, str)
        and dtype != ""
        and type(output.itemsize) is int
        and output.itemsize > 0
        and type(output.elementwise) is bool
    )


def output_bound(codec: Codec, raw_length: int) -> int:
    """Return `Codec.max_encoded_size`; raises CodecError if that is no size."""
    with _calling(codec, lambda: f"cannot say how large {raw_length} bytes may get"):
        bound = codec.max_encoded_size(raw_length)
    if type(bound) is not int or bound < 0:
        msg = f"codec {codec.name} broke its contract: max_encoded_size is {bound!r}, no size"
        raise CodecError(msg)
    return bound


def load_link(codec: Codec) -> None:
    """Call `Codec.load`; raises CodecError if it fails."""
    with _calling(codec, lambda: "failed to load"):
        codec.load()


def encode_link(
    codec: Codec, source: memoryview, target: memoryview, context: CodecContext
) -> int | Declined:
    """Call `Codec.encode`; raises CodecError if it fails, or returns no length within `target`."""
    with _calling(codec, lambda: f"failed on {source.nbytes} bytes of {context.dtype}"):
        length = codec.encode(source, target, context=context)
    if isinstance(length, Declined):
        return length
    if type(length) is not int or not 0 <= length <= target.nbytes:
        msg = (
            f"codec {codec.name} broke its contract: wrote {length!r} bytes into {target.nbytes}, "
            "as encode says"
        )
        raise CodecError(msg)
    return length


def decode_link(
    codec: Codec, source: memoryview, target: memoryview, context: CodecContext
) -> None:
    """Call `Codec.decode`; raises CodecError if it fails, MemoryError if memory is short."""
    # Too little memory says nothing about the frame.
    with _calling(
        codec, lambda: f"failed on a frame of {source.nbytes} bytes", passing=MemoryError
    ):
        codec.decode(source, target, context=context)

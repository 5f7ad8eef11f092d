"""A chain of codecs over one chunk, and the checksums of what is stored.

A frame that does not get smaller is stored encoded all the same: whether a frame is raw is
decided by its rule alone, so that the plan can fix raw offsets beforehand.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from penstock.core.blame import blaming
from penstock.core.errors import CodecError, PenstockError
from penstock.core.types import Buffer, ByteRange, flat_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.abc import Codec, CodecContext


def checksum(view: Buffer) -> int:
    """xxh3-64 of `view`, without copying and without the GIL."""
    return xxhash.xxh3_64_intdigest(view)


def checksum_blocks(view: memoryview, ranges: Iterable[ByteRange]) -> list[int]:
    """xxh3-64 of each of `ranges` of the flat `view`."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[block.start : block.stop]) for block in ranges]


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """What came out of encoding one chunk.

    Attributes:
        length: Stored bytes.
        checksum: xxh3-64 of the stored bytes.
        raw_checksum: xxh3-64 of the chunk; None when a codec of the chain is lossy.
        lengths: Lengths between the codecs, in encoding order (one fewer than there are codecs).
    """

    length: int
    checksum: int
    raw_checksum: int | None
    lengths: tuple[int, ...]


class CodecChain:
    """Codecs in the order of encoding. Thread-safe.

    The first codec sees the chunk as it is; later ones see flat `uint8`.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        """Join `codecs`.

        Raises:
            CodecError: There is none: the empty chain is raw, and has no frames to encode.
        """
        if not codecs:
            msg = "a codec chain needs at least one codec"
            raise CodecError(msg)
        self.codecs = tuple(codecs)

    def __repr__(self) -> str:
        return f"CodecChain({' -> '.join(codec.name for codec in self.codecs)})"

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back exactly what was encoded."""
        return all(codec.lossless for codec in self.codecs)

    @property
    def needs_base(self) -> bool:
        """Whether the first codec wants `CodecContext.base`."""
        return self.codecs[0].needs_base

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Bytes that `encode` may need at most for any chunk of `raw_length` bytes."""
        return self._bounds(raw_length)[-1]

    def scratch_size(self, raw_length: int, /) -> int:
        """Bytes that a thread may hold beside `out` while it encodes or decodes such a chunk."""
        between = self._bounds(raw_length)[:-1]
        return max(between[::2], default=0) + max(between[1::2], default=0)

    def encode(
        self, chunk: memoryview, out: memoryview, /, *, context: CodecContext
    ) -> EncodedFrame:
        """Encode `chunk` into the beginning of `out`, which has `max_encoded_size` bytes or more.

        Raises:
            CodecError: A codec refused the chunk or broke its contract; `out` is undefined.
        """
        source = flat_view(chunk).toreadonly()
        raw_checksum = checksum(source) if self.lossless else None
        lengths: list[int] = []
        for number, codec in enumerate(self.codecs):
            bound = _bound(codec, source.nbytes)
            last = number == len(self.codecs) - 1
            target = flat_view(out) if last else _scratch.take(number % 2, bound)
            if target.nbytes < bound:
                msg = f"codec {codec.name} may need {bound} bytes of output, has {target.nbytes}"
                raise CodecError(msg)
            length = _encode_link(codec, source, target, _link_context(context, number, source))
            lengths.append(length)
            source = target[:length].toreadonly()
        stored = lengths.pop()
        return EncodedFrame(stored, checksum(source), raw_checksum, tuple(lengths))

    def decode(
        self,
        frame: memoryview,
        out: memoryview,
        /,
        *,
        context: CodecContext,
        lengths: Sequence[int] = (),
        raw_checksum: int | None = None,
    ) -> None:
        """Fill `out` (exactly `context.raw_length` bytes) from `frame`.

        Whoever reads compares the stored checksum first (`checksum(frame)`), so that codecs see
        damaged frames only when the checksum collides.

        Args:
            frame: The stored bytes, all of them.
            out: Where the chunk goes; undefined after a failure.
            context: As it was for `encode`.
            lengths: `EncodedFrame.lengths`.
            raw_checksum: Compared with the decoded bytes, unless None.

        Raises:
            CodecError: The frame does not decode to this chunk, or a codec broke its contract.
        """
        target = flat_view(out)
        self._check_lengths(lengths, target.nbytes, context)
        outputs = (target.nbytes, *lengths)  # what each codec decodes to
        source = flat_view(frame).toreadonly()
        for number in reversed(range(len(self.codecs))):
            codec = self.codecs[number]
            into = target if number == 0 else _scratch.take(number % 2, outputs[number])
            into = into[: outputs[number]]
            _decode_link(codec, source, into, _link_context(context, number, into))
            source = into.toreadonly()
        if raw_checksum is not None and checksum(target) != raw_checksum:
            msg = f"{self!r} decoded {target.nbytes} bytes that are not the ones encoded"
            raise CodecError(msg)

    def _bounds(self, raw_length: int) -> list[int]:
        bounds, length = [], raw_length
        for codec in self.codecs:
            length = _bound(codec, length)
            bounds.append(length)
        return bounds

    def _check_lengths(
        self, lengths: Sequence[int], raw_length: int, context: CodecContext
    ) -> None:
        if raw_length != context.raw_length:
            msg = f"{self!r} is to decode {context.raw_length} bytes into {raw_length}"
            raise CodecError(msg)
        # Lengths come from the manifest: bounded before memory is taken for them.
        bounds = self._bounds(raw_length)[:-1]
        if len(lengths) != len(bounds) or any(
            not 0 <= length <= bound for length, bound in zip(lengths, bounds, strict=True)
        ):
            msg = f"{self!r} cannot have lengths {tuple(lengths)} between its codecs"
            raise CodecError(msg)


class _Scratch(threading.local):
    """Two buffers per thread, between which the links alternate; they grow and are kept."""

    def __init__(self) -> None:
        self._buffers = [memoryview(bytearray()), memoryview(bytearray())]

    def take(self, which: int, size: int) -> memoryview:
        if self._buffers[which].nbytes < size:
            self._buffers[which] = memoryview(bytearray(size))
        return self._buffers[which]


_scratch = _Scratch()


def _link_context(context: CodecContext, number: int, raw: memoryview) -> CodecContext:
    if number == 0:
        return context
    return replace(
        context,
        dtype="uint8",
        itemsize=1,
        shape=(raw.nbytes,),
        start=0,
        raw_length=raw.nbytes,
        base=None,
    )


def _bound(codec: Codec, raw_length: int) -> int:
    try:
        bound = codec.max_encoded_size(raw_length)
    except PenstockError:
        raise
    except Exception as error:
        msg = f"codec {codec.name} cannot say how large {raw_length} bytes may get: {error!r}"
        raise CodecError(msg) from error
    if type(bound) is not int or bound < 0:
        msg = f"codec {codec.name} broke its contract: max_encoded_size is {bound!r}, no size"
        raise CodecError(msg)
    return bound


def _encode_link(
    codec: Codec, source: memoryview, target: memoryview, context: CodecContext
) -> int:
    try:
        with blaming(lambda: f"in codec {codec.name}"):
            length = codec.encode(source, target, context=context)
    except PenstockError:
        raise
    except Exception as error:
        msg = f"codec {codec.name} failed on {source.nbytes} bytes of {context.dtype}: {error!r}"
        raise CodecError(msg) from error
    if type(length) is not int or not 0 <= length <= target.nbytes:
        msg = (
            f"codec {codec.name} broke its contract: wrote {length!r} bytes into {target.nbytes}, "
            "as encode says"
        )
        raise CodecError(msg)
    return length


def _decode_link(
    codec: Codec, source: memoryview, target: memoryview, context: CodecContext
) -> None:
    try:
        with blaming(lambda: f"in codec {codec.name}"):
            codec.decode(source, target, context=context)
    except (PenstockError, MemoryError):  # too little memory says nothing about the frame
        raise
    except Exception as error:
        msg = f"codec {codec.name} failed on a frame of {source.nbytes} bytes: {error!r}"
        raise CodecError(msg) from error

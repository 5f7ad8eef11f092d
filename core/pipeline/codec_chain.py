"""Encodes and decodes a chunk by a chain of codecs, and computes checksums of blocks and frames.

A chunk that encoding does not make smaller is still stored encoded, unless all codecs decline it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import xxhash

from penstock.core.abc import FLOAT_DTYPES, convert_floats
from penstock.core.abc.codec import Declined
from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.errors import CodecError
from penstock.core.pipeline.links import (
    context_behind,
    context_for,
    decode_link,
    encode_link,
    output_bound,
)
from penstock.core.pipeline.staging import ThreadMemory
from penstock.core.types import Buffer, ByteRange, WorstErrors, flat_view

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.core.abc import Codec, CodecContext

_COMPARED = 64 << 10  # elements compared at once, so that they stay in the cache


def checksum(view: Buffer) -> int:
    """Return xxh3-64 of `view`, without copying and without the GIL."""
    return xxhash.xxh3_64_intdigest(view)


def content_hash(view: Buffer) -> int:
    """Return xxh3-128 of `view`, without copying and without the GIL.

    Chunks with equal hashes count as equal.
    """
    return xxhash.xxh3_128_intdigest(view)


def checksum_blocks(view: memoryview, ranges: Iterable[ByteRange]) -> list[int]:
    """Return xxh3-64 of each of `ranges` of the flat `view`."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[block.start : block.stop]) for block in ranges]


def mismatches(
    view: memoryview, ranges: Sequence[ByteRange], sums: Sequence[int], *, offset: int = 0
) -> list[ByteRange]:
    """Return those of `ranges` whose bytes in the flat `view` do not have the checksum in `sums`.

    Each returned range is shifted by `offset`.
    """
    blocks = zip(ranges, checksum_blocks(view, ranges), sums, strict=True)
    return [
        ByteRange(block.start + offset, block.stop + offset)
        for block, actual, expected in blocks
        if actual != expected
    ]


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """The result of encoding one chunk.

    Attributes:
        length: Stored bytes.
        checksum: xxh3-64 of the stored bytes.
        raw_checksum: xxh3-64 of the decoded bytes: the chunk, or lossy codecs' version of it.
        lengths: Output length of each codec that encoded the chunk, except the last.
        declined: Numbers of the codecs of the chain that declined the chunk or were skipped,
            ascending. The other codecs decode the frame. If no codec has encoded the chunk, nothing
            was written, and the chunk itself must be stored.
        errors: The worst errors of each range passed to `encode`; empty unless a lossy codec
            encoded the chunk. None for elements that are not floats.
    """

    length: int
    checksum: int
    raw_checksum: int
    lengths: tuple[int, ...]
    declined: tuple[int, ...] = ()
    errors: tuple[WorstErrors | None, ...] = ()


class CodecChain:
    """A sequence of codecs, in the order of encoding. Thread-safe.

    The first codec that accepts a chunk gets the chunk itself. Each later codec gets the output of
    the one before, as elements of the dtype that the earlier codec declares for its output.
    """

    def __init__(self, codecs: Sequence[Codec], *, versions: Sequence[int] | None = None) -> None:
        """Join `codecs`.

        Args:
            codecs: At least one codec.
            versions: The codec versions that wrote the frames to decode; default: the current ones.

        Raises:
            CodecError: `codecs` is empty; or a lossy codec comes after a lossless one, whose frames
                it would destroy; or a codec that needs a base is not first, or is in one chain
                with a lossy codec.
        """
        if not codecs:
            msg = "a codec chain needs at least one codec"
            raise CodecError(msg)
        _check_base_is_exact(codecs)
        for before, codec in pairwise(codecs):
            if before.lossless and not codec.lossless:
                msg = (
                    f"codec {codec.name} is lossy and comes after {before.name}, whose frames "
                    f"would no longer decode: put {codec.name} first"
                )
                raise CodecError(msg)
            if codec.needs_base:
                # The base is a chunk as it was saved, not the output of another codec.
                msg = (
                    f"codec {codec.name} compares with the same chunk of an earlier checkpoint, so "
                    f"it cannot come after {before.name}: put {codec.name} first"
                )
                raise CodecError(msg)
        self.codecs = tuple(codecs)
        self.versions = tuple(c.version for c in codecs) if versions is None else tuple(versions)

    def __repr__(self) -> str:
        return f"CodecChain({' -> '.join(codec.name for codec in self.codecs)})"

    @property
    def lossless(self) -> bool:
        """Whether `decode` restores exactly the bytes that `encode` was given."""
        return all(codec.lossless for codec in self.codecs)

    @property
    def needs_base(self) -> bool:
        """Whether the first codec reads `CodecContext.base`."""
        return self.codecs[0].needs_base

    def max_encoded_size(self, raw_length: int, /) -> int:
        """Return the most bytes that `encode` needs for any chunk of `raw_length` bytes.

        Any codec may decline; the next codec then gets the chunk at its old size.
        """
        bound = 0  # if at least one codec has encoded the chunk so far
        for codec in self.codecs:
            bound = max(bound, output_bound(codec, max(bound, raw_length)))
        return bound

    def encode(
        self,
        chunk: memoryview,
        out: memoryview,
        /,
        *,
        context: CodecContext,
        ranges: Sequence[ByteRange] = (),
    ) -> EncodedFrame:
        """Encode `chunk` into the beginning of `out`, which has at least `max_encoded_size` bytes.

        A codec that declines the chunk is skipped, and the next one gets the same input. A lossy
        codec is also skipped if an earlier codec has encoded the chunk.

        Args:
            chunk: The raw bytes.
            out: The memory for the frame.
            context: The facts about the chunk.
            ranges: The places in the chunk of the objects whose errors are needed.

        Raises:
            CodecError: A codec refused the chunk or broke its contract; `out` is undefined.
        """
        raw = source = flat_view(chunk).toreadonly()
        target = flat_view(out)
        used: list[Codec] = []
        declined: list[int] = []
        lengths: list[int] = []
        seen = context
        for number, codec in enumerate(self.codecs):
            if used and not codec.lossless:
                # It would round the frame of the codec before it, which then would not decode.
                declined.append(number)
                continue
            bound = output_bound(codec, source.nbytes)
            last = number == len(self.codecs) - 1
            # Codecs that encode the chunk alternate between two buffers. One that declines does not
            # count: the next codec may overwrite its output, and its input is in the other buffer.
            into = target if last else _scratch.take(bound, len(used) % 2)
            if into.nbytes < bound:
                msg = f"codec {codec.name} may need {bound} bytes of output, but has {into.nbytes}"
                raise CodecError(msg)
            seen = context_for(codec, seen, codec.version)
            length = encode_link(codec, source, into, seen)
            if isinstance(length, Declined):
                declined.append(number)
                continue
            seen = context_behind(codec, seen, length)
            used.append(codec)
            lengths.append(length)
            source = into[:length].toreadonly()
        if not used:
            plain = checksum(raw)
            return EncodedFrame(raw.nbytes, plain, plain, (), tuple(declined))
        if declined and declined[-1] == len(self.codecs) - 1:
            source = _moved(source, target)
        stored = lengths.pop()
        errors: tuple[WorstErrors | None, ...] = ()
        if all(codec.lossless for codec in used):
            raw_checksum = checksum(raw)
        else:
            # Readers compare this checksum with the decoded bytes, which a lossy codec has changed.
            decoded = _scratch.take(raw.nbytes, 2)
            links = [(codec, codec.version) for codec in used]
            _decode_links(links, source, decoded, context, lengths)
            raw_checksum = checksum(decoded)
            errors = tuple(
                worst_errors(raw[r.start : r.stop], decoded[r.start : r.stop], context.dtype)
                for r in ranges
            )
        _scratch.shrink()
        return EncodedFrame(
            stored, checksum(source), raw_checksum, tuple(lengths), tuple(declined), errors
        )

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

        The caller compares the stored checksum first (`checksum(frame)`), so codecs get damaged
        frames only if the checksum collides.

        Args:
            frame: All stored bytes of the frame.
            out: The memory for the chunk; undefined after a failure.
            context: The same as for `encode`.
            lengths: `EncodedFrame.lengths`.
            raw_checksum: `EncodedFrame.raw_checksum`; None: the decoded bytes are not compared.

        Raises:
            CodecError: The frame does not decode to this chunk, or a codec broke its contract.
        """
        target = flat_view(out)
        self._check_lengths(lengths, target.nbytes, context)
        links = list(zip(self.codecs, self.versions, strict=True))
        _decode_links(links, flat_view(frame).toreadonly(), target, context, lengths)
        _scratch.shrink()
        if raw_checksum is not None and checksum(target) != raw_checksum:
            msg = f"{self!r} decoded {target.nbytes} bytes that do not match their checksum"
            raise CodecError(msg)

    def _bounds(self, raw_length: int) -> list[int]:
        bounds, length = [], raw_length
        for codec in self.codecs:
            length = output_bound(codec, length)
            bounds.append(length)
        return bounds

    def _check_lengths(
        self, lengths: Sequence[int], raw_length: int, context: CodecContext
    ) -> None:
        if raw_length != context.raw_length:
            msg = (
                f"{self!r} cannot decode a chunk of {context.raw_length} bytes into {raw_length} "
                "bytes of memory"
            )
            raise CodecError(msg)
        # Lengths come from the manifest, which may be forged: check them before allocating memory.
        bounds = self._bounds(raw_length)[:-1]
        if len(lengths) != len(bounds) or any(
            not 0 <= length <= bound for length, bound in zip(lengths, bounds, strict=True)
        ):
            msg = (
                f"the recorded lengths {tuple(lengths)} after each codec of {self!r} but the last "
                f"are impossible for a chunk of {raw_length} bytes"
            )
            raise CodecError(msg)


# Two pieces that the links alternate between, and one for decoded bytes.
_scratch = ThreadMemory(3)


def _moved(source: memoryview, target: memoryview) -> memoryview:
    """Copy `source` to the beginning of `target`; return the copy."""
    into = target[: source.nbytes]
    copy_bytes(into, source)
    return into.toreadonly()


def _decode_links(
    links: Sequence[tuple[Codec, int]],
    source: memoryview,
    target: memoryview,
    context: CodecContext,
    lengths: Sequence[int],
) -> None:
    """Decode `source` into `target` through codecs with versions, given in encoding order."""
    calls: list[tuple[Codec, CodecContext]] = []
    for number, (codec, version) in enumerate(links):
        if calls:
            context = context_behind(*calls[-1], lengths[number - 1])
        calls.append((codec, context_for(codec, context, version)))
    for number, (codec, seen) in reversed(list(enumerate(calls))):
        into = target if number == 0 else _scratch.take(seen.raw_length, number % 2)
        decode_link(codec, source, into, seen)
        source = into.toreadonly()


def _check_base_is_exact(codecs: Sequence[Codec]) -> None:
    """Refuse a lossy codec together with one that needs a base: either order is wrong."""
    based = next((codec.name for codec in codecs if codec.needs_base), None)
    lossy = next((codec.name for codec in codecs if not codec.lossless), None)
    if based is not None and lossy is not None and based != lossy:
        msg = (
            f"codec {lossy} is lossy, but codec {based} needs the exact bytes of an earlier "
            f"checkpoint, so no rule can have both: leave out {lossy} or {based}"
        )
        raise CodecError(msg)


def worst_errors(saved: memoryview, given: memoryview, dtype: str) -> WorstErrors | None:
    """Return the worst errors in an array of floats; None if `convert_floats` lacks its dtype.

    Equal numbers have no error, and neither do two NaNs. NaN or infinity against any other value
    gives infinite errors. A nonzero number in place of zero has an infinite relative error. Errors
    are computed in float32, or in float64 for float64.

    Args:
        saved: The exact numbers.
        given: The numbers that readers get in their place.
        dtype: The dtype of both arrays.
    """
    import numpy as np  # noqa: PLC0415 - `penstock verify` works without it

    size = FLOAT_DTYPES.get(dtype)
    if size is None:
        return None
    wide = "float64" if dtype == "float64" else "float32"
    count = saved.nbytes // size
    blocks = np.empty((2, min(count, _COMPARED)), wide)
    absolute = relative = 0.0
    for start in range(0, count, _COMPARED):
        number = min(_COMPARED, count - start)
        here = slice(start * size, (start + number) * size)
        exact, error = blocks[0, :number], blocks[1, :number]
        convert_floats(saved[here], dtype, exact.view(np.uint8).data, wide)
        convert_floats(given[here], dtype, error.view(np.uint8).data, wide)
        with np.errstate(all="ignore"):
            np.subtract(error, exact, out=error)
            np.abs(error, out=error)
            if np.isnan(np.maximum.reduce(error)):  # from NaN, or from two equal infinities
                if _nan_moved(saved[here], given[here], dtype):
                    return WorstErrors(math.inf, math.inf)
                error[np.isnan(error)] = 0
            absolute = max(absolute, float(np.maximum.reduce(error)))
            if math.isinf(absolute):
                return WorstErrors(math.inf, math.inf)
            np.abs(exact, out=exact)
            np.divide(error, exact, out=error)
            ratio = float(np.fmax.reduce(error))  # which ignores 0 / 0
            relative = max(relative, 0.0 if math.isnan(ratio) else ratio)
    return WorstErrors(absolute, relative)


def _nan_moved(saved: memoryview, given: memoryview, dtype: str) -> bool:
    """Return whether one of two arrays has NaN where the other has not."""
    import numpy as np  # noqa: PLC0415 - as above

    masks: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for data in (saved, given):
        numbers = np.empty(data.nbytes // FLOAT_DTYPES[dtype])
        convert_floats(data, dtype, numbers.view(np.uint8).data, "float64")
        masks.append(np.isnan(numbers))
    return not np.array_equal(masks[0], masks[1])

"""One frame on its way back: verified, decoded, and placed where it belongs."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

from penstock.core.errors import CodecError
from penstock.core.format.blocks import frame_blocks
from penstock.core.pipeline.chain import checksum, mismatches
from penstock.core.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.plan.restore import ChunkUse, FrameJob


def direct_target(job: FrameJob[CodecChain], span: ByteRange) -> memoryview | None:
    """The memory of the one sink that takes the whole raw frame as it is."""
    if job.chain is not None or len(job.uses) != 1 or span.length != job.frame.length:
        return None
    use = job.uses[0]
    if use.sink is None or use.at != 0 or use.length != job.frame.raw_length:
        return None
    view = use.sink.view()
    return None if view is None else view[use.start : use.start + use.length]


class FrameReader:
    """Verifies and places what was read of frames. Thread-safe."""

    def __init__(self) -> None:
        self._scratch = threading.local()

    def finish(
        self,
        job: FrameJob[CodecChain],
        span: ByteRange,
        data: memoryview,
        *,
        placed: bool,
        decode: bool,
    ) -> str | None:
        """Verify `data`, the bytes of `span`, and bring them where they belong.

        Args:
            job: The frame.
            span: Which of its bytes these are.
            data: The bytes.
            placed: Whether they are in their target already.
            decode: Off, an encoded frame is compared with its checksum only.

        Returns:
            What is wrong with them, or None.
        """
        frame = job.frame
        if job.chain is None:
            detail = _verify_blocks(job, span, data)
            if detail is None and not placed:
                _place(job.uses, data, base=span.start)
            return detail
        if checksum(data) != frame.checksums[0]:
            return f"checksum of the frame at {job.blob}:{frame.offset} does not match"
        return self._decode(job, data) if decode else None

    def _decode(self, job: FrameJob[CodecChain], data: memoryview) -> str | None:
        frame, chain = job.frame, job.chain
        assert chain is not None
        assert job.context is not None
        use = job.uses[0]
        whole = len(job.uses) == 1 and use.at == 0 and use.length == frame.raw_length
        target = use.sink.view() if whole and use.sink is not None else None
        if target is not None:
            out = target[use.start : use.start + use.length]
        else:
            out = self._output(frame.raw_length)
        try:
            chain.decode(data, out, context=job.context, lengths=frame.lengths)
        except CodecError as error:
            return f"the frame at {job.blob}:{frame.offset} does not decode: {error}"
        if frame.raw_checksum is not None and checksum(out) != frame.raw_checksum:
            codecs = " and ".join(codec.name for codec in chain.codecs)
            return (
                f"decoded bytes of the frame at {job.blob}:{frame.offset} do not match, though its "
                f"stored bytes do: not the store is at fault, but {codecs} or this machine's memory"
            )
        if target is None:
            _place(job.uses, out, base=0)
        return None

    def _output(self, length: int) -> memoryview:
        """This thread's reused memory for decoded chunks."""
        held: memoryview | None = getattr(self._scratch, "view", None)
        if held is None or held.nbytes < length:
            held = self._scratch.view = memoryview(mmap.mmap(-1, max(length, 1)))
        return held[:length]


def _verify_blocks(job: FrameJob[CodecChain], span: ByteRange, data: memoryview) -> str | None:
    frame = job.frame
    ranges, expected = [], []
    for number, block in enumerate(frame_blocks(frame.offset, frame.length, job.block_bytes)):
        if span.start <= block.start and block.stop <= span.stop:
            ranges.append(ByteRange(block.start - span.start, block.stop - span.start))
            expected.append(frame.checksums[number])
    if sum(r.length for r in ranges) != span.length:
        return f"the range {span} of {job.blob}:{frame.offset} is not made of whole blocks"
    wrong = mismatches(data, ranges, expected, offset=frame.offset + span.start)
    if wrong:
        return f"checksum of {wrong[0].length} bytes at {job.blob}:{wrong[0].start} does not match"
    return None


def _place(uses: Sequence[ChunkUse], data: memoryview, *, base: int) -> None:
    """Copy what lies inside `data` (bytes of the chunk from `base` on) to its sinks."""
    for use in uses:
        if use.sink is None or use.at < base or use.at + use.length > base + data.nbytes:
            continue
        use.sink.copy_in(use.start, data[use.at - base : use.at - base + use.length])

"""Encodes chunks one by one, each by its chain of codecs, and against its base if they need one."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.core.errors import CodecError
from penstock.core.plan.save import context_of
from penstock.core.types import ByteRange, show_path

if TYPE_CHECKING:
    from penstock.core.pipeline.chain import CodecChain, EncodedFrame
    from penstock.core.pipeline.choices import ChainChoices
    from penstock.core.pipeline.chunks import Captured
    from penstock.core.plan.bases import StoredFrame
    from penstock.core.plan.save import Chunk, SavePlan
    from penstock.core.save.bases import SaveBases


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The frame of a chunk.

    Attributes:
        frame: What encoding showed of it.
        data: Its bytes, until this thread encodes the next chunk. None if all codecs declined the
            chunk, whose own bytes are to be stored.
        base: The frame against which it was encoded.
    """

    frame: EncodedFrame
    data: memoryview | None
    base: StoredFrame | None = None


class ChunkEncoder:
    """Encodes the chunks of one save. Thread-safe."""

    def __init__(self, plan: SavePlan, choices: ChainChoices, bases: SaveBases | None) -> None:
        """Prepare to encode.

        Args:
            plan: Chunks and objects of the save.
            choices: The codec chain of each chunk.
            bases: The earlier contents of the chunks; None: every chunk is encoded whole.
        """
        self._plan = plan
        self._choices = choices
        self._bases = bases
        self._slots = threading.local()
        self._slot_bytes = choices.max_encoded_size()

    def encode(self, captured: Captured) -> EncodedChunk:
        """Encode a chunk that has a chain.

        Raises:
            CodecError: A codec refused the chunk; the message names its objects.
        """
        index = captured.index
        chunk, chain = self._plan.chunks[index], self._choices.chain(index)
        assert chain is not None
        bases = self._bases if chain.needs_base else None
        context, slot = context_of(self._plan, chunk), self._slot()
        found = None if bases is None else bases.base_of(index)
        if found is not None:
            context = replace(context, base=found[1].toreadonly())
        try:
            frame = chain.encode(captured.view, slot, context=context, ranges=_ranges(chain, chunk))
        except CodecError as error:
            first = show_path(self._plan.objects[chunk.pieces[0].item].entry.path)
            more = f" and {len(chunk.pieces) - 1} more" if len(chunk.pieces) > 1 else ""
            msg = f"{first}{more}: {error}"
            raise CodecError(msg) from (error.__cause__ or error)
        if bases is not None:
            bases.keep(index, captured.view)
        if len(frame.declined) == len(chain.codecs):
            return EncodedChunk(frame, None)
        base = None if found is None or 0 in frame.declined else found[0]
        return EncodedChunk(frame, slot[: frame.length], base)

    def _slot(self) -> memoryview:
        """Return this thread's memory for one encoded frame."""
        slot: memoryview | None = getattr(self._slots, "view", None)
        if slot is None:
            slot = self._slots.view = memoryview(mmap.mmap(-1, max(self._slot_bytes, 1)))
        return slot


def _ranges(chain: CodecChain, chunk: Chunk) -> list[ByteRange]:
    """Return where the pieces of a chunk stand that a lossy chain is to be judged by."""
    if chain.lossless:
        return []
    return [ByteRange(p.at, p.at + p.stop - p.start) for p in chunk.pieces]

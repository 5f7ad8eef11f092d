"""Finds the chunks of a save whose bytes are stored already, so that they are not stored again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.pipeline.chain import content_hash
from penstock.core.pipeline.chunks import ChunkResult

if TYPE_CHECKING:
    from penstock.core.pipeline.chain import EncodedFrame
    from penstock.core.pipeline.choices import ChainChoices
    from penstock.core.pipeline.chunks import Captured, ChunkBases


class ChunkSharing:
    """Looks up the chunks of one save by their content. Thread-safe."""

    def __init__(self, choices: ChainChoices, bases: ChunkBases) -> None:
        """Prepare to look up chunks.

        Args:
            choices: The codec chain of each chunk.
            bases: Finds the frames of earlier saves.
        """
        self._choices = choices
        self._bases = bases
        self._contents: dict[int, int] = {}

    def content(self, index: int) -> int | None:
        """Return the hash of a chunk, if `find` has taken it."""
        return self._contents.get(index)

    def find(self, captured: Captured) -> ChunkResult | None:
        """Hash a chunk; return its result if its bytes are stored already, else None."""
        index = captured.index
        chain = self._choices.chain(index)
        content = self._contents[index] = content_hash(captured.view)
        if chain is not None and not chain.lossless:
            return None  # see `find_encoded`: its errors arise when the chunk is encoded
        stored = self._bases.shared(index, content, self._choices.number(index))
        if stored is None:
            return None
        if chain is not None and chain.needs_base:
            self._bases.keep(index, captured.view)
        return ChunkResult(0, 0, (), chain=0, shared=stored)

    def find_encoded(self, index: int, frame: EncodedFrame) -> ChunkResult | None:
        """Return the result of a chunk if what a lossy chain made of it is stored already."""
        chain, content = self._choices.chain(index), self._contents.get(index)
        if chain is None or chain.lossless or content is None:
            return None
        stored = self._bases.shared(index, content, self._choices.number(index))
        # Equal chunks: but a frame by other codecs gives back other values.
        if stored is None or len(stored.chain) != len(chain.codecs) - len(frame.declined):
            return None
        if stored.chain and stored.frame.raw_checksum != frame.raw_checksum:
            return None
        return ChunkResult(0, 0, (), chain=0, shared=stored, errors=frame.errors)

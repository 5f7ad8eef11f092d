"""Finds the chunks of a save whose bytes are stored already, so that they are not stored again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock.core.pipeline.chain import content_hash
from penstock.core.pipeline.chunks import ChunkResult
from penstock.core.plan.earlier_frames import content_key
from penstock.core.plan.save import context_of, elements_of

if TYPE_CHECKING:
    from penstock.core.pipeline.auto import ChainChoices
    from penstock.core.pipeline.chain import EncodedFrame
    from penstock.core.pipeline.chunks import Captured
    from penstock.core.plan.earlier_frames import ContentKey, StoredFrame
    from penstock.core.plan.save import SavePlan
    from penstock.core.save.bases import SaveBases


class ChunkSharing:
    """Looks up the chunks of one save by their content. Thread-safe.

    A chunk is found in an earlier checkpoint, or, if it has none of its kind, in this save: the
    first of equal chunks is stored, and the others refer to its frame.
    """

    def __init__(self, plan: SavePlan, choices: ChainChoices, bases: SaveBases | None) -> None:
        """Prepare to look up chunks.

        Args:
            plan: Chunks and objects of the save.
            choices: The codec chain of each chunk.
            bases: Finds the frames of earlier saves; None: there are none.
        """
        self._plan = plan
        self._choices = choices
        self._bases = bases
        self._contents: dict[int, int] = {}
        self._lock = threading.Lock()  # guards `_first`
        self._first: dict[tuple[int, ContentKey], int] = {}

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
        stored = self._earlier(index, content)
        same_as = None if stored is not None else self._earlier_in_save(index, content)
        if stored is None and same_as is None:
            return None
        if self._bases is not None and chain is not None and chain.needs_base:
            self._bases.keep(index, captured.view)
        return ChunkResult(0, 0, (), chain=0, shared=stored, same_as=same_as)

    def _earlier(self, index: int, content: int) -> StoredFrame | None:
        if self._bases is None:
            return None
        return self._bases.shared(index, content, self._choices.number(index))

    def _earlier_in_save(self, index: int, content: int) -> int | None:
        """Return the number of the chunk of this save whose frame is decoded to this one, too."""
        chunk, number = self._plan.chunks[index], self._choices.number(index)
        context, elements = context_of(self._plan, chunk), elements_of(self._plan, chunk)
        is_raw = self._choices.chain(index) is None
        key = number, content_key(content, context, elements, is_raw=is_raw)
        with self._lock:
            first = self._first.setdefault(key, index)
        return None if first == index else first

    def find_encoded(self, index: int, frame: EncodedFrame) -> ChunkResult | None:
        """Return the result of a chunk if what a lossy chain made of it is stored already."""
        chain, content = self._choices.chain(index), self._contents.get(index)
        if chain is None or chain.lossless or content is None:
            return None
        stored = self._earlier(index, content)
        # Equal chunks: but a frame by other codecs gives back other values.
        if stored is None or len(stored.chain) != len(chain.codecs) - len(frame.declined):
            return None
        if stored.chain and stored.frame.raw_checksum != frame.raw_checksum:
            return None
        return ChunkResult(0, 0, (), chain=0, shared=stored, errors=frame.errors)

"""Finds frames of an earlier checkpoint that a save may refer to. Sans-IO.

A frame can be the base of a delta only if the earlier checkpoint cut the same bytes of the same
objects into one chunk. Chunk keys show this: if two keys are equal, every byte is at the same place
of the same object. A frame can replace a chunk if it holds the same bytes, and codecs get the same
context for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.core.abc.codec import CodecContext
from penstock.core.format.records import blob_uid
from penstock.core.plan.save import ShardSpan, slab_context
from penstock.core.types import Region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.format.records import BlobRecord, Chain, Frame, ObjectRecord, PartHead
    from penstock.core.plan.save import Piece, SavePlan
    from penstock.core.types import ObjectPath


class PieceKey(NamedTuple):
    """Bytes `[start, stop)` of a region of an object, which are at byte `at` of a chunk."""

    path: ObjectPath
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    region: Region
    start: int
    stop: int
    at: int


ChunkKey: TypeAlias = tuple[PieceKey, ...]
"""The pieces of a chunk, in their order in the chunk."""


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A frame with the facts from its part, so that another save's part can list it.

    Attributes:
        frame: The frame; its blob and chain numbers index the tables of its own part.
        blob: The blob that holds it.
        chain: The codecs that encoded it.
        block_bytes: The bytes per checksum in a raw frame.
        base: The frame that it is encoded against, if any.
    """

    frame: Frame
    blob: BlobRecord
    chain: Chain
    block_bytes: int
    base: StoredFrame | None = None

    def links(self) -> Iterator[StoredFrame]:
        """Yield the frame, then its bases, nearest first."""
        link: StoredFrame | None = self
        while link is not None:
            yield link
            link = link.base

    @property
    def depth(self) -> int:
        """The number of bases that it decodes with."""
        return sum(1 for _ in self.links()) - 1


def planned_keys(plan: SavePlan, numbers: Iterable[int]) -> dict[int, ChunkKey]:
    """Return the keys of chunks of a plan, by number.

    With several ranks, all of these must be chunks that this rank writes, and `SavePlan.spans` must
    have their rectangles.
    """
    return {
        number: tuple(key for piece in plan.chunks[number].pieces for key in _keys(plan, piece))
        for number in numbers
    }


def _keys(plan: SavePlan, piece: Piece) -> Iterator[PieceKey]:
    entry = plan.objects[piece.item].entry
    spec = entry.spec
    spans = plan.spans.get(piece.item)
    if spans is None:
        spans = (ShardSpan(0, Region.whole(spec.shape)),)
    for span in spans:
        start = max(piece.start, span.start)
        stop = min(piece.stop, span.start + span.region.numel * spec.itemsize)
        if start < stop:
            yield PieceKey(
                entry.path,
                spec.dtype,
                spec.itemsize,
                spec.shape,
                span.region,
                start - span.start,
                stop - span.start,
                piece.at + start - piece.start,
            )


def stored_frames(objects: Iterable[ObjectRecord]) -> dict[ChunkKey, StoredFrame]:
    """Return all frames of a checkpoint by the keys of their chunks.

    Equal chunks may share a frame, which then has the key of each. Slabs that share a frame are not
    found, since the manifest does not record which pieces belong to which slab.

    Args:
        objects: All objects of the checkpoint; tied ones have no frames.
    """
    pieces: dict[tuple[int, int, int], list[PieceKey]] = {}
    frames: dict[tuple[int, int, int], tuple[Frame, PartHead]] = {}
    for record in objects:
        for shard in record.shards:
            for ref in shard.chunks:
                frame = record.frames[ref.frame]
                place = record.head.rank, frame.blob, frame.offset
                frames[place] = frame, record.head
                pieces.setdefault(place, []).append(
                    PieceKey(
                        record.path,
                        record.spec.dtype,
                        record.spec.itemsize,
                        record.spec.shape,
                        shard.region,
                        ref.start,
                        ref.stop,
                        ref.at,
                    )
                )
    return {
        key: stored
        for place, (frame, head) in frames.items()
        for stored in [resolved(frame, head.blobs, head.chains, head.block_bytes)]
        for key in _keys_of(pieces[place], frame.raw_length)
    }


def _keys_of(pieces: Iterable[PieceKey], length: int) -> Iterator[ChunkKey]:
    slab: list[PieceKey] = []
    for piece in pieces:
        if piece.stop - piece.start == length:
            yield (piece,)
        else:
            slab.append(piece)
    if slab:
        yield tuple(sorted(slab, key=lambda piece: piece.at))


def resolved(
    frame: Frame, blobs: Sequence[BlobRecord], chains: Sequence[Chain], block_bytes: int
) -> StoredFrame:
    """Return a frame and its bases, with their entries in the tables of its part."""
    base = None if frame.base is None else resolved(frame.base, blobs, chains, block_bytes)
    return StoredFrame(frame, blobs[frame.blob], chains[frame.chain], block_bytes, base)


_RAW, _DECLINED = ("raw",), ("declined",)


class ContentKey(NamedTuple):
    """Content and length of a chunk, and the context that a reader passes to its codecs.

    If two chunks have equal keys and the same codecs, the frame of either decodes to both.
    """

    content: int
    length: int
    context: tuple[object, ...]
    elements: tuple[str, int] | None


def content_key(
    content: int, context: CodecContext, elements: tuple[str, int] | None, *, is_raw: bool
) -> ContentKey:
    """Return the key of a chunk that is stored raw or encoded.

    Args:
        content: The hash of the bytes of the chunk.
        context: The context of the codecs for the chunk.
        elements: The elements of the chunk as its frame would record them.
        is_raw: Whether the chunk goes to no codec, so that only its bytes count.
    """
    if is_raw:
        return ContentKey(content, context.raw_length, _RAW, None)
    return ContentKey(content, context.raw_length, _described(context), elements)


class EarlierFrames:
    """The frames of a checkpoint that a later save may refer to.

    A chunk is encoded against the frame with the same key. A chunk with equal content is not stored
    again: the save refers to the frame.

    Attributes:
        by_key: The frames by the keys of their chunks.
    """

    def __init__(
        self,
        by_key: Mapping[ChunkKey, StoredFrame] | None = None,
        shared: Iterable[tuple[CodecContext, StoredFrame]] = (),
    ) -> None:
        """Collect the frames.

        Args:
            by_key: The frames by the keys of their chunks.
            shared: The frames to find by content, each with the context that codecs get for its
                chunk. Frames of a save are left out if the checkpoint uses less than half of that
                save's blobs, since a few shared chunks would keep all of that save's data alive.
        """
        self.by_key = by_key or {}
        known = list(shared)
        worth = _worthwhile([stored for _, stored in known])
        self._by_content: dict[ContentKey, StoredFrame] = {}
        for context, stored in known:
            content = stored.frame.content
            if content is not None and worth.issuperset(_uids(stored)):
                where = _where(context, stored)
                key = ContentKey(content, context.raw_length, where, stored.frame.elements)
                self._by_content[key] = stored

    def equal(
        self, content: int, context: CodecContext, elements: tuple[str, int] | None, chain: Chain
    ) -> StoredFrame | None:
        """Return a frame that a reader decodes to the chunk; None if there is none.

        Args:
            content: The hash of the bytes of the chunk.
            context: The context of the codecs for the chunk.
            elements: The elements of the chunk as its frame would record them.
            chain: The codecs that would encode the chunk. The frame was encoded by the same codecs,
                except those that declined.
        """
        stored = self._by_content.get(content_key(content, context, elements, is_raw=not chain))
        if not chain:
            return stored
        if stored is not None:
            links = iter(chain)
            if all(link in links for link in stored.chain):
                return stored
        return self._by_content.get(ContentKey(content, context.raw_length, _DECLINED, None))


def with_contexts(
    frames: Mapping[ChunkKey, StoredFrame],
) -> Iterator[tuple[CodecContext, StoredFrame]]:
    """Yield frames of a checkpoint with the contexts for decoding them."""
    for key, stored in frames.items():
        length = stored.frame.raw_length
        for piece in key:
            if piece.at == 0 and piece.stop - piece.start == length:
                sizes = piece.region.sizes
                context = CodecContext(piece.dtype, piece.itemsize, sizes, piece.start, length)
                break
        else:
            context = slab_context(length, stored.frame.elements)
        yield context, stored


def _where(context: CodecContext, stored: StoredFrame) -> tuple[object, ...]:
    if stored.frame.chain:
        return _described(context)
    # A raw frame among encoded ones holds a chunk that every codec declined.
    return _DECLINED if stored.blob.name.endswith(".enc") else _RAW


def _described(context: CodecContext) -> tuple[object, ...]:
    return context.dtype, context.itemsize, context.shape, context.start


def _worthwhile(frames: Collection[StoredFrame]) -> set[str | None]:
    links = [link for stored in frames for link in stored.links()]
    used = {(link.blob.name, link.frame.offset): link.frame.length for link in links}
    lengths = {link.blob.name: link.blob.length for link in links}
    balance: dict[str | None, int] = {}
    for (name, _), length in used.items():
        balance[blob_uid(name)] = balance.get(blob_uid(name), 0) + 2 * length
    for name, length in lengths.items():
        balance[blob_uid(name)] -= length
    return {uid for uid, rest in balance.items() if rest >= 0}


def _uids(stored: StoredFrame) -> set[str | None]:
    return {blob_uid(link.blob.name) for link in stored.links()}


class PartTables:
    """The blob and chain tables of a part being written. Frames refer to entries by number."""

    def __init__(self, blobs: Sequence[BlobRecord], chains: Sequence[Chain]) -> None:
        """Begin with the save's own blobs and chains."""
        self.blobs = list(blobs)
        self.chains = list(chains)
        self._blob_numbers = {blob.name: number for number, blob in enumerate(blobs)}
        self._placed: dict[tuple[str, int], Frame] = {}

    def place(self, stored: StoredFrame) -> Frame:
        """Return another save's frame and its bases, renumbered for these tables."""
        key = stored.blob.name, stored.frame.offset
        if key not in self._placed:
            self._placed[key] = replace(
                stored.frame,
                blob=self._blob(stored.blob),
                chain=self._chain(stored.chain),
                base=None if stored.base is None else self.place(stored.base),
            )
        return self._placed[key]

    def _blob(self, blob: BlobRecord) -> int:
        if blob.name not in self._blob_numbers:
            self._blob_numbers[blob.name] = len(self.blobs)
            self.blobs.append(blob)
        return self._blob_numbers[blob.name]

    def _chain(self, chain: Chain) -> int:
        if chain not in self.chains:
            self.chains.append(chain)
        return self.chains.index(chain)

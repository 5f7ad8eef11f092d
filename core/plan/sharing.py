"""Finds stored frames that hold the bytes of a chunk, by their content. Sans-IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.core.abc.codec import CodecContext
from penstock.core.format.records import blob_uid
from penstock.core.plan.save import slab_context

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from penstock.core.format.records import Chain
    from penstock.core.plan.bases import ChunkKey, StoredFrame

_RAW, _DECLINED = ("raw",), ("declined",)


class ContentKey(NamedTuple):
    """Content and length of a chunk, and what a reader tells the codecs of its frame.

    Where these are equal, one frame is decoded to both chunks, if it has the codecs of both.
    """

    content: int
    length: int
    context: tuple[object, ...]
    elements: tuple[str, int] | None


def content_key(
    content: int, context: CodecContext, elements: tuple[str, int] | None, *, is_raw: bool
) -> ContentKey:
    """Return the key of a chunk that is to be stored raw, or goes to codecs.

    Args:
        content: The hash of the bytes of the chunk.
        context: The context of the codecs for the chunk.
        elements: The elements of the chunk as its frame would record them.
        is_raw: Whether it goes to no codec, so that nothing but its bytes counts.
    """
    if is_raw:
        return ContentKey(content, context.raw_length, _RAW, None)
    return ContentKey(content, context.raw_length, _described(context), elements)


class SharedFrames:
    """The frames of a checkpoint that a later save may refer to, by the content of their chunks.

    Frames of a save of whose blobs the checkpoint uses less than half are left out: a chunk or two
    would keep all data of that save alive.
    """

    def __init__(self, frames: Iterable[tuple[CodecContext, StoredFrame]] = ()) -> None:
        """Take the frames, each with the context that codecs get for its chunk."""
        known = list(frames)
        worth = _worthwhile([stored for _, stored in known])
        self._frames: dict[ContentKey, StoredFrame] = {}
        for context, stored in known:
            content = stored.frame.content
            if content is not None and worth.issuperset(_uids(stored)):
                where = _where(context, stored)
                key = ContentKey(content, context.raw_length, where, stored.frame.elements)
                self._frames[key] = stored

    def __len__(self) -> int:
        return len(self._frames)

    def find(
        self, content: int, context: CodecContext, elements: tuple[str, int] | None, chain: Chain
    ) -> StoredFrame | None:
        """Return a frame that a reader decodes to the chunk.

        Args:
            content: The hash of the bytes of the chunk.
            context: The context of the codecs for the chunk.
            elements: The elements of the chunk as its frame would record them.
            chain: The codecs that would encode the chunk. Those of the frame are the same, but for
                codecs that declined.
        """
        stored = self._frames.get(content_key(content, context, elements, is_raw=not chain))
        if not chain:
            return stored
        if stored is not None:
            links = iter(chain)
            if all(link in links for link in stored.chain):
                return stored
        return self._frames.get(ContentKey(content, context.raw_length, _DECLINED, None))


def with_contexts(
    frames: Mapping[ChunkKey, StoredFrame],
) -> Iterator[tuple[CodecContext, StoredFrame]]:
    """Yield frames of a checkpoint with the contexts in which a reader decodes them."""
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
    # Among encoded frames a raw one is of a chunk that every codec has declined.
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

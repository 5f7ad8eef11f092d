"""The save plan, sans-IO: objects -> chunks and slabs -> places in blobs.

The way back is in `restore_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.manifest import MAX_CHUNK_BYTES
from penstock.core.types import PAGE_BYTES, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.core.types import Role

SLAB_ALIGNMENT = 64
"""Bytes to which the pieces of a slab are aligned; the bytes between them are zero."""


class Capture(StrEnum):
    """When an object's bytes are taken."""

    FROZEN = "frozen"  # a value: bytes already
    NOW = "now"  # before `save` returns
    DEFERRED = "deferred"  # behind the fence


_CAPTURE_ORDER = {Capture.FROZEN: 0, Capture.NOW: 1, Capture.DEFERRED: 2}


@dataclass(frozen=True, slots=True)
class PlanItem:
    """What planning needs to know of one object on this rank.

    Attributes:
        nbytes: Raw bytes.
        itemsize: Bytes per element.
        phase: Address modulo 4096 that the file offset shall be congruent to.
        group: Top-level key.
        role: Purpose.
        chain: Number of the codec chain; 0 is raw.
        device: Where the memory is.
        capture: When it is taken.
    """

    nbytes: int
    itemsize: int
    phase: int
    group: str
    role: Role
    chain: int
    device: str
    capture: Capture


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, stop)` of item `item` stand at `at` in the chunk."""

    item: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of capture and encoding.

    Attributes:
        pieces: One, or (a slab) several.
        length: Raw bytes, padding between pieces included.
        phase: Address modulo 4096 of its first byte, in memory and (raw) in the blob.
        chain: Number of the codec chain; 0 is raw.
        offset: In the `.raw` blob; None for encoded chunks.
        capture: When it is taken; slabs are uniform.
        slab: Whether it is gathered from several small objects.
    """

    pieces: tuple[Piece, ...]
    length: int
    phase: int
    chain: int
    offset: int | None
    capture: Capture
    slab: bool


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Chunks in order of capture (frozen and now, then deferred), offsets ascending in it.

    Attributes:
        chunks: See above.
        raw_blob_bytes: Where the last raw frame ends, gaps included.
        raw_bytes: Bytes of all objects, without padding.
    """

    chunks: tuple[Chunk, ...]
    raw_blob_bytes: int
    raw_bytes: int


def plan_save(
    items: Sequence[PlanItem],
    *,
    chunk_bytes: int,
    slab_limit_bytes: int = 1 << 20,
    encoded_slab_bytes: int = 1 << 20,
) -> SavePlan:
    """Cut objects into chunks and slabs, and give every raw chunk its place in the `.raw` blob.

    Every frame has whole pages of the blob to itself, so no two writes ever touch one alignment
    unit. The same items and sizes give the same plan.

    Args:
        items: Objects of this rank in the order in which they were described.
        chunk_bytes: Most raw bytes of a chunk; rounded down to pages, at least one page.
        slab_limit_bytes: Smaller objects are gathered into slabs.
        encoded_slab_bytes: Most raw bytes of a slab that goes through a codec chain.

    Raises:
        ConfigError: `chunk_bytes` is beyond `MAX_CHUNK_BYTES`, or cannot hold one element.
    """
    chunk_bytes = max(PAGE_BYTES, align_down(chunk_bytes, PAGE_BYTES))
    if chunk_bytes > MAX_CHUNK_BYTES:
        msg = f"chunk_bytes is {chunk_bytes}; the format allows at most {MAX_CHUNK_BYTES}"
        raise ConfigError(msg)
    gatherer = _SlabGatherer(slab_limit_bytes, chunk_bytes, encoded_slab_bytes)
    drafts: list[Chunk] = []
    raw_bytes = 0
    for number, item in enumerate(items):
        raw_bytes += item.nbytes
        if item.nbytes and not gatherer.take(number, item):
            drafts += _cut(number, item, chunk_bytes)
    drafts += gatherer.finish()
    drafts.sort(key=lambda c: (_CAPTURE_ORDER[c.capture], c.pieces[0].item))
    chunks, end = _lay_out(drafts)
    return SavePlan(chunks, end, raw_bytes)


class _SlabGatherer:
    def __init__(self, limit_bytes: int, raw_bytes: int, encoded_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._raw_bytes = raw_bytes
        self._encoded_bytes = min(encoded_bytes, raw_bytes)
        self._open: dict[tuple[str, Role, int, str, Capture], tuple[list[Piece], int]] = {}
        self._done: list[Chunk] = []

    def take(self, number: int, item: PlanItem) -> bool:
        """Put the object into a slab; False if it is too large for one."""
        capacity = self._encoded_bytes if item.chain else self._raw_bytes
        if item.nbytes >= self._limit_bytes or item.nbytes > capacity:
            return False
        key = (item.group, item.role, item.chain, item.device, item.capture)
        pieces, end = self._open.get(key, ([], 0))
        at = align_up(end, SLAB_ALIGNMENT)
        if pieces and at + item.nbytes > capacity:
            self._close(key, pieces, end)
            pieces, at = [], 0
        pieces.append(Piece(number, 0, item.nbytes, at))
        self._open[key] = (pieces, at + item.nbytes)
        return True

    def finish(self) -> list[Chunk]:
        for key, (pieces, end) in self._open.items():
            self._close(key, pieces, end)
        return self._done

    def _close(
        self, key: tuple[str, Role, int, str, Capture], pieces: list[Piece], end: int
    ) -> None:
        _, _, chain, _, capture = key
        self._done.append(Chunk(tuple(pieces), end, 0, chain, None, capture, slab=True))


def _cut(number: int, item: PlanItem, chunk_bytes: int) -> Iterator[Chunk]:
    # Elements of an odd size cannot be cut at pages; their chunks get pages of their own, copied.
    paged = PAGE_BYTES % item.itemsize == 0
    step = chunk_bytes - chunk_bytes % item.itemsize
    if not step:
        msg = f"chunk_bytes is {chunk_bytes}, less than one element of {item.itemsize} bytes"
        raise ConfigError(msg)
    phase = item.phase if paged and not item.chain and item.phase % item.itemsize == 0 else 0
    start = 0
    while start < item.nbytes:
        stop = min(item.nbytes, start + step - phase)
        piece = Piece(number, start, stop, 0)
        yield Chunk((piece,), stop - start, phase, item.chain, None, item.capture, slab=False)
        start, phase = stop, 0


def _lay_out(drafts: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], int]:
    chunks: list[Chunk] = []
    end = 0
    for draft in drafts:
        if draft.chain:
            chunks.append(draft)
            continue
        # A chunk that continues its object at a page boundary lands right behind the one before.
        offset = align_up(end, PAGE_BYTES) + draft.phase
        end = offset + draft.length
        chunks.append(replace(draft, offset=offset))
    return tuple(chunks), end

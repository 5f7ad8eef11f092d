"""Finds objects that change before they are captured, by their versions and by samples.

A write through `tensor.data` or `tensor.numpy()` does not change the version of a tensor. So a few
cache lines of each object are copied when `save` returns, and compared with the captured bytes and
with the memory at the fence. The samples include the first and the last line of each object, and of
each 16 MiB of a large one. A change of few elements may lie between the lines, and is then missed.

One call of numpy gathers the lines of all objects: 8 lines of each of 3,000 tensors take 2 ms, and
one call of `ctypes.string_at` per line would take 11.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import places_of, versions_of
from penstock.core.concurrency.gather import gather
from penstock.core.ranks.structure import LINE_BYTES, LINES
from penstock.core.save.live_memory import by_class, torn, while_still

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.core.abc import ByteSource
    from penstock.core.plan.save import Chunk, PlannedObject

_LINES_OF_CHUNK = 64  # of 16 MiB; an object in a slab, of less than 1 MiB, has `LINES`
_NOISE = np.frombuffer(os.urandom(LINE_BYTES), np.uint8)


@dataclass(slots=True)
class _SampleLines:
    """The lines of one width, in the order in which chunks are captured.

    Attributes:
        width: Bytes of each line: 64, or less where an object is smaller.
        piece: Number of the piece that a line belongs to.
        offset: Bytes from the start of the object to the start of the line.
        at: Bytes from the start of the chunk; negative if the chunk has the elements in another
            order.
        chunk: Number of the chunk; ascending.
        values: The bytes of the line when `save` returned.
    """

    width: int
    piece: NDArray[np.int64]
    offset: NDArray[np.int64]
    at: NDArray[np.int64]
    chunk: NDArray[np.int64]
    values: NDArray[np.void]


class MemorySamples:
    """Cache lines of every sampled object in host memory, copied at creation."""

    def __init__(
        self, chunks: Sequence[Chunk], numbers: Sequence[int], objects: Sequence[PlannedObject]
    ) -> None:
        """Sample the objects that the chunks with these numbers capture, in their order."""
        sampled = [chunks[number] for number in numbers]
        pieces = [piece for chunk in sampled for piece in chunk.pieces]
        sizes = [len(chunk.pieces) for chunk in sampled]
        wanted = [LINES if chunk.slab else _LINES_OF_CHUNK for chunk in sampled]
        self._items = [piece.item for piece in pieces]
        self._runs: dict[int, tuple[int, int]] = {}  # first and last piece of each item, on demand
        self._sources = [objects[item].entry.source for item in self._items]
        table = _Pieces(
            np.repeat(np.array(numbers, np.int64), sizes),
            np.array([piece.start for piece in pieces], np.int64),
            np.array([piece.stop for piece in pieces], np.int64),
            np.array([piece.at for piece in pieces], np.int64),
            np.repeat(np.array(wanted, np.int64), sizes),
        )
        for number, source in enumerate(self._sources):
            if source.address is None:
                _sample_scattered(table, number, source)
        self._lines = _place_lines(table)
        self._groups = by_class(self._sources)
        for lines, values in zip(self._lines, self._read(), strict=True):
            lines.values = values

    def changed(self) -> set[int]:
        """Return the items whose memory differs from the samples."""
        return {
            item
            for lines, values in zip(self._lines, self._read(), strict=True)
            for item in self._differing(lines, slice(None), values)
        }

    def changed_in(self, copies: Mapping[int, int]) -> set[int]:
        """Return the items whose captured bytes differ; `copies` maps chunks to addresses."""
        changed: set[int] = set()
        numbers = np.array(sorted(copies), np.int64)
        addresses = np.array([copies[number] for number in numbers.tolist()], np.int64)
        for lines in self._lines:
            firsts, lasts = np.searchsorted(lines.chunk, [numbers, numbers + 1])
            counts = lasts - firsts
            # All lines of these chunks: places are consecutive in a chunk, and jump between chunks.
            jumps = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
            part = np.arange(len(jumps)) + jumps
            at = lines.at[part]
            if len(at):
                values = gather(np.where(at < 0, 0, at) + np.repeat(addresses, counts), lines.width)
                values = np.where(at < 0, lines.values[part], values)
                changed.update(self._differing(lines, part, values))
        return changed

    def is_changed(self, item: int) -> bool:
        """Return whether an item's memory differs from the samples; the caller holds it."""
        first, last = self._pieces_of(item)
        source = self._sources[first]
        at = source.locate()
        start = (source.address if at is None else at) or 0
        for lines in self._lines:
            low, high = np.searchsorted(lines.piece, [first, last + 1])
            part = slice(int(low), int(high))
            if low < high:
                values = gather(_addresses(np.int64(start), lines.offset[part]), lines.width)
                if self._differing(lines, part, values):
                    return True
        return False

    def _pieces_of(self, item: int) -> tuple[int, int]:
        if not self._runs:
            for number, each in enumerate(self._items):
                self._runs[each] = self._runs.get(each, (number, number))[0], number
        return self._runs[item]

    def _read(self) -> list[NDArray[np.void]]:
        return while_still(self._groups, self._read_now)

    def _read_now(self) -> list[NDArray[np.void]]:
        places = zip(self._sources, places_of(self._sources), strict=True)
        first = [(source.address if at is None else at) or 0 for source, at in places]
        starts = np.array(first, np.int64)
        return [
            gather(_addresses(starts[lines.piece], lines.offset), lines.width)
            for lines in self._lines
        ]

    def _differing(
        self, lines: _SampleLines, part: slice | NDArray[np.int64], values: NDArray[np.void]
    ) -> Iterable[int]:
        word = f"u{min(lines.width, 8)}"
        before, after = lines.values[part].view(word), values.view(word)
        if np.array_equal(before, after):
            return ()
        differs = (before != after).reshape(len(values), -1).any(axis=1)
        return {self._items[piece] for piece in set(lines.piece[part][differs].tolist())}


@dataclass(slots=True)
class _Pieces:
    """Columns of the sampled pieces: chunk, first and last byte, place in the chunk, lines."""

    chunk: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    at: NDArray[np.int64]
    count: NDArray[np.int64]


def _place_lines(table: _Pieces) -> list[_SampleLines]:
    """Spread the lines of each piece evenly over it."""
    chunk, start, at, count = table.chunk, table.start, table.at, table.count
    length = np.maximum(table.stop - start, 1)
    # Two lines of at least half its size cover an object that is smaller than a line.
    exponents = np.frexp(np.minimum(length, LINE_BYTES).astype(np.float64))[1] - 1
    width = np.left_shift(1, exponents.astype(np.int64))
    count = np.where(width < LINE_BYTES, np.minimum(count, 2), count)
    piece = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
    offset = (length[piece] - width[piece]) * number // (count[piece] - 1)
    by_width = []
    # Not `np.unique`: its first call imports masked arrays, which takes 20 ms.
    for each in np.flatnonzero(np.bincount(width)).tolist():
        these = np.flatnonzero(width[piece] == each)
        these = these[np.argsort(chunk[piece[these]], kind="stable")]
        owner = piece[these]
        by_width.append(
            _SampleLines(
                width=each,
                piece=owner,
                offset=start[owner] + offset[these],
                at=np.where(at[owner] < 0, -1, at[owner] + offset[these]),
                chunk=chunk[owner],
                values=np.empty(0, f"V{each}"),
            )
        )
    return by_width


def _addresses(start: NDArray[np.int64] | np.int64, offset: NDArray[np.int64]) -> NDArray[np.int64]:
    # Freed memory counts as changed: read random bytes there, which equal no sample.
    return np.where(start == 0, _NOISE.ctypes.data, start + offset)


def _is_dense(source: ByteSource) -> bool:
    """Return whether memory that is not row-major (channels last) has no gaps."""
    memory = source.memory
    if memory is None or source.device != "cpu" or source.locate() is None:
        return False
    expected = source.nbytes // math.prod(memory.shape)
    for stride, size in sorted(zip(memory.strides, memory.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _sample_scattered(table: _Pieces, number: int, source: ByteSource) -> None:
    """Sample the memory of an object that is not row-major, if the memory has no gaps.

    Its lines are compared with the memory only: a chunk has its elements in another order.
    """
    if table.start[number] or not _is_dense(source):
        table.count[number] = 0
        return
    table.stop[number] = source.nbytes
    table.at[number] = -1


class TornCheck:
    """Finds objects that change between the call of `save` and their capture, or the fence.

    Compares versions and, for deferred objects, also samples of their memory.

    Attributes:
        passed: Whether the fence was passed, after which deferred memory may change.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        objects: Sequence[PlannedObject],
        *,
        now: Sequence[int],
        deferred: Sequence[int],
    ) -> None:
        """Prepare to compare.

        Args:
            chunks: The chunks of the plan.
            objects: The objects of the plan.
            now: The numbers of the chunks that are captured while `save` waits.
            deferred: The numbers of the chunks captured later.
        """
        self.passed = False
        self.objects = objects
        """The objects of the plan; none once the save is over."""
        self._chunks = chunks
        self._now, self._deferred = now, deferred
        self._samples: MemorySamples | None = None

    def sample(self) -> None:
        """Sample the deferred memory now, when `save` is about to return."""
        if self._deferred:
            self._samples = MemorySamples(self._chunks, self._deferred, self.objects)

    def check(self, *, deferred: bool, samples: bool = False, known: Collection[int] = ()) -> None:
        """Compare versions with those at the time of `save` and, if requested, samples.

        Args:
            deferred: Whether to compare the deferred objects; if not, all others.
            samples: Whether to compare the memory with its samples, too.
            known: Objects that are known to differ.

        Raises:
            TornSnapshotError: Some objects differ.
        """
        # Read these first, `objects` last: `forget` may run meanwhile, and drops objects first.
        sampled, chunks, objects = self._samples, self._chunks, self.objects
        if not objects or (deferred and self.passed):
            return  # the save is over, or the memory was allowed to change
        changed = set(known)
        numbers = self._deferred if deferred else self._now
        items = [piece.item for number in numbers for piece in chunks[number].pieces]
        versions = versions_of([objects[item].entry.source for item in items])
        for item, version in zip(items, versions, strict=True):
            described = objects[item].version
            if described is not None and version != described:
                changed.add(item)
        if samples and sampled is not None:
            changed |= sampled.changed()
        # If the fence was passed meanwhile, it compared this memory, which may change afterwards.
        if changed and not (deferred and self.passed):
            raise torn([objects[item].entry.path for item in sorted(changed)], deferred=deferred)

    def check_copies(self, copies: Mapping[int, int]) -> None:
        """Compare captured bytes with the samples; `copies` maps chunks to addresses of copies.

        A tensor may change before its copy and get its old values back before the fence, as when
        averaged weights are swapped in and out. Then only the copy shows the change.

        Raises:
            TornSnapshotError: Some objects differ.
        """
        if self._samples is not None:
            changed = self._samples.changed_in(copies)
            if changed:
                self.check(deferred=True, samples=True, known=changed)

    def check_items(self, items: Iterable[int]) -> None:
        """Compare the memory of deferred objects with the samples; the caller holds it.

        Raises:
            TornSnapshotError: Some objects differ.
        """
        if self._samples is not None:
            changed = {item for item in items if self._samples.is_changed(item)}
            if changed:
                self.check(deferred=True, known=changed)

    def deferred_sources(self) -> list[ByteSource]:
        """Return the sources of all deferred objects; none after the save."""
        chunks, objects = self._chunks, self.objects
        if not objects:
            return []
        items = {p.item: None for number in self._deferred for p in chunks[number].pieces}
        return [objects[item].entry.source for item in items]

    def forget(self) -> None:
        """Drop all references to the state after the save."""
        self.passed = True
        self.objects = self._chunks = ()
        self._samples = None

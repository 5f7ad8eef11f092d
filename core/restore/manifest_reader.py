"""Reads the records of one committed checkpoint from any tier, and verifies each of them."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.core.catalog.catalog import Catalog
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, DamagedError, FormatError
from penstock.core.foreign import memory_permitting
from penstock.core.format.commit_record import decode_borrowed
from penstock.core.format.index import IndexReader
from penstock.core.format.part import decode_head, decode_section, decode_shards
from penstock.core.format.records import ManyParts, borrowed_from
from penstock.core.storage.failover import from_any_tier
from penstock.core.types import ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from penstock.core.abc import Backend
    from penstock.core.errors import PenstockError
    from penstock.core.format.index import ShardTable
    from penstock.core.format.records import (
        ChoiceRecord,
        CommitRecord,
        PartEntry,
        PartHead,
        Section,
        SectionInfo,
    )
    from penstock.core.tree.select import Selection
    from penstock.core.types import Region

T = TypeVar("T")
Place = tuple[int, int]
"""A section: the number of its part, and its number in the part."""

# Reads up to this length skip the check of the size, which would take as long as the read itself.
_UNCHECKED_BYTES = 1 << 20

_AHEAD_BYTES = 16 << 20  # the most that `read_ahead` reads in one batch


class ManifestReader:
    """Reads the index of a checkpoint, and the heads and sections of its parts. Not thread-safe.

    A record that is missing or damaged in one tier is read from another.

    Attributes:
        record: The commit record.
        backend: The store of the checkpoint.
        bytes_read: The bytes of records read so far.
        heads: The heads read so far, by part.
        kept: The decoded sections that are kept, each with all of its objects, by place.
    """

    def __init__(self, backend: Backend, record: CommitRecord) -> None:
        self.record = record
        self.backend = backend
        self.bytes_read = 0
        self.heads: dict[int, PartHead] = {}
        self.kept: dict[Place, Section] = {}
        self._indexes: dict[int, IndexReader] = {}
        self._parts = record.parts if record.many_parts is None else None
        # By path hash: the sections with shards of an object, and the regions of these shards.
        self._rows: dict[int, list[tuple[Place, Region | None]]] = {}

    @property
    def parts(self) -> tuple[PartEntry, ...]:
        """The parts, as the commit record or the index lists them."""
        if self._parts is None:
            self._parts = self.from_index(self._listed_parts)
        return self._parts

    def _listed_parts(self, index: IndexReader) -> tuple[PartEntry, ...]:
        many, name = self.record.many_parts, self.record.index.name
        parts = index.parts(self.record.uid)
        lengths = sum(part.length for part in parts)
        if many != ManyParts(len(parts), lengths) or parts[-1].rank >= self.record.world_size:
            msg = f"{name}: does not list the parts that the commit record counts"
            raise FormatError(msg, [name])
        return parts

    def head(self, part: int) -> PartHead:
        """Return the head of a part, verified by the commit record's digest."""
        if part not in self.heads:
            entry = self.parts[part]
            self.heads[part] = self._decoded(
                entry.name,
                (0, entry.head_length),
                lambda data: decode_head(data, entry, self.record),
            )
        return self.heads[part]

    def section(self, part: int, number: int) -> Section:
        """Return a section of a part, verified by the digest in the head."""
        place = (part, number)
        if place not in self.kept:
            head = self.head(part)
            info = head.sections[number]
            self.kept[place] = self._decoded(
                self.parts[part].name,
                (info.offset, info.length),
                lambda data: decode_section(data, info, head),
            )
        return self.kept[place]

    def sections(
        self,
        part: int,
        selection: Selection | None = None,
        wanted: Collection[int] | None = None,
        *,
        keep: bool = False,
    ) -> Iterator[Section]:
        """Yield sections of a part.

        Reads adjacent sections together. A million objects are in 500 sections, and separate reads
        would take 500 round trips.

        Args:
            part: The number of the part.
            selection: Leave out the objects that it does not touch. Sections without a touched
                object are not read, except the first, which has the root's node.
            wanted: The numbers of the sections; None: all.
            keep: Whether to put the sections into `kept`, for a caller that needs them again. Has
                no effect with a selection.
        """
        head, name = self.head(part), self.parts[part].name
        numbers = [
            number
            for number, info in enumerate(head.sections)
            if (wanted is None or number in wanted) and _may_hold(info, number, selection)
        ]
        for run in _runs(head.sections, numbers):
            start = head.sections[run[0]].offset
            data: bytes | None = None
            # After damage, each section is read again alone, from any tier that has it whole.
            with suppress(DamagedError):
                last = head.sections[run[-1]]
                data = self._fetch(name, start, last.offset + last.length - start, self.backend)
            for number in run:
                info = head.sections[number]
                section = self.kept.get((part, number))
                if section is None and data is not None:
                    at = info.offset - start
                    piece = data[at : at + info.length]
                    with suppress(FormatError):
                        section = decode_section(piece, info, head, selection)
                        if selection is None and keep:
                            self.kept[part, number] = section
                section = section or self.section(part, number)
                if selection is not None:
                    kept = tuple(o for o in section.objects if selection.touches(o.path))
                    section = replace(section, objects=kept)
                yield section

    def shards(self, part: int) -> ShardTable:
        """Return the table of a part's shards, verified by the digest in the head."""
        head = self.head(part)
        info, name = head.shards, self.parts[part].name
        return self._decoded(
            name, (info.offset, info.length), lambda data: decode_shards(data, head)
        )

    def choices(self) -> tuple[ChoiceRecord, ...]:
        """Return one codec choice for each class of objects: that of the first rank with one."""
        choices: dict[str, ChoiceRecord] = {}
        for part in range(len(self.parts)):
            for choice in self.head(part).choices:
                choices.setdefault(choice.objects, choice)
        return tuple(choices.values())

    # -- the index ---------------------------------------------------------------------------------

    def index(self, backend: Backend) -> IndexReader:
        """Return a reader of one tier's index; it has read and verified the head."""
        index = self.record.index
        if id(backend) not in self._indexes:
            self._indexes[id(backend)] = IndexReader(
                lambda offset, length: self._fetch(index.name, offset, length, backend),
                index,
                borrowed=self.record.many_borrowed,
            )
        return self._indexes[id(backend)]

    def from_index(self, read: Callable[[IndexReader], T]) -> T:
        """Return the result of `read` on the index of any tier where it is undamaged."""
        name = self.record.index.name
        return from_any_tier(self.backend, name, lambda backend: read(self.index(backend)))

    def find_all(self, hashes: Collection[int]) -> ShardTable:
        """Return the rows of the index for these path hashes."""
        return self.from_index(lambda index: index.find_all(np.array([*hashes], np.uint64)))

    def rows(self, hashed: int) -> list[tuple[Place, Region | None]]:
        """Return the section and region of each shard of the object with this path hash."""
        self.look_up([hashed])
        return self._rows[hashed]

    def look_up(self, hashes: Collection[int]) -> None:
        """Find and keep the rows of several objects, ten times as fast as one by one."""
        unknown = np.array([*set(hashes) - self._rows.keys()], np.uint64)

        def read(index: IndexReader) -> None:
            table = index.find_all(unknown)
            rows = zip(table.hashes.tolist(), table.places(), table.regions(), strict=True)
            self._rows |= {number: [] for number in unknown.tolist()}
            for number, group in groupby(rows, key=itemgetter(0)):
                self._rows[number] = [(place, region) for _, place, region in group]

        if len(unknown):
            self.from_index(read)

    def checked_place(self, place: Place) -> Place:
        """Return `place` if its section exists.

        Raises:
            FormatError: An index row points to a section that does not exist.
        """
        part, number = place
        if part >= len(self.parts) or number >= len(self.head(part).sections):
            name = self.record.index.name
            msg = f"{name}: a shard is in section {number} of part {part}, which does not exist"
            raise FormatError(msg, [name])
        return place

    def read_ahead(self, places: Collection[Place]) -> None:
        """Read these sections, after the heads that they need, in large batches.

        Skips records that are damaged, missing or long. Their reader fetches them one by one from
        any tier and raises the right error.
        """
        parts = {part for part, _ in places if part < len(self.parts)} - self.heads.keys()
        entries = [(part, self.parts[part]) for part in sorted(parts)]
        heads = [(part, (entry.name, 0, entry.head_length)) for part, entry in entries]
        for part, data in self._fetched(heads):
            with suppress(DamagedError):
                self.heads[part] = decode_head(data, self.parts[part], self.record)
        sections = []
        for part, number in sorted({*places} - self.kept.keys()):
            head = self.heads.get(part)
            if head is not None and number < len(head.sections):
                info = head.sections[number]
                sections.append(((part, number), (self.parts[part].name, info.offset, info.length)))
        for (part, number), data in self._fetched(sections):
            head = self.heads[part]
            with suppress(DamagedError):
                self.kept[part, number] = decode_section(data, head.sections[number], head)

    # -- checks ------------------------------------------------------------------------------------

    def check_index(self) -> None:
        """Read and verify the whole index.

        Raises:
            FormatError: The index is damaged.
        """
        index = self.record.index
        with memory_permitting(index.name):
            self.check_size(index.name, index.length)
            # Each block is verified as it is read.
            self.from_index(lambda index: deque(index.blocks(), maxlen=0))

    def check_borrowed(self) -> None:
        """Compare the borrowed blobs in the heads read so far with the record's table.

        Raises:
            FormatError: The table of borrowed blobs is damaged, or lacks one of them.
        """
        index, table = self.record.index, self.record.many_borrowed
        if table is None:
            return  # compared when each head was read
        start = index.length - table.length
        place = start, table.length
        listed = set(self._decoded(index.name, place, lambda d: decode_borrowed(d, self.record)))
        every = {blob for head in self.heads.values() for blob in head.blobs}
        lacking = [b for b in borrowed_from(every, self.record.uid) if b not in listed]
        if lacking:
            name = index.name
            msg = f"{name}: does not list the borrowed blob {lacking[0].name} that the parts name"
            raise FormatError(msg, [name])

    def check_size(self, name: str, length: int) -> None:
        """Compare the size of a record or blob with its recorded length.

        Raises:
            FormatError: The size differs, or there is no such record or blob.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """

        def check(backend: Backend) -> None:
            size = self._size(name, backend)
            if size != length:
                msg = f"{name} on {backend.url} has {size} bytes, but {length} were written"
                raise FormatError(msg, [name])

        from_any_tier(self.backend, name, check)

    def lengths(self) -> dict[str, int]:
        """Return the lengths of the index, of the parts, and of the blobs of heads read so far."""
        lengths = {entry.name: entry.length for entry in self.parts}
        lengths[self.record.index.name] = self.record.index.length
        for head in self.heads.values():
            lengths |= {blob.name: blob.length for blob in head.blobs}
        return lengths

    # -- bytes -------------------------------------------------------------------------------------

    def _decoded(self, name: str, place: tuple[int, int], decode: Callable[[bytes], T]) -> T:
        """Read the bytes at `place`, `(offset, length)`, from any tier, and decode them."""
        return from_any_tier(
            self.backend, name, lambda backend: decode(self._fetch(name, *place, backend))
        )

    def _fetched(
        self, wanted: Iterable[tuple[T, tuple[str, int, int]]]
    ) -> Iterator[tuple[T, bytes]]:
        """Yield the bytes at each `(name, offset, length)`, except those that `read_ahead` skips.

        Yields nothing from a batch with a missing or truncated blob.
        """
        batch: list[tuple[T, ReadRequest]] = []
        size = 0
        for key, (name, offset, length) in wanted:
            if length > _UNCHECKED_BYTES:
                continue
            if size + length > _AHEAD_BYTES:
                yield from self._fetched_batch(batch)
                batch, size = [], 0
            batch.append((key, ReadRequest(name, offset, memoryview(bytearray(length)))))
            size += length
        yield from self._fetched_batch(batch)

    def _fetched_batch(self, batch: Sequence[tuple[T, ReadRequest]]) -> Iterator[tuple[T, bytes]]:
        if not batch:
            return
        try:
            self.backend.read([request for _, request in batch])
        except (BlobNotFoundError, BlobTruncatedError):
            return
        for key, request in batch:
            self.bytes_read += request.target.nbytes
            yield key, bytes(request.target)

    def _fetch(self, name: str, offset: int, length: int, backend: Backend) -> bytes:
        # A damaged record may declare any length, so a large length is compared with the size
        # before memory is allocated. A small read that is too long simply fails.
        if length > _UNCHECKED_BYTES and offset + length > (size := self._size(name, backend)):
            msg = (
                f"{name} on {backend.url} has {size} bytes, but {offset + length} are "
                "recorded: it is truncated"
            )
            raise FormatError(msg, [name])
        data = bytearray(length)
        try:
            backend.read([ReadRequest(name, offset, memoryview(data))])
        except BlobNotFoundError as error:
            raise self._missing(name) from error
        except BlobTruncatedError as error:
            raise FormatError(str(error), [name]) from error
        self.bytes_read += length
        return bytes(data)

    def _size(self, name: str, backend: Backend) -> int:
        try:
            return backend.stat(name).size_bytes
        except BlobNotFoundError as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> PenstockError:
        """Return the error for a missing record: the checkpoint was deleted, or is damaged."""
        error = FormatError(f"{name} on {self.backend.url} is missing", [name])
        catalog = Catalog(self.backend)
        return catalog.gone_or_damaged(self.record.step, self.record.uid, error)


def _may_hold(info: SectionInfo, number: int, selection: Selection | None) -> bool:
    """Return whether a section may hold touched objects, or the node of the root."""
    if selection is None or info.groups is None or not number:
        return True  # the root comes first, so its node is in the first section
    test = selection.below(())
    return test if isinstance(test, bool) else any(map(test, info.groups))


def _runs(infos: Sequence[SectionInfo], numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield groups of adjacent sections, each short enough to be read without a size check."""
    run: list[int] = []
    for number in numbers:
        total = infos[number].offset + infos[number].length - infos[run[0]].offset if run else 0
        if run and (number != run[-1] + 1 or total > _UNCHECKED_BYTES):
            yield run
            run = []
        run.append(number)
    if run:
        yield run

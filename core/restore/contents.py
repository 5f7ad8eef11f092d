"""Reads the manifest of one committed checkpoint, lazily, and verifies each piece."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.core.abc import FLOAT_DTYPES
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.garbage import collections_held
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    DamagedError,
    FormatError,
    PluginError,
)
from penstock.core.foreign import memory_permitting
from penstock.core.format.commit_record import decode_borrowed
from penstock.core.format.index import (
    NO_BYTES,
    IndexReader,
    dump_table,
    encode_index,
    shard_table,
)
from penstock.core.format.part import decode_head, decode_section, decode_shards
from penstock.core.format.records import ManyParts, borrowed_from
from penstock.core.format.section import shards_of
from penstock.core.pipeline.chain import CodecChain
from penstock.core.plan.derived import MASTER_DTYPE, ROUNDED_DTYPES
from penstock.core.plan.regions import common_region, flaw_of_cover
from penstock.core.plan.restore import Located, ObjectRequest, plan_restore
from penstock.core.restore.cast import CastSink
from penstock.core.restore.scatter import shard_requests
from penstock.core.storage.failover import from_any_tier
from penstock.core.tree.paths import path_hash, paths_above, show_path
from penstock.core.types import Kind, ReadRequest
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.errors import PenstockError
    from penstock.core.format.index import ShardTable
    from penstock.core.format.records import (
        ChoiceRecord,
        CodecRecord,
        CommitRecord,
        Frame,
        IndexEntry,
        NodeRecord,
        ObjectRecord,
        PartEntry,
        PartHead,
        Section,
        SectionInfo,
        ShardRecord,
    )
    from penstock.core.plan.restore import FrameJob, ShardRequest
    from penstock.core.plugins.registry import Registry
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath, Region

T = TypeVar("T")

# Up to so many bytes are read without a look at the size, which takes a store as long as the read.
_UNASKED_BYTES = 1 << 20

_AHEAD_BYTES = 16 << 20  # of the records that are read at once

_SHOWN_FLAWS = 4
_DIFFERENT = "the ranks that saved it describe it differently"


class AbsentChain(CodecChain):
    """A chain whose codecs are not installed; `why` says which. It decodes nothing."""

    def __init__(self, why: str) -> None:
        self.codecs = ()
        self.versions = ()
        self.why = why


class Contents:
    """The manifest of one checkpoint. Not thread-safe."""

    def __init__(self, backend: Backend, record: CommitRecord, registry: Registry) -> None:
        self.record = record
        self.bytes_read = 0
        self._backend = backend
        self._registry = registry
        self._heads: dict[int, PartHead] = {}
        self._sections: dict[tuple[int, int], Section] = {}
        self._by_path: dict[tuple[int, int], dict[ObjectPath, Located]] = {}
        self._chains: dict[tuple[int, int], CodecChain] = {}
        self._indexes: dict[int, IndexReader] = {}
        self._parts = record.parts if record.many_parts is None else None
        self._everything: tuple[list[Located], list[NodeRecord]] | None = None
        self._touched: tuple[Selection, tuple[list[Located], list[NodeRecord]]] | None = None
        self._known: dict[ObjectPath, Located] = {}
        # By path hash: where the shards of objects are that were looked up, and their regions.
        self._rows: dict[int, list[tuple[tuple[int, int], Region | None]]] = {}

    @property
    def parts(self) -> tuple[PartEntry, ...]:
        """The parts, as the commit record or the index lists them."""
        if self._parts is None:
            with memory_permitting(self.record.index.name):
                self._parts = from_any_tier(self._backend, self._listed_parts)
        return self._parts

    def _listed_parts(self, backend: Backend) -> tuple[PartEntry, ...]:
        many, name = self.record.many_parts, self.record.index.name
        found = self.index(backend).parts(self.record.uid)
        lengths = sum(part.length for part in found)
        if many != ManyParts(len(found), lengths) or found[-1].rank >= self.record.world_size:
            msg = f"{name}: does not list the parts that the commit record counts"
            raise FormatError(msg, [name])
        return found

    def head(self, part: int) -> PartHead:
        """Return the head of a part, bound by the commit record's digest."""
        if part not in self._heads:
            entry = self.parts[part]
            self._heads[part] = self._decoded(
                entry.name,
                (0, entry.head_length),
                lambda data: decode_head(data, entry, self.record),
            )
        return self._heads[part]

    def section(self, part: int, number: int) -> Section:
        """Return a section of a part, bound by the digest in the head."""
        key = (part, number)
        if key not in self._sections:
            head = self.head(part)
            info = head.sections[number]
            self._sections[key] = self._decoded(
                self.parts[part].name,
                (info.offset, info.length),
                lambda data: decode_section(data, info, head),
            )
        return self._sections[key]

    def choices(self) -> tuple[ChoiceRecord, ...]:
        """Return how codecs were chosen, once for each class of objects: as the first rank did."""
        found: dict[str, ChoiceRecord] = {}
        for part in range(len(self.parts)):
            for choice in self.head(part).choices:
                found.setdefault(choice.objects, choice)
        return tuple(found.values())

    def objects(self) -> list[Located]:
        """Return every object, in the order in which the tree was described."""
        return self._all()[0]

    def nodes(self) -> list[NodeRecord]:
        """Return every recorded container and composite, in the same order."""
        return self._all()[1]

    def touched(self, selection: Selection) -> tuple[list[Located], list[NodeRecord]]:
        """Return the objects and nodes that `selection` touches, in the same order.

        No records are made of other objects: among a million, that takes most of the time. The
        objects that touched ones are tied to are returned as well, and at least all nodes that
        have a top-level key in common with a touched object.
        """
        if self._everything is not None:
            objects, nodes = self._everything
            return [o for o in objects if selection.touches(o.record.path)], nodes
        if self._touched is None or self._touched[0] is not selection:
            with memory_permitting(f"step {self.record.step}"):
                self._touched = selection, self._read(selection)
        return self._touched[1]

    def sections(self, part: int) -> Iterator[Section]:
        """Yield the sections of a part without keeping them, for a caller that reads each once."""
        return self._read_sections(part, None, keep=False)

    def shards(self, part: int) -> ShardTable:
        """Return the table of a part's shards, bound by the digest in the head."""
        head = self.head(part)
        info, name = head.shards, self.parts[part].name
        with memory_permitting(name):
            return decode_shards(self._fetch(name, info.offset, info.length, self._backend), head)

    def check_index(self) -> None:
        """Read and verify the whole index.

        Raises:
            FormatError: The index is damaged.
        """
        index = self.record.index
        with memory_permitting(index.name):
            self.check_size(index.name, index.length)
            for _ in self.index(self._backend).blocks():
                pass  # each is verified as it is read

    def check_borrowed(self) -> None:
        """Compare what the heads read so far name of other saves with what the record borrows.

        Raises:
            FormatError: The table of borrowed blobs is damaged, or lacks one of them.
        """
        index, table = self.record.index, self.record.many_borrowed
        if table is None:
            return  # compared as each head was read
        start = index.length - table.length
        data = self._fetch(index.name, start, table.length, self._backend)
        with memory_permitting(index.name):
            listed = set(decode_borrowed(data, self.record))
        every = {blob for head in self._heads.values() for blob in head.blobs}
        lacking = [b for b in borrowed_from(every, self.record.uid) if b not in listed]
        if lacking:
            name = index.name
            msg = f"{name}: does not list the borrowed {lacking[0].name} that the parts name"
            raise FormatError(msg, [name])

    def check_cover(self) -> None:
        """Check that the parts describe each object alike, and have each of its elements.

        Raises:
            FormatError: They do not, or a part is damaged; names the first objects.
        """
        if self.record.world_size == 1:
            return  # a section with an object that is not one whole shard cannot be read
        with memory_permitting(f"step {self.record.step}"):
            parts = range(len(self.parts))
            described = ((p, o) for p in parts for s in self.sections(p) for o in s.objects)
            flaws = [*_flaws(Located(record, part, ()) for part, record in described)]
        if flaws:
            shown = "; ".join(f"{path}: {why}" for path, why in flaws[:_SHOWN_FLAWS])
            msg = f"step {self.record.step}: {len(flaws)} object(s) are not whole: {shown}"
            raise FormatError(msg, [path for path, _ in flaws])

    def check_size(self, name: str, length: int) -> None:
        """Compare the size of a record or blob with its recorded length.

        Raises:
            FormatError: The size differs, or there is no such record or blob.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        size = self._size(name, self._backend)
        if size != length:
            msg = f"{name} on {self._backend.url} has {size} bytes, {length} were written"
            raise FormatError(msg, [name])

    def lengths(self) -> dict[str, int]:
        """Return the lengths of the index, of the parts, and of the blobs of heads read so far."""
        found = {entry.name: entry.length for entry in self.parts}
        found[self.record.index.name] = self.record.index.length
        for head in self._heads.values():
            found |= {blob.name: blob.length for blob in head.blobs}
        return found

    def find(self, path: ObjectPath) -> Located | None:
        """Return the object at `path`, found by the index, so that other sections are not read."""
        if self._everything is not None:
            if not self._known:
                self._known = {located.record.path: located for located in self._everything[0]}
            return self._known.get(path)
        with memory_permitting(self.record.index.name):
            return from_any_tier(self._backend, lambda backend: self._find(path, backend))

    def owner(self, located: Located) -> Located:
        """Return the object whose bytes a tied object shares; an untied object itself.

        Raises:
            FormatError: The owner is not there, is tied itself, or is of another kind.
        """
        tied = located.record.same_as
        if tied is None:
            return located
        return self._origin(located.record, tied)

    def master(self, located: Located) -> Located:
        """Return the object that a derived object is derived from; any other object itself.

        Raises:
            FormatError: The master is not there, or is no object to derive from.
        """
        path = located.record.derived
        if path is None:
            return located
        return self._origin(located.record, path)

    def _origin(self, record: ObjectRecord, path: ObjectPath) -> Located:
        found = self.find(path)
        if found is None or not _is_origin(found.record, record):
            raise _astray([show_path(record.path)])
        return found

    def _find(self, path: ObjectPath, backend: Backend) -> Located | None:
        found = self.index(backend).find(path_hash(path))
        # Each section once: a forged index can name one section a million times.
        for part, number in dict.fromkeys(found.places()):
            located = self._in_section(*self._checked_place((part, number))).get(path)
            if located is not None:
                return located
        return None

    def _checked_place(self, place: tuple[int, int]) -> tuple[int, int]:
        part, number = place
        if part >= len(self.parts) or number >= len(self.head(part).sections):
            name = self.record.index.name
            msg = f"{name}: a shard is in section {number} of part {part}, which is not there"
            raise FormatError(msg, [name])
        return place

    def _in_section(self, part: int, number: int) -> dict[ObjectPath, Located]:
        key = (part, number)
        if key not in self._by_path:
            section = self.section(part, number)
            self._by_path[key] = {o.path: Located(o, part, section.frames) for o in section.objects}
        return self._by_path[key]

    def jobs(
        self, requests: Sequence[ObjectRequest], *, absent: set[str] | None = None
    ) -> tuple[Sequence[FrameJob[CodecChain]], int]:
        """Return the frames to read for `requests`, and the bytes that are needed of them.

        A derived object is read from its master, and rounded on its way into the sink.

        Args:
            requests: The objects to read. Without a sink, of an object that several ranks hold, the
                shards of the part that it was found in.
            absent: Collects the reasons why codecs are missing. Frames of these codecs then have an
                `AbsentChain`: their stored bytes can be verified, but not decoded.

        Raises:
            PluginError: A codec is missing, and `absent` is None; nothing was read.
            FormatError: The records of an object contradict each other.
        """
        wanted: list[ShardRequest] = []
        of_stored = [*map(self._of_stored, requests)]
        several = self.record.part_count > 1
        if several:
            self._look_up({r.located.record.path for r in of_stored if r.sink is not None})
            self._read_ahead(of_stored)
        for request in of_stored:
            stored = self._stored(request) if several else _here(request.located)
            wanted += shard_requests(request, stored, lambda part: self.head(part).block_bytes)
        with collections_held:
            plan = plan_restore(
                wanted,
                head_of=self.head,
                chain_of=lambda part, number: self._chain(part, number, absent),
            )
        for job in plan.jobs:
            for link in job.links:
                # Of a codec that is absent nothing gives a bound but the blob's size.
                if link.chain is not None and not isinstance(link.chain, AbsentChain):
                    check_length(link.frame, link.chain, link.blob)
        return plan.jobs, plan.bytes_needed

    def descriptions(self, located: Located, within: Region | None = None) -> Sequence[Located]:
        """Return an object as each part describes it that has shards of it.

        Args:
            located: The object, as any part describes it.
            within: Leave out parts whose shards have nothing in common with this region.

        Raises:
            FormatError: The index leads astray.
        """
        if len(self.parts) == 1:
            return [located]
        path = located.record.path
        with memory_permitting(self.record.index.name):
            return from_any_tier(
                self._backend, lambda backend: self._described(path, within, backend)
            )

    def everywhere(
        self, within: Mapping[ObjectPath, Collection[Region]] | None = None
    ) -> list[Located]:
        """Return objects as each part describes them that has shards of them.

        Args:
            within: The paths of the objects, each with regions: parts without shards that have
                anything in common with one of these are not read. None: all objects, of all parts.

        Raises:
            FormatError: The index leads astray, or a part is damaged.
        """
        if len(self.parts) == 1:
            return [o for o in self.objects() if within is None or o.record.path in within]
        wanted = {o.record.path: () for o in self.objects()} if within is None else within
        paths = {path_hash(path): path for path in wanted}
        with memory_permitting(self.record.index.name):
            table = from_any_tier(self._backend, lambda one: self._shards_of(paths, one))
        found: dict[tuple[ObjectPath, tuple[int, int]], Located] = {}
        for number, place, region in zip(
            table.hashes.tolist(), table.places(), table.regions(), strict=True
        ):
            path = paths[number]
            regions = wanted[path]
            if (path, place) in found or not (region is None or _meets(region, regions)):
                continue
            located = self._in_section(*self._checked_place(place)).get(path)
            if located is not None:
                found[path, place] = located
        return list(found.values())

    def _shards_of(self, hashes: Collection[int], backend: Backend) -> ShardTable:
        """Return the rows of objects in the index, less those of parts with none of their bytes."""
        table = self.index(backend).find_all(np.array([*hashes], np.uint64))
        return table.take(np.flatnonzero(table.dims != NO_BYTES))

    def _look_up(self, paths: Collection[ObjectPath]) -> None:
        """Find the shards of objects in the index at once: one by one takes ten times as long."""
        unknown = {path_hash(path) for path in paths} - self._rows.keys()
        if not unknown:
            return
        with memory_permitting(self.record.index.name):
            table = from_any_tier(
                self._backend,
                lambda one: self.index(one).find_all(np.array([*unknown], np.uint64)),
            )
        rows = zip(table.hashes.tolist(), table.places(), table.regions(), strict=True)
        for number, group in groupby(rows, key=itemgetter(0)):
            self._rows[number] = [(place, region) for _, place, region in group]

    def _read_ahead(self, requests: Sequence[ObjectRequest]) -> None:
        """Read the heads and sections that `requests` need in two batches, not one by one."""
        places: dict[tuple[int, int], None] = {}
        for request in requests:
            within = request.region
            for place, region in self._rows.get(path_hash(request.located.record.path), ()):
                if within is None or region is None or common_region(region, within):
                    places[place] = None
        if not places:
            return
        parts = {part for part, _ in places if part < len(self.parts)} - self._heads.keys()
        entries = [(part, self.parts[part]) for part in sorted(parts)]
        heads = [(part, (entry.name, 0, entry.head_length)) for part, entry in entries]
        for part, data in self._fetched(heads):
            with suppress(DamagedError):
                self._heads[part] = decode_head(data, self.parts[part], self.record)
        sections = []
        for part, number in sorted(places.keys() - self._sections.keys()):
            head = self._heads.get(part)
            if head is not None and number < len(head.sections):
                info = head.sections[number]
                sections.append(((part, number), (self.parts[part].name, info.offset, info.length)))
        for (part, number), data in self._fetched(sections):
            head = self._heads[part]
            with suppress(DamagedError):
                self._sections[part, number] = decode_section(data, head.sections[number], head)

    def _fetched(
        self, wanted: Iterable[tuple[T, tuple[str, int, int]]]
    ) -> Iterator[tuple[T, bytes]]:
        """Yield what is at places, `(name, offset, length)`, as far as it can be read at once.

        What is damaged or missing, or long, is left out: who needs it reads it by itself, from any
        tier, and knows what to say of it.
        """
        batch: list[tuple[T, ReadRequest]] = []
        size = 0
        for key, (name, offset, length) in wanted:
            if length > _UNASKED_BYTES:
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
            self._backend.read([request for _, request in batch])
        except (BlobNotFoundError, BlobTruncatedError):
            return
        for key, request in batch:
            self.bytes_read += request.target.nbytes
            yield key, bytes(request.target)

    def _described(
        self, path: ObjectPath, within: Region | None, backend: Backend
    ) -> list[Located]:
        rows = self._rows.get(path_hash(path))
        if rows is None:
            table = self.index(backend).find(path_hash(path))
            rows = [*zip(table.places(), table.regions(), strict=True)]
        places: dict[tuple[int, int], None] = {}
        for place, region in rows:
            if within is None or region is None or common_region(region, within):
                places[self._checked_place(place)] = None
        return [one for place in places if (one := self._in_section(*place).get(path))]

    def _stored(self, request: ObjectRequest) -> Sequence[tuple[Located, ShardRecord]]:
        located = request.located
        if request.sink is None:
            return _here(located)
        parts = self.descriptions(located, request.region)
        if any(one is not located and _differ(one.record, located.record) for one in parts):
            path = show_path(located.record.path)
            msg = f"{path}: {_DIFFERENT}"
            raise FormatError(msg, [path])
        return [pair for one in parts for pair in _here(one)]

    def _of_stored(self, request: ObjectRequest) -> ObjectRequest:
        """Return the request for stored bytes that fills the sink of a request for any object."""
        if request.located.record.derived is None:
            return request
        master = self.master(request.located)
        record, sink = request.located.record, request.sink
        one, other = record.spec, master.record.spec
        if sink is not None:
            sink = CastSink(sink, other, one)
        at = request.at // one.itemsize * other.itemsize
        return ObjectRequest(master, sink, request.region, at, record.path)

    def check_codecs(self, part: int, head: PartHead) -> None:
        """Check that every codec of a part is installed, and takes the stored options.

        Raises:
            PluginError: A codec is missing, or refuses its options.
        """
        for number in range(1, len(head.chains)):  # 0 is raw
            self._chain(part, number)

    def sweep(self, damage: Callable[[str, str], None]) -> tuple[list[PartHead], list[Located]]:
        """Read every record of the manifest; report the damage of each instead of stopping.

        Args:
            damage: Called with the record's name and a sentence on the damage.

        Returns:
            The heads and the untied objects that can be read.
        """
        heads: list[PartHead] = []
        objects: list[Located] = []
        tables: list[ShardTable] = []
        index = self.record.index
        with _reported(index.name, damage):
            self.check_index()
        parts: tuple[PartEntry, ...] = ()
        with _reported(index.name, damage):
            parts = self.parts
        for part, entry in enumerate(parts):
            with _reported(entry.name, damage):
                self.check_size(entry.name, entry.length)
            with _reported(entry.name, damage):
                heads.append(self.head(part))
            if part not in self._heads:
                continue
            with _reported(entry.name, damage):
                tables.append(self.shards(part))
            for number in range(len(self.head(part).sections)):
                with _reported(f"{entry.name} section {number}", damage):
                    section = self.section(part, number)
                    objects += [Located(o, part, section.frames) for o in section.objects]
            with _reported(entry.name, damage):
                self._check_shards(part, tables)
        with _reported(index.name, damage):
            self.check_borrowed()
        absent: set[ObjectPath] = set()
        with _reported(index.name, damage):
            absent = self._check_paths(objects, damage)
        # A lookup of one path relies on the index, a full read on the sections: an index that
        # lacks a path would hide the object from some readers only.
        if parts and len(tables) == len(parts):
            with _reported(index.name, damage):
                tables = [table.without(map(path_hash, absent)) for table in tables]
                if self._index_over(tables) != index:
                    msg = f"{index.name}: does not lead to every path of the parts"
                    raise FormatError(msg, [index.name])
        if len(heads) == len(parts) and self.record.world_size > 1:
            for path, why in _flaws(objects):
                damage(path, why)
        try:
            check_ties([o.record for o in objects])
        except FormatError as error:
            for name in error.damaged:
                damage(name, str(error))
        return heads, [o for o in objects if o.record.same_as is None]

    def _check_paths(
        self, objects: Sequence[Located], damage: Callable[[str, str], None]
    ) -> set[ObjectPath]:
        """Report objects that have others below them; return the values that count as absent.

        These are not in the index, and no reader sees them.
        """
        nodes = [node for section in self._sections.values() for node in section.nodes]
        both = _containers(objects, nodes) & {o.record.path for o in objects}
        absent = self._unlisted([o for o in objects if o.record.path in both])
        for path in sorted(both - absent):
            damage(show_path(path), "is stored as one object, and other objects below it")
        return absent

    def _unlisted(self, objects: Sequence[Located]) -> set[ObjectPath]:
        """Return the values among objects of several parts that are not in the index."""
        values = {path_hash(o.record.path): o.record.path for o in objects if _is_value(o)}
        if len(self.parts) == 1 or not values:
            return set()
        with memory_permitting(self.record.index.name):
            table = from_any_tier(
                self._backend,
                lambda one: self.index(one).find_all(np.array([*values], np.uint64)),
            )
        return {values[hashed] for hashed in values.keys() - set(table.hashes.tolist())}

    def _nodes_at(self, paths: Collection[ObjectPath]) -> list[NodeRecord]:
        """Return the nodes at paths, of any part: nothing is below them, so no object led there."""
        found: dict[ObjectPath, NodeRecord] = {}
        for part in range(len(self.parts)) if paths else ():
            for section in self.sections(part):
                found |= {n.path: n for n in section.nodes if n.path in paths}
        return [*found.values()]

    def _index_over(self, tables: Sequence[ShardTable]) -> IndexEntry:
        parts = () if self.record.many_parts is None else self.parts
        entry, table = encode_index(self.record.uid, tables, parts).entry, self.record.many_borrowed
        return replace(entry, length=entry.length + (table.length if table else 0))

    def _all(self) -> tuple[list[Located], list[NodeRecord]]:
        if self._everything is None:
            with memory_permitting(f"step {self.record.step}"):
                self._everything = self._read(None)
        return self._everything

    def _read(self, selection: Selection | None) -> tuple[list[Located], list[NodeRecord]]:
        """Read the objects and nodes of all sections, or of those that may hold selected ones.

        Of what several parts describe, the first one counts, and no other is read. A value that the
        index leaves out says that a rank had nothing there, where others had a container.
        """
        objects: list[Located] = []
        nodes: list[NodeRecord] = []
        for part, wanted in self._outline().items():
            here: list[Located] = []
            above: list[NodeRecord] = []
            for section in self._read_sections(part, selection, wanted):
                here += [Located(o, part, section.frames) for o in section.objects]
                above += section.nodes
            if objects or nodes:
                here, above = _behind(objects, nodes, here, above)
            objects += sorted(here, key=lambda located: located.record.ordinal)
            nodes += sorted(above, key=lambda node: node.ordinal)
        absent = self._unlisted(objects)
        if absent:
            objects = [o for o in objects if o.record.path not in absent]
            nodes += self._nodes_at(absent - _containers(objects, nodes))
        check_ties([o.record for o in self._with_owners(objects)])
        return objects, nodes

    def _outline(self) -> dict[int, set[int] | None]:
        """Return the sections, by part, that describe every object at least once; None: all."""
        if len(self.parts) == 1:
            return {0: None}
        found: dict[int, set[int] | None] = {}
        with memory_permitting(self.record.index.name):
            places = from_any_tier(self._backend, lambda one: self.index(one).first_places())
        for place in places:
            part, number = self._checked_place(place)
            wanted = found.setdefault(part, set())
            assert wanted is not None
            wanted.add(number)
        return dict(sorted(found.items()))

    def _with_owners(self, objects: list[Located]) -> Sequence[Located]:
        """Return the objects, followed by those that some of them get their bytes from."""
        if all(o.record.same_as is None and o.record.derived is None for o in objects):
            return objects
        found, known = list(objects), {o.record.path for o in objects}
        for _ in range(2):  # the owner of a tied object may be derived itself
            origins = {path for o in objects for path in (o.record.same_as, o.record.derived)}
            needed = {path for path in origins - known if path is not None}
            objects = [*filter(None, map(self.find, sorted(needed)))]
            found += objects
            known |= needed
        return found

    def _read_sections(
        self,
        part: int,
        selection: Selection | None,
        wanted: Collection[int] | None = None,
        *,
        keep: bool = True,
    ) -> Iterator[Section]:
        """Yield the wanted sections of a part, without objects that `selection` does not touch.

        Adjacent sections are read at once. A million objects are in 500 sections, and one read for
        each would be a round trip for each.
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
            # After damage each section is read again alone, from any tier that has it whole.
            with suppress(DamagedError):
                last = head.sections[run[-1]]
                data = self._fetch(name, start, last.offset + last.length - start, self._backend)
            for number in run:
                info = head.sections[number]
                section = self._sections.get((part, number))
                if section is None and data is not None:
                    at = info.offset - start
                    piece = data[at : at + info.length]
                    with suppress(FormatError):
                        section = decode_section(piece, info, head, selection)
                        if selection is None and keep:
                            self._sections[part, number] = section
                section = section or self.section(part, number)
                if selection is not None:
                    kept = tuple(o for o in section.objects if selection.touches(o.path))
                    section = replace(section, objects=kept)
                yield section

    def _check_shards(self, part: int, tables: Sequence[ShardTable]) -> None:
        """Compare the table of a part, the last of `tables`, with the shards in its sections."""
        numbers = range(len(self.head(part).sections))
        if len(tables) <= part or any((part, number) not in self._sections for number in numbers):
            return  # a section or a table could not be read, which is reported already
        found = shard_table(shards_of(self._sections[part, number]) for number in numbers)
        several = self.record.world_size > 1
        same_traits = not several or np.array_equal(found.traits, tables[part].traits)
        if dump_table(found) != dump_table(tables[part]) or not same_traits:
            name = self.parts[part].name
            msg = f"{name}: its table does not list the shards that are in its sections"
            raise FormatError(msg, [name])

    def _chain(self, part: int, number: int, absent: set[str] | None = None) -> CodecChain:
        key = (part, number)
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = self._made_chain(self.head(part).chains[number])
        if isinstance(chain, AbsentChain):
            if absent is None:
                raise PluginError(chain.why)
            absent.add(chain.why)
        return chain

    def _made_chain(self, records: Sequence[CodecRecord]) -> CodecChain:
        try:
            return decoding_chain(records, self._registry)
        except PluginError as error:
            plugins = (f"codec {record.name}" for record in records)
            shipped = dict.fromkeys(filter(None, map(self.record.plugins.get, plugins)))
            by = f"; this checkpoint was written with {' and '.join(shipped)}" if shipped else ""
            return AbsentChain(f"{error}{by}")

    def index(self, backend: Backend) -> IndexReader:
        """Return a reader of the index on one tier; its head is read and verified."""
        index = self.record.index
        if id(backend) not in self._indexes:
            self._indexes[id(backend)] = IndexReader(
                lambda offset, length: self._fetch(index.name, offset, length, backend),
                index,
                borrowed=self.record.many_borrowed,
            )
        return self._indexes[id(backend)]

    def _decoded(self, name: str, place: tuple[int, int], decode: Callable[[bytes], T]) -> T:
        """Read the bytes at `place`, `(offset, length)`, from any tier, and decode them."""
        with memory_permitting(name):
            return from_any_tier(
                self._backend,
                lambda backend: decode(self._fetch(name, *place, backend)),
            )

    def _fetch(self, name: str, offset: int, length: int, backend: Backend) -> bytes:
        # A damaged record may declare any length, so a large one is compared with the size before
        # memory is allocated. A small read that is too long fails by itself.
        if length > _UNASKED_BYTES and offset + length > (size := self._size(name, backend)):
            msg = (
                f"{name} on {backend.url} has {size} bytes, but {offset + length} are "
                "recorded: it was cut off"
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
        error = FormatError(f"{name} on {self._backend.url} is missing", [name])
        catalog = Catalog(self._backend)
        return catalog.gone_or_damaged(self.record.step, self.record.uid, error)


def decoding_chain(records: Sequence[CodecRecord], registry: Registry) -> CodecChain:
    """Return the codecs of a stored chain; each learns the version that wrote the frames.

    Raises:
        PluginError: A codec is missing, or refuses its options or that version.
    """
    return CodecChain(
        [registry.codec_from_record(r.name, r.version, r.config) for r in records],
        versions=[record.version for record in records],
    )


def check_length(frame: Frame, chain: CodecChain, blob: str) -> None:
    """Check that an encoded frame is no longer than its codecs can make it.

    Memory is allocated for a frame before it is read, so a damaged length must not ask for more
    than that.

    Raises:
        FormatError: The frame is longer.
    """
    bound = chain.max_encoded_size(frame.raw_length)
    if frame.length > bound:
        msg = (
            f"the frame at {blob}:{frame.offset} is recorded with {frame.length} bytes, but its "
            f"codecs make at most {bound} of {frame.raw_length}"
        )
        raise FormatError(msg, [blob])


def _here(located: Located) -> list[tuple[Located, ShardRecord]]:
    """Return the shards of an object that one part has."""
    return [(located, shard) for shard in located.record.shards]


def _is_value(located: Located) -> bool:
    return located.record.kind is Kind.VALUE


def _containers(objects: Sequence[Located], nodes: Sequence[NodeRecord]) -> set[ObjectPath]:
    """Return the paths of nodes, and those that have objects or nodes below them."""
    of_nodes = {node.path for node in nodes}
    return paths_above({o.record.path for o in objects} | of_nodes) | of_nodes


def _flaws(described: Iterable[Located]) -> Iterator[tuple[str, str]]:
    """Yield objects that the parts describe differently, or do not hold as a whole."""
    by_path: dict[ObjectPath, list[ObjectRecord]] = {}
    for located in described:
        by_path.setdefault(located.record.path, []).append(located.record)
    for path, records in by_path.items():
        first = records[0]
        if any(_differ(record, first) for record in records):
            yield show_path(path), _DIFFERENT
        elif first.same_as is None and first.derived is None:
            regions = (shard.region for record in records for shard in record.shards)
            if flaw := flaw_of_cover(first.spec.shape, regions):
                yield show_path(path), flaw


def _behind(
    objects: Sequence[Located],
    nodes: Sequence[NodeRecord],
    more: Sequence[Located],
    above: Sequence[NodeRecord],
) -> tuple[list[Located], list[NodeRecord]]:
    """Return what a further part describes and no earlier one, with ordinals behind theirs."""
    first = 1 + max([o.record.ordinal for o in objects] + [n.ordinal for n in nodes])
    known = {o.record.path for o in objects}
    known_nodes = {n.path for n in nodes}
    return (
        [
            o._replace(record=o.record._replace(ordinal=o.record.ordinal + first))
            for o in more
            if o.record.path not in known
        ],
        [replace(n, ordinal=n.ordinal + first) for n in above if n.path not in known_nodes],
    )


def _differ(one: ObjectRecord, other: ObjectRecord) -> bool:
    """Return whether two parts describe one object differently."""

    def told(record: ObjectRecord) -> tuple[object, ...]:
        return (
            record.kind,
            record.spec,
            record.role,
            record.form,
            record.same_as,
            record.derived,
        )

    return told(one) != told(other)


def check_ties(records: Sequence[ObjectRecord]) -> None:
    """Check that every tied object leads to an untied one, and every derived one to its master.

    A master has bytes of its own, the float dtype that derived objects are rounded from, and the
    same shape.

    Raises:
        FormatError: Names the objects that do not.
    """
    loose = []
    by_path: dict[ObjectPath, ObjectRecord] = {}
    for record in records:
        path = record.derived if record.same_as is None else record.same_as
        if path is None:
            continue
        by_path = by_path or {one.path: one for one in records}  # few checkpoints need it
        target = by_path.get(path)
        if target is None or not _is_origin(target, record):
            loose.append(show_path(record.path))
    if loose:
        raise _astray(loose)


def _astray(loose: Sequence[str]) -> FormatError:
    msg = (
        f"{counted(len(loose), 'object')} tied to or derived from an object that is missing, is "
        f"tied or derived itself or is of another kind: {', '.join(loose[:8])}"
    )
    return FormatError(msg, loose)


def _is_origin(target: ObjectRecord, record: ObjectRecord) -> bool:
    """Return whether a tied or derived object may have the bytes of `target`."""
    return _is_master(target, record) if record.same_as is None else _is_owner(target, record)


def _is_owner(target: ObjectRecord, record: ObjectRecord) -> bool:
    same = (target.kind, target.spec, target.form) == (record.kind, record.spec, record.form)
    return same and target.same_as is None


def _is_master(target: ObjectRecord, record: ObjectRecord) -> bool:
    def is_plain(one: ObjectRecord) -> bool:
        spec = one.spec
        return one.kind is Kind.TENSOR and FLOAT_DTYPES.get(spec.dtype) == spec.itemsize

    return (
        is_plain(target)
        and is_plain(record)
        and target.spec.dtype == MASTER_DTYPE
        and record.spec.dtype in ROUNDED_DTYPES
        and target.spec.shape == record.spec.shape
        and target.same_as is None
        and target.derived is None
    )


def _meets(region: Region, others: Collection[Region]) -> bool:
    """Return whether a region has elements of any of the others; if there are none, it does."""
    dims = len(region.sizes)  # the object had others when it was saved
    return not others or any(
        len(other.sizes) == dims and common_region(region, other) for other in others
    )


def _may_hold(info: SectionInfo, number: int, selection: Selection | None) -> bool:
    """Return whether a section may hold touched objects, or the node of the root."""
    if selection is None or info.groups is None or not number:
        return True  # the root is described first, so its node is in the first section
    test = selection.below(())
    return test if isinstance(test, bool) else any(map(test, info.groups))


def _runs(infos: Sequence[SectionInfo], numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield runs of adjacent sections, each short enough for one read of unasked size."""
    run: list[int] = []
    for number in numbers:
        total = infos[number].offset + infos[number].length - infos[run[0]].offset if run else 0
        if run and (number != run[-1] + 1 or total > _UNASKED_BYTES):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


@contextmanager
def _reported(name: str, damage: Callable[[str, str], None]) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        damage(name, str(error))

"""Finds the objects of one committed checkpoint, and the frames that hold their bytes.

Tested in `tests/core/restore/test_ranks.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.abc import FLOAT_DTYPES
from penstock.core.concurrency.garbage import collections_held
from penstock.core.errors import FormatError, PluginError
from penstock.core.foreign import memory_permitting
from penstock.core.format.index import NO_BYTES, IndexReader
from penstock.core.pipeline.codec_chain import CodecChain
from penstock.core.plan.derived import MASTER_DTYPE, ROUNDED_DTYPES
from penstock.core.plan.reads import ObjectRequest, plan_reads
from penstock.core.plan.regions import common_region
from penstock.core.restore.manifest_reader import ManifestReader
from penstock.core.tree.cast import CastSink
from penstock.core.tree.paths import path_hash, paths_above, show_path
from penstock.core.types import Kind
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.format.records import (
        CodecRecord,
        CommitRecord,
        Frame,
        NodeRecord,
        ObjectRecord,
        PartHead,
    )
    from penstock.core.plan.reads import FrameJob
    from penstock.core.plugins.registry import Registry
    from penstock.core.restore.manifest_reader import Place
    from penstock.core.tree.select import Selection
    from penstock.core.types import ObjectPath, Region

DIFFERENT = "the ranks that saved it describe it differently"


class AbsentChain(CodecChain):
    """A chain that decodes nothing: a codec is missing, or refuses its version or options.

    `why` is the error text.
    """

    def __init__(self, why: str) -> None:
        self.codecs = ()
        self.versions = ()
        self.why = why


class Contents:
    """The objects and containers of one checkpoint, by path. Not thread-safe."""

    def __init__(self, backend: Backend, record: CommitRecord, registry: Registry) -> None:
        self.record = record
        self.manifest = ManifestReader(backend, record)
        self._registry = registry
        self._by_path: dict[Place, dict[ObjectPath, ObjectRecord]] = {}
        self._chains: dict[tuple[int, int], CodecChain] = {}
        self._everything: tuple[list[ObjectRecord], list[NodeRecord]] | None = None
        self._touched: tuple[Selection, tuple[list[ObjectRecord], list[NodeRecord]]] | None = None
        self._known: dict[ObjectPath, ObjectRecord] = {}

    def objects(self) -> list[ObjectRecord]:
        """Return every object, in the order of the tree's description."""
        return self._all()[0]

    def nodes(self) -> list[NodeRecord]:
        """Return every node, in the order of the tree's description."""
        return self._all()[1]

    def touched(self, selection: Selection) -> tuple[list[ObjectRecord], list[NodeRecord]]:
        """Return the objects that `selection` touches and the nodes around them, in tree order.

        Makes no records of other objects, which would take most of the time for a million objects.
        So the owner of a tied object is missing unless it is touched too. The nodes are at least
        those that share a top-level key with a touched object.
        """
        if self._everything is not None:
            objects, nodes = self._everything
            return [o for o in objects if selection.touches(o.path)], nodes
        if self._touched is None or self._touched[0] is not selection:
            with memory_permitting(f"step {self.record.step}"):
                self._touched = selection, self._read(selection)
        return self._touched[1]

    def find(self, path: ObjectPath) -> ObjectRecord | None:
        """Return the object at `path`. Uses the index, so that other sections are not read."""
        if self._everything is not None:
            if not self._known:
                self._known = {record.path: record for record in self._everything[0]}
            return self._known.get(path)
        # Each section once: a forged index can name one section a million times.
        places = dict.fromkeys(place for place, _ in self.manifest.rows(path_hash(path)))
        return next(self._described(path, places), None)

    def _described(self, path: ObjectPath, places: Iterable[Place]) -> Iterator[ObjectRecord]:
        """Yield the records of an object in the sections that have one."""
        for place in places:
            record = self._in_section(place).get(path)
            if record is not None:
                yield record

    def owner(self, record: ObjectRecord) -> ObjectRecord:
        """Return the owner of a tied object; an object that is not tied is returned as is.

        Raises:
            FormatError: The owner is missing, is tied itself, or is of another kind.
        """
        tied = record.same_as
        if tied is None:
            return record
        return self._origin(record, tied)

    def master(self, record: ObjectRecord) -> ObjectRecord:
        """Return the master of a derived object; an object that is not derived is returned as is.

        Raises:
            FormatError: The master is missing, or cannot be derived from.
        """
        path = record.derived
        if path is None:
            return record
        return self._origin(record, path)

    def _origin(self, record: ObjectRecord, path: ObjectPath) -> ObjectRecord:
        origin = self.find(path)
        if origin is None or not _is_origin(origin, record):
            raise _bad_origins([show_path(record.path)])
        return origin

    def _in_section(self, place: Place) -> dict[ObjectPath, ObjectRecord]:
        if place not in self._by_path:
            part, number = self.manifest.checked_place(place)
            with memory_permitting(self.record.index.name):
                section = self.manifest.section(part, number)
                self._by_path[place] = {record.path: record for record in section.objects}
        return self._by_path[place]

    def jobs(
        self, requests: Sequence[ObjectRequest], *, absent: set[str] | None = None
    ) -> tuple[Sequence[FrameJob[CodecChain]], int]:
        """Return the frames to read for `requests`, and the bytes needed from them.

        A derived object is read from its master, and rounded on its way into the sink.

        Args:
            requests: The objects to read. For an object of several ranks, a request without a sink
                reads only the shards in its record's part.
            absent: Collects the reasons why codecs cannot be used. Frames of these codecs then have
                an `AbsentChain`: their stored bytes can be verified, but not decoded.

        Raises:
            PluginError: A codec cannot be used, and `absent` is None; no frame was read.
            FormatError: The records of an object contradict each other.
        """
        of_stored = [*map(self._of_stored, requests)]
        several = self.record.part_count > 1
        if several:
            paths = {r.record.path for r in of_stored if r.sink is not None}
            self.manifest.look_up({path_hash(path) for path in paths})
            self.manifest.read_ahead(self._places(of_stored))

        wanted = ((r, self._parts_of(r) if several else (r.record,)) for r in of_stored)
        with collections_held:
            jobs, needed = plan_reads(wanted, partial(self._chain, absent=absent))
        for job in jobs:
            for link in job.links:
                # For an absent codec, only the blob's size is a bound.
                if link.chain is not None and not isinstance(link.chain, AbsentChain):
                    check_length(link.frame, link.chain, link.blob)
        return jobs, needed

    def descriptions(
        self, record: ObjectRecord, within: Region | None = None
    ) -> Sequence[ObjectRecord]:
        """Return the record of an object in each part that has shards of it.

        Args:
            record: The object's record in any part.
            within: Leave out parts whose shards do not overlap this region.

        Raises:
            FormatError: An index row points to a section that does not exist.
        """
        if len(self.manifest.parts) == 1:
            return [record]
        return [*self._described(record.path, self._places_of(record.path, within))]

    def _places_of(self, path: ObjectPath, within: Region | None) -> Iterable[Place]:
        """Return the sections with shards of an object, each once.

        With `within`, returns only those whose shards may overlap it.
        """
        rows = self.manifest.rows(path_hash(path))
        return dict.fromkeys(
            place
            for place, region in rows
            if within is None or region is None or common_region(region, within)
        )

    def _places(self, requests: Sequence[ObjectRequest]) -> set[Place]:
        """Return the sections that `requests` need, for objects whose rows were looked up."""
        wanted = (r for r in requests if r.sink is not None)
        return {place for r in wanted for place in self._places_of(r.record.path, r.region)}

    def everywhere(
        self, within: Mapping[ObjectPath, Collection[Region]] | None = None
    ) -> list[ObjectRecord]:
        """Return the records of objects, from each part that has shards of them.

        Args:
            within: The paths of the objects, each with regions. Parts without shards that overlap
                one of these are not read; an object without regions is read from all of its parts.
                None: all objects, from all parts.

        Raises:
            FormatError: An index row points to a section that does not exist, or a part is damaged.
        """
        if len(self.manifest.parts) == 1:
            return [o for o in self.objects() if within is None or o.path in within]
        wanted = {o.path: () for o in self.objects()} if within is None else within
        paths = {path_hash(path): path for path in wanted}
        table = self.manifest.find_all(paths)
        table = table.take(np.flatnonzero(table.dims != NO_BYTES))  # parts that have their bytes
        records: dict[tuple[ObjectPath, tuple[int, int]], ObjectRecord] = {}
        for number, place, region in zip(
            table.hashes.tolist(), table.places(), table.regions(), strict=True
        ):
            path = paths[number]
            regions = wanted[path]
            if (path, place) in records or not (region is None or _meets(region, regions)):
                continue
            record = self._in_section(place).get(path)
            if record is not None:
                records[path, place] = record
        return list(records.values())

    def _parts_of(self, request: ObjectRequest) -> Sequence[ObjectRecord]:
        record = request.record
        if request.sink is None:
            return (record,)
        parts = self.descriptions(record, request.region)
        if any(part is not record and differ(part, record) for part in parts):
            path = show_path(record.path)
            msg = f"{path}: {DIFFERENT}"
            raise FormatError(msg, [path])
        return parts

    def _of_stored(self, request: ObjectRequest) -> ObjectRequest:
        """Turn a request for a derived object into one for its master; return others unchanged."""
        record, sink = request.record, request.sink
        if record.derived is None:
            return request
        master = self.master(record)
        spec, stored = record.spec, master.spec
        if sink is not None:
            sink = CastSink(sink, stored, spec)
        at = request.at // spec.itemsize * stored.itemsize
        return ObjectRequest(master, sink, request.region, at, record.path)

    def check_codecs(self, head: PartHead) -> None:
        """Check that every codec of a part is installed, and accepts the stored options.

        Raises:
            PluginError: A codec is missing, or refuses its options.
        """
        for number in range(1, len(head.chains)):  # 0 is raw
            self._chain(head, number)

    def unlisted(self, objects: Sequence[ObjectRecord]) -> set[ObjectPath]:
        """Return the paths of the values that the index leaves out; none if there is one part."""
        values = {path_hash(o.path): o.path for o in objects if o.kind is Kind.VALUE}
        if len(self.manifest.parts) == 1 or not values:
            return set()
        table = self.manifest.find_all(values)
        return {values[hashed] for hashed in values.keys() - set(table.hashes.tolist())}

    def _nodes_at(self, paths: Collection[ObjectPath]) -> list[NodeRecord]:
        """Search all parts for the nodes at `paths`.

        There is no object below these nodes, so the index does not lead to their sections.
        """
        nodes: dict[ObjectPath, NodeRecord] = {}
        for part in range(len(self.manifest.parts)) if paths else ():
            for section in self.manifest.sections(part):
                nodes |= {n.path: n for n in section.nodes if n.path in paths}
        return [*nodes.values()]

    def _all(self) -> tuple[list[ObjectRecord], list[NodeRecord]]:
        if self._everything is None:
            with memory_permitting(f"step {self.record.step}"):
                self._everything = self._read(None)
        return self._everything

    def _read(self, selection: Selection | None) -> tuple[list[ObjectRecord], list[NodeRecord]]:
        """Read the objects and nodes of all sections, or of those that may hold selected ones.

        If several parts describe an object, only the first of these is read. The index leaves out
        a value, such as an empty dict, if other ranks have a container at its path: then the nodes
        of the container take its place.
        """
        objects: list[ObjectRecord] = []
        nodes: list[NodeRecord] = []
        for part, wanted in self._outline().items():
            here: list[ObjectRecord] = []
            above: list[NodeRecord] = []
            for section in self.manifest.sections(part, selection, wanted, keep=True):
                here += section.objects
                above += section.nodes
            if objects or nodes:
                here, above = _new_in(objects, nodes, here, above)
            objects += sorted(here, key=lambda record: record.ordinal)
            nodes += sorted(above, key=lambda node: node.ordinal)
        absent = self.unlisted(objects)
        if absent:
            objects = [o for o in objects if o.path not in absent]
            nodes += self._nodes_at(absent - containers(objects, nodes))
        check_ties(self._with_owners(objects))
        return objects, nodes

    def _outline(self) -> dict[int, set[int] | None]:
        """Return sections, by part, that together describe every object; None is all of a part."""
        if len(self.manifest.parts) == 1:
            return {0: None}
        by_part: dict[int, set[int] | None] = {}
        for place in self.manifest.from_index(IndexReader.first_places):
            part, number = self.manifest.checked_place(place)
            wanted = by_part.setdefault(part, set())
            assert wanted is not None
            wanted.add(number)
        return dict(sorted(by_part.items()))

    def _with_owners(self, objects: list[ObjectRecord]) -> Sequence[ObjectRecord]:
        """Return the objects, followed by the owners and masters that have their bytes."""
        if all(o.same_as is None and o.derived is None for o in objects):
            return objects
        every, known = list(objects), {o.path for o in objects}
        for _ in range(2):  # the owner of a tied object may be derived itself
            origins = {path for o in objects for path in (o.same_as, o.derived)}
            needed = {path for path in origins - known if path is not None}
            objects = [*filter(None, map(self.find, sorted(needed)))]
            every += objects
            known |= needed
        return every

    def _chain(self, head: PartHead, number: int, absent: set[str] | None = None) -> CodecChain:
        key = (head.rank, number)
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = self._made_chain(head.chains[number])
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


def decoding_chain(records: Sequence[CodecRecord], registry: Registry) -> CodecChain:
    """Return the codecs of a stored chain, in the versions that wrote the frames.

    Raises:
        PluginError: A codec is missing, or refuses its options or that version.
    """
    return CodecChain(
        [registry.codec_from_record(r.name, r.version, r.config) for r in records],
        versions=[record.version for record in records],
    )


def check_length(frame: Frame, chain: CodecChain, blob: str) -> None:
    """Check that an encoded frame is no longer than its codecs can make it.

    Memory is allocated for a frame before it is read, so a damaged length must not cause a larger
    allocation.

    Raises:
        FormatError: The frame is longer.
    """
    bound = chain.max_encoded_size(frame.raw_length)
    if frame.length > bound:
        msg = (
            f"the frame at {blob}:{frame.offset} has a recorded length of {frame.length} bytes, "
            f"but its codecs make at most {bound} bytes from {frame.raw_length}"
        )
        raise FormatError(msg, [blob])


def containers(objects: Sequence[ObjectRecord], nodes: Sequence[NodeRecord]) -> set[ObjectPath]:
    """Return the paths of nodes, and the paths with objects or nodes below them."""
    of_nodes = {node.path for node in nodes}
    return paths_above({o.path for o in objects} | of_nodes) | of_nodes


def _new_in(
    objects: Sequence[ObjectRecord],
    nodes: Sequence[NodeRecord],
    more: Sequence[ObjectRecord],
    above: Sequence[NodeRecord],
) -> tuple[list[ObjectRecord], list[NodeRecord]]:
    """Return the objects and nodes that earlier parts lack, with ordinals after theirs."""
    first = 1 + max([o.ordinal for o in objects] + [n.ordinal for n in nodes])
    known = {o.path for o in objects}
    known_nodes = {n.path for n in nodes}
    return (
        [o._replace(ordinal=o.ordinal + first) for o in more if o.path not in known],
        [replace(n, ordinal=n.ordinal + first) for n in above if n.path not in known_nodes],
    )


def differ(first: ObjectRecord, second: ObjectRecord) -> bool:
    """Return whether two records, from two parts, describe one object differently."""

    def traits(record: ObjectRecord) -> tuple[object, ...]:
        return (
            record.kind,
            record.spec,
            record.role,
            record.form,
            record.same_as,
            record.derived,
        )

    return traits(first) != traits(second)


def check_ties(records: Sequence[ObjectRecord]) -> None:
    """Check that tied objects have untied owners, and that derived objects have masters.

    A master must have its own bytes, the dtype `float32`, and the shape of the derived object.

    Raises:
        FormatError: Some have none; names them.
    """
    loose = []
    by_path: dict[ObjectPath, ObjectRecord] = {}
    for record in records:
        path = record.derived if record.same_as is None else record.same_as
        if path is None:
            continue
        by_path = by_path or {r.path: r for r in records}  # made only if a record needs it
        target = by_path.get(path)
        if target is None or not _is_origin(target, record):
            loose.append(show_path(record.path))
    if loose:
        raise _bad_origins(loose)


def _bad_origins(loose: Sequence[str]) -> FormatError:
    msg = (
        f"{counted(len(loose), 'object')} cannot be read, because the object with their bytes is "
        "missing, refers to another object itself, or is of another kind: "
        f"{', '.join(loose[:8])}"
    )
    return FormatError(msg, loose)


def _is_origin(target: ObjectRecord, record: ObjectRecord) -> bool:
    """Return whether a tied or derived object may use the bytes of `target`."""
    return _is_master(target, record) if record.same_as is None else _is_owner(target, record)


def _is_owner(target: ObjectRecord, record: ObjectRecord) -> bool:
    same = (target.kind, target.spec, target.form) == (record.kind, record.spec, record.form)
    return same and target.same_as is None


def _is_master(target: ObjectRecord, record: ObjectRecord) -> bool:
    def is_plain(candidate: ObjectRecord) -> bool:
        spec = candidate.spec
        return candidate.kind is Kind.TENSOR and FLOAT_DTYPES.get(spec.dtype) == spec.itemsize

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
    """Return whether a region overlaps any of the others; True if there are no others."""
    dims = len(region.sizes)  # the saved object may have had other dimensions
    return not others or any(
        len(other.sizes) == dims and common_region(region, other) for other in others
    )

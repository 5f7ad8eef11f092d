"""From a save plan and what became of its chunks to the sections of a part. Sans-IO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import SaveError
from penstock.core.manifest import Frame, NodeRecord
from penstock.core.section_draft import SectionDraft, new_draft

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.plan import SavePlan
    from penstock.core.types import Kind, ObjectPath, Region, Role, TensorSpec

SECTION_OBJECTS = 2048
"""Most objects and nodes of a section: what opening one object has to read and check."""

SECTION_WEIGHT = 4 << 20
"""Rough bytes of JSON after which a section ends (long paths, many checksums)."""

_ONE_REF = 3


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of one chunk of the plan: fields as in `Frame`."""

    offset: int
    length: int
    checksums: tuple[int, ...]
    raw_checksum: int | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object as described, and where it stands in the plan.

    Attributes as in `StateObject`, and:
        ordinal: Number among objects and nodes, in the order in which they were described.
        item: Number of its `PlanItem`; None if it is tied.
    """

    ordinal: int
    path: ObjectPath
    kind: Kind
    spec: TensorSpec
    region: Region
    role: Role
    form: str
    same_as: ObjectPath | None
    item: int | None


def build_sections(
    entries: Sequence[ObjectEntry | NodeRecord],
    plan: SavePlan,
    results: Sequence[ChunkResult],
    *,
    blobs: Mapping[str, int],
    section_objects: int = SECTION_OBJECTS,
) -> list[SectionDraft]:
    """Put what was described and what was stored together, in order of storage.

    A slab whose objects fall into two sections is listed as a frame in both.

    Args:
        entries: Objects and nodes in the order in which they were described.
        plan: Of the save.
        results: For each chunk of the plan what became of it.
        blobs: Number in the part's table of the blob that holds raw (`"raw"`) and encoded
            (`"enc"`) frames.
        section_objects: Most objects and nodes of a section.

    Raises:
        SaveError: The plan does not hold every byte of every object once: a bug.
    """
    refs = _refs_by_item(plan, len(entries))
    frames = [
        Frame(
            blobs["enc" if chunk.chain else "raw"],
            result.offset,
            result.length,
            chunk.length,
            chunk.chain,
            result.checksums,
            result.raw_checksum,
            result.lengths,
        )
        for chunk, result in zip(plan.chunks, results, strict=True)
    ]
    drafts: list[SectionDraft] = []
    writer = _SectionWriter(frames)
    for number in _storage_order(entries, refs):
        entry = entries[number]
        if isinstance(entry, NodeRecord):
            writer.add_node(entry)
        else:
            writer.add_object(entry, () if entry.item is None else refs[entry.item])
        if writer.count >= section_objects or writer.weight >= SECTION_WEIGHT:
            drafts.append(writer.draft)
            writer = _SectionWriter(frames)
    if writer.count:
        drafts.append(writer.draft)
    return drafts


def _refs_by_item(plan: SavePlan, count: int) -> list[Sequence[int]]:
    # Flat runs of (chunk, at, length). Tuples where one will do: the collector forgets tuples of
    # integers, so a million objects take half the time.
    refs: list[Sequence[int]] = [()] * count
    longer: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for number, chunk in enumerate(plan.chunks):
        for piece in chunk.pieces:
            item, length = piece.item, piece.stop - piece.start
            if not piece.start and not refs[item]:
                refs[item] = (number, piece.at, length)
                continue
            if item not in longer:
                refs[item] = longer[item] = list(refs[item])
                ends[item] = sum(longer[item][2:])
            if not piece.start or piece.start != ends[item]:
                msg = f"the plan does not go on at byte {piece.start} of item {item}"
                raise SaveError(msg)
            longer[item] += (number, piece.at, length)
            ends[item] = piece.stop
    return refs


def _storage_order(
    entries: Sequence[ObjectEntry | NodeRecord], refs: Sequence[Sequence[int]]
) -> list[int]:
    # What has no bytes goes with the entry that was described before it.
    keys: list[int] = []
    chunk = 0
    for entry in entries:
        if not isinstance(entry, NodeRecord) and entry.item is not None and refs[entry.item]:
            chunk = refs[entry.item][0]
        keys.append(chunk)
    return sorted(range(len(keys)), key=keys.__getitem__)


class _SectionWriter:
    def __init__(self, frames: Sequence[Frame]) -> None:
        self.draft = new_draft()
        self.count = 0
        self.weight = 0
        self._frames = frames
        self._local: dict[int, int] = {}
        self._types: dict[tuple[Any, ...], int] = {}
        self._last: ObjectEntry | None = None
        self._last_type = 0

    def add_node(self, node: NodeRecord) -> None:
        self.draft.node_rows.append([node.ordinal, node.path, node.form, node.meta])
        self.count += 1
        self.weight += sum(map(len, node.path)) + len(repr(node.meta))

    def add_object(self, entry: ObjectEntry, refs: Sequence[int]) -> None:
        spec, region = entry.spec, entry.region
        columns = self.draft.columns
        shards: tuple[tuple[Any, ...], ...] = ()
        if entry.same_as is not None:
            columns["same_as"].append([len(columns["path"]), entry.same_as])
        else:
            stored = refs[2] if len(refs) == _ONE_REF else sum(refs[2::3])
            if stored != spec.itemsize * math.prod(region.sizes):
                msg = f"the plan holds {stored} bytes of {entry.path}"
                raise SaveError(msg)
            local = self._local_refs(refs)
            whole = region.sizes == spec.shape
            shards = ((local,) if whole else (local, region.offsets, region.sizes),)
        columns["ordinal"].append(entry.ordinal)
        columns["path"].append(entry.path)
        columns["type"].append(self._type(entry))
        columns["shape"].append(spec.shape)
        columns["shards"].append(shards)
        self.count += 1
        self.weight += len(refs) + sum(map(len, entry.path))

    def _local_refs(self, refs: Sequence[int]) -> tuple[int, ...]:
        if len(refs) == _ONE_REF:
            number, at, length = refs
            return self._local_frame(number), at, length
        local = list(refs)
        local[::3] = map(self._local_frame, refs[::3])
        return tuple(local)

    def _local_frame(self, number: int) -> int:
        local = self._local.get(number)
        if local is None:
            local = self._local[number] = len(self._local)
            self.draft.frames.append(self._frames[number])
            self.weight += 20 * len(self._frames[number].checksums)
        return local

    def _type(self, entry: ObjectEntry) -> int:
        spec, last = entry.spec, self._last
        if (
            last is not None
            and entry.kind is last.kind
            and entry.role is last.role
            and entry.form == last.form
            and spec.dtype == last.spec.dtype
            and spec.itemsize == last.spec.itemsize
        ):
            return self._last_type  # hashing two enum members a million times takes a second
        key = (entry.kind, spec.dtype, spec.itemsize, entry.role, entry.form)
        number = self._types.get(key)
        if number is None:
            number = self._types[key] = len(self._types)
            self.draft.types.append(list(key))
        self._last, self._last_type = entry, number
        return number

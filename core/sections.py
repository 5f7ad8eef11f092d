"""From a save plan and what became of its chunks to the sections of a part. Sans-IO."""

from __future__ import annotations

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
    refs = _refs_by_item(plan)
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
            writer.add_object(entry, () if entry.item is None else refs.get(entry.item, ()))
        if writer.count >= section_objects or writer.weight >= SECTION_WEIGHT:
            drafts.append(writer.draft)
            writer = _SectionWriter(frames)
    if writer.count:
        drafts.append(writer.draft)
    return drafts


def _refs_by_item(plan: SavePlan) -> dict[int, list[int]]:
    # Flat lists of (chunk, at, length): a third of the time of records for a million objects.
    refs: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for number, chunk in enumerate(plan.chunks):
        for piece in chunk.pieces:
            item, start, stop = piece.item, piece.start, piece.stop
            if start != ends.get(item, 0):
                msg = f"the plan does not go on at byte {start} of item {item}"
                raise SaveError(msg)
            ends[item] = stop
            if start:
                refs[item] += (number, piece.at, stop - start)
            else:
                refs[item] = [number, piece.at, stop]
    return refs


def _storage_order(
    entries: Sequence[ObjectEntry | NodeRecord], refs: Mapping[int, list[int]]
) -> list[int]:
    # What has no bytes goes with the entry that was described before it.
    keys: list[int] = []
    chunk = 0
    for entry in entries:
        item = None if isinstance(entry, NodeRecord) else entry.item
        if item is not None and item in refs:
            chunk = refs[item][0]
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

    def add_node(self, node: NodeRecord) -> None:
        self.draft.node_rows.append([node.ordinal, node.path, node.form, node.meta])
        self.count += 1
        self.weight += sum(map(len, node.path)) + len(repr(node.meta))

    def add_object(self, entry: ObjectEntry, refs: Sequence[int]) -> None:
        spec = entry.spec
        columns = self.draft.columns
        shards: list[list[Any]] = []
        if entry.same_as is not None:
            columns["same_as"].append([len(columns["path"]), entry.same_as])
        else:
            whole = entry.region.sizes == spec.shape
            stored = sum(refs[2::3])
            if stored != spec.itemsize * entry.region.numel:
                msg = f"the plan holds {stored} bytes of {entry.path}"
                raise SaveError(msg)
            row: list[Any] = [self._local_refs(refs)]
            shards = [row if whole else [*row, entry.region.offsets, entry.region.sizes]]
        columns["ordinal"].append(entry.ordinal)
        columns["path"].append(entry.path)
        columns["type"].append(self._type(entry))
        columns["shape"].append(spec.shape)
        columns["shards"].append(shards)
        self.count += 1
        self.weight += sum(map(len, entry.path)) + 8 * len(refs)

    def _local_refs(self, refs: Sequence[int]) -> list[int]:
        local = list(refs)
        for at in range(0, len(local), 3):
            number = local[at]
            if number not in self._local:
                self._local[number] = len(self._local)
                self.draft.frames.append(self._frames[number])
                self.weight += 20 * len(self._frames[number].checksums)
            local[at] = self._local[number]
        return local

    def _type(self, entry: ObjectEntry) -> int:
        key = (entry.kind, entry.spec.dtype, entry.spec.itemsize, entry.role, entry.form)
        number = self._types.get(key)
        if number is None:
            number = self._types[key] = len(self._types)
            self.draft.types.append(list(key))
        return number

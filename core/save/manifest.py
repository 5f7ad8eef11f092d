"""Encodes the manifest of a save from its plan and the stored frames of its chunks. Sans-IO.

Tested in `tests/core/format/test_records.py`.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.core.abc.provider import Node
from penstock.core.errors import SaveError
from penstock.core.format.commit_record import encode_borrowed
from penstock.core.format.index import index_of
from penstock.core.format.part import encode_part
from penstock.core.format.records import (
    BlobRecord,
    ChoiceRecord,
    CodecRecord,
    CommitRecord,
    Frame,
    ManyParts,
    blob_uid,
    borrowed_from,
)
from penstock.core.format.section_writer import SectionWriter
from penstock.core.limits import MAX_LISTED_BORROWED, MAX_LISTED_PARTS
from penstock.core.plan.earlier_frames import PartTables, resolved
from penstock.core.plan.save import elements_of
from penstock.core.types import WorstErrors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import StateObject
    from penstock.core.format.index import IndexBlocks, ShardTable
    from penstock.core.format.records import BaseEntry, Chain, PartEntry
    from penstock.core.pipeline.chunks import ChunkResult
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.earlier_frames import StoredFrame
    from penstock.core.plan.save import Chunk, SavePlan, ShardSpan
    from penstock.core.reporting.reports import CodecChoice
    from penstock.core.save.request import SaveRequest
    from penstock.core.types import ObjectPath

SECTION_OBJECTS = 2048
"""The most objects and nodes of a section. To open one object, a reader reads its whole section."""

SECTION_WEIGHT = 4 << 20
"""A section also ends after about this many bytes of JSON: paths or checksums may be long."""

_ONE_REF = 3


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A summary of a part for the commit record and the index.

    Attributes:
        entry: The part.
        codecs: Codecs used, name to version.
        borrowed: The blobs of other saves that it refers to, ascending by name.
        bytes_raw: Raw bytes of the objects that it stores.
        bytes_stored: Bytes of the blobs that its rank wrote.
        blobs: Number of these blobs.
    """

    entry: PartEntry
    codecs: Mapping[str, int]
    borrowed: tuple[BlobRecord, ...]
    bytes_raw: int
    bytes_stored: int
    blobs: int = 0


@dataclass(frozen=True, slots=True)
class RankManifest:
    """The encoded part of one rank, with the shards that it lists.

    The first `listing_bytes` bytes of `data` list the shards. `frames` maps chunk numbers of the
    plan to frames; numbers inside a frame index `tables`.
    """

    data: bytes
    summary: PartSummary
    shards: ShardTable
    listing_bytes: int
    frames: Mapping[int, Frame]
    tables: PartTables

    def stored_frames(self, block_bytes: int) -> dict[int, StoredFrame]:
        """Return the frames of chunks by number, for a later save that refers to them."""
        blobs, chains = self.tables.blobs, self.tables.chains
        return {n: resolved(f, blobs, chains, block_bytes) for n, f in self.frames.items()}


@dataclass(frozen=True, slots=True)
class RankShare:
    """The chunks and entries that this rank writes and lists; by default, one process has all.

    Attributes:
        rank: The number of this rank.
        world_size: Number of ranks.
        chunks: The chunks of the plan that it writes; None: all.
        lists_all: Whether it lists all that it describes. If not, it lists only objects whose bytes
            it stores; the first rank with the same structure lists the rest.
        own_paths: Paths below which each rank has its own objects, and lists all of them.
        masters: The objects of the plan that it may store as derived, as in `SavePlan.masters`.
    """

    rank: int = 0
    world_size: int = 1
    chunks: frozenset[int] | None = None
    lists_all: bool = True
    own_paths: tuple[ObjectPath, ...] = ()
    masters: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def derived(self, equal: Mapping[int, int]) -> dict[int, int]:
        """Return the objects that this rank stores as derived, with their masters.

        `equal` maps each object that equals its rounded master to that master.
        """
        return {n: m for n, m in equal.items() if m in self.masters.get(n, ())}

    def writes(self, chunk: int) -> bool:
        """Return whether this rank writes a chunk of the plan."""
        return self.chunks is None or chunk in self.chunks

    def lists(self, path: ObjectPath) -> bool:
        """Return whether this rank lists the entry at `path` even without storing bytes of it."""
        return self.lists_all or any(path[: len(own)] == own for own in self.own_paths)


ALONE = RankShare()


class ManifestWriter:
    """Encodes the manifest of one save after all its blobs are written."""

    def __init__(
        self,
        request: SaveRequest,
        metadata: Mapping[str, Any],
        *,
        shipper: Callable[[str], str],
        earlier_errors: Mapping[ObjectPath, WorstErrors] | None = None,
        earlier_choices: Sequence[ChoiceRecord] = (),
        compacts: str = "",
    ) -> None:
        """Prepare for `request`.

        Args:
            request: The entries and the plan of the save.
            metadata: The user's metadata, for the commit record.
            shipper: Names the distribution of a plugin, as `Registry.shipper` does.
            earlier_errors: The errors that lossy codecs caused in an earlier checkpoint, by object.
            earlier_choices: The codec choices of reused frames.
            compacts: As in `CommitRecord`.
        """
        self._request = request
        self._metadata = metadata
        self._shipper = shipper
        self._earlier = earlier_errors or {}
        self._earlier_choices = earlier_choices
        self._compacts = compacts
        self._chains = [chain_record(chain) for chain in request.chains]

    def encode_part(
        self,
        uid: str,
        results: Mapping[int, ChunkResult],
        blobs: Sequence[tuple[str, int]],
        *,
        derived: Mapping[int, int],
        choices: Sequence[CodecChoice] = (),
        share: RankShare = ALONE,
    ) -> RankManifest:
        """Encode the part of this rank.

        Args:
            uid: The uid of the save.
            results: The stored frames of the chunks of the plan that this rank writes, by number.
            blobs: Name and length of each blob, as sealed; those of other saves are borrowed.
            derived: Maps the number of each derived object to its master's.
            choices: The codecs chosen while the save ran, by class of objects.
            share: The chunks and entries of this rank.

        Raises:
            FormatError: No reader would accept the part.
        """
        request = self._request
        stored, numbers = stored_chains(request.plan, results, self._chains)
        tables = PartTables([BlobRecord(name, length) for name, length in blobs], stored)
        frames = frames_of(
            request.plan,
            results,
            blobs={b.name[-3:]: i for i, b in enumerate(tables.blobs) if blob_uid(b.name) == uid},
            chains=numbers,
            place=tables.place,
        )
        borrowed = borrowed_from(tables.blobs, uid)
        part = encode_part(
            build_sections(
                request.entries,
                request.plan,
                frames,
                derived=derived,
                errors=self._errors(results),
                share=share,
            ),
            uid=uid,
            rank=share.rank,
            world_size=share.world_size,
            step=request.step,
            block_bytes=request.block_bytes,
            blobs=tables.blobs,
            chains=tables.chains,
            choices=[
                *self._earlier_choices,
                *(ChoiceRecord(choice.objects, choice.codec, choice.why) for choice in choices),
            ],
        )
        summary = PartSummary(
            part.entry,
            codecs_of(tables.chains),
            borrowed,
            request.plan.bytes_of_chunks(share.chunks),
            sum(blob.length for blob in tables.blobs if blob not in borrowed),
            len(tables.blobs) - len(borrowed),
        )
        return RankManifest(part.data, summary, part.shards, part.listing_bytes, frames, tables)

    def encode(
        self,
        uid: str,
        parts: Sequence[PartSummary],
        blocks: IndexBlocks,
        *,
        engine: str,
        created: str,
        base: BaseEntry | None = None,
        world_size: int = 1,
        providers: Mapping[str, int] | None = None,
    ) -> tuple[bytes, CommitRecord]:
        """Encode the index and the commit record.

        Args:
            uid: The uid of the save.
            parts: The parts of all ranks that stored anything, in rank order.
            blocks: The index over their shards.
            engine: Name of the backend that wrote the blobs.
            created: The time of the commit, as records write it.
            base: The earlier checkpoint that frames are encoded against.
            world_size: Number of ranks.
            providers: Name and version of each provider used by other ranks.

        Raises:
            FormatError: No reader would accept the manifest.
        """
        request = self._request
        entries = tuple(part.entry for part in parts)
        many = None
        if len(entries) > MAX_LISTED_PARTS:
            many = ManyParts(len(entries), sum(entry.length for entry in entries))
        borrowed = borrowed_from({blob for part in parts for blob in part.borrowed}, uid)
        table, many_borrowed = b"", None
        if len(borrowed) > MAX_LISTED_BORROWED:
            table, many_borrowed = encode_borrowed(borrowed)
        index = index_of(uid, blocks, entries if many else (), table)
        codecs = {name: version for part in parts for name, version in part.codecs.items()}
        record = CommitRecord(
            uid=uid,
            step=request.step,
            generation=request.generation,
            created=created,
            world_size=world_size,
            index=index.entry,
            parts=() if many else entries,
            many_parts=many,
            codecs=codecs,
            providers=dict(request.providers) | dict(providers or {}),
            borrowed=() if many_borrowed else borrowed,
            many_borrowed=many_borrowed,
            base=base,
            compacts=self._compacts,
            metadata=dict(self._metadata),
            bytes_raw=sum(part.bytes_raw for part in parts),
            bytes_stored=sum(part.bytes_stored for part in parts),
            objects=index.objects,
            penstock=__version__,
            engine=engine,
            plugins=self._plugins(codecs, engine),
        )
        return index.data, record

    def _errors(self, results: Mapping[int, ChunkResult]) -> dict[ObjectPath, WorstErrors]:
        """Return each object's errors: those of this save added to earlier ones."""
        by_item: dict[int, list[WorstErrors | None]] = {}
        for number, result in results.items():
            chunk = self._request.plan.chunks[number]
            for piece, errors in zip(chunk.pieces, result.errors, strict=False):
                by_item.setdefault(piece.item, []).append(errors)
        objects = self._request.plan.objects
        now = {objects[item].entry.path: _worst_of(errors) for item, errors in by_item.items()}
        paths = {o.entry.path for o in objects} if self._earlier else now
        every = {path: _both(self._earlier.get(path), now.get(path)) for path in paths}
        return {path: errors for path, errors in every.items() if errors is not None}

    def _plugins(self, codecs: Mapping[str, int], engine: str) -> dict[str, str]:
        """Return the third-party plugins that the save used, each with its distribution."""
        plugins = [f"codec {name}" for name in codecs]
        plugins += [f"provider {name}" for name, _ in self._request.providers]
        shippers = {plugin: self._shipper(plugin) for plugin in (*plugins, f"backend {engine}")}
        return {plugin: by for plugin, by in sorted(shippers.items()) if by}


def codecs_of(chains: Iterable[Chain]) -> dict[str, int]:
    """Return the codecs of chains, name to version."""
    return {codec.name: codec.version for chain in chains for codec in chain}


def chain_record(chain: CodecChain | None) -> Chain:
    """Return the codecs of a chain as records; None and the empty chain mean raw."""
    codecs = () if chain is None else chain.codecs
    return tuple(CodecRecord(c.name, c.version, c.config.model_dump(mode="json")) for c in codecs)


def stored_chains(
    plan: SavePlan, results: Mapping[int, ChunkResult], chains: Sequence[Chain]
) -> tuple[list[Chain], dict[int, int]]:
    """Return the chains that encoded the frames, without the codecs that declined a chunk.

    Args:
        plan: The plan of the save.
        results: The stored frames of chunks, by number.
        chains: The chains that the plan and the results number.

    Returns:
        A list of the empty chain (raw) and of the chains that frames need; and, for each chunk, the
        index of its chain in the list.
    """
    table: list[Chain] = [()]
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    numbers: dict[int, int] = {}
    for number, result in results.items():
        chain = given_chain(plan.chunks[number], result)
        key = (chain, result.declined)
        if key not in known:
            links = enumerate(chains[chain])
            used = tuple(link for n, link in links if n not in result.declined)
            if used not in table:
                table.append(used)
            known[key] = table.index(used)
        numbers[number] = known[key]
    return table, numbers


def given_chain(chunk: Chunk, result: ChunkResult) -> int:
    """Return the number of the chain that got a chunk. Its codecs may have declined the chunk."""
    return chunk.chain if result.chain is None else result.chain


def frames_of(
    plan: SavePlan,
    results: Mapping[int, ChunkResult],
    *,
    blobs: Mapping[str, int],
    chains: Mapping[int, int],
    place: Callable[[StoredFrame], Frame],
) -> dict[int, Frame]:
    """Return the frames of chunks of a plan, by number.

    Args:
        plan: The plan of the save.
        results: The stored frames of chunks, by number.
        blobs: Index in the part's table of the blob of raw (`"raw"`) and encoded (`"enc"`) frames.
        chains: The number of each chunk's chain, from `stored_chains`.
        place: Renumbers a frame of another save for the part's tables.
    """
    frames = {
        number: Frame(
            blobs["enc" if given_chain(chunk, result) else "raw"],
            result.offset,
            result.length,
            chunk.length,
            chain,
            result.checksums,
            result.raw_checksum,
            result.lengths,
            elements_of(plan, chunk) if chain else None,
            None if result.base is None else place(result.base),
            result.content,
        )
        if result.shared is None
        else place(result.shared)
        for number, result in results.items()
        for chunk, chain in [(plan.chunks[number], chains[number])]
        if result.same_as is None
    }
    twins = {n: result.same_as for n, result in results.items() if result.same_as is not None}
    return frames | {number: frames[first] for number, first in twins.items()}


def build_sections(
    entries: Sequence[StateObject | Node],
    plan: SavePlan,
    frames: Mapping[int, Frame],
    *,
    derived: Mapping[int, int] | None = None,
    errors: Mapping[ObjectPath, WorstErrors] | None = None,
    section_objects: int = SECTION_OBJECTS,
    share: RankShare = ALONE,
) -> list[SectionWriter]:
    """Join the described entries with their stored frames, in order of storage.

    A slab whose objects fall into two sections is listed as a frame in both.

    Args:
        entries: Objects and nodes as described; the plan has the objects that are not tied, in the
            same order.
        plan: The plan of the save.
        frames: The frame of each chunk of the plan, from `frames_of`.
        derived: Maps the number of each derived object to its master's.
        errors: The errors that lossy codecs caused, by the path of the object.
        section_objects: At most this many objects and nodes per section.
        share: The chunks and entries of this rank.

    Raises:
        SaveError: The plan does not hold every byte of every object once: a bug.
    """
    by_item = _refs_by_item(plan, share)
    masters: dict[ObjectPath, ObjectPath] = {}
    for item, master in (derived or {}).items():
        by_item[item] = ()
        masters[plan.objects[item].entry.path] = plan.objects[master].entry.path
    refs = _refs_by_entry(entries, by_item)
    spans = {plan.objects[item].entry.path: spans for item, spans in plan.spans.items()}
    errors = errors or {}
    elsewhere = _decided_elsewhere(plan, by_item, share) - masters.keys()
    sections: list[SectionWriter] = []
    section = SectionWriter()
    for ordinal in _storage_order(refs):
        entry, places = entries[ordinal], refs[ordinal]
        path = entry.path
        if not places and path not in masters and (path in elsewhere or not share.lists(path)):
            continue
        if isinstance(entry, Node):
            section.add_node(ordinal, entry)
        elif entry.same_as is not None or path in masters:
            section.add_object(ordinal, entry, (), derived=masters.get(path))
        else:
            shards = _shard_rows(entry, places, spans.get(path), frames, section)
            worst = [*map(_json, astuple(errors[path]))] if path in errors else None
            section.add_object(ordinal, entry, shards, errors=worst)
            section.weight += len(places)
        if section.count >= section_objects or section.weight >= SECTION_WEIGHT:
            sections.append(section)
            section = SectionWriter()
    if section.count:
        sections.append(section)
    return sections


def _shard_rows(
    entry: StateObject,
    refs: Sequence[int],
    spans: Sequence[ShardSpan] | None,
    frames: Mapping[int, Frame],
    section: SectionWriter,
) -> Sequence[Sequence[Any]]:
    """Return the shards of an object for `SectionWriter.add_object`.

    Raises:
        SaveError: The plan does not hold all of its bytes: a bug.
    """
    spec = entry.spec
    spans = spans if spec.nbytes else None
    stored = refs[2] if len(refs) == _ONE_REF else sum(refs[2::3])
    if stored != (spec.nbytes if spans is None else _bytes_of(spans, spec.itemsize)):
        msg = (
            f"the plan has {stored} bytes of {entry.path}, more or fewer than this rank stores: "
            "this is a bug"
        )
        raise SaveError(msg)
    if len(refs) == _ONE_REF:  # nearly all objects
        number, at, length = refs
        refs = section.frame_number(frames[number]), at, length
    else:
        places = zip(refs[::3], refs[1::3], refs[2::3], strict=True)
        refs = tuple(n for c, a, s in places for n in (section.frame_number(frames[c]), a, s))
    return ((refs,),) if spans is None else tuple(_cut_refs(refs, spans, spec.itemsize))


def _decided_elsewhere(
    plan: SavePlan, by_item: Sequence[Sequence[int]], share: RankShare
) -> set[ObjectPath]:
    """Return the objects for which another rank records whether they are derived or stored."""
    if share.chunks is None:
        return set()
    return {plan.objects[item].entry.path for item in plan.masters if not by_item[item]}


def _refs_by_item(plan: SavePlan, share: RankShare) -> list[Sequence[int]]:
    # Flat lists of (chunk, at, length). An object in one chunk gets a tuple, since the garbage
    # collector does not track tuples of integers: a million objects take half the time.
    refs: list[Sequence[int]] = [()] * len(plan.objects)
    longer: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    first = {item: spans[0].start for item, spans in plan.spans.items() if spans}
    for number, chunk in enumerate(plan.chunks):
        if not share.writes(number):
            continue
        for piece in chunk.pieces:
            item, length = piece.item, piece.stop - piece.start
            if not refs[item] and piece.start == first.get(item, 0):
                refs[item] = (number, piece.at, length)
                continue
            if item not in longer:
                refs[item] = longer[item] = list(refs[item])
                ends[item] = first.get(item, 0) + sum(longer[item][2:])
            if not refs[item] or piece.start != ends[item]:
                msg = (
                    f"the plan has a gap or an overlap at byte {piece.start} of item {item}: this "
                    "is a bug"
                )
                raise SaveError(msg)
            longer[item] += (number, piece.at, length)
            ends[item] = piece.stop
    return refs


def _refs_by_entry(
    entries: Sequence[StateObject | Node], by_item: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Return each entry's chunk references; nodes and tied or derived objects have none."""
    items = iter(by_item)
    return [
        () if isinstance(entry, Node) or entry.same_as is not None else next(items)
        for entry in entries
    ]


def _bytes_of(spans: Iterable[ShardSpan], itemsize: int) -> int:
    return itemsize * sum(span.region.numel for span in spans)


def _cut_refs(
    refs: Sequence[int], spans: Iterable[ShardSpan], itemsize: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield the chunk references, offsets and sizes of each span, cut from `refs`."""
    pieces = zip(refs[::3], refs[1::3], refs[2::3], strict=True)
    frame = at = left = 0
    for span in spans:
        need = span.region.numel * itemsize
        cut: list[int] = []
        while need:
            if not left:
                frame, at, left = next(pieces)
            length = min(left, need)
            cut += (frame, at, length)
            at, left, need = at + length, left - length, need - length
        yield tuple(cut), span.region.offsets, span.region.sizes


def _storage_order(refs: Sequence[Sequence[int]]) -> list[int]:
    # An entry without bytes follows the entry described before it.
    keys: list[int] = []
    chunk = 0
    for places in refs:
        if places:
            chunk = places[0]
        keys.append(chunk)
    return sorted(range(len(keys)), key=keys.__getitem__)


def _worst_of(errors: Iterable[WorstErrors | None]) -> WorstErrors | None:
    """Return the worst absolute and the worst relative error of all; None if there are none."""
    known = [worst for worst in errors if worst is not None]
    if not known:
        return None
    return WorstErrors(max(e.absolute for e in known), max(e.relative for e in known))


def _both(before: WorstErrors | None, now: WorstErrors | None) -> WorstErrors | None:
    """Return the worst errors of elements that two saves changed."""
    if before is None or now is None:
        return before or now
    if not now.absolute:  # nothing was added; below, infinity times zero would be NaN
        return before
    # The second relative error applies to the value after the first error.
    relative = before.relative + now.relative * (1 + before.relative)
    return WorstErrors(before.absolute + now.absolute, relative)


def _json(error: float) -> float | None:
    return None if math.isinf(error) else error

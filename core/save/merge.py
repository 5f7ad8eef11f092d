"""Reads the parts of all ranks back from the root, and checks that they hold every byte.

Rank 0 does that before it commits, to detect a root that the hosts do not share, and bytes that no
rank has stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.abc import Node, StateObject
from penstock.core.catalog.survey import sizes_below
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    SaveError,
)
from penstock.core.format.compressed import check_digest, digest
from penstock.core.format.index import (
    NO_BYTES,
    WHOLE,
    dump_table,
    dump_traits,
    encode_blocks,
    merged,
)
from penstock.core.format.part import decode_section, decode_shards, read_head
from penstock.core.format.records import (
    PartEntry,
    blob_uid,
    borrowed_from,
    part_name,
)
from penstock.core.limits import MAX_DIMENSIONS
from penstock.core.plan.regions import flaw_of_cover
from penstock.core.ranks.contradictions import Contradictions
from penstock.core.save.manifest import PartSummary, codecs_of
from penstock.core.tree.paths import path_hash, show_path
from penstock.core.types import Kind, ReadRequest, Region, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.core.abc import Backend
    from penstock.core.format.index import IndexBlocks, ShardTable
    from penstock.core.format.records import BlobRecord, ObjectRecord, PartHead
    from penstock.core.types import ObjectPath

_BATCH = 64  # parts that are read at once


@dataclass(frozen=True, slots=True)
class MergedParts:
    """The merged parts of one save.

    Attributes:
        basis: The digests of all tables, and the other inputs of `merge`; equal inputs merge alike.
        blocks: The index over the shards of all parts.
        bytes_twice: Bytes of tensors that are stored beyond one copy of each.
        judged: The hashes of the objects whose shards were compared with their shape.
        shapes: The shapes of these objects on rank 0; see `_shapes_of`.
    """

    basis: tuple[object, ...]
    blocks: IndexBlocks
    bytes_twice: int
    judged: Sequence[int]
    shapes: Sequence[object]


class KnownParts:
    """Keeps the newest merged index, for a later save whose ranks store the same shards."""

    def __init__(self) -> None:
        self.newest: MergedParts | None = None


class PartsOfRanks:
    """Reads and merges the parts of a save on rank 0, after all ranks sealed."""

    def __init__(
        self,
        backend: Backend,
        *,
        uid: str,
        step: int,
        world_size: int,
        references: Collection[str],
        tick: Callable[[], None],
        known: KnownParts | None = None,
    ) -> None:
        """Prepare to read.

        Args:
            backend: The root.
            uid: The uid of the save.
            step: The step.
            world_size: Number of ranks.
            references: The uids of the other saves whose data the intent protects.
            tick: Called after each read.
            known: Has the parts that were merged last, and gets the new ones.
        """
        self._known = known or KnownParts()
        self._backend = backend
        self._uid = uid
        self._step = step
        self._world_size = world_size
        self._references = references
        self._tick = tick
        self._heads: dict[int, PartHead] = {}
        self._entries: dict[int, PartEntry] = {}
        self._tables: dict[int, bytes] = {}
        self._records: dict[tuple[int, int], dict[int, ObjectRecord]] = {}  # of sections, by hash

    def read(self, own: PartSummary, posts: Mapping[int, Mapping[str, Any]]) -> list[PartSummary]:
        """Read the listings of the parts back from the root; return all parts, in rank order.

        Args:
            own: The part of rank 0.
            posts: The posts of the other ranks about their parts, by rank.

        Raises:
            SaveError: A part, or one of its blobs, is not in the root as rank 0 sees it.
            FormatError: A part is damaged.
        """
        entries = self._entries = {
            rank: PartEntry(part_name(self._uid, rank), *post["part"])
            for rank, post in sorted(posts.items())
            if post.get("part")
        }
        # Each file is opened once: opening a thousand takes longer than everything else here.
        listings = self._ranges({rank: (0, posts[rank]["listing"]) for rank in entries}, entries)
        for rank, data in listings.items():
            head_length = entries[rank].head_length
            self._heads[rank] = read_head(
                data[:head_length],
                entries[rank],
                uid=self._uid,
                rank=rank,
                world_size=self._world_size,
                borrowed=None,
            )
            info = self._heads[rank].shards
            table = self._tables[rank] = data[head_length:]
            check_digest(table, entries[rank].name, length=info.length, expected=info.sha256)
        parts = [own]
        for rank, head in sorted(self._heads.items()):
            borrowed = borrowed_from(head.blobs, self._uid)
            parts.append(
                PartSummary(
                    entries[rank],
                    codecs_of(head.chains),
                    borrowed,
                    posts[rank]["raw"],
                    sum(blob.length for blob in head.blobs if blob not in borrowed),
                    len(head.blobs) - len(borrowed),
                )
            )
        self._check_blobs(parts)
        return parts

    def merge(
        self,
        own: ShardTable,
        entries: Sequence[StateObject | Node],
        *,
        derived: Collection[ObjectPath] = (),
        structures: Sequence[str] = (),
        nothing: frozenset[str] = frozenset(),
    ) -> MergedParts:
        """Return the index over all parts, once their shards are known to hold every byte.

        The index omits the values of ranks that have nothing where others have a container.

        Args:
            own: The shards in the part of rank 0; `read` has those of the others.
            entries: The entries of rank 0. The shapes of other objects are read from the parts.
            derived: The objects that rank 0 stores as derived. Other ranks' are read from parts.
            structures: Digests of the structures of all ranks, in order. Ranks with equal digests
                describe the same entries, and the first such rank lists all.
            nothing: The shown paths of values that mean "nothing here" on a rank.

        Raises:
            SaveError: The shards of an object do not form complete copies, or entries of ranks at
                one path do not fit together; names the object.
        """
        known = self._known.newest
        heads = sorted(self._heads.items())
        # The offset of the table in its part does not matter.
        parts = [(r, replace(h.shards, offset=0), len(h.sections)) for r, h in heads]
        tables = digest(dump_table(own) + dump_traits(own))
        basis = (tables, parts, len(entries), tuple(structures), nothing)
        # The tables have only 32 bits about each shape, so the shapes are compared too.
        if (
            known is not None
            and known.basis == basis
            and _shapes_of(known.judged, entries) == known.shapes
        ):
            return known
        table = merged([own, *(decode_shards(self._tables[rank], head) for rank, head in heads)])
        self._tick()
        every = [0, *(rank for rank, _ in heads)]
        judged, twice = self.check_cover(table, every, entries, derived)
        self._tick()
        absent = self._absent(structures, entries, nothing)
        table = table.without(map(path_hash, absent))
        shapes = _shapes_of(judged, entries)
        newest = MergedParts(basis, encode_blocks(table), twice, judged, shapes)
        self._known.newest = newest
        return newest

    def check_cover(
        self,
        table: ShardTable,
        ranks: Sequence[int],
        entries: Sequence[StateObject | Node],
        derived: Collection[ObjectPath] = (),
    ) -> tuple[list[int], int]:
        """Check that the shards of each object form one or more complete copies of it.

        Args:
            table: The shards of all parts.
            ranks: The rank of each part.
            entries: The entries of rank 0. The shapes of other objects are read from the parts.
            derived: The objects that rank 0 stores as derived. Other ranks' are read from parts.

        Returns:
            The hashes of the objects whose shape was checked; and the bytes of tensors that are
            stored beyond one copy of each.

        Raises:
            SaveError: The shards of an object do not form complete copies, or ranks describe it
                differently; names the object.
        """
        self._check_traits(table, ranks, entries, derived)
        known = {path_hash(e.path): e for e in entries if isinstance(e, StateObject)}
        self._check_listed(table, known)
        doubtful = _doubtful(table)
        if not len(doubtful):
            return [], 0
        twice = 0
        chosen = table if len(doubtful) == len(table) else table.take(doubtful)
        firsts = np.flatnonzero(np.diff(chosen.hashes, prepend=chosen.hashes[0] + 1)).tolist()
        bounds = np.cumsum(np.where(chosen.dims > MAX_DIMENSIONS, 0, chosen.dims)).tolist()
        for first, stop in zip(firsts, [*firsts[1:], len(chosen)], strict=True):
            entry = known.get(int(chosen.hashes[first]))
            rows = slice(first, stop)
            if entry is not None:
                described: StateObject | ObjectRecord = entry
            else:
                rank, section = ranks[int(chosen.parts[first])], int(chosen.sections[first])
                described = self._record(rank, section, int(chosen.hashes[first]))
            shape, needs = _shape_of(described)
            if needs and entry is not None and (chosen.dims[rows] == NO_BYTES).all():
                shards = chosen.take(np.arange(first, stop))
                needs = entry.path not in derived and not self._is_derived(ranks, shards)
            if not needs:
                continue
            own = chosen.bounds[bounds[first - 1] if first else 0 : bounds[stop - 1]]
            flaw, elements = _cover(shape, chosen.dims[rows], own)
            if described.kind is Kind.TENSOR:
                twice += (elements - math.prod(shape)) * described.spec.itemsize
            if flaw is not None:
                msg = (
                    f"step {self._step}: {show_path(described.path)}, of shape {list(shape)}: "
                    f"{flaw}; do all ranks take part, and put the same state into save()?"
                )
                raise SaveError(msg)
        return [int(hashed) for hashed in chosen.hashes[firsts]], twice

    def _check_listed(self, table: ShardTable, known: Mapping[int, StateObject]) -> None:
        """Check that each object that rank 0 describes is in some part."""
        wanted = np.fromiter(known, np.uint64, len(known))
        first = np.searchsorted(table.hashes, wanted, "left")
        unlisted = np.flatnonzero(first == np.searchsorted(table.hashes, wanted, "right"))
        if len(unlisted):
            path = show_path(known[int(wanted[unlisted[0]])].path)
            msg = (
                f"step {self._step}: no rank has stored {path}, which rank 0 has: give all ranks "
                "the same configuration"
            )
            raise SaveError(msg)

    def _check_traits(
        self,
        table: ShardTable,
        ranks: Sequence[int],
        entries: Sequence[StateObject | Node],
        derived: Collection[ObjectPath],
    ) -> None:
        """Check that all ranks that list an object agree about it. Readers check the same."""
        unlike = table.traits[1:] != table.traits[:-1]
        unlike &= table.hashes[1:] == table.hashes[:-1]
        if not unlike.any():
            return
        first = int(np.flatnonzero(unlike)[0])
        listings: list[tuple[int, StateObject | ObjectRecord, str]] = []
        for row in (first, first + 1):
            shard = table.take(np.array([row]))
            (part, section), hashed = shard.places()[0], int(shard.hashes[0])
            rank = ranks[part]
            own = [e for e in entries if path_hash(e.path) == hashed]
            entry = next((e for e in own if isinstance(e, StateObject)), None)
            if rank or entry is None:
                record = self._record(rank, section, hashed)
                master = record.derived
                source = "" if master is None else f" that is rounded from {show_path(master)}"
                listings.append((rank, record, source))
            else:
                source = " that is rounded from another" if entry.path in derived else ""
                listings.append((rank, entry, source))
        (rank, listed, source), (rank_2, listed_2, source_2) = listings
        here, there = _in_words(listed) + source, _in_words(listed_2) + source_2
        if here == there:
            here, there = f"{here} ({listed.form})", f"{there} ({listed_2.form})"
        remedy = (
            "give all ranks the same configuration, and the same tensors to round from"
            if source != source_2
            else "one path has to be one object on all ranks that have it; use separate keys for "
            "objects that differ"
        )
        msg = (
            f"step {self._step}: {show_path(listed.path)} is {here} on rank {rank}, and {there} "
            f"on rank {rank_2}: {remedy}"
        )
        raise SaveError(msg)

    def _absent(
        self,
        structures: Sequence[str],
        entries: Sequence[StateObject | Node],
        nothing: frozenset[str],
    ) -> set[ObjectPath]:
        """Check that the ranks' entries at each path fit together; return the paths to omit."""
        alike: dict[str, list[int]] = {}
        for rank, structure in enumerate(structures):
            alike.setdefault(structure, []).append(rank)
        if len(alike) < 2:  # noqa: PLR2004 - ranks of one structure cannot contradict each other
            return set()
        objects = {e.path: e.kind for e in entries if isinstance(e, StateObject)}
        outlines = Contradictions(nothing)
        outlines.add(alike.pop(structures[0]), objects, [e for e in entries if isinstance(e, Node)])
        listing = {rank for rank, head in self._heads.items() if head.sections}
        firsts = {ranks[0]: ranks for ranks in alike.values() if ranks[0] in listing}
        try:
            for at in range(0, len(firsts), _BATCH):
                places = self._sections_of([*firsts][at : at + _BATCH])
                for rank, data in self._ranges(places, self._entries).items():
                    outlines.add(firsts[rank], *_outline(self._heads[rank], data))
        except SaveError as error:
            msg = f"step {self._step}: {error}"
            raise SaveError(msg) from None
        return outlines.absent

    def _sections_of(self, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return offset and length of the sections in the parts of other ranks."""
        starts = {rank: self._heads[rank].sections[0].offset for rank in ranks}
        return {rank: (at, self._entries[rank].length - at) for rank, at in starts.items()}

    def _is_derived(self, ranks: Sequence[int], rows: ShardTable) -> bool:
        """Return whether another rank's part lists an object as derived."""
        return any(
            self._record(ranks[part], number, int(rows.hashes[0])).derived is not None
            for part, number in rows.places()
            if ranks[part] in self._heads
        )

    def _record(self, rank: int, section: int, hashed: int) -> ObjectRecord:
        """Return the record of an object in a section of another rank's part."""
        records = self._records.get((rank, section))
        if records is None:
            info = self._heads[rank].sections[section]
            data = self._ranges({rank: (info.offset, info.length)}, self._entries)
            objects = decode_section(data[rank], info, self._heads[rank]).objects
            records = self._records[rank, section] = {path_hash(o.path): o for o in objects}
        return records[hashed]

    def _ranges(
        self, places: Mapping[int, tuple[int, int]], entries: Mapping[int, PartEntry]
    ) -> dict[int, bytes]:
        """Read one byte range of each rank's part."""
        buffers = {rank: bytearray(length) for rank, (_, length) in places.items()}
        ranks = list(places)
        for at in range(0, len(ranks), _BATCH):
            requests = {
                rank: ReadRequest(entries[rank].name, places[rank][0], memoryview(buffers[rank]))
                for rank in ranks[at : at + _BATCH]
            }
            try:
                self._backend.read(list(requests.values()))
            except (BlobNotFoundError, BlobTruncatedError) as error:
                raise self._lost(self._first_lost(requests), error) from error
            self._tick()
        return {rank: bytes(buffer) for rank, buffer in buffers.items()}

    def _first_lost(self, requests: Mapping[int, ReadRequest]) -> int:
        for rank, request in requests.items():
            try:
                self._backend.read([request])
            except (BlobNotFoundError, BlobTruncatedError):
                return rank
        return next(iter(requests))

    def _check_blobs(self, parts: Sequence[PartSummary]) -> None:
        """Check that the store lists the blobs of the save, and those that it borrows.

        Raises:
            SaveError: A blob is missing, or belongs to a save that the intent does not protect: it
                may be deleted at any moment.
        """
        sizes = sizes_below(self._backend, (self._uid, *sorted(self._references)))
        self._tick()
        for part in parts:
            rank = part.entry.rank
            for blob in part.borrowed:
                if blob_uid(blob.name) not in self._references:
                    msg = (
                        f"step {self._step}: rank {rank} refers to {blob.name}, of a save that "
                        "this save's intent does not protect; this is a bug"
                    )
                    raise SaveError(msg)
            blobs = self._heads[rank].blobs if rank in self._heads else part.borrowed
            named: list[BlobRecord | PartEntry] = [*blobs]
            if rank in self._heads:
                named.append(part.entry)
            if any(sizes.get(file.name) != file.length for file in named):
                raise self._lost(rank, None)

    def _lost(self, rank: int, error: Exception | None) -> SaveError:
        detail = "" if error is None else f" ({error})"
        return SaveError(
            f"step {self._step}: the data of rank {rank} is not on {self._backend.url} as rank "
            f"0 sees it: is the folder shared by all hosts?{detail}"
        )


def _outline(head: PartHead, data: bytes) -> tuple[dict[ObjectPath, Kind], list[Node]]:
    """Return the kinds of all objects that a part lists, by path, and its nodes.

    Args:
        head: The head of the part.
        data: All of its sections.
    """
    objects: dict[ObjectPath, Kind] = {}
    nodes: list[Node] = []
    for info in head.sections:
        at = info.offset - head.sections[0].offset
        section = decode_section(data[at : at + info.length], info, head)
        objects |= {record.path: record.kind for record in section.objects}
        nodes += [Node(node.path, node.form, node.meta) for node in section.nodes]
    return objects, nodes


def _shapes_of(
    hashes: Sequence[int], entries: Sequence[StateObject | Node]
) -> list[tuple[tuple[int, ...], bool] | None]:
    """Return the shapes on rank 0, and whether bytes are stored; None for unknown objects."""
    if not hashes:
        return []
    known = {path_hash(e.path): _shape_of(e) for e in entries if isinstance(e, StateObject)}
    return [known.get(hashed) for hashed in hashes]


def _shape_of(entry: StateObject | ObjectRecord) -> tuple[tuple[int, ...], bool]:
    """Return the shape of an object, and whether bytes of it are stored."""
    # A value is stored whole, whatever its length at this step.
    shape = () if entry.kind is Kind.VALUE else entry.spec.shape
    is_derived = not isinstance(entry, StateObject) and entry.derived is not None
    return shape, entry.same_as is None and not is_derived and entry.spec.nbytes > 0


def _doubtful(table: ShardTable) -> NDArray[np.intp]:
    """Return the rows of objects that are not stored whole by one rank."""
    hashes = table.hashes
    first = np.ones(len(table), bool)
    first[1:] = hashes[1:] != hashes[:-1]
    group = np.cumsum(first) - 1
    alone = np.bincount(group) == 1
    plain = alone[group] & (table.dims == WHOLE) if len(table) else first
    return np.flatnonzero(~plain)


def _cover(
    shape: tuple[int, ...], dims: NDArray[np.uint8], bounds: NDArray[np.int64]
) -> tuple[str | None, int]:
    """Return a flaw in how shards cover a tensor, or None, and how many elements the shards have.

    Args:
        shape: Shape of the tensor.
        dims: Number of dimensions of each shard's region, or a marker.
        bounds: Offset and size in each dimension of each region, in sequence.
    """
    held = dims[dims != NO_BYTES]
    if ((held != WHOLE) & (held != len(shape))).any():
        return "a shard has another number of dimensions", 0
    if len(held) and (held == len(shape)).all() and _are_rows(shape, bounds):
        return None, math.prod(shape)
    regions = [Region.whole(shape)] * int((held == WHOLE).sum())
    pairs = iter(bounds.tolist())
    for dimensions in held[held != WHOLE].tolist():
        region = [next(pairs) for _ in range(dimensions)]
        regions.append(Region(tuple(o for o, _ in region), tuple(n for _, n in region)))
    return flaw_of_cover(shape, regions), sum(region.numel for region in regions)


def _are_rows(shape: tuple[int, ...], bounds: NDArray[np.int64]) -> bool:
    """Return whether the regions are consecutive groups of whole rows that cover the tensor.

    Most tensors are cut this way. Checking a million regions one by one takes seconds.
    """
    if not shape:
        return False
    boxes = bounds.reshape(-1, len(shape), 2)
    inner = boxes[:, 1:]
    if (inner[:, :, 0] != 0).any() or (inner[:, :, 1] != shape[1:]).any():
        return False
    rows = boxes[:, 0][np.argsort(boxes[:, 0, 0])]
    ends = rows.sum(axis=1)
    follows = rows[0, 0] == 0 and ends[-1] == shape[0] and (rows[1:, 0] == ends[:-1]).all()
    return bool(follows and (rows[:, 1] > 0).all())


def _in_words(entry: StateObject | ObjectRecord) -> str:
    """Return the kind of an object in words: "a float32 tensor of shape [4, 3]"."""
    if entry.kind is Kind.VALUE:
        return "a value"
    tied = "" if entry.same_as is None else f" tied to {show_path(entry.same_as)}"
    role = "" if entry.role is Role.OTHER else f" {entry.role.value}"
    return f"a {entry.spec.dtype}{role} tensor of shape {list(entry.spec.shape)}{tied}"

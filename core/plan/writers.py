"""Chooses the chunks of a save that one of several ranks writes. Sans-IO.

Ranks that hold the same bytes divide the work: each writes one run of the chunks. Every rank
decides alone, and all get the same result, since their plans cut the same bytes into the same
chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.core.plan.save import ShardSpan, replicas_of
from penstock.core.types import Kind, Region, Replica, Role, regions_of_range

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import StateObject
    from penstock.core.plan.save import SavePlan
    from penstock.core.types import ObjectPath

WRITER_BYTES = 64 << 20
"""The fewest bytes that one of several replicas writes: fewer would make many small blobs."""


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """The places of one rank among ranks with equal data, known after all ranks have met.

    Attributes:
        plain: Its place among ranks with the same structure, which hold equal plain tensors.
        shared: For each `PerRank` with an index, by its shown path: its place among the ranks with
            the same index. A rank stores all of its other `PerRank`s.
    """

    plain: Replica = field(default_factory=Replica)
    shared: Mapping[str, Replica] = field(default_factory=dict)

    def of(self, entry: StateObject) -> Replica:
        """Return this rank's place among the ranks with an object's data."""
        if entry.replica is None:
            return self.plain
        return self.shared.get(entry.replica.place, entry.replica)


def among(replica: Replica, members: Collection[int]) -> Replica:
    """Return the place of a rank among those of `members` that hold the same data.

    The mesh of an object may include ranks that do not take part in this save. They hold the same
    data but write nothing, so they are not counted.

    Args:
        replica: The place of a member among all ranks that hold the same data.
        members: The job-wide numbers of the ranks that save together.
    """
    ranks = tuple(rank for rank in replica.ranks if rank in members)
    if ranks == replica.ranks:
        return replica
    index = ranks.index(replica.ranks[replica.index])
    return replace(replica, index=index, count=len(ranks), ranks=ranks)


def chunks_of_rank(
    plan: SavePlan, places: RankPlaces, *, writer_bytes: int = WRITER_BYTES
) -> frozenset[int]:
    """Return the numbers of the chunks that this rank writes.

    Ranks that hold the same tensors divide their chunks. Values, buffers and each `PerRank` are not
    divided: the first rank that holds them writes them. Buffers must come from one rank, since each
    rank may have computed them from its own data.

    The rank that writes the first chunk of a master also writes the objects that may be derived
    from it, so that one rank has both. These objects do not count when chunks are divided, since
    most take no bytes.

    Args:
        plan: The plan of everything that this rank holds, with even cuts.
        places: The places of this rank among the ranks with the same data.
        writer_bytes: The fewest bytes that one of several writers gets.
    """
    groups: dict[object, list[int]] = {}
    held: dict[object, tuple[Replica, bool]] = {}  # `True`: one rank writes the whole group
    leaders = _leaders(plan)
    for number, chunk in enumerate(plan.chunks):
        if chunk.pieces[0].item in leaders:
            continue
        entry = _entry_of(plan, number)
        key = _group_of(entry)
        one_writes = key[1]
        groups.setdefault(key, []).append(number)
        held.setdefault(key, (places.of(entry), one_writes))
    mine: set[int] = set()
    for group, numbers in groups.items():
        place, one_writes = held[group]
        total = sum(plan.chunks[number].length for number in numbers)
        writers = 1 if one_writes else min(place.count, max(1, total // writer_bytes))
        done = 0
        for number in numbers:
            length = plan.chunks[number].length
            if (2 * done + length) * writers // (2 * total) == place.index:
                mine.add(number)
            done += length
    if leaders:
        mine.update(
            number
            for number, chunk in enumerate(plan.chunks)
            if leaders.get(chunk.pieces[0].item) in mine
        )
    return frozenset(mine)


def bytes_of_rank(plan: SavePlan) -> tuple[int, int]:
    """Return the raw bytes that all ranks of equal structure hold, and this rank's other bytes.

    Of data replicated on a mesh, each rank counts only its share. So the second numbers of all
    ranks add up to the bytes that they store.
    """
    alike = others = 0
    for number, chunk in enumerate(plan.chunks):
        replica = _entry_of(plan, number).replica
        if replica is None:
            alike += chunk.length
        else:
            others += chunk.length * (replica.index + 1) // replica.count
            others -= chunk.length * replica.index // replica.count
    return alike, others


def derivable(
    plan: SavePlan, mine: frozenset[int], plain: Replica, world_size: int
) -> dict[int, tuple[int, ...]]:
    """Return the objects that this rank may store as derived, in the form of `SavePlan.masters`.

    This rank writes all of each such object and of its masters, so the bytes that it compares are
    those that are stored. If the ranks differ in structure, no object is derived, since several
    ranks would decide about the same one.

    Args:
        plan: As for `chunks_of_rank`.
        mine: The chunks that this rank writes.
        plain: `RankPlaces.plain` of this rank.
        world_size: Number of ranks.
    """
    if plain.count < world_size:
        return {}
    others = {
        piece.item
        for number, chunk in enumerate(plan.chunks)
        if number not in mine
        for piece in chunk.pieces
    }
    own = {
        item: tuple(master for master in masters if master not in others)
        for item, masters in plan.masters.items()
        if item not in others
    }
    return {item: masters for item, masters in own.items() if masters}


def masters_of(plan: SavePlan) -> list[tuple[ObjectPath, list[ObjectPath]]]:
    """Return the paths of objects that may be derived, each with the paths of its masters."""
    paths = [planned.entry.path for planned in plan.objects] if plan.masters else []
    return [(paths[item], [paths[m] for m in masters]) for item, masters in plan.masters.items()]


def _leaders(plan: SavePlan) -> dict[int, int]:
    """Return the first chunk of the first master of each object that may be derived."""
    if not plan.masters:
        return {}
    firsts: dict[int, int] = {}
    for number, chunk in enumerate(plan.chunks):
        for piece in chunk.pieces:
            firsts.setdefault(piece.item, number)
    leaders: dict[int, int] = {}
    for item, masters in plan.masters.items():
        group = _group_of(plan.objects[item].entry)
        for master in masters:
            number = firsts[master]
            # The first object of a slab decides its group.
            if _group_of(_entry_of(plan, number)) == group and master not in plan.masters:
                leaders[item] = number
                break
    return leaders


def _group_of(entry: StateObject) -> tuple[object, bool]:
    """Return a key of the objects that are divided together, and whether one rank writes them."""
    of_one = entry.kind is Kind.VALUE or entry.role is Role.BUFFER
    return replicas_of(entry), of_one or (entry.replica is not None and bool(entry.replica.place))


def spans_of_rank(plan: SavePlan, mine: frozenset[int]) -> dict[int, tuple[ShardSpan, ...]]:
    """Return the rectangles that a writer of the chunks `mine` stores, by object number.

    An object that it stores whole has no entry; an object that it does not store has an empty one.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for number in sorted(mine):
        for piece in plan.chunks[number].pieces:
            first, _ = ranges.get(piece.item, (piece.start, 0))
            ranges[piece.item] = first, piece.stop
    spans: dict[int, tuple[ShardSpan, ...]] = {}
    for item, planned in enumerate(plan.objects):
        entry = planned.entry
        start, stop = ranges.get(item, (0, 0))
        if start == 0 and stop == entry.spec.nbytes and _is_whole(entry):
            continue
        spans[item] = tuple(_spans(entry.regions, entry.spec.itemsize, start, stop))
    return spans


def _entry_of(plan: SavePlan, number: int) -> StateObject:
    return plan.objects[plan.chunks[number].pieces[0].item].entry


def _is_whole(entry: StateObject) -> bool:
    return len(entry.regions) == 1 and entry.regions[0].sizes == entry.spec.shape


def _spans(regions: Sequence[Region], itemsize: int, start: int, stop: int) -> Iterator[ShardSpan]:
    """Yield the rectangles that make up bytes `[start, stop)` of the joined regions."""
    at = 0
    for region in regions:
        end = at + region.numel * itemsize
        first, last = max(start, at), min(stop, end)
        if first < last:
            first_element, last_element = (first - at) // itemsize, (last - at) // itemsize
            for part in regions_of_range(region.sizes, first_element, last_element):
                offsets = map(sum, zip(region.offsets, part.offsets, strict=True))
                yield ShardSpan(first, Region(tuple(offsets), part.sizes))
                first += part.numel * itemsize
        at = end

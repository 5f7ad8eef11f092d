"""Decides which rank reads the bytes that several ranks or several hosts need. Sans-IO.

The ranks of a host that read together are its members, numbered from 0. They know each other's
plans. A plan may have a million rows, so hosts exchange digests of their needs instead. If the
members with the same numbers need the same bytes on two hosts, the digests of both hosts are equal,
and each host already knows the rows that a digest covers. If digests are equal by chance, only time
is lost: a rank refuses a request for bytes that it does not read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.core.format.compressed import compress, decompress
from penstock.core.pipeline.exchange import Share
from penstock.core.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.reads import FrameJob

MOST_RANKS = 16
"""The most ranks that read together. Each has a socket to each other rank, and one rank creates all
240 ends. A process may usually have 1,024 files open."""

# Neighboring small frames form runs of up to this size, and one rank reads each run. If the frames
# are few, runs are shorter, so that each rank reads about 16 of them.
_RUN_BYTES = 16 << 20
_RUNS = 16
_ENCODED = 0  # `block_bytes` of encoded frames, which have no checksum cuts
_COLUMNS = 5

MOST_HOSTS = 64
"""The most hosts that read together: a rank has two connections to a rank of each other host."""

# Each component falls into a bucket by its own digest, and hosts share a bucket only if its digests
# are equal. So a component that only one rank needs, such as its random state, spoils at most one
# bucket, wherever it is stored. With one digest per blob, it would spoil the whole blob.
_BUCKETS = 8192
_BUCKET_SHIFT = np.uint64(64 - 13)
_HALF = np.uint64(32)


class PlannedRange(NamedTuple):
    """One range of a chunk that a rank needs.

    Two ranges are the same bytes if all fields are equal and `blob` means the same name.

    Attributes:
        blob: The index of the blob's name in the plan.
        offset: The offset of the frame in the blob.
        block_bytes: The bytes per checksum in a raw frame; 0 for an encoded frame.
        start: The first byte, counted from the start of the chunk.
        stop: The end of the range, counted from the same place.
    """

    blob: int
    offset: int
    block_bytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The needs of one rank: the names of the blobs, and int64 rows of `PlannedRange`."""

    blobs: tuple[str, ...]
    rows: npt.NDArray[np.int64]

    def encode(self) -> bytes:
        """Return the plan as bytes to send to other ranks."""
        names = json.dumps(self.blobs).encode()
        return len(names).to_bytes(8, "little") + names + self.rows.tobytes()

    @classmethod
    def decode(cls, data: bytes | memoryview) -> ReadPlan:
        """Return the plan encoded by `encode`.

        Raises:
            ValueError: The bytes are not a plan.
        """
        at = 8 + int.from_bytes(data[:8], "little")
        names = json.loads(bytes(data[8:at]))
        rows = np.frombuffer(data[at:], np.int64).reshape(-1, _COLUMNS)
        if len(rows) and not 0 <= rows[:, 0].min() <= rows[:, 0].max() < len(names):
            msg = "a row names a blob that is not listed"
            raise ValueError(msg)
        return cls(tuple(names), rows)


class Relayed(NamedTuple):
    """The route of bytes that several hosts need: to this host, or from this host to the others.

    Attributes:
        member: The index of the member that handles the bytes, the same on each of these hosts.
        source: The rank on another host that reads the bytes and passes them on to `member`; None:
            `member` reads them from the store.
        recipients: The ranks on other hosts to which `member` passes the bytes on after it has
            read them; empty if `source` is set.
    """

    member: int
    source: int | None = None
    recipients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Division:
    """The reads of one member of a host.

    Attributes:
        alone: The reads of bytes that no other rank needs.
        pieces: The pieces that this member shares with others. Pieces that several members of
            this host need come first; the rest of the order is by blob and offset. Ranks that pass
            bytes on to each other all use this order, so that no two of them wait for each other.
    """

    alone: tuple[FrameJob[CodecChain], ...]
    pieces: tuple[Share, ...]


class OwnPlan:
    """The plan of this rank, with the `FrameJob` of each row."""

    def __init__(self, jobs: Sequence[FrameJob[CodecChain]], *, most_bytes: int) -> None:
        """Plan the reads of `jobs`. Chunks larger than `most_bytes` are not shared."""
        names: dict[str, int] = {}
        rows: list[PlannedRange] = []
        self._jobs: list[tuple[FrameJob[CodecChain], ByteRange]] = []
        self._alone: list[FrameJob[CodecChain]] = []
        for job in jobs:
            if job.frame.raw_length > most_bytes or not job.ranges:
                self._alone.append(job)
                continue
            blob = names.setdefault(job.blob, len(names))
            spans, block_bytes = job.ranges, job.block_bytes
            if job.chain is not None:  # other ranks take the decoded bytes of the whole frame
                spans, block_bytes = (ByteRange(0, job.frame.raw_length),), _ENCODED
            for span in spans:
                self._jobs.append((job, span))
                rows.append(
                    PlannedRange(blob, job.frame.offset, block_bytes, span.start, span.stop)
                )
        table = np.array(rows, np.int64).reshape(-1, _COLUMNS)
        self.plan = ReadPlan(tuple(names), table)
        """The plan to send to the other ranks."""

    def divide(self, needs: HostNeeds, me: int, relayed: Mapping[int, Relayed]) -> Division:
        """Return the reads of member `me`, given the needs of all members.

        Each member computes only its own reads, without communication, and the reads of all members
        fit together. Overlapping ranges of one frame become one read. The member that `relayed`
        names does that read; if `relayed` names none, the member with the fewest bytes so far does.

        Args:
            needs: The needs of all members, including this one.
            me: The index of this member.
            relayed: The routes of components that other hosts also need, by index in `needs`.
        """
        own = needs.component_of(me)
        alone: dict[int, tuple[FrameJob[CodecChain], list[ByteRange]]] = {}
        shared: dict[int, list[FrameJob[CodecChain]]] = defaultdict(list)
        for (job, span), component in zip(self._jobs, own.tolist(), strict=True):
            if needs.reader[component] < 0 and component not in relayed:
                alone.setdefault(id(job), (job, []))[1].append(span)
            elif job not in shared[component]:
                shared[component].append(job)
        pieces = []
        for component in sorted(shared):
            span, way = needs.span(component), relayed.get(component)
            reader = int(needs.reader[component]) if way is None else way.member
            takers = tuple(m for m in needs.members(component) if m != reader)
            job = _joined(shared[component], span)
            pieces.append(Share(component, job, span, reader, takers))
        pieces.sort(key=lambda p: (not p.takers, p.job.blob, p.job.frame.offset, p.span.start))
        rest = [*self._alone, *(_part(job, spans) for job, spans in alone.values())]
        return Division(tuple(rest), tuple(pieces))


class HostNeeds:
    """The needs of a host's members. Overlapping ranges of one frame form one component."""

    def __init__(self, plans: Sequence[ReadPlan]) -> None:
        """Join the plans of all members, given in the order of members."""
        self.member_count = len(plans)
        names: dict[str, int] = {}
        tables = []
        for plan in plans:
            numbers = np.array([names.setdefault(n, len(names)) for n in plan.blobs], np.int64)
            rows = plan.rows.copy()
            if len(rows):
                rows[:, 0] = numbers[rows[:, 0]]
            tables.append(rows)
        self.blobs = tuple(names)
        """The names of all blobs."""
        lengths = [len(rows) for rows in tables]
        self._first = np.cumsum([0, *lengths])
        rows = np.concatenate(tables)
        member = np.repeat(np.arange(len(plans)), lengths)
        order = np.lexsort((rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))
        rows, member = rows[order], member[order]
        frame = np.zeros(len(rows), np.int64)
        if len(rows):
            frame[1:] = np.cumsum((rows[1:, :3] != rows[:-1, :3]).any(axis=1))
        # A range starts a new component if all earlier ranges of its frame end at or before its
        # start.
        far = int(rows[:, 4].max(initial=0)) + 1
        reach = np.maximum.accumulate(rows[:, 4] + frame * far)
        begins = np.ones(len(rows), bool)
        begins[1:] = rows[1:, 3] + frame[1:] * far >= reach[:-1]
        component = np.cumsum(begins) - 1
        self._component = np.empty(len(rows), np.int64)
        self._component[order] = component
        firsts = np.flatnonzero(begins)
        self.components = rows[firsts]
        """A row of `PlannedRange` for each component."""
        self.masks = np.zeros(0, np.int64)
        """For each component, a bit mask of the members that need it."""
        if len(rows):
            self.components[:, 4] = np.maximum.reduceat(rows[:, 4], firsts)
            self.masks = np.bitwise_or.reduceat(np.left_shift(1, member), firsts)
        self.reader = self._readers()
        """The member that reads each component; -1 if only one needs it."""

    def component_of(self, member: int) -> npt.NDArray[np.int64]:
        """Return the component of each of a member's rows."""
        return self._component[self._first[member] : self._first[member + 1]]

    def members(self, component: int) -> list[int]:
        """Return the members that need a component."""
        mask = int(self.masks[component])
        return [member for member in range(mask.bit_length()) if mask >> member & 1]

    def span(self, component: int) -> ByteRange:
        """Return the byte range of a component."""
        return ByteRange(*map(int, self.components[component, 3:]))

    def evenly(self, components: Sequence[int], load: npt.NDArray[np.int64]) -> list[int]:
        """Choose a reader for each component, so that all readers get about equally many bytes.

        Components that are neighbors in a blob share a reader, up to 16 MiB.

        Args:
            components: The components, in stored order.
            load: The bytes that each member (column) of each host (row) reads already. All of these
                hosts need the components. This method adds the bytes of the components.

        Returns:
            The number of each component's reader: the row of its host times the member count, plus
            its member.
        """
        length = (self.components[:, 4] - self.components[:, 3])[components]
        run_bytes = min(_RUN_BYTES, int(length.sum()) // (_RUNS * load.size))
        found: list[int] = []
        run: tuple[int, int] | None = None
        reader = left = 0
        for component, size in zip(components, length.tolist(), strict=True):
            blob, mask = int(self.components[component, 0]), int(self.masks[component])
            if run != (blob, mask) or left < size:
                run, left = (blob, mask), run_bytes
                members = self.members(component)
                place, at = divmod(int(np.argmin(load[:, members])), len(members))
                reader = place * self.member_count + members[at]
            left -= size
            load.flat[reader] += size
            found.append(reader)
        return found

    def _readers(self) -> npt.NDArray[np.int64]:
        length = self.components[:, 4] - self.components[:, 3]
        load = [int(length[self.masks == 1 << m].sum()) for m in range(self.member_count)]
        found = np.full(len(length), -1, np.int64)
        several = np.flatnonzero((self.masks & (self.masks - 1)) != 0)
        found[several] = self.evenly(several.tolist(), np.array([load], np.int64))
        return found


def _part(job: FrameJob[CodecChain], spans: Sequence[ByteRange]) -> FrameJob[CodecChain]:
    if job.chain is not None or len(spans) == len(job.ranges):
        return job
    return replace(job, ranges=tuple(spans))


def _joined(jobs: Sequence[FrameJob[CodecChain]], span: ByteRange) -> FrameJob[CodecChain]:
    """Merge `jobs`, which all read one frame, into one job that reads the bytes of `span`."""
    first = jobs[0]
    return replace(
        first,
        ranges=first.ranges if first.chain is not None else (span,),
        uses=[use for job in jobs for use in job.uses],
        paths=[path for job in jobs for path in job.paths],
    )


def component_numbers(needs: HostNeeds) -> npt.NDArray[np.uint64]:
    """Return a 64-bit digest of each component: of its place, its members and the member count."""
    digests = (blake2b(name.encode(), digest_size=8).digest() for name in needs.blobs)
    names = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
    columns = needs.components.astype(np.uint64)
    found = names[needs.components[:, 0]]
    count = np.full(len(found), needs.member_count, np.uint64)
    for column in (*columns[:, 1:].T, needs.masks.astype(np.uint64), count):
        found = _mixed(found ^ column)
    return found


def bucket_digests(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Return one digest for each bucket of component numbers; 0 for an empty bucket."""
    sums = np.zeros(_BUCKETS, np.uint64)
    np.add.at(sums, _buckets(numbers), _mixed(numbers))
    return (sums >> _HALF).astype(np.uint32)


def encode_digests(digests: npt.NDArray[np.uint32]) -> bytes:
    """Return the digests as bytes of a post, at most about 32 KiB."""
    return compress(digests.astype("<u4").tobytes())


def decode_digests(data: bytes) -> npt.NDArray[np.uint32]:
    """Return the digests encoded by `encode_digests`.

    Raises:
        FormatError: The bytes are not digests.
    """
    name = "the needs of a host"
    content = decompress(data, name, raw_length=4 * _BUCKETS)
    return np.frombuffer(content, "<u4").astype(np.uint32)


def hosts_together(
    sets: Sequence[tuple[int, ...]], rank: int
) -> tuple[Sequence[tuple[int, ...]], int]:
    """Return the group of at most `MOST_HOSTS` hosts that includes the host of `rank`.

    Args:
        sets: The ranks of each host, the same on every rank.
        rank: A rank in one of the sets.

    Returns:
        The ranks of each host of the group, and the index of the host of `rank` in it.
    """
    here = next(number for number, ranks in enumerate(sets) if rank in ranks)
    first = here // MOST_HOSTS * MOST_HOSTS
    return sets[first : first + MOST_HOSTS], here - first


def relayed(
    needs: HostNeeds,
    digests: Mapping[int, npt.NDArray[np.uint32]],
    hosts: Sequence[tuple[int, ...]],
    here: int,
) -> dict[int, Relayed]:
    """Return the route of each component that several hosts need.

    All hosts that need a component choose the same route without communication. The same members
    need it on each of these hosts, and the one with the fewest bytes so far reads it. The member
    with the same index on each other host receives it.

    Args:
        needs: The needs of this host.
        digests: The digests of all participating hosts, by index in `hosts`.
        hosts: The ranks of each host.
        here: The index of this host in `hosts`.

    Returns:
        The route of each component that other hosts also need.
    """
    numbers = component_numbers(needs)
    found: dict[int, Relayed] = {}
    for together, components in _sets(needs, numbers, digests, hosts, here).items():
        load = np.zeros((len(together), needs.member_count), np.int64)
        for component, chosen in zip(components, needs.evenly(components, load), strict=True):
            place, member = divmod(chosen, needs.member_count)
            ranks = {host: hosts[host][member] for host in together}
            reader = together[place]
            is_here = reader == here
            others = tuple(rank for host, rank in ranks.items() if host != here)
            found[component] = Relayed(
                member=member,
                source=None if is_here else ranks[reader],
                recipients=others if is_here else (),
            )
    return found


def _sets(
    needs: HostNeeds,
    numbers: npt.NDArray[np.uint64],
    digests: Mapping[int, npt.NDArray[np.uint32]],
    hosts: Sequence[tuple[int, ...]],
    here: int,
) -> dict[tuple[int, ...], list[int]]:
    """Group this host's components by the hosts that need them, in the same order on all hosts."""
    own = bucket_digests(numbers)
    # Digests include the member count, so those of other counts could be equal only by chance.
    alike = [h for h in sorted(digests) if len(hosts[h]) == needs.member_count and h != here]
    equal = {host: digests[host] == own for host in alike}
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    buckets = _buckets(numbers).tolist()
    by_place = sorted(
        range(len(numbers)),
        key=lambda c: (needs.blobs[needs.components[c, 0]], *needs.components[c, 1:].tolist()),
    )
    for component in by_place:
        others = [host for host in alike if equal[host][buckets[component]]]
        if others:
            found[tuple(sorted([here, *others]))].append(component)
    return found


def _buckets(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return (numbers >> _BUCKET_SHIFT).astype(np.int64)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return each number with all its bits mixed: the finalizer of splitmix64."""
    found = numbers + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))

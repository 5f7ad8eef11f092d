"""Divides what the ranks of a host read: who reads the bytes that several of them need. Sans-IO."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from penstock.core.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from penstock.core.plan.reads import FrameJob

ChainT = TypeVar("ChainT")

MOST_RANKS = 16
"""The most ranks that read together. Each has a socket to each other one: 240 file descriptors pass
through one process, of the 1,024 that it usually may have open."""

# Neighbours that one rank reads, where frames are smaller; of a small state each has 16 such runs.
_RUN_BYTES = 16 << 20
_RUNS = 16
_ENCODED = 0  # in the place of the distance of checksum cuts, which encoded frames do not have
_COLUMNS = 5


class PlannedRange(NamedTuple):
    """One range that a rank needs: what is equal in the rows of two ranks names the same bytes.

    Attributes:
        blob: Number of the blob's name, in the plan.
        offset: Offset of the frame.
        block_bytes: Distance of the checksum cuts; 0 for an encoded frame.
        start: First byte of the chunk.
        stop: Its end.
    """

    blob: int
    offset: int
    block_bytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What one rank needs: the names of the blobs, and rows of `PlannedRange`, int64."""

    blobs: tuple[str, ...]
    rows: npt.NDArray[np.int64]

    def encode(self) -> bytes:
        """Return the plan as bytes for the other ranks."""
        names = json.dumps(self.blobs).encode()
        return len(names).to_bytes(8, "little") + names + self.rows.tobytes()

    @classmethod
    def decode(cls, data: bytes | memoryview) -> ReadPlan:
        """Return the plan that `encode` made bytes of.

        Raises:
            ValueError: The bytes are no plan.
        """
        at = 8 + int.from_bytes(data[:8], "little")
        names = json.loads(bytes(data[8:at]))
        rows = np.frombuffer(data[at:], np.int64).reshape(-1, _COLUMNS)
        if len(rows) and not 0 <= rows[:, 0].min() <= rows[:, 0].max() < len(names):
            msg = "a row names a blob that is not listed"
            raise ValueError(msg)
        return cls(tuple(names), rows)


class Relayed(NamedTuple):
    """How bytes that several hosts need get to this one, or from this one to the others.

    Attributes:
        member: The member that deals with them, the same on each of these hosts.
        source: The rank of another host that reads them, and hands them on to `member`; None:
            `member` reads them.
        recipients: The ranks of other hosts to which `member` then hands them on.
    """

    member: int
    source: int | None = None
    recipients: tuple[int, ...] = ()


class SharedPiece(NamedTuple, Generic[ChainT]):
    """Bytes of one frame that several ranks need.

    Attributes:
        number: The same on all ranks of the host.
        job: The frame, with what this rank does with the bytes.
        span: The bytes, of the chunk.
        reader: The member that reads them.
        takers: The other members that need them; none, if only other hosts do.
        relayed: How they cross the network; None: only this host needs them.
    """

    number: int
    job: FrameJob[ChainT]
    span: ByteRange
    reader: int
    takers: tuple[int, ...]
    relayed: Relayed | None = None


@dataclass(frozen=True, slots=True)
class Division(Generic[ChainT]):
    """What one member does.

    Attributes:
        alone: Jobs whose bytes no other rank needs, in their order.
        pieces: What this member shares with others, in the order in which all go through it. Those
            with takers come first, then by blob and place: ranks of several hosts that hand bytes
            on to each other take them in one order, so that no two wait for each other.
    """

    alone: tuple[FrameJob[ChainT], ...]
    pieces: tuple[SharedPiece[ChainT], ...]


NOTHING_RELAYED: Mapping[int, Relayed] = MappingProxyType({})


class OwnPlan(Generic[ChainT]):
    """The plan of this rank, with the jobs that its rows stand for."""

    def __init__(self, jobs: Sequence[FrameJob[ChainT]], *, most_bytes: int) -> None:
        """Make the plan of `jobs`; chunks above `most_bytes` are read by each rank alone."""
        names: dict[str, int] = {}
        rows: list[PlannedRange] = []
        self._jobs: list[tuple[FrameJob[ChainT], ByteRange]] = []
        self._alone: list[FrameJob[ChainT]] = []
        for job in jobs:
            if job.frame.raw_length > most_bytes or not job.ranges:
                self._alone.append(job)
                continue
            blob = names.setdefault(job.blob, len(names))
            spans, block_bytes = job.ranges, job.block_bytes
            if job.chain is not None:  # what others take of it is decoded
                spans, block_bytes = (ByteRange(0, job.frame.raw_length),), _ENCODED
            for span in spans:
                self._jobs.append((job, span))
                rows.append(
                    PlannedRange(blob, job.frame.offset, block_bytes, span.start, span.stop)
                )
        table = np.array(rows, np.int64).reshape(-1, _COLUMNS)
        self.plan = ReadPlan(tuple(names), table)
        """What the others get to know."""

    def divide(
        self, needs: HostNeeds, me: int, relayed: Mapping[int, Relayed] = NOTHING_RELAYED
    ) -> Division[ChainT]:
        """Return what member `me` does, given what all members need.

        All members come to the same result, without further words. Ranges of one frame that
        overlap are read as one; the member with the fewest bytes so far reads it, unless `relayed`
        names another.

        Args:
            needs: The needs of all members, this one included.
            me: The number of this member.
            relayed: What other hosts need as well, by component.
        """
        own = needs.component_of(me)
        alone: dict[int, tuple[FrameJob[ChainT], list[ByteRange]]] = {}
        shared: dict[int, list[FrameJob[ChainT]]] = defaultdict(list)
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
            pieces.append(SharedPiece(component, job, span, reader, takers, way))
        pieces.sort(key=lambda p: (not p.takers, p.job.blob, p.job.frame.offset, p.span.start))
        rest = [*self._alone, *(_part(job, spans) for job, spans in alone.values())]
        return Division(tuple(rest), tuple(pieces))


class HostNeeds:
    """What the members of a host need, as components: ranges of one frame that overlap, joined."""

    def __init__(self, plans: Sequence[ReadPlan]) -> None:
        """Join the plans of all members, in their order."""
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
        # A range is a further component if it begins where all before it in its frame have ended.
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
        """The members that need each component, as bits."""
        if len(rows):
            self.components[:, 4] = np.maximum.reduceat(rows[:, 4], firsts)
            self.masks = np.bitwise_or.reduceat(np.left_shift(1, member), firsts)
        self.reader = self._readers(len(plans))
        """The member that reads each component; -1 where one alone needs it."""

    def component_of(self, member: int) -> npt.NDArray[np.int64]:
        """Return the component of each row of a member."""
        return self._component[self._first[member] : self._first[member + 1]]

    def members(self, component: int) -> list[int]:
        """Return the members that need a component."""
        return _members(int(self.masks[component]))

    def span(self, component: int) -> ByteRange:
        """Return the bytes of a component."""
        return ByteRange(*map(int, self.components[component, 3:]))

    def run_bytes(self, length: npt.NDArray[np.int64], readers: int) -> int:
        """Return how much of neighbours one of so many readers reads, of components this long."""
        return min(_RUN_BYTES, int(length.sum()) // (_RUNS * readers))

    def _readers(self, count: int) -> npt.NDArray[np.int64]:
        length = self.components[:, 4] - self.components[:, 3]
        several = (self.masks & (self.masks - 1)) != 0
        load = [int(length[self.masks == 1 << member].sum()) for member in range(count)]
        found = np.full(len(length), -1, np.int64)
        run_bytes = self.run_bytes(length[several], count)
        run: tuple[int, int] | None = None
        reader = left = 0
        for component in np.flatnonzero(several).tolist():
            blob, mask = int(self.components[component, 0]), int(self.masks[component])
            size = int(length[component])
            if run != (blob, mask) or left < size:
                run, left = (blob, mask), run_bytes
                reader = min(_members(mask), key=lambda member: (load[member], member))
            left -= size
            load[reader] += size
            found[component] = reader
        return found


def _members(mask: int) -> list[int]:
    return [member for member in range(mask.bit_length()) if mask >> member & 1]


def _part(job: FrameJob[ChainT], spans: Sequence[ByteRange]) -> FrameJob[ChainT]:
    """Return the job for some of its ranges."""
    if job.chain is not None or len(spans) == len(job.ranges):
        return job
    return replace(job, ranges=tuple(spans))


def _joined(jobs: Sequence[FrameJob[ChainT]], span: ByteRange) -> FrameJob[ChainT]:
    """Return one job for what `jobs`, of the same frame, do with the bytes of `span`."""
    first = jobs[0]
    return replace(
        first,
        ranges=first.ranges if first.chain is not None else (span,),
        uses=[use for job in jobs for use in job.uses],
        paths=[path for job in jobs for path in job.paths],
    )

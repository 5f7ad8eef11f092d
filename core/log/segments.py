"""The stored log of a checkpoint: finds its whole entries, and appends new ones.

Tested in `tests/core/log/test_segments.py`.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.core.abc import copies_of
from penstock.core.errors import BlobExistsError, StorageError
from penstock.core.format.segment import (
    FIRST,
    HEADER_BYTES,
    NO_SESSION,
    decode_header,
    encode_entry,
    is_whole,
    log_prefix,
    moved_header,
    segment_name,
    segment_number,
)
from penstock.core.types import ReadRequest, WriteRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.format.segment import EntryHeader
    from penstock.core.types import BlobInfo, Buffer

log = logging.getLogger("penstock")

T = TypeVar("T")

PIECE_BYTES = 16 << 20
_SEGMENT_BYTES = 1 << 30
"""A segment ends after this many bytes: one file with a day of training would be hard to copy."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """The place of an entry in its segment.

    Attributes:
        segment: The name of the segment.
        offset: The offset at which the entry begins.
        header: The header of the entry.
    """

    segment: str
    offset: int
    header: EntryHeader

    @property
    def end(self) -> int:
        """The offset at which the next entry begins."""
        return self.offset + self.header.stored_bytes

    def damage(self, backend: Backend) -> str:
        """Return the end of a message about a log in which this entry is damaged."""
        return (
            f"ends before step {self.header.step}: its entry in {self.segment} on {backend.url} "
            "is damaged"
        )

    def is_whole(self, backend: Backend, into: memoryview | None = None) -> bool:
        """Read the payload, from another copy if one is damaged; return whether it is whole."""
        return bool(
            _found(backend, lambda one: is_whole(self.pieces(one, into), self.header) or None)
        )

    def pieces(self, backend: Backend, into: memoryview | None = None) -> Iterator[memoryview]:
        """Yield the payload in pieces that end at page boundaries of the segment.

        Args:
            backend: The store.
            into: The memory for the whole payload; None: each piece gets its own memory.
        """
        begin = start = self.offset + HEADER_BYTES
        left, limit = self.header.payload_bytes, PIECE_BYTES - HEADER_BYTES
        while left:
            size, at = min(left, limit), start - begin
            data = memoryview(bytearray(size)) if into is None else into[at : at + size]
            backend.read([ReadRequest(self.segment, start, data)])
            yield data
            start, left, limit = start + len(data), left - len(data), PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Segment:
    """A stored segment.

    Attributes:
        info: The name and size of the segment.
        entries: The entries before the first header that is damaged or cut off.
    """

    info: BlobInfo
    entries: Sequence[StoredEntry]

    @property
    def end(self) -> int:
        """The offset at which the entries end."""
        if not self.entries:
            return 0
        last = self.entries[-1]
        return last.end

    @property
    def is_cut(self) -> bool:
        """Whether there are bytes after the last entry."""
        return self.end < self.info.size_bytes


class StoredLog:
    """The log of one rank after one checkpoint.

    Attributes:
        entries: The entries that continue the checkpoint without a gap, oldest first. Their headers
            are valid; their payloads may be damaged (see `whole`).
        segments: All segments, in the order of their numbers.
        strays: The segments that continue no entry of an earlier segment.
    """

    def __init__(self, backend: Backend, base: str, rank: int) -> None:
        """Read the headers of all entries since the checkpoint with the uid `base`."""
        self._backend = backend
        self.entries: list[StoredEntry] = []
        self.segments = [
            Segment(info, [*entries_of(backend, info.name, info.size_bytes, base, rank)])
            for info in backend.list(log_prefix(base, rank))
        ]
        self.strays = [segment for segment in self.segments if not self._join(segment.entries)]

    def _join(self, found: Sequence[StoredEntry]) -> bool:
        """Append a segment's entries; return False if they continue no known entry.

        The segment may continue an earlier entry than the last, after a restore to that step. Then
        it replaces the entries after that step.
        """
        if not found:
            return True
        ends = [FIRST, *(entry.header.digest for entry in self.entries)]
        if found[0].header.previous not in ends:
            return False
        self.entries = [*self.entries[: ends.index(found[0].header.previous)], *found]
        return True

    def up_to(self, step: int | None) -> list[StoredEntry]:
        """Return the entries up to `step`, or all entries if it is None. Verifies no payload."""
        return [e for e in self.entries if step is None or e.header.step <= step]

    def whole(self, *, up_to: int | None = None) -> list[StoredEntry]:
        """Return the entries up to a step and before the first damaged one; reads all of them."""
        chosen = self.up_to(up_to)
        for number, entry in enumerate(chosen):
            if not entry.is_whole(self._backend):
                log.warning("the log %s", entry.damage(self._backend))
                return chosen[:number]
        return chosen

    @property
    def steps(self) -> list[int]:
        """The logged steps, ascending."""
        return [entry.header.step for entry in self.entries]

    def entries_to_latest(self) -> list[StoredEntry]:
        """Return the entries up to the last whole one. Reads entries from the end back to it."""
        latest = self.latest()
        return [] if latest is None else self.up_to(latest)

    def latest(self) -> int | None:
        """Return the step of the last whole entry. Reads entries only from the end back to it."""
        for entry in reversed(self.entries):
            if entry.is_whole(self._backend):
                return entry.header.step
        return None


class Session(NamedTuple):
    """The steps that a rank logged between two restores.

    Attributes:
        name: See `EntryHeader.session`.
        first: The step of the first entry.
        last: The step of the last entry.
    """

    name: str
    first: int
    last: int


def sessions_of(entries: Iterable[StoredEntry]) -> list[Session]:
    """Return the sessions of consecutive entries, oldest first."""
    sessions: list[Session] = []
    for entry in entries:
        name, step = entry.header.session, entry.header.step
        if sessions and sessions[-1].name == name:
            sessions[-1] = sessions[-1]._replace(last=step)
        else:
            sessions.append(Session(name, step, step))
    return sessions


def common_sessions(of_ranks: Sequence[Sequence[Session]]) -> list[Session]:
    """Return the sessions that all ranks have, each up to the last step that all ranks have.

    Entries with equal steps are not enough. A rank may still have entries that the others lost. If
    the ranks then continue from an earlier step, that rank's old entries must not pass for the new
    entries of the same steps.
    """
    common = []
    for session in of_ranks[0]:
        same = [
            other
            for sessions in of_ranks
            for other in sessions
            if (other.name, other.first) == (session.name, session.first)
        ]
        if len(same) == len(of_ranks):
            common.append(session._replace(last=min(other.last for other in same)))
    return common


def logs_of(backend: Backend, base: str) -> list[StoredLog]:
    """Return the logs of all ranks after a checkpoint; empty if rank 0 has not logged."""
    first = StoredLog(backend, base, 0)
    if not first.entries:
        return []
    others = range(1, first.entries[0].header.world_size)
    return [first, *(StoredLog(backend, base, rank) for rank in others)]


def last_step(logs: Sequence[StoredLog]) -> int | None:
    """Return the last step of a common session that all logs have whole; None if there is none."""
    sessions = [sessions_of(log.entries_to_latest()) for log in logs]
    common = common_sessions(sessions) if sessions else []
    return max((session.last for session in common), default=None)


def entries_of(
    backend: Backend,
    name: str,
    size: int,
    base: str,
    rank: int,
    *,
    after: StoredEntry | None = None,
) -> Iterator[StoredEntry]:
    """Yield the entries of a segment before the first header that is damaged or cut off.

    Args:
        backend: The store.
        name: The name of the segment.
        size: The bytes of the segment to read.
        base: The uid of the checkpoint.
        rank: The rank that logged.
        after: The entry before the first one to yield; None: yield all.
    """
    at, previous = 0, None
    if after is not None:
        at, previous = after.end, after.header.digest
    while at + HEADER_BYTES <= size:
        header = _found(backend, partial(_header, name, at))
        if header is None or at + HEADER_BYTES + header.payload_bytes > size:
            return
        if (header.base, header.rank) != (base, rank):
            log.warning(
                "%s on %s belongs to another log: it is ignored from step %d on",
                name, backend.url, header.step,
            )  # fmt: skip
            return
        if previous is not None and header.previous != previous:
            return
        yield StoredEntry(name, at, header)
        at, previous = at + header.stored_bytes, header.digest


def _header(name: str, at: int, backend: Backend) -> EntryHeader | None:
    data = bytearray(HEADER_BYTES)
    backend.read([ReadRequest(name, at, memoryview(data))])
    return decode_header(bytes(data), name)


def _found(backend: Backend, read: Callable[[Backend], T | None]) -> T | None:
    """Return the first result of `read` that is not None: of the store, then of each copy."""
    found = read(backend)
    for place in copies_of(backend) if found is None else ():
        with suppress(StorageError):  # it may lack the segment, or its end
            if (found := read(place.backend)) is not None:
                break
    return found


def _requests(at: int, buffers: Sequence[Buffer]) -> Iterator[WriteRequest]:
    """Yield writes of at most 16 MiB that store `buffers` from the offset `at` on.

    Each write must end within the store's time limit.
    """
    pieces: list[memoryview] = []
    size = 0
    for buffer in buffers:
        left = memoryview(buffer)
        while left:
            piece, left = left[: PIECE_BYTES - size], left[PIECE_BYTES - size :]
            pieces.append(piece)
            size += len(piece)
            if size == PIECE_BYTES:
                yield WriteRequest(at, tuple(pieces))
                at, size, pieces = at + size, 0, []
    if pieces:
        yield WriteRequest(at, tuple(pieces))


class SegmentWriter:
    """Appends entries to the log of one checkpoint. Only one thread may use it."""

    def __init__(  # noqa: PLR0913 - options, each by name
        self,
        backend: Backend,
        base: str,
        rank: int,
        world_size: int,
        *,
        session: str = NO_SESSION,
        previous: bytes = FIRST,
        number: int = 0,
        opened: tuple[str, BlobWriter] | None = None,
        synced: Callable[[Mapping[str, int]], None] = lambda _: None,
    ) -> None:
        """Prepare to append.

        Args:
            backend: The store.
            base: The uid of the checkpoint.
            rank: The rank that logs.
            world_size: The number of ranks.
            session: See `EntryHeader`.
            previous: The digest of the entry after which the log continues.
            number: The lowest number of a new segment.
            opened: The name and the writer of the only segment, however long; None: segments get
                free numbers.
            synced: Called with the durable bytes of segments, by name.
        """
        self._backend = backend
        self._number = number
        self._synced = synced
        self._name, opened_writer = opened or ("", None)
        self._limit_bytes = _SEGMENT_BYTES if opened is None else math.inf
        self._base = base
        self._rank = rank
        self._world_size = world_size
        self._session = session
        self._previous = previous
        self._writer: BlobWriter | None = opened_writer
        self._end = 0
        self._unsynced = 0
        self._ended = False

    def end(self) -> None:
        """Ignore all further entries."""
        self._ended = True

    def append(self, step: int, files: Mapping[str, Sequence[Buffer]], *, sync_every: int) -> int:
        """Append an entry; every `sync_every`-th call makes all appended entries durable.

        Returns:
            The size of the stored entry in bytes; 0 after `end`.

        Raises:
            StorageError: The store failed; this entry, or entries before it, may be lost.
        """
        if self._ended:
            return 0
        header, buffers = encode_entry(
            files, base=self._base, rank=self._rank, world_size=self._world_size, step=step,
            session=self._session, previous=self._previous,
        )  # fmt: skip
        if self._writer is None:
            self._writer, self._end = self._create(header.stored_bytes), 0
        for request in _requests(self._end, buffers):
            self._writer.write([request])
        self._end += header.stored_bytes
        self._previous = header.digest
        self._unsynced += 1
        if self._unsynced >= sync_every:
            self.sync()
        return header.stored_bytes

    def copy(self, entry: StoredEntry, source: Backend) -> int:
        """Append an entry of another log, whose checkpoint has the same state.

        The entry is durable only after `sync` or `close`.

        Returns:
            The size of the stored entry in bytes; 0 if the entry is damaged. If it is, the log ends
            before this entry.

        Raises:
            StorageError: A store failed; call `abort`.
        """
        header, start = moved_header(entry.header, self._base, self._previous)
        if self._writer is None:
            self._writer, self._end = self._create(header.stored_bytes), 0
        if not is_whole(self._copied(self._writer, start, entry.pieces(source)), header):
            self.close() if self._end else self.abort()
            return 0
        self._end += header.stored_bytes
        self._previous = header.digest
        self._unsynced += 1
        if self._end >= self._limit_bytes:
            self.close()
        return header.stored_bytes

    def _copied(
        self, writer: BlobWriter, start: bytes, pieces: Iterable[memoryview]
    ) -> Iterator[memoryview]:
        at, header = self._end, memoryview(start)
        for piece in pieces:
            writer.write([WriteRequest(at, (header, piece))])
            yield piece
            at, header = at + len(header) + len(piece), header[:0]

    def abort(self) -> None:
        """Discard the open segment, and ignore all further entries; nothing if none is open."""
        if self._writer is not None:
            self._writer.abort()
            self._writer, self._ended = None, True

    def sync(self) -> None:
        """Make all appended entries durable."""
        if self._writer is None or not self._unsynced or self._ended:
            return
        if self._backend.capabilities.appends and self._end < self._limit_bytes:
            self._writer.sync(self._end)
        else:
            self._writer.seal(self._end)
            self._writer = None
        self._unsynced = 0
        self._synced({self._name: self._end})

    def close(self) -> None:
        """Make all appended entries durable, and seal the segment."""
        if self._writer is not None and not self._ended:
            self._writer.seal(self._end)
            self._writer, self._unsynced = None, 0
            self._synced({self._name: self._end})

    def _create(self, size_hint: int) -> BlobWriter:
        ends = {
            i.name: i.size_bytes for i in self._backend.list(log_prefix(self._base, self._rank))
        }
        self._synced(ends)
        number = max((1 + segment_number(name) for name in ends), default=0)
        number = max(number, self._number)
        while True:
            try:
                self._name = segment_name(self._base, self._rank, number)
                return self._backend.create(self._name, size_hint=size_hint)
            except BlobExistsError:  # another process logs too; the highest segment number counts
                number += 1

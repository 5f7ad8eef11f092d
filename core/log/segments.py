"""The stored log of a checkpoint: finds its whole entries, and appends new ones.

Tested in `tests/core/log/test_segments.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import BlobExistsError, FormatError
from penstock.core.format.segment import (
    FIRST,
    HEADER_BYTES,
    NO_SESSION,
    decode_directory,
    decode_header,
    encode_entry,
    is_whole,
    log_prefix,
    segment_name,
)
from penstock.core.types import ReadRequest, WriteRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, BlobWriter
    from penstock.core.format.segment import EntryHeader

log = logging.getLogger("penstock")

_PIECE_BYTES = 16 << 20
_SEGMENT_BYTES = 1 << 30
"""A segment ends after this much: one file of a day's training would be hard to copy."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in its segment.

    Attributes:
        segment: The name of the segment.
        offset: Where the entry begins.
        header: Its header.
    """

    segment: str
    offset: int
    header: EntryHeader

    def files(self, backend: Backend) -> dict[str, tuple[str, int, int]]:
        """Return segment, offset and length of each of its files.

        Raises:
            FormatError: Its directory is damaged.
        """
        start = self.offset + HEADER_BYTES
        data = bytearray(self.header.directory_bytes)
        backend.read([ReadRequest(self.segment, start, memoryview(data))])
        files = decode_directory(bytes(data), self.header, self.segment)
        return {name: (self.segment, start + at, length) for name, (at, length) in files.items()}

    def is_whole(self, backend: Backend) -> bool:
        """Read the whole entry; return whether its bytes are those that were written."""
        start, left = self.offset + HEADER_BYTES, self.header.payload_bytes
        pieces: list[bytes | memoryview] = []
        while left:
            data = bytearray(min(left, _PIECE_BYTES))
            backend.read([ReadRequest(self.segment, start, memoryview(data))])
            pieces.append(memoryview(data))
            start, left = start + len(data), left - len(data)
        return is_whole(pieces, self.header)


class StoredLog:
    """The log of one rank since one checkpoint.

    Attributes:
        entries: The entries that continue the checkpoint without a gap, oldest first. Their headers
            are whole; `whole` compares their payloads.
        segments: The number of segments.
    """

    def __init__(self, backend: Backend, base: str, rank: int) -> None:
        """Read the headers of all entries since the checkpoint with the uid `base`."""
        self._backend = backend
        self.entries: list[StoredEntry] = []
        names = backend.list(log_prefix(base, rank))
        self.segments = len(names)
        for info in names:
            self._join([*_entries(backend, info.name, info.size_bytes, base, rank)])

    def _join(self, found: Sequence[StoredEntry]) -> None:
        """Continue with a segment, which may begin before entries that its writer did not use."""
        if not found:
            return
        ends = [FIRST, *(entry.header.digest for entry in self.entries)]
        if found[0].header.previous in ends:
            self.entries = [*self.entries[: ends.index(found[0].header.previous)], *found]

    def whole(self, *, up_to: int | None = None) -> list[StoredEntry]:
        """Return the entries before the first damaged one, up to a step; reads all of them."""
        chosen = [e for e in self.entries if up_to is None or e.header.step <= up_to]
        for number, entry in enumerate(chosen):
            if not entry.is_whole(self._backend):
                log.warning(
                    "the log ends before step %d: its entry in %s on %s is damaged",
                    entry.header.step, entry.segment, self._backend.url,
                )  # fmt: skip
                return chosen[:number]
        return chosen

    @property
    def steps(self) -> list[int]:
        """The logged steps, ascending."""
        return [entry.header.step for entry in self.entries]

    def entries_to_latest(self) -> list[StoredEntry]:
        """Return the entries up to the last whole one; reads only the last ones."""
        latest = self.latest()
        return [e for e in self.entries if latest is not None and e.header.step <= latest]

    def latest(self) -> int | None:
        """Return the step of the last whole entry; reads only the last ones."""
        for entry in reversed(self.entries):
            if entry.is_whole(self._backend):
                return entry.header.step
        return None


class Session(NamedTuple):
    """The entries of a log that were made between two restores.

    Attributes:
        name: See `EntryHeader.session`.
        first: The step of the first entry.
        last: The step of the last one.
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
    """Return what all ranks have of each session.

    A rank may still have entries that the others lost. When all continue from an earlier step, its
    old entries must not be taken for new ones of the same steps.
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
    """Return the logs of all ranks since a checkpoint; empty if rank 0 has not logged."""
    first = StoredLog(backend, base, 0)
    if not first.entries:
        return []
    others = range(1, first.entries[0].header.world_size)
    return [first, *(StoredLog(backend, base, rank) for rank in others)]


def _entries(backend: Backend, name: str, size: int, base: str, rank: int) -> Iterator[StoredEntry]:
    at, previous = 0, None
    while at + HEADER_BYTES <= size:
        data = bytearray(HEADER_BYTES)
        backend.read([ReadRequest(name, at, memoryview(data))])
        header = decode_header(bytes(data), name)
        if header is None or at + HEADER_BYTES + header.payload_bytes > size:
            return
        if (header.base, header.rank) != (base, rank):
            msg = f"{name}: its entry of step {header.step} belongs to another log"
            raise FormatError(msg, [name])
        if previous is not None and header.previous != previous:
            return
        yield StoredEntry(name, at, header)
        at, previous = at + header.stored_bytes, header.digest


class SegmentWriter:
    """Appends entries to the log of one checkpoint. For one thread."""

    def __init__(
        self,
        backend: Backend,
        base: str,
        rank: int,
        world_size: int,
        *,
        session: str = NO_SESSION,
        previous: bytes = FIRST,
    ) -> None:
        """Prepare to append.

        Args:
            backend: The store.
            base: The uid of the checkpoint.
            rank: The rank.
            world_size: Number of ranks.
            session: See `EntryHeader`.
            previous: The digest of the entry that the log continues after.
        """
        self._backend = backend
        self._base = base
        self._rank = rank
        self._world_size = world_size
        self._session = session
        self._previous = previous
        self._writer: BlobWriter | None = None
        self._end = 0
        self._unsynced = 0
        self._ended = False

    def end(self) -> None:
        """Append nothing more."""
        self._ended = True

    def append(self, step: int, files: Mapping[str, bytes], *, sync_every: int) -> int:
        """Append an entry; every `sync_every`-th call makes all of them durable.

        Returns:
            The bytes that it takes; 0 after `end`.

        Raises:
            StorageError: The log ends before this entry.
        """
        if self._ended:
            return 0
        header, buffers = encode_entry(
            files, base=self._base, rank=self._rank, world_size=self._world_size, step=step,
            session=self._session, previous=self._previous,
        )  # fmt: skip
        if self._writer is None:
            self._writer, self._end = self._create(header.stored_bytes), 0
        self._writer.write([WriteRequest(self._end, tuple(map(memoryview, buffers)))])
        self._end += header.stored_bytes
        self._previous = header.digest
        self._unsynced += 1
        if self._unsynced >= sync_every:
            self.sync()
        return header.stored_bytes

    def sync(self) -> None:
        """Make all entries durable."""
        if self._writer is None or not self._unsynced or self._ended:
            return
        if self._backend.capabilities.appends and self._end < _SEGMENT_BYTES:
            self._writer.sync(self._end)
        else:
            self._writer.seal(self._end)
            self._writer = None
        self._unsynced = 0

    def close(self) -> None:
        """Make all entries durable, and seal the segment."""
        if self._writer is not None and not self._ended:
            self._writer.seal(self._end)
            self._writer, self._unsynced = None, 0

    def _create(self, size_hint: int) -> BlobWriter:
        number = len(self._backend.list(log_prefix(self._base, self._rank)))
        while True:
            try:
                name = segment_name(self._base, self._rank, number)
                return self._backend.create(name, size_hint=size_hint)
            except BlobExistsError:  # another process logs, too; the later segment counts
                number += 1

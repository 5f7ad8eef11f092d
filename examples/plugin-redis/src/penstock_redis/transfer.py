"""Bytes between buffers and chunks: many commands under way, a bounded number of bytes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.types import flat_view

from penstock_redis.receiving import get_ranges

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Sequence

    import redis
    from penstock.core.types import ReadRequest, WriteRequest

    from penstock_redis.keys import Entry, Keys
    from penstock_redis.server import Server

_COMMANDS = 1000  # a round of tiny ones is still worth sending


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one chunk: `data` stands, or goes, at `start` of it."""

    number: int
    start: int
    data: memoryview


class Transfer:
    """Writes pieces of blobs, and reads them."""

    def __init__(self, server: Server, keys: Keys, *, pipeline_bytes: int, ttl_ms: int) -> None:
        self._server = server
        self._keys = keys
        self._pipeline_bytes = pipeline_bytes
        self._ttl_ms = ttl_ms

    def write(
        self, name: str, entry: Entry, requests: Sequence[WriteRequest], stop: threading.Event
    ) -> None:
        """Set all bytes of `requests`; returns when the server has answered for each."""
        whole = entry.chunk_bytes
        for some in _rounds(_joined(requests, whole), self._pipeline_bytes):

            def send(client: redis.Redis, some: list[Piece] = some) -> None:
                pipe = self._server.pipeline(client)
                for piece in some:
                    key = self._keys.chunk(entry.blob, piece.number)
                    self._set(pipe, key, piece, whole=piece.data.nbytes == whole)
                pipe.execute()

            self._server.run(f"write {name}", send, stop=stop)

    def _set(self, pipe: Any, key: str, piece: Piece, *, whole: bool) -> None:
        expiry = ("PX", self._ttl_ms) if self._ttl_ms else ()
        if whole:
            pipe.execute_command("SET", key, piece.data, *expiry)
            return
        if expiry:
            # SETRANGE alone would make a key that stays for ever if this process ends here.
            pipe.execute_command("SET", key, b"", "NX", *expiry)
        pipe.execute_command("SETRANGE", key, piece.start, piece.data)

    def read(self, requests: Sequence[tuple[ReadRequest, Entry]]) -> list[str]:
        """Fill the targets of `requests`; returns the names of blobs that lack a chunk."""
        wanted = (
            (request.name, entry.blob, piece)
            for request, entry in requests
            for piece in _cut(request.offset, flat_view(request.target), entry.chunk_bytes)
        )
        missing: set[str] = set()
        for some in _rounds(wanted, self._pipeline_bytes):
            missing.update(self._fill(some))
        return sorted(missing)

    def _fill(self, wanted: list[tuple[str, str, Piece]]) -> Iterator[str]:
        names = sorted({name for name, _, _ in wanted})
        ranges = [
            (self._keys.chunk(blob, piece.number), piece.start, piece.data)
            for _, blob, piece in wanted
        ]
        what = f"read {', '.join(names[:3])}"
        found = self._server.run(what, lambda client: get_ranges(client, ranges))
        short: dict[str, list[str]] = defaultdict(list)
        for (name, _, piece), (key, _, _), size in zip(wanted, ranges, found, strict=True):
            if size < piece.data.nbytes:
                piece.data[size:] = bytes(piece.data.nbytes - size)
                short[name].append(key)
        for name, keys in short.items():

            def count(client: redis.Redis, keys: list[str] = keys) -> int:
                return int(client.exists(*keys))

            there = self._server.run(f"read {name}", count)
            if there < len(keys):
                yield name


def top_of(requests: Sequence[WriteRequest]) -> int:
    """Where the last of the bytes of `requests` end."""
    return max((request.offset + request.length for request in requests), default=0)


def _cut(offset: int, data: memoryview, chunk_bytes: int) -> Iterator[Piece]:
    while data:
        number, start = divmod(offset, chunk_bytes)
        part, data = data[: chunk_bytes - start], data[chunk_bytes - start :]
        yield Piece(number, start, part)
        offset += part.nbytes


def _joined(requests: Sequence[WriteRequest], chunk_bytes: int) -> Iterator[Piece]:
    """Pieces without copies, but where several that touch lie in one chunk: those become one.

    A chunk that comes as a whole is kept as it is sent; one that grows is allocated with slack.
    """
    waiting: list[Piece] = []
    for request in requests:
        offset = request.offset
        for buffer in request.buffers:
            for piece in _cut(offset, flat_view(buffer), chunk_bytes):
                if waiting and not _touch(waiting[-1], piece):
                    yield _one(waiting)
                    waiting = []
                waiting.append(piece)
            offset += buffer.nbytes
    if waiting:
        yield _one(waiting)


def _touch(one: Piece, other: Piece) -> bool:
    return one.number == other.number and one.start + one.data.nbytes == other.start


def _one(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    data = memoryview(b"".join(piece.data for piece in pieces))
    return Piece(pieces[0].number, pieces[0].start, data)


def _rounds(pieces: Iterable[Any], most_bytes: int) -> Iterator[list[Any]]:
    """Lists of at most `most_bytes`, or of one."""
    some: list[Any] = []
    size = 0
    for item in pieces:
        nbytes = (item if isinstance(item, Piece) else item[2]).data.nbytes
        if some and (size + nbytes > most_bytes or len(some) == _COMMANDS):
            yield some
            some, size = [], 0
        some.append(item)
        size += nbytes
    if some:
        yield some

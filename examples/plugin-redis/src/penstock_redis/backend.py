"""The `redis` backend: blobs and records in a Redis server that writes an append-only file.

One hash is the index: each name has an entry with an id, a state, a size and a time. The bytes of a
blob are strings of `CHUNK_BYTES` under its id, so the entry alone decides what readers see.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import redis
from penstock.core.abc import Backend, BlobWriter, PluginConfig, check_blob_name
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    FormatError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import BlobInfo, Capabilities, flat_view
from pydantic import ConfigDict, Field
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.types import ReadRequest, WriteRequest

    Piece = tuple[str, int, memoryview]  # key of a chunk, start in it, bytes

_REQUIRED = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}
CHUNK_BYTES = 1 << 20
_BATCH_BYTES, _BATCH_COMMANDS = 16 << 20, 1000  # limits of a write in flight
_REPLACED_S = 60  # a replaced record's bytes stay this long for readers with its entry

# Changes the entry of a name only if it is still the caller's: the name may have been deleted and
# belong to another writer.
_CHANGE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1])
else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return 1
"""


class RedisConfig(PluginConfig):
    """Options of `redis`. The password comes from the variable REDIS_PASSWORD.

    Attributes:
        url: `redis://host:6379/0`, without credentials: URLs are shown.
        prefix: Name of the root on the server. It has no colon, which separates the parts of a
            key, so no root can reach into another.
        timeout_s: How long the server may take to connect, or to make progress.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(pattern=r"^redis://[^/?#@]+/\d+$")
    prefix: str = Field(default="penstock", pattern=r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$")
    timeout_s: float = Field(default=30.0, gt=0)


class Entry(NamedTuple):
    """The index entry of a name; `sealed` is 0 while its writer is unfinished."""

    id: str
    sealed: int
    size: int
    modified_ms: int

    def encode(self) -> str:
        return " ".join(map(str, self))

    def info(self, name: str) -> BlobInfo:
        return BlobInfo(name, self.size, self.modified_ms / 1000)

    @classmethod
    def decode(cls, data: bytes) -> Entry:
        blob_id, *numbers = data.decode().split()
        return cls(blob_id, *map(int, numbers))


class RedisBackend(Backend):
    """Blobs and records in one Redis server.

    `seal` and `publish` are durable: the server answers after fsync of its append-only file. A
    server without that setting is refused when the root is opened.
    """

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "redis"
    Config: ClassVar[type[PluginConfig]] = RedisConfig

    def __init__(self, config: RedisConfig, /) -> None:
        """Connect, and refuse a server that could lose confirmed data."""
        self._config = config
        self._index = f"penstock:{config.prefix}:index"
        self._closed = False
        password = os.environ.get("REDIS_PASSWORD")
        self._client = redis.Redis.from_url(
            config.url,
            # Unlike `password`, it is in no `repr`.
            credential_provider=password and UsernamePasswordCredentialProvider(None, password),
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
            socket_read_size=CHUNK_BYTES,  # by default 64 KiB, which takes twice the CPU
            # By default redis-py retries a call whose reply was lost. An exclusive publish would
            # then find its own record, and report that another publisher won.
            retry=Retry(NoBackoff(), 0),
        )
        with self.mapped("open the root") as client:
            wrong = [f"{n} {v}" for n, v in _REQUIRED.items() if client.config_get(n).get(n) != v]
        if wrong:
            self.close()
            msg = f"{self.url} could lose confirmed data: set {', '.join(wrong)} in redis.conf"
            raise CapabilityError(msg)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options for `redis://host:port/database/prefix`."""
        scheme, _, rest = url.partition("://")
        place, _, path = rest.partition("/")
        database, _, prefix = path.partition("/")
        named = {"prefix": prefix} if prefix else {}
        url = f"{scheme}://{place}/{database}"
        return cls.Config.model_validate({**options, **named, "url": url})

    @property
    def url(self) -> str:
        return f"{self._config.url}/{self._config.prefix}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(preferred_io_bytes=_BATCH_BYTES, preferred_parallel=2)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        del size_hint
        check_blob_name(name)
        entry = Entry(secrets.token_hex(8), 0, 0, self.now_ms(f"create {name}"))
        with self.mapped(f"create {name}") as client:
            # The server decides, in one command: a check before the write would let two win.
            if not client.hsetnx(self._index, name, entry.encode()):
                msg = f"{name} already exists on {self.url}"
                raise BlobExistsError(msg)
        return RedisWriter(self, name, entry)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        for request in requests:
            check_blob_name(request.name)
        names = {request.name for request in requests}
        entries = self._entries(names)
        for request in requests:
            target, entry = flat_view(request.target), entries[request.name]
            if request.offset + target.nbytes > entry.size:
                msg = f"{request.name} on {self.url} ends at {entry.size}, inside the range"
                raise BlobTruncatedError(msg)
            for start in range(0, target.nbytes, CHUNK_BYTES):
                part = target[start : start + CHUNK_BYTES]
                self._fill(request.name, entry, request.offset + start, part)
        # Missing chunks read as zeros, and a blob that was deleted meanwhile has none.
        if self._entries(names) != entries:
            msg = f"cannot read {', '.join(names)} on {self.url}: replaced during the read"
            raise StorageError(msg)

    def _fill(self, name: str, entry: Entry, offset: int, target: memoryview) -> None:
        pieces = list(self.cut(entry, offset, target))
        with self.mapped(f"read {name}") as client:
            pipe = client.pipeline(transaction=False)
            for key, start, data in pieces:
                pipe.getrange(key, start, start + data.nbytes - 1)
            for (_, _, data), stored in zip(pieces, pipe.execute(), strict=True):
                data[: len(stored)] = stored
                data[len(stored) :] = bytes(data.nbytes - len(stored))  # never written

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        check_blob_name(name)
        entry = self._entries({name})[name]
        if entry.size > limit_bytes:
            msg = f"{name} on {self.url} has {entry.size} bytes, more than {limit_bytes}"
            raise FormatError(msg, [name])
        data = bytearray(entry.size)
        self._fill(name, entry, 0, memoryview(data))
        self._entries({name})  # raises if it was deleted; a replaced record's bytes stay
        return bytes(data)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        check_blob_name(name)
        what = f"publish {name}"
        entry = Entry(secrets.token_hex(8), 1, len(data), self.now_ms(what))
        with self.mapped(what) as client:
            # The bytes first: no reader sees them before the entry names them.
            for key, _, piece in self.cut(entry, 0, memoryview(data)):
                client.set(key, piece)
            if not exclusive:
                pipe = client.pipeline(transaction=True)
                pipe.hget(self._index, name)
                pipe.hset(self._index, name, entry.encode())
                before = pipe.execute()[0]
                for key in self.keys(Entry.decode(before)) if before is not None else ():
                    client.expire(key, _REPLACED_S)
            elif not client.hsetnx(self._index, name, entry.encode()):
                self.unlink(self.keys(entry))
                msg = f"{name} already exists on {self.url}"
                raise BlobExistsError(msg)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        check_blob_name(prefix, prefix=True)
        with self.mapped(f"list {prefix!r}") as client:
            index: Any = client.hgetall(self._index)
        entries = {name.decode(): Entry.decode(data) for name, data in index.items()}
        names = sorted(name for name in entries if name.startswith(prefix))
        return [entries[name].info(name) for name in names]

    def stat(self, name: str, /) -> BlobInfo:
        check_blob_name(name)
        return self._entries({name})[name].info(name)

    def delete(self, names: Sequence[str], /) -> None:
        for name in names:
            check_blob_name(name)
        for name in names:
            with self.mapped(f"delete {name}") as client:
                pipe = client.pipeline(transaction=True)
                pipe.hget(self._index, name)
                pipe.hdel(self._index, name)
                if (entry := pipe.execute()[0]) is not None:
                    self.unlink(self.keys(Entry.decode(entry)))

    def sweep(self, before_s: float, /) -> None:
        """Remove chunks without an entry, from requests that were cut off or late."""
        idle_s = self.store_time_s() - before_s
        with self.mapped("sweep") as client:
            # The keys first: a blob that is created later has its entry before its chunks.
            keys = list(client.scan_iter(f"penstock:{self._config.prefix}:chunk:*", 1000))
            index: Any = client.hvals(self._index)
            used = {Entry.decode(data).id for data in index}
            for key in keys:
                if key.decode().split(":")[3] not in used:
                    seconds: Any = client.object("idletime", key)
                    if seconds is not None and seconds > idle_s:
                        client.unlink(key)

    def store_time_s(self) -> float:
        return self.now_ms("ask for the time") / 1000

    def close(self) -> None:
        super().close()  # waits until nothing is in flight
        self._closed = True
        self._client.close()

    def change(self, what: str, name: str, before: Entry, after: Entry | None) -> bool:
        """Replace the entry of `name`, or remove it, if it is still `before`."""
        new = "" if after is None else after.encode()
        with self.mapped(what) as client:
            return bool(client.eval(_CHANGE, 1, self._index, name, before.encode(), new))

    def now_ms(self, what: str) -> int:
        with self.mapped(what) as client:
            seconds, microseconds = client.time()
        return seconds * 1000 + microseconds // 1000

    def key(self, entry: Entry, number: int) -> str:
        return f"penstock:{self._config.prefix}:chunk:{entry.id}:{number}"

    def cut(self, entry: Entry, offset: int, data: memoryview) -> Iterator[Piece]:
        """Yield the pieces of `data` at `offset`, cut where chunks end."""
        while data:
            number, start = divmod(offset, CHUNK_BYTES)
            size = min(data.nbytes, CHUNK_BYTES - start)
            yield self.key(entry, number), start, data[:size]
            data, offset = data[size:], offset + size

    def keys(self, entry: Entry, *, after: int = 0) -> list[str]:
        """Return the keys of the chunks of a blob that begin at `after` bytes or later."""
        numbers = range(-(-after // CHUNK_BYTES), -(-entry.size // CHUNK_BYTES))
        return [self.key(entry, number) for number in numbers]

    def unlink(self, keys: list[str]) -> None:
        with self.mapped(f"delete {len(keys)} chunks") as client:
            for start in range(0, len(keys), _BATCH_COMMANDS):
                client.unlink(*keys[start : start + _BATCH_COMMANDS])

    @contextmanager
    def mapped(self, what: str) -> Iterator[redis.Redis]:
        """Lend the client, and map Redis' errors to ours in one place."""
        if self._closed:
            msg = f"cannot {what} on {self.url}: it is closed"
            raise StorageError(msg)
        try:
            yield self._client
        except redis.RedisError as error:
            msg = f"cannot {what} on {self.url}: {error}"
            if isinstance(error, redis.OutOfMemoryError):
                msg = f"{msg}; delete checkpoints, or raise the server's maxmemory"
                raise StorageFullError(msg) from error
            if isinstance(error, redis.TimeoutError):
                raise StorageTimeoutError(f"{msg}; check the server, or raise timeout_s") from error
            if isinstance(error, redis.AuthenticationError):
                raise StorageError(f"{msg}; check REDIS_PASSWORD") from error
            raise StorageError(f"{msg}; check that the server answers, then save again") from error

    def _entries(self, names: set[str]) -> dict[str, Entry]:
        with self.mapped(f"find {', '.join(sorted(names)[:3])}") as client:
            values: Any = client.hmget(self._index, sorted(names)) if names else []
        entries = {}
        for name, data in zip(sorted(names), values, strict=True):
            if data is None or not Entry.decode(data).sealed:
                msg = f"{name} is not on {self.url}"
                raise BlobNotFoundError(msg)
            entries[name] = Entry.decode(data)
        return entries


class RedisWriter(BlobWriter):
    """Sets chunks that no reader sees; `seal` makes them visible in one step."""

    def __init__(self, backend: RedisBackend, name: str, entry: Entry) -> None:
        self._backend = backend
        self._name = name
        self._entry = entry
        self._finished = False
        # Held by every call, so that `abort` waits for a write in flight.
        self._lock = threading.Lock()

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        what = f"write {self._name}"
        with self._lock:
            self._check_unfinished(what)
            # The size first: `delete` needs it to find the chunks that a crash left.
            end = max((request.offset + request.length for request in requests), default=0)
            self._change(what, size=max(end, self._entry.size))
            with self._backend.mapped(what) as client:
                pipe, size = client.pipeline(transaction=False), 0
                for key, start, piece in self._pieces(requests):
                    pipe.setrange(key, start, piece)
                    size += piece.nbytes
                    if size >= _BATCH_BYTES or len(pipe) >= _BATCH_COMMANDS:
                        pipe.execute()
                        size = 0
                pipe.execute()

    def _pieces(self, requests: Sequence[WriteRequest]) -> Iterator[Piece]:
        for request in requests:
            offset = request.offset
            for buffer in request.buffers:
                yield from self._backend.cut(self._entry, offset, flat_view(buffer))
                offset += buffer.nbytes

    def seal(self, length: int, /) -> None:
        with self._lock:
            self._check_unfinished(f"seal {self._name}")
            written = self._entry
            self._change(f"seal {self._name}", size=length, sealed=1)
            self._finished = True
            self._backend.unlink(self._backend.keys(written, after=length))

    def abort(self) -> None:
        with self._lock, suppress(StorageError):
            finished, self._finished = self._finished, True
            if not finished and self._backend.change("abort", self._name, self._entry, None):
                self._backend.unlink(self._backend.keys(self._entry))

    def _change(self, what: str, **fields: int) -> None:
        after = self._entry._replace(modified_ms=self._backend.now_ms(what), **fields)
        if not self._backend.change(what, self._name, self._entry, after):
            msg = f"cannot {what} on {self._backend.url}: it was deleted"
            raise StorageError(msg)
        self._entry = after

    def _check_unfinished(self, what: str) -> None:
        if self._finished:
            msg = f"cannot {what} on {self._backend.url}: it is already finished"
            raise StorageError(msg)

"""The `redis` backend: blobs and records in the memory of a Redis server."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.core.abc import Backend, BlobWriter, PluginConfig, check_blob_name
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    FormatError,
    StorageError,
    StorageFullError,
)
from penstock.core.types import BlobInfo, Capabilities

from penstock_redis.config import RedisConfig, options_of_url
from penstock_redis.keys import Entry, Keys, group_of, groups_named
from penstock_redis.scripts import CREATE, DELETE, PUBLISH, RECORD, SWEEP, USED
from penstock_redis.server import MARGIN_MS, Server, check_policy, check_server
from penstock_redis.transfer import Transfer
from penstock_redis.writer import RedisWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis
    from penstock.core.types import ReadRequest

_LARGEST_RECORD_BYTES = 512_000_000
_LOOKS = 5  # at a name whose blob is replaced while it is read
_GROUPS = 100  # asked for, or deleted, in one go
_NOTE = (
    "in the memory of the server: survives the end of training, not that of the server, unless "
    "it writes an append-only file and require_aof is set"
)
_AOF_NOTE = "the server writes to its append-only file before it answers"


class RedisBackend(Backend):
    """Blobs as chunks, each a string; records as one.

    Sealed blobs and published records are in the memory of another process, or machine: they are
    durable against the end of this one. With `require_aof` they are on that machine's disk.
    """

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "redis"
    Config: ClassVar[type[PluginConfig]] = RedisConfig

    def __init__(self, config: RedisConfig, /) -> None:
        """Connect, and refuse a server that would not keep its data."""
        self._config = config
        self._keys = Keys(config.prefix)
        self._server = Server(config, self._keys)
        ttl_ms = 0 if config.ttl_s is None else round(config.ttl_s * 1000) + 3 * MARGIN_MS
        self._transfer = Transfer(
            self._server, self._keys, pipeline_bytes=config.pipeline_bytes, ttl_ms=ttl_ms
        )
        # Births of the groups that this instance relies on: one that has another has lost its past.
        self._births: dict[str, str] = {}
        # What it sealed there, by name: who went on after a restart may not know that it is gone.
        self._sealed: dict[str, dict[str, str]] = {}
        try:
            check_server(
                self._server, expires=config.ttl_s is not None, require_aof=config.require_aof
            )
        except StorageError:
            self._server.close()
            raise

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Options for `redis://host:port/db/prefix`."""
        return cls.Config.model_validate(options_of_url(url, options))

    @property
    def url(self) -> str:
        return self._config.shown_url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            preferred_io_bytes=self._config.pipeline_bytes,
            preferred_parallel=2,
            notes=(_AOF_NOTE if self._config.require_aof else _NOTE,),
        )

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        del size_hint
        check_blob_name(name)
        group, blob = group_of(name), secrets.token_hex(8)
        chunk_bytes, what = self._config.chunk_bytes, f"create {name}"
        birth = secrets.token_hex(8), self._births.get(group, "")
        word, rest = self._server.answer(what, CREATE, group, name, blob, chunk_bytes, *birth)
        self._refuse(what, word, rest)
        self._births.setdefault(group, rest[0].decode())
        entry = Entry(False, blob, 0, chunk_bytes, 0)
        return RedisWriter(
            self._server, self._transfer, (group, name), entry, self._refuse, self._sealed_here
        )

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        for request in requests:
            check_blob_name(request.name)
        names = sorted({request.name for request in requests})
        entries = self._entries(names)
        for _ in range(_LOOKS):
            for request in requests:
                self._check_range(request, entries[request.name])
            missing = self._transfer.read([(r, entries[r.name]) for r in requests])
            if not missing:
                return
            # Replaced or deleted since, or else damaged.
            before, entries = entries, self._entries(names)
            for name in missing:
                if entries[name].blob == before[name].blob:
                    raise BlobTruncatedError(self._lost(name))  # damage: another tier may have it
        msg = f"cannot read {missing[0]} on {self.url}: it was replaced {_LOOKS} times meanwhile"
        raise StorageError(msg)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        check_blob_name(name)
        what = f"read {name}"
        word, rest = self._server.answer(what, RECORD, group_of(name), name, limit_bytes)
        if word == "large":
            msg = f"{name} on {self.url} has {int(rest[0])} bytes, more than {limit_bytes} allowed"
            raise FormatError(msg, [name])
        if word == "lost":
            raise FormatError(self._lost(name), [name])
        if word == "missing":
            raise BlobNotFoundError(self._not_there(name))
        return rest[0]

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        check_blob_name(name)
        if len(data) > _LARGEST_RECORD_BYTES:
            msg = f"cannot publish {name} on {self.url}: {len(data)} bytes are no small record"
            raise StorageError(msg)
        what, group = f"publish {name}", group_of(name)
        named = groups_named(name, data)
        known = [part for other in named for part in (other, self._births.get(other, ""))]
        # Drawn once: a repetition finds its own record by it, and does not fail by itself.
        blob, token = secrets.token_hex(8), secrets.token_hex(8)
        stamp = self._server.stamp(what)
        relied_on = self._births.get(group, "")
        for other in named:
            self._check_sealed(what, other)
        mine = (group, name, blob, token, relied_on, stamp, int(exclusive), data)
        word, rest = self._server.answer(what, PUBLISH, *mine, *known)
        self._refuse(what, word, rest)
        born, *others = (birth.decode() for birth in rest)
        self._births.setdefault(group, born)
        for other, birth in zip(others[::2], others[1::2], strict=True):
            self._births.setdefault(other, birth)
            self._sealed.pop(other, None)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        check_blob_name(prefix, prefix=True)
        what = f"list {prefix!r}"
        fields: Any = self._server.run(what, lambda client: client.hkeys(self._keys.root))
        groups = [field.decode() for field in fields if _may_hold(field.decode(), prefix)]
        found: list[BlobInfo] = []
        for at in range(0, len(groups), _GROUPS):
            keys = [self._keys.group(group) for group in groups[at : at + _GROUPS]]

            def ask(client: redis.Redis, keys: Sequence[str] = keys) -> Any:
                pipe = self._server.pipeline(client)
                for key in keys:
                    pipe.hgetall(key)
                return pipe.execute()

            for names in self._server.run(what, ask):
                # Unsealed ones too: `prune` deletes only listed blobs.
                found += [
                    _info(name.decode(), Entry.parse(words))
                    for name, words in names.items()
                    if not name.startswith(b"~") and name.startswith(prefix.encode())
                ]
        return sorted(found, key=lambda info: info.name)

    def stat(self, name: str, /) -> BlobInfo:
        check_blob_name(name)
        return _info(name, self._entries([name])[name])

    def delete(self, names: Sequence[str], /) -> None:
        for name in names:
            check_blob_name(name)
        self._server.check_open()
        if not names:
            return
        what = f"delete {', '.join(names[:3])}"
        stamp = self._server.stamp(what)
        for at in range(0, len(names), _GROUPS):
            some = names[at : at + _GROUPS]

            def remove(client: redis.Redis, some: Sequence[str] = some) -> Any:
                pipe = self._server.pipeline(client)
                for name in some:  # one connection, so in this order
                    self._server.script(pipe, DELETE, group_of(name), name, stamp)
                return pipe.execute()

            for name in some:
                self._sealed.get(group_of(name), {}).pop(name, None)
            for name, (_, left) in zip(some, self._server.run(what, remove), strict=True):
                if left == b"0":  # our own data is gone, and we know it
                    self._births.pop(group_of(name), None)

    def store_time_s(self) -> float:
        seconds, micros = self._server.run("ask for the time", lambda client: client.time())
        return float(seconds) + micros / 1e6

    def free_bytes(self) -> int | None:
        """Return the free part of the server's `maxmemory`, and of `max_bytes`.

        Raises:
            CapabilityError: It has been told to drop keys when it is full, since it was opened.
        """
        info: dict[str, Any] = self._server.run(
            "ask for room", lambda client: client.info("memory")
        )
        self._check_policy(str(info.get("maxmemory_policy")))
        room = []
        if info.get("maxmemory"):
            room.append(info["maxmemory"] - info["used_memory"])
        if self._config.max_bytes is not None:
            _, rest = self._server.answer("ask for room", USED)
            room.append(self._config.max_bytes - int(rest[0]))
        return max(0, min(room)) if room else None

    def sweep(self, before_s: float, /) -> None:
        self._server.answer("sweep", SWEEP, round(before_s * 1e6))

    def close(self) -> None:
        super().close()
        self._server.close()

    def _sealed_here(self, group: str, name: str, blob: str) -> None:
        self._sealed.setdefault(group, {})[name] = blob

    def _check_sealed(self, what: str, group: str) -> None:
        """Refuse to name a group that lacks data of this instance.

        A restart behind this look is seen by the birth that is relied on.
        """
        sealed = self._sealed.get(group)
        if not sealed:
            return
        try:
            found = self._entries(sorted(sealed))
        except BlobNotFoundError:
            found = {}
        if any(name not in found or found[name].blob != blob for name, blob in sealed.items()):
            self._sealed.pop(group, None)
            self._refuse(what, "lost", [group.encode()])

    def _entries(self, names: Sequence[str]) -> dict[str, Entry]:
        def ask(client: redis.Redis) -> list[bytes | None]:
            pipe = self._server.pipeline(client)
            for name in names:
                pipe.hget(self._keys.group(group_of(name)), name)
            found: list[bytes | None] = pipe.execute()
            return found

        answers = self._server.run(f"look up {', '.join(names[:3])}", ask)
        entries: dict[str, Entry] = {}
        for name, words in zip(names, answers, strict=True):
            entry = None if words is None else Entry.parse(words)
            if entry is None or not entry.sealed:
                raise BlobNotFoundError(self._not_there(name))
            entries[name] = entry
        return entries

    def _check_range(self, request: ReadRequest, entry: Entry) -> None:
        stop = request.offset + request.target.nbytes
        if stop > entry.size_bytes:
            msg = (
                f"cannot read {request.target.nbytes} bytes from {request.offset} on of "
                f"{request.name} on {self.url}: it has {entry.size_bytes}"
            )
            raise BlobTruncatedError(msg)

    def _refuse(self, what: str, word: str, rest: Sequence[bytes]) -> None:
        """Turn any answer of a script but `ok` into an error."""
        if word == "ok":
            return
        if word in {"restarted", "lost", "expired", "gone"}:
            self._births.pop(rest[0].decode(), None)  # a retry begins anew
        if word == "evicts":
            self._check_policy(rest[0].decode())
        head = f"cannot {what} on {self.url}"
        if word == "exists":
            msg = f"{head}: the name is taken"
            raise BlobExistsError(msg)
        if word == "full":
            most = self._config.max_bytes
            msg = f"{head}: {int(rest[0])} of max_bytes {most} are used; delete checkpoints"
            raise StorageFullError(msg)
        said = {
            "gone": "it was sealed, deleted or lost meanwhile, or expired; save again",
            "restarted": "the server was restarted since this save began, and may have lost parts "
            "of it; save again",
            "lost": "the server has lost what this record names; save again",
            "expired": "what this record names has expired since; save again, with a larger ttl_s",
        }
        msg = f"{head}: {said[word]}"
        raise StorageError(msg)

    def _check_policy(self, policy: str) -> None:
        check_policy(self.url, policy, expires=self._config.ttl_s is not None)

    def _not_there(self, name: str) -> str:
        return f"{name} is not on {self.url}"

    def _lost(self, name: str) -> str:
        return (
            f"{name} on {self.url} lacks a part: it was evicted, or deleted by something else; "
            f"check maxmemory-policy, and take another checkpoint"
        )


def _may_hold(group: str, prefix: str) -> bool:
    return not group.startswith("~") and (group.startswith(prefix) or prefix.startswith(group))


def _info(name: str, entry: Entry) -> BlobInfo:
    return BlobInfo(name, entry.size_bytes, entry.modified_us / 1e6)

"""The connection: retries, and the mapping of Redis' errors to ours."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from penstock.core.errors import (
    CapabilityError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from penstock_redis.scripts import STAMP

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_redis.config import RedisConfig
    from penstock_redis.keys import Keys

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_CONNECTIONS = 256
_DOWN_S = 1.0  # calls queued after one that found no server need not wait as long again
# Between the ends of what belongs together: groups that a record names outlive it by this much.
MARGIN_MS = 60_000


class Server:
    """One root's connections to the server. Thread-safe, and usable in a forked child."""

    def __init__(self, config: RedisConfig, keys: Keys) -> None:
        self.url = config.shown_url
        self._place = f"{config.host}:{config.port}"
        self._keys = keys
        self._retry_total_s = config.retry_total_s
        ttl_ms = 0 if config.ttl_s is None else max(1, round(config.ttl_s * 1000))
        self._limits = (ttl_ms, MARGIN_MS, config.max_bytes or 0)
        self._closed = threading.Event()
        self._down: tuple[float, redis.RedisError] | None = None  # until when, and why
        self._pool = _pool(config)
        self._redis = redis.Redis(connection_pool=self._pool)

    def close(self) -> None:
        """No call begins any more; those under way end."""
        self._closed.set()
        self._pool.disconnect(inuse_connections=False)

    def check_open(self) -> None:
        """Raise StorageError after `close`."""
        if self._closed.is_set():
            msg = f"the backend {self.url} is closed"
            raise StorageError(msg)

    def run(
        self,
        what: str,
        operation: Callable[[redis.Redis], T],
        *,
        stop: threading.Event | None = None,
        total_s: float | None = None,
    ) -> T:
        """The result of `operation`, tried again while the server cannot be reached.

        For a moment after a call was given up for that, others fail likewise at once.

        Args:
            what: For messages: `write data/x`.
            operation: Must be safe to repeat whatever became of the attempt before.
            stop: Set by another thread: no further attempt.
            total_s: Instead of the configured time after which nothing is tried again.

        Raises:
            StorageError: The call failed.
        """
        stop = stop or threading.Event()
        until_s = time.monotonic() + (self._retry_total_s if total_s is None else total_s)
        wait_s = _FIRST_WAIT_S
        if (down := self._down) is not None and time.monotonic() < down[0]:
            self.check_open()
            raise self._mapped(what, down[1]) from down[1]
        while True:
            self.check_open()
            try:
                found = operation(self._redis)
            except redis.RedisError as error:
                # Jitter: the ranks of a job lose the server together.
                delay_s = random.uniform(wait_s / 2, wait_s)
                late = time.monotonic() + delay_s > until_s
                if _transient(error) and late and total_s is None:
                    self._down = time.monotonic() + _DOWN_S, error
                if not _transient(error) or late or stop.wait(delay_s) or self._closed.is_set():
                    raise self._mapped(what, error) from error
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self._down = None
                return found

    def script(self, client: Any, source: str, *arguments: str | int | bytes) -> Any:
        """Hand a script over; on a pipeline, the answer comes with the others."""
        fixed = (1, self._keys.root, self._keys.base, *self._limits)
        return client.execute_command("EVAL", source, *fixed, *arguments)

    def answer(
        self, what: str, source: str, *arguments: str | int | bytes, **how: Any
    ) -> tuple[str, list[bytes]]:
        """Return the word that a script answers with, and the values after it."""
        word, *rest = self.run(what, lambda c: self.script(c, source, *arguments), **how)
        return word.decode(), rest

    def stamp(self, what: str) -> int:
        """Return the position of a call that begins now, among all changes of this root."""
        return int(self.run(what, lambda c: self.script(c, STAMP)))

    def pipeline(self, client: redis.Redis) -> Any:
        """Many commands in one go, each on its own."""
        return client.pipeline(transaction=False)

    def _mapped(self, what: str, error: redis.RedisError) -> StorageError:
        text = f"cannot {what} on {self.url}: {error}"
        if isinstance(error, redis.OutOfMemoryError):
            return StorageFullError(f"{text}; delete checkpoints, or raise the server's maxmemory")
        if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
            return StorageError(f"{text}; check REDIS_USERNAME, REDIS_PASSWORD and the user's ACL")
        if isinstance(error, redis.exceptions.ReadOnlyError):
            return StorageError(f"{text}; this is a replica: give the URL of the primary")
        advice = f"check that a server answers at {self._place}, then try again"
        if isinstance(error, redis.TimeoutError):
            return StorageTimeoutError(f"{text}; {advice}, or raise timeout_s")
        if isinstance(error, redis.ConnectionError):
            return StorageError(f"{text}; {advice}")
        return StorageError(f"{text}; see the server's log")


def check_server(server: Server, *, expires: bool, require_aof: bool) -> None:
    """Refuse a server that does not keep its data.

    Raises:
        CapabilityError: It is too old, evicts, or does not write as `require_aof` asks.
        StorageError: It does not answer.
    """
    info: dict[str, Any] = server.run("open the root", lambda client: client.info())
    version = str(info["redis_version"])
    if int(version.split(".", 1)[0]) < 7:
        msg = f"{server.url} is Redis {version}; this backend needs 7.0 or later"
        raise CapabilityError(msg)
    check_policy(server.url, str(info.get("maxmemory_policy")), expires=expires)
    if require_aof:
        _check_aof(server, enabled=bool(info.get("aof_enabled")))


def check_policy(url: str, policy: str, *, expires: bool) -> None:
    """Refuse a server that drops single keys when it is full.

    Raises:
        CapabilityError: Its `maxmemory-policy` is none of those that leave ours alone.
    """
    if policy.startswith("allkeys") or (expires and policy.startswith("volatile")):
        msg = (
            f"{url} has maxmemory-policy {policy}, and would drop parts of checkpoints when "
            f"it is full; set noeviction: a save then fails, and nothing is lost"
        )
        raise CapabilityError(msg)


def _check_aof(server: Server, *, enabled: bool) -> None:
    names = ("appendfsync", "no-appendfsync-on-rewrite")
    found = server.run("open the root", lambda client: client.config_get(*names))
    if not enabled or found != {"appendfsync": "always", "no-appendfsync-on-rewrite": "no"}:
        msg = (
            f"{server.url} answers before what it was given is on disk, and require_aof asks for "
            f"that: set appendonly yes, appendfsync always and no-appendfsync-on-rewrite no"
        )
        raise CapabilityError(msg)


def _transient(error: redis.RedisError) -> bool:
    refused = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
    lost = (redis.ConnectionError, redis.TimeoutError)  # LOADING, while it starts, is one of them
    return isinstance(error, lost) and not isinstance(error, refused)


def _pool(config: RedisConfig) -> redis.ConnectionPool:
    username, password = config.credentials()
    options: dict[str, Any] = {}
    if password is not None:
        # Unlike `password`, it is in no `repr` of any version.
        options["credential_provider"] = UsernamePasswordCredentialProvider(username, password)
    if config.tls:
        options |= {
            "connection_class": redis.SSLConnection,
            "ssl_ca_certs": config.ca_file,
            "ssl_check_hostname": True,  # not the default of every version
        }
    return redis.ConnectionPool(
        host=config.host,
        port=config.port,
        db=config.database,
        socket_timeout=config.timeout_s,
        socket_connect_timeout=config.timeout_s,
        socket_keepalive=True,
        # By default redis-py repeats every failed call: it does not know which are safe to repeat.
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        protocol=2,
        max_connections=_CONNECTIONS,
        **options,
    )

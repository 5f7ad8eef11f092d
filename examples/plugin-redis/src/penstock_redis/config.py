"""Options of the `redis` backend. The password stays out of `repr`, URLs and messages."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit

from penstock.core.abc import PluginConfig, SizeBytes
from pydantic import ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_core import PydanticCustomError

# No colon: it separates the parts of a key, so no root can reach into another.
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_LARGEST_CHUNK_BYTES = 256 << 20  # Redis takes 512 MB; a chunk is a reply held in memory
_CREDENTIALS = "no credentials in the URL: use REDIS_USERNAME and REDIS_PASSWORD, or the options"


class RedisConfig(PluginConfig):
    """Options of `redis`.

    Attributes:
        url: `redis://host:6379/0`; `rediss://` for TLS.
        prefix: Name of the root among others on the same server.
        username: Of an ACL user; else the variable REDIS_USERNAME.
        password: Else the variable REDIS_PASSWORD, which is better.
        ca_file: File with the certificates to trust, for `rediss://`.
        ttl_s: How long a checkpoint stays after its commit; None: until it is deleted.
        max_bytes: Most that all blobs and records of this root may have together.
        chunk_bytes: Size of the strings that blobs are cut into.
        pipeline_bytes: Most that is on its way on one connection.
        timeout_s: How long the server may take to connect, or to go on.
        retry_total_s: After this long nothing is tried again.
        require_aof: Refuse a server that may lose confirmed data at a power cut.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str
    prefix: str = "penstock"
    username: str | None = None
    password: SecretStr | None = Field(default=None, repr=False)
    ca_file: str | None = None
    ttl_s: float | None = Field(default=None, gt=0)
    max_bytes: SizeBytes | None = Field(default=None, gt=0)
    chunk_bytes: SizeBytes = Field(default=4 << 20, ge=1 << 12, le=_LARGEST_CHUNK_BYTES)
    pipeline_bytes: SizeBytes = Field(default=16 << 20, gt=0)
    timeout_s: float = Field(default=30.0, gt=0)
    retry_total_s: float = Field(default=30.0, ge=0)
    require_aof: bool = False

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str) -> str:
        parts = urlsplit(url)
        if "@" in parts.netloc or "@" in url:
            raise ValueError(_CREDENTIALS)
        database = parts.path.strip("/")
        fine = parts.scheme in {"redis", "rediss"} and parts.hostname and not parts.query
        if not fine or (database and not database.isdecimal()):
            msg = "it should be redis://host:6379/0; text after the database goes into `prefix`"
            raise ValueError(msg)
        if parts.port == 0:
            msg = "port 0 cannot be connected to"
            raise ValueError(msg)
        return url

    @field_validator("prefix")
    @classmethod
    def _plain(cls, prefix: str) -> str:
        if not _PREFIX.fullmatch(prefix):
            msg = "it may hold A-Z a-z 0-9 . _ - and single slashes between them"
            raise ValueError(msg)
        return prefix

    @property
    def host(self) -> str:
        """Name or address, without the port."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """6379 where the URL names none."""
        return urlsplit(self.url).port or 6379

    @property
    def database(self) -> int:
        """0 where the URL names none."""
        return int(urlsplit(self.url).path.strip("/") or 0)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return urlsplit(self.url).scheme == "rediss"

    @property
    def shown_url(self) -> str:
        """The URL to show to people, without credentials."""
        scheme = "rediss" if self.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.database}/{self.prefix}"

    def credentials(self) -> tuple[str | None, str | None]:
        """User and password, from the options or else the environment."""
        password = self.password.get_secret_value() if self.password else None
        return (
            self.username or os.environ.get("REDIS_USERNAME"),
            password or os.environ.get("REDIS_PASSWORD"),
        )


def options_of_url(url: str, options: dict[str, str]) -> dict[str, Any]:
    """Options for `redis://host:port/db/prefix` and its query.

    Raises:
        ValidationError: The query holds a password: it would end up in process lists and logs.
    """
    if "password" in options:
        error = PydanticCustomError("credentials", _CREDENTIALS)
        raise ValidationError.from_exception_data(
            "RedisConfig", [{"type": error, "loc": ("url",), "input": None}], hide_input=True
        )
    scheme, _, rest = url.partition("://")
    place, _, path = rest.partition("/")
    database, _, prefix = path.partition("/")
    named = {"prefix": prefix.rstrip("/")} if prefix.rstrip("/") else {}
    return {**options, **named, "url": f"{scheme}://{place}/{database}"}

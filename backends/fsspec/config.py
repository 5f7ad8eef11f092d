"""The options of `fsspec`. Options that may be secret never appear in `repr` and messages."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.core.abc import PluginConfig, SizeBytes, without_credentials

S3_SCHEMES = frozenset({"s3", "s3a"})
MIN_PART_BYTES = 5 << 20  # a limit of S3, for all parts but the last
MAX_PARTS = 10_000  # a limit of S3

# An option holds a credential if its name contains one of these words, or is one of these names.
_SECRET_WORDS = (
    "secret", "token", "passw", "passphrase", "credential", "sig", "auth", "cookie", "bearer",
    "jwt", "private", "connection_string", "login",
)  # fmt: skip
_SECRET_NAMES = frozenset({"pass", "pwd", "sas", "pat"})
# Options that messages may show. All others are hidden, since each file system has its own options,
# and an unknown one may hold a credential.
_HARMLESS = frozenset({
    "endpoint_url", "endpoint", "region", "region_name", "location", "project", "profile",
    "bucket", "container", "addressing_style", "signature_version", "verify", "host", "hostname",
    "port", "protocol", "target_protocol", "username", "user", "account_name", "path", "root",
    "mode", "encoding", "compression", "cache_type", "api", "version", "access", "consistency",
    "listings_cache", "use_listings_cache", "size_policy", "content_type",
})  # fmt: skip
_SHORT = 6  # characters; hiding shorter texts would blank out parts of words in a message


class FsspecConfig(PluginConfig):
    """Options of `fsspec`.

    Attributes:
        url: The root: `s3://bucket/run`, or any other URL that fsspec knows.
        options: The options of the store: `S3Options` for S3, else the arguments of the fsspec file
            system. Prefer the environment for credentials.
        part_bytes: Minimum part size of an upload, and maximum request size of a read. Blobs
            above 256 MiB get parts of up to 16 MiB, or larger if there would be more than 10,000.
        parallel: Maximum requests in flight.
        buffer_bytes: Maximum memory in flight for parts of S3 uploads that are assembled from
            several writes, or from pieces below 1 MiB. Other parts are sent from the caller's
            memory, without a copy.
        merge_gap_bytes: The largest gap between two ranges that one request reads together.
        timeout_s: Maximum seconds to connect, or to wait until the store sends or accepts bytes.
        attempts: Maximum attempts of an operation that is safe to repeat.
        retry_total_s: The seconds after which no further attempt begins. If this is at most
            `timeout_s`, an attempt that times out is the last one.
        conditional_put: Whether the store decides between concurrent publishers (`If-None-Match: *`
            of S3 and Azure, generations of Google). `auto` assumes that AWS does, and probes other
            stores with a test record.
        checksums: Whether each part of an S3 upload carries a CRC for the store to check.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    url: str = Field(repr=False)
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    part_bytes: SizeBytes = Field(default=8 << 20, ge=MIN_PART_BYTES, le=5 << 30)
    parallel: int = Field(default=16, ge=1, le=256)
    buffer_bytes: SizeBytes = Field(default=64 << 20, ge=0)
    merge_gap_bytes: SizeBytes = Field(default=64 << 10, ge=0)
    timeout_s: float = Field(default=60.0, gt=0)
    attempts: int = Field(default=6, ge=1)
    retry_total_s: float = Field(default=180.0, ge=0)
    conditional_put: Literal["auto", "yes", "no"] = "auto"
    checksums: bool = True

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if not separator or not scheme:
            msg = "it must begin with a scheme, as in s3://bucket/run"
            raise ValueError(msg)
        if scheme.lower() in S3_SCHEMES:
            bucket = rest.partition("/")[0]
            if "@" in rest or ":" in bucket:
                msg = (
                    "credentials do not belong in the URL: use the environment "
                    "(AWS_ACCESS_KEY_ID, AWS_PROFILE, a role) or options"
                )
                raise ValueError(msg)
            if not bucket or "?" in rest:
                msg = "it should be s3://bucket/folder"
                raise ValueError(msg)
        return url.rstrip("/")

    @property
    def scheme(self) -> str:
        """The scheme of the URL, in lower case, without `://`."""
        return self.url.partition("://")[0].lower()

    @property
    def shown_url(self) -> str:
        """The URL without user, password, query and fragment."""
        return shown(self.url)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The strings in the options and the URL that no message may show."""
        texts = _in_url(self.url)
        _collect(self.options, texts)
        return tuple({text for text in texts if text})


class S3Options(BaseModel):
    """`options` for S3.

    Missing options come from the sources that every AWS tool uses: environment, `~/.aws`, web
    identity, container or instance role.

    Attributes:
        endpoint_url: The endpoint of stores other than AWS: `https://minio.example:9000`.
        region: The region of the bucket.
        profile: A section of `~/.aws/config`.
        key: The access key id.
        secret: The secret access key.
        token: The session token.
        anon: Whether to send requests without credentials.
        addressing_style: Whether the host name or the path contains the bucket.
        verify: Whether to check TLS certificates, or a file with the certificates to trust.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    key: str | None = Field(default=None, repr=False)
    secret: str | None = Field(default=None, repr=False)
    token: str | None = Field(default=None, repr=False)
    anon: bool = False
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    verify: bool | str = True

    @field_validator("endpoint_url")
    @classmethod
    def _without_credentials(cls, url: str | None) -> str | None:
        if url is not None and "@" in urlsplit(url).netloc:
            msg = "credentials do not belong in it: use the options key and secret"
            raise ValueError(msg)
        return url


def shown(url: str) -> str:
    """Return `url` without user, password, query and fragment."""
    return without_credentials(url)


def is_secret_name(name: str) -> bool:
    """Return whether an option of that name is known to hold a credential."""
    plain = name.lower().replace("-", "_")
    if plain in _HARMLESS:
        return False
    known = plain in _SECRET_NAMES or plain.endswith("key")
    return known or any(word in plain for word in _SECRET_WORDS)


def _collect(value: object, texts: list[str], name: str = "", *, secret: bool = False) -> None:
    """Add to `texts` the strings in options that may be secret.

    Leaves out options that are known to be harmless, and short strings of options whose names
    suggest no secret.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            _collect(inner, texts, str(key), secret=secret or is_secret_name(str(key)))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _collect(inner, texts, name, secret=secret)
    elif isinstance(value, str) and (
        secret or (name.lower() not in _HARMLESS and len(value) >= _SHORT)
    ):
        texts.append(value)


def _in_url(url: str) -> list[str]:
    """Return `user:password` and `password` of a URL; an empty list without a password."""
    rest = url.partition("://")[2]
    # The last `@`: a password may hold one, and also `/`, where URL parsers end the host.
    head, _, _ = rest.rpartition("@")
    _, colon, password = head.partition(":")
    return [head, password] if colon else []

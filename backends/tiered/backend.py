"""Combines several tiers into one backend, which has a blob if any tier has it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, TypeVar
from urllib.parse import unquote

from pydantic import ConfigDict, Field

from penstock.backends.tiered.failing_tiers import LateBackend, open_or_wait
from penstock.core.abc import (
    Backend,
    Deadline,
    PluginConfig,
    SizeBytes,
    Tier,
    call_all_with_deadline,
    current_timing,
    host_roots,
    misplaced_roots,
    read_root,
)
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    ConfigError,
    FormatError,
    StorageError,
    StorageTimeoutError,
    WrongPlaceError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import BlobWriter, RootRecord
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest

log = logging.getLogger("penstock")
away_log = logging.getLogger(__name__)  # commands silence it, and print the same themselves

T = TypeVar("T")

_COMMITS = "commits/"  # the prefix of all commit records

Place: TypeAlias = str | dict[str, Any]


class TieredConfig(PluginConfig):
    """Options of `tiered`: a fast tier for saves, and a durable tier for copies of them.

    Attributes:
        fast: The path, URL or table of any backend, even of another `tiered`.
        durable: The path, URL or table of the durable tier.
        durable_means: The tier that must have the whole checkpoint before `handle.durable` is done.
        drain_every: N, to copy every N-th save; 0 copies none. A save that does not fit in `fast`
            still goes to `durable`.
        drain_bytes_per_s: Maximum bytes per second to copy; None sets no limit.
        drain_in: Where copies run: on a `thread` of the trainer, or in a separate `process`, which
            slows training less; `auto` uses a process for checkpoints of 64 MiB and more.
        keep_fast: The number of checkpoints that eviction keeps in `fast` after they were copied to
            `durable`; None keeps all that fit.
        on_full: What a save does if `fast` is full, even after eviction, and `durable` does not
            answer: `skip` the save, `block` training until a tier has room, or `raise`
            StorageFullError.
        roots: Whether to `check` that these tiers were used together before, or to `accept` and
            record them as they are now; set `accept` for one save or drain only.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    fast: Place = Field(repr=False)  # may hold credentials
    durable: Place = Field(repr=False)
    durable_means: Literal["fast", "durable"] = "durable"
    drain_every: int = Field(default=1, ge=0)
    drain_bytes_per_s: SizeBytes | None = Field(default=None, gt=0)
    drain_in: Literal["auto", "process", "thread"] = "auto"
    keep_fast: int | None = Field(default=None, ge=0)
    on_full: Literal["block", "skip", "raise"] = "skip"
    roots: Literal["check", "accept"] = "check"


class TieredBackend(Backend):
    """Reads each blob from the fastest tier that has it, and writes to the fastest tier.

    Core decides which blobs to copy and evict (see `Backend.tiers`), since it knows the blobs of a
    checkpoint.
    """

    name: ClassVar[str] = "tiered"
    Config: ClassVar[type[PluginConfig]] = TieredConfig

    def __init__(
        self,
        config: TieredConfig,
        /,
        *,
        fast: Backend | None = None,
        durable: Backend | None = None,
    ) -> None:
        """Combine two open backends; `close` closes both."""
        if fast is None or durable is None:
            msg = "tiered needs two backends: open it from a configuration, or give both"
            raise ConfigError(msg)
        self._owned = [fast, durable]
        self._tiers = _flat(config, fast, durable)
        self._roots: dict[int, RootRecord | None] = {}  # the root records of tiers that answered
        self._backends = [tier.backend for tier in self._tiers]
        self._checks_roots = False
        check_apart(self._backends)
        if any(place.copies for number, place in host_roots(self).items() if number):
            msg = "copies are made in the fastest tier only: leave `copies` out in slower ones"
            raise ConfigError(msg)
        for number, backend in enumerate(self._backends):
            if isinstance(backend, LateBackend):
                backend.check = partial(self._check_late, number)

    @classmethod
    def open(cls, config: Any, /, *, open_backend: Callable[[Any], Backend]) -> Self:
        """Open both backends; a failure leaves none open.

        If one backend does not answer, later calls try to open it again.
        """
        if config.fast == config.durable and not _is_anonymous(config.fast):
            msg = "fast and durable are one place: give each its own place"
            raise ConfigError(msg)
        fast = _open(config.fast, open_backend)
        try:
            durable = _open(config.durable, open_backend)
            try:
                _check_one_answers(fast, durable)
                backend = cls(config, fast=fast, durable=durable)
                if config.roots == "check":
                    backend._check_roots()
            except BaseException:
                durable.close()
                raise
        except BaseException:
            fast.close()
            raise
        return backend

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options of `tiered://?fast=/nvme/run&durable=s3://bucket/run` (URL-quoted)."""
        if url.partition("://")[2].strip("/"):
            msg = "a tiered:// URL has options only: tiered://?fast=...&durable=..."
            raise ConfigError(msg)
        return cls.Config.model_validate(options)

    def _check_roots(self) -> None:
        """Read the root records; skip each tier that does not answer, or that looks unmounted.

        Raises:
            ConfigError: The tiers belong to different runs, or have a different order.
            StorageError: No tier is left.
        """
        began_s = time.monotonic()
        self._checks_roots = True  # tiers that open later are checked too
        late = [number for number, backend in enumerate(self._backends) if not _is_open(backend)]
        failed = self._read_roots([n for n in range(len(self._backends)) if n not in late])
        for number, why in misplaced_roots(
            self._tiers,
            self._roots,
            has_checkpoints=lambda number: _lists_any(self._backends[number]),
        ).items():
            failed[number] = WrongPlaceError(why)
            self._roots.pop(number)
        if len(late) + len(failed) == len(self._backends):
            raise next(iter(failed.values()))
        for number, error in failed.items():
            away_log.error("a tier is skipped until it can be used: %s", str(error))
            self._delay(number, error, time.monotonic() - began_s)

    def _read_roots(self, numbers: Sequence[int]) -> dict[int, StorageError]:
        """Read the root records of these tiers; return the errors of tiers that do not answer."""
        failed: dict[int, StorageError] = {}
        deadline = Deadline(current_timing().tier_answer_s)
        answers = call_all_with_deadline(
            "ask",
            [partial(read_root, self._backends[number]) for number in numbers],
            deadline,
            lambda: StorageTimeoutError(f"no answer for {deadline.limit_s:g} s"),
        )
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, CapabilityError):  # it answers, but cannot be used
                raise answer
            if isinstance(answer, StorageError):
                failed[number] = answer
            elif isinstance(answer, FormatError):  # the next save replaces the record
                log.warning("%s: %s", self._backends[number].url, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self._roots[number] = answer
        return failed

    def _delay(self, number: int, error: StorageError, took_s: float) -> None:
        """Replace a tier's backend with one that opens after the tier has the right root."""
        backend = self._backends[number]

        def open_checked() -> Backend:
            self._check_root(number, backend)
            return backend

        late = LateBackend(open_checked, backend.url, error, took_s)
        self._owned.append(late)
        self._backends[number] = late
        self._tiers = tuple(
            replace(tier, backend=late) if at == number else tier
            for at, tier in enumerate(self._tiers)
        )

    def _check_late(self, number: int, backend: Backend) -> None:
        others = self._backends[:number] + self._backends[number + 1 :]
        check_apart([backend, *others])
        if self._checks_roots:
            self._check_root(number, backend)

    def _check_root(self, number: int, backend: Backend) -> None:
        roots = {**self._roots, number: read_root(backend)}
        reasons = misplaced_roots(
            self._tiers,
            roots,
            # The tier itself is being opened, and would wait for the end of this check.
            has_checkpoints=lambda n: n != number or _lists_any(backend),
        )
        if number in reasons:
            raise WrongPlaceError(reasons[number])
        self._roots = roots

    @property
    def url(self) -> str:
        """The URLs of all tiers, the fastest first."""
        return f"tiered({', '.join(backend.url for backend in self._backends)})"

    @property
    def capabilities(self) -> Capabilities:
        """The fastest open tier's, without `renames`.

        With `exclusive_publish` only if all tiers are open and have it.
        """
        known = [backend.capabilities for backend in self._backends if _is_open(backend)]
        exclusive = len(known) == len(self._backends) and all(c.exclusive_publish for c in known)
        return replace(known[0], exclusive_publish=exclusive, renames=False)

    @property
    def direct_io(self) -> bool:
        """Whether the fastest open tier uses direct I/O."""
        return next(filter(_is_open, self._backends)).direct_io

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, the fastest first."""
        return self._tiers

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Create a blob in the fastest tier, unless another tier has its name."""
        self._check_free(name)
        return self._backends[0].create(name, size_hint=size_hint)

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Write with the fastest tier's `submit_write`."""
        return self._backends[0].submit_write(writer, requests)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Read each blob from the fastest tier that has it."""
        missing = [*requests]

        def read_some(backend: Backend) -> None:
            missing[:] = _read_there(backend, missing)
            if missing:
                msg = f"{missing[0].name} is in no tier of {self.url}"
                raise BlobNotFoundError(msg)

        self._first(read_some)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read with the fastest tier's `submit_read`; if that fails, retry with `read`."""
        return self._submit_or_read(self._backends[0], requests, StorageError)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """Read a record from the fastest tier that has it."""
        return self._first(lambda backend: backend.read_record(name, limit_bytes=limit_bytes))

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """Publish in the fastest tier; with `exclusive` only if no other tier has the name."""
        if exclusive:
            self._check_free(name)
        self._backends[0].publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List the blobs of all tiers, each with size and time from the fastest tier that has it.

        Lists the fastest tier first. Otherwise the list could miss a blob that is copied to a
        slower tier and evicted meanwhile.

        Raises:
            StorageError: A tier does not answer, so its blobs are unknown.
        """
        infos: dict[str, BlobInfo] = {}
        for tier in self._tiers:
            try:
                infos = {info.name: info for info in tier.backend.list(prefix)} | infos
            except StorageError as error:
                msg = (
                    f"tier {tier.name} of the run does not answer, so its blobs are unknown: "
                    f"{error}. To continue from another tier, open that one alone"
                )
                raise type(error)(msg) from error
        return [infos[name] for name in sorted(infos)]

    def stat(self, name: str, /) -> BlobInfo:
        """Return the size and time of a blob in the fastest tier that has it."""
        return self._first(lambda backend: backend.stat(name))

    def delete(self, names: Sequence[str], /) -> None:
        """Delete from the slowest tier to the fastest; if one fails, faster tiers are unchanged."""
        for backend in reversed(self._backends):
            backend.delete(names)

    def free_bytes(self) -> int | None:
        """Return the free space of the fastest tier in bytes."""
        return self._backends[0].free_bytes()

    def check_writable(self) -> None:
        """Check every tier, since a save must be copied to become durable."""
        for backend in self._backends:
            backend.check_writable()

    def sweep(self, before_s: float, /) -> None:
        """Sweep every tier."""
        for backend in self._backends:
            backend.sweep(before_s)

    def close(self) -> None:
        """Close every tier, even a tier that is not open yet."""
        super().close()
        for backend in self._owned:
            backend.close()

    # -- below --------------------------------------------------------------------------------

    def _first(self, call: Callable[[Backend], T]) -> T:
        """Return the result of `call` on the fastest tier where it succeeds.

        Raises:
            BlobTruncatedError: A tier has a damaged copy. Core then reads another tier's copy and
                repairs the damage.
            BlobNotFoundError: All tiers answer, and none has the blob.
            StorageError: No tier returned a result, and one of them failed.
        """
        missing: BlobNotFoundError | None = None
        failure: StorageError | None = None
        for backend in self._backends:
            try:
                return call(backend)
            except BlobTruncatedError:
                raise
            except BlobNotFoundError as error:
                missing = error
            except StorageError as error:
                log.warning("%s cannot be read, trying the next tier: %s", backend.url, str(error))
                failure = failure or error
        reason = failure or missing
        assert reason is not None
        raise reason

    def _check_free(self, name: str) -> None:
        for backend in self._backends[1:]:
            if _has(backend, name):
                msg = f"{name} already exists on {backend.url}"
                raise BlobExistsError(msg)


def _read_there(backend: Backend, requests: Sequence[ReadRequest]) -> Sequence[ReadRequest]:
    """Read the blobs that a tier has; return the requests for other blobs."""
    try:
        backend.read(requests)
    except BlobNotFoundError:
        names = {name for name in {r.name for r in requests} if _has(backend, name)}
        try:
            backend.read([r for r in requests if r.name in names])
        except BlobNotFoundError:  # evicted since `stat`: the next tier has it
            return requests
        return [r for r in requests if r.name not in names]
    return ()


def _has(backend: Backend, name: str) -> bool:
    try:
        backend.stat(name)
    except BlobNotFoundError:
        return False
    return True


def _open(spec: Place, open_backend: Callable[[Any], Backend]) -> Backend:
    if _kind(spec) == TieredBackend.name:  # the number of its tiers is known only once it is open
        return open_backend(spec)
    return open_or_wait(lambda: open_backend(spec), f"{_kind(spec)} (not open yet)")


def _kind(spec: Place) -> str:
    if isinstance(spec, str):
        return spec.partition("://")[0] if "://" in spec else "a folder"
    return str(spec.get("type"))


def _lists_any(backend: Backend) -> bool:
    """Return whether the store lists a commit record; False if it does not answer."""
    try:
        return bool(backend.list(_COMMITS))
    except StorageError:
        return False


def _is_open(backend: Backend) -> bool:
    return not isinstance(backend, LateBackend) or backend.failure is None


def _check_one_answers(fast: Backend, durable: Backend) -> None:
    """Raise the error of opening `fast`, if neither backend could be opened."""
    if isinstance(fast, LateBackend) and isinstance(durable, LateBackend) and fast.failure:
        raise fast.failure


def _is_anonymous(spec: object) -> bool:
    """Return whether `spec` opens a new store each time."""
    return spec in ("memory://", {"type": "memory"})


def _flat(config: TieredConfig, fast: Backend, durable: Backend) -> tuple[Tier, ...]:
    """Return the tiers of both backends. The last of `fast` drains to the first of `durable`."""
    upper = _inner("fast", fast, durable=config.durable_means == "fast")
    lower = _inner("durable", durable, durable=config.durable_means == "durable")
    link = replace(
        upper[-1],
        drain_every=config.drain_every,
        drain_bytes_per_s=config.drain_bytes_per_s,
        drain_in=config.drain_in,
        keep_last=config.keep_fast,
        on_full=config.on_full,
    )
    accepted = config.roots == "accept"
    return tuple(
        replace(tier, accept_root=accepted or tier.accept_root)
        for tier in (*upper[:-1], link, *lower)
    )


def _inner(name: str, backend: Backend, *, durable: bool) -> tuple[Tier, ...]:
    if not backend.tiers:
        return (Tier(name, backend, durable=durable),)
    return tuple(
        replace(tier, name=f"{name}.{tier.name}", durable=tier.durable and durable)
        for tier in backend.tiers
    )


def check_apart(backends: Sequence[Backend], /) -> None:
    """Check that no two tiers are the same folder, even with different paths or engines.

    Raises:
        ConfigError: Two tiers are the same folder; the message names them.
    """
    seen: dict[Hashable, str] = {}
    for backend in backends:
        place = _place(backend.url)
        if place is None:
            continue
        if place in seen:
            msg = (
                f"two tiers are one place ({seen[place]} and {backend.url}): blobs evicted from "
                "the faster one would be lost. Give each its own place."
            )
            raise ConfigError(msg)
        seen[place] = backend.url


def _place(url: str) -> Hashable | None:
    """Return the identity of a folder across links and bind mounts; None if `url` has no folder.

    If the server of a mount is gone, only the path identifies the folder, so that the run can open
    without that tier.
    """
    where = url.partition("://")[2]
    if not where.startswith("/"):
        return None
    path = Path(os.path.realpath(unquote(where)))
    try:
        ancestor = next((p for p in (path, *path.parents) if p.exists()), path)
        status = ancestor.stat()
    except OSError:  # ENOTCONN, ESTALE, EIO: `exists` raises these as well
        return str(path)
    return status.st_dev, status.st_ino, str(path.relative_to(ancestor))

"""Several places as one: what any of them has is there."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from penstock.backends.tiered.apart import check_apart
from penstock.backends.tiered.config import TieredConfig
from penstock.backends.tiered.late import LateBackend, open_or_wait
from penstock.backends.tiered.reading import read_from, read_in_background
from penstock.core.abc import Backend, PluginConfig, Tier
from penstock.core.errors import BlobExistsError, BlobNotFoundError, ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import Any

    from penstock.backends.tiered.config import Place
    from penstock.core.abc import BlobWriter
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest

log = logging.getLogger("penstock")

T = TypeVar("T")


class TieredBackend(Backend):
    """Reads whatever any tier has, from the fastest that has it; writes go to the fastest.

    What is copied when, and what goes, is the engine's business (see `Backend.tiers`): it knows
    which blobs are a checkpoint.
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
        """Put two open backends together, which belong to this one from now on."""
        if fast is None or durable is None:
            msg = "tiered is made of two backends: open it from a configuration, or give both"
            raise ConfigError(msg)
        self._owned = (fast, durable)
        self._tiers = _flat(config, fast, durable)
        self._backends = [tier.backend for tier in self._tiers]
        check_apart(self._backends)
        for backend in self._backends:
            if isinstance(backend, LateBackend):
                backend.check = partial(self._check_apart_with, backend)

    @classmethod
    def open(cls, config: Any, /, *, open_backend: Callable[[Any], Backend]) -> Self:
        """Open both; a failure leaves none open.

        One that does not answer is opened when it does.
        """
        if config.fast == config.durable and not _is_anonymous(config.fast):
            msg = "fast and durable are one place: give each a place of its own"
            raise ConfigError(msg)
        fast = _open(config.fast, open_backend)
        try:
            durable = _open(config.durable, open_backend)
            try:
                _check_one_answers(fast, durable)
                return cls(config, fast=fast, durable=durable)
            except BaseException:
                durable.close()
                raise
        except BaseException:
            fast.close()
            raise

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Options for `tiered://?fast=/nvme/run&durable=s3://bucket/run`, values URL-quoted."""
        if url.partition("://")[2].strip("/"):
            msg = "a tiered:// URL has options only: tiered://?fast=...&durable=..."
            raise ConfigError(msg)
        return cls.Config.model_validate(options)

    def _check_apart_with(self, late: Backend, opened: Backend) -> None:
        check_apart([opened if backend is late else backend for backend in self._backends])

    @property
    def url(self) -> str:
        """All places, the fastest first."""
        return f"tiered({', '.join(backend.url for backend in self._backends)})"

    @property
    def capabilities(self) -> Capabilities:
        """Those of the fastest tier that is open; exclusive only if all are."""
        found = [backend.capabilities for backend in self._backends if _is_open(backend)]
        exclusive = len(found) == len(self._backends) and all(c.exclusive_publish for c in found)
        return replace(found[0], exclusive_publish=exclusive)

    @property
    def direct_io(self) -> bool:
        """That of the fastest tier that is open."""
        return next(filter(_is_open, self._backends)).direct_io

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All places, the fastest first."""
        return self._tiers

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """In the fastest tier; a name that another has is taken."""
        self._check_free(name)
        return self._backends[0].create(name, size_hint=size_hint)

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """By the fastest tier's engine."""
        return self._backends[0].submit_write(writer, requests)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Each from the fastest tier that has it."""
        read_from(self._backends, requests)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """By the fastest tier's engine, as far as it has all."""
        return read_in_background(self._backends, requests, self._executor().submit)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """From the fastest tier that has it."""
        return self._first(name, lambda backend: backend.read_record(name, limit_bytes=limit_bytes))

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """In the fastest tier; exclusively, if no other has the name."""
        if exclusive:
            self._check_free(name)
        self._backends[0].publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """What any tier has; sizes and times are the fastest one's."""
        found: dict[str, BlobInfo] = {}
        for tier in reversed(self._tiers):
            try:
                found.update((info.name, info) for info in tier.backend.list(prefix))
            except StorageError as error:
                msg = (
                    f"tier {tier.name} of the run does not answer, so what there is cannot be "
                    f"told: {error}. To go on from what another tier has, open that one alone"
                )
                raise type(error)(msg) from error
        return [found[name] for name in sorted(found)]

    def stat(self, name: str, /) -> BlobInfo:
        """As the fastest tier that has it says."""
        return self._first(name, lambda backend: backend.stat(name))

    def delete(self, names: Sequence[str], /) -> None:
        """From the most durable tier to the fastest, so that nothing is copied once more."""
        for backend in reversed(self._backends):
            backend.delete(names)

    def free_bytes(self) -> int | None:
        """Room in the fastest tier."""
        return self._backends[0].free_bytes()

    def sweep(self, before_s: float, /) -> None:
        """In every tier."""
        for backend in self._backends:
            backend.sweep(before_s)

    def close(self) -> None:
        """Close all."""
        super().close()
        for backend in self._owned:
            backend.close()

    # -- below --------------------------------------------------------------------------------

    def _first(self, name: str, call: Callable[[Backend], T]) -> T:
        """What the fastest tier that has `name` answers."""
        failure: StorageError | None = None
        for backend in self._backends:
            try:
                return call(backend)
            except BlobNotFoundError:
                continue
            except StorageError as error:
                log.warning("%s does not give %s: %s", backend.url, name, str(error))
                failure = failure or error
        if failure is not None:
            raise failure
        msg = f"{name} is in none of {self.url}"
        raise BlobNotFoundError(msg)

    def _check_free(self, name: str) -> None:
        for backend in self._backends[1:]:
            try:
                backend.stat(name)
            except BlobNotFoundError:
                continue
            msg = f"{name} exists on {backend.url} already"
            raise BlobExistsError(msg)


def _open(spec: Place, open_backend: Callable[[Any], Backend]) -> Backend:
    if _kind(spec) == TieredBackend.name:  # how many tiers these are is known once it is open
        return open_backend(spec)
    return open_or_wait(lambda: open_backend(spec), f"{_kind(spec)} (not open yet)")


def _kind(spec: Place) -> str:
    if isinstance(spec, str):
        return spec.partition("://")[0] if "://" in spec else "a folder"
    return str(spec.get("type"))


def _is_open(backend: Backend) -> bool:
    return not isinstance(backend, LateBackend) or backend.failure is None


def _check_one_answers(fast: Backend, durable: Backend) -> None:
    if isinstance(fast, LateBackend) and isinstance(durable, LateBackend) and fast.failure:
        raise fast.failure


def _is_anonymous(spec: object) -> bool:
    """Whether each use of it is a store of its own."""
    return spec in ("memory://", {"type": "memory"})


def _flat(config: TieredConfig, fast: Backend, durable: Backend) -> tuple[Tier, ...]:
    """The tiers of both, in one row; the last of `fast` drains into the first of `durable`."""
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
    return (*upper[:-1], link, *lower)


def _inner(name: str, backend: Backend, *, durable: bool) -> tuple[Tier, ...]:
    if not backend.tiers:
        return (Tier(name, backend, durable=durable),)
    return tuple(
        replace(tier, name=f"{name}.{tier.name}", durable=tier.durable and durable)
        for tier in backend.tiers
    )

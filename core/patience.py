"""A store that may hang: what is asked of it in the foreground ends, one way or the other."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import Backend
from penstock.core.errors import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import BlobWriter
    from penstock.core.abc.backend import Tier
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest
    from penstock.core.workers import Workers

T = TypeVar("T")

_AT_ONCE = 1000  # names per call of `delete`, so that only one request has to fit into the limit
_SHOWN_NAMES = 3


class PatientBackend(Backend):
    """Delegates all; a call that blocks its caller is given up after `limit_s`.

    Such a call runs on a thread of its own, which stays behind with all that it uses if the store
    never answers. Blobs are written, and read in the background, as by the backend itself: saves
    and restores watch the progress of those themselves. `sweep` may walk all of a store, and is
    waited for; Ctrl-C ends that.
    """

    def __init__(
        self,
        inner: Backend,
        /,
        workers: Workers,
        limit_s: float,
        *,
        doubt: dict[object, Sequence[str]] | None = None,
    ) -> None:
        """Wrap `inner`, which stays the caller's to close; `doubt` is shared among tiers."""
        self.inner = inner
        self.name = inner.name  # type: ignore[misc] # reports are to name the wrapped one
        self._workers = workers
        self._limit_s = limit_s
        self._doubt: dict[object, Sequence[str]] = {} if doubt is None else doubt

    def may_go(self, name: str) -> bool:
        """Whether a deletion that was given up may still take what has this name."""
        return any(name in names for names in list(self._doubt.values()))

    @property
    def url(self) -> str:
        """The wrapped backend's."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The wrapped backend's; it may have to ask the store."""
        return self._ask("say what it can do", (), lambda: self.inner.capabilities)

    @property
    def direct_io(self) -> bool:
        """The wrapped backend's."""
        return self._ask("say what it can do", (), lambda: self.inner.direct_io)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """As the contract says."""
        return self._ask("create", [name], lambda: self.inner.create(name, size_hint=size_hint))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """As the contract says; after a timeout the targets stay the store's."""
        names = [request.name for request in requests]
        self._ask("read", names, lambda: self.inner.read(requests))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """As the contract says."""
        return self._ask(
            "read", [name], lambda: self.inner.read_record(name, limit_bytes=limit_bytes)
        )

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """As the contract says, and as long as it takes."""
        return self.inner.submit_write(writer, requests)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """As the contract says, and as long as it takes."""
        return self.inner.submit_read(requests)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """As the contract says; after a timeout the outcome is unknown."""
        self._ask("publish", [name], lambda: self.inner.publish(name, data, exclusive=exclusive))

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """As the contract says."""
        return self._ask("list", [prefix], lambda: self.inner.list(prefix))

    def stat(self, name: str, /) -> BlobInfo:
        """As the contract says."""
        return self._ask("stat", [name], lambda: self.inner.stat(name))

    def delete(self, names: Sequence[str], /) -> None:
        """As the contract says; after a timeout any of them may still go."""
        for at in range(0, len(names), _AT_ONCE):
            some = names[at : at + _AT_ONCE]
            key = object()
            self._doubt[key] = some
            self._ask("delete", some, partial(self._delete, key, some))

    def _delete(self, key: object, names: Sequence[str]) -> None:
        try:
            self.inner.delete(names)
        finally:
            del self._doubt[key]  # it has come to its end, however late

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The wrapped backend's, each as patient."""
        return tuple(
            replace(
                tier,
                backend=PatientBackend(
                    tier.backend, self._workers, self._limit_s, doubt=self._doubt
                ),
            )
            for tier in self.inner.tiers
        )

    def free_bytes(self) -> int | None:
        """As the contract says."""
        return self._ask("say how much is free", (), self.inner.free_bytes)

    def sweep(self, before_s: float, /) -> None:
        """As the contract says, and as long as it takes."""
        self._workers.apart("sweep", lambda: self.inner.sweep(before_s), cancel=_no_way)

    def store_time_s(self) -> float:
        """As the contract says."""
        return self._ask("tell the time", (), self.inner.store_time_s)

    def close(self) -> None:
        """Nothing: the wrapped backend is not this one's."""

    def close_inner(self) -> None:
        """Close the wrapped backend, which waits for what is in flight."""
        self._ask("close", (), self.inner.close)

    def _ask(self, what: str, names: Sequence[str], call: Callable[[], T]) -> T:
        """What `call` gives.

        Raises:
            StorageTimeoutError: It gave nothing for `limit_s`; it may still be carried out.
        """
        began_s = time.monotonic()

        def check() -> None:
            if time.monotonic() - began_s <= self._limit_s:
                return
            shown = " ".join(names[:_SHOWN_NAMES])
            if len(names) > _SHOWN_NAMES:
                shown += f" and {len(names) - _SHOWN_NAMES} more"
            msg = (
                f"{self.url} did not answer for {self._limit_s:g} s (io_timeout_s) when it was "
                f"to {what}{shown and ' '}{shown}, which may still happen; is the store stuck, or "
                "the network away?"
            )
            raise StorageTimeoutError(msg)

        return self._workers.apart(what.split(maxsplit=1)[0], call, cancel=_no_way, check=check)


def _no_way() -> None:
    """No call of a store can be taken back."""

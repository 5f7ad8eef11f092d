"""Third parties' backends: whatever they raise beside the contract becomes a StorageError here."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.abc import Backend, BlobWriter
from penstock.core.errors import PenstockError, StorageError
from penstock.core.shipping import shipped_by
from penstock.core.types import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.abc.backend import Tier
    from penstock.core.types import BlobInfo, ReadRequest, WriteRequest

log = logging.getLogger("penstock")

_OURS = __name__.split(".", maxsplit=1)[0]


def guarded(backend: Backend) -> Backend:
    """`backend`, which raises nothing but our tree; our own do so by themselves.

    What is no `Exception` (Ctrl-C, exits) passes as it is.
    """
    if type(backend).__module__.split(".")[0] == _OURS:
        return backend
    return GuardedBackend(backend)


class GuardedBackend(Backend):
    """Delegates all, and maps foreign errors; a bug of the wrapped backend is named as its own."""

    def __init__(self, inner: Backend, /) -> None:
        """Wrap `inner`; closing this closes it."""
        self.inner = inner
        self.name = inner.name  # type: ignore[misc] # reports are to name the wrapped one

    @property
    def url(self) -> str:
        """The wrapped backend's."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The wrapped backend's."""
        with self._mapped("say what it can do", ()):
            found: object = self.inner.capabilities
        if not isinstance(found, Capabilities):
            raise self._broken(found, "capabilities", "Capabilities")
        return found

    @property
    def direct_io(self) -> bool:
        """The wrapped backend's."""
        with self._mapped("say what it can do", ()):
            return self.inner.direct_io

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """As the contract says."""
        with self._mapped("create", [name]):
            writer: object = self.inner.create(name, size_hint=size_hint)
        if not isinstance(writer, BlobWriter):
            what = f"create({name!r})"
            raise self._broken(writer, what, "a BlobWriter")
        return _GuardedWriter(self, name, writer)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """As the contract says."""
        with self._mapped("read", [r.name for r in requests]):
            self.inner.read(requests)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """As the contract says."""
        with self._mapped("read", [name]):
            return self.inner.read_record(name, limit_bytes=limit_bytes)

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """As the contract says."""
        assert isinstance(writer, _GuardedWriter)
        with self._mapped("write", [writer.name]):
            return self._future(self.inner.submit_write(writer.inner, requests), [writer.name])

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """As the contract says."""
        names = [r.name for r in requests]
        with self._mapped("read", names):
            return self._future(self.inner.submit_read(requests), names, "read")

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """As the contract says."""
        with self._mapped("publish", [name]):
            self.inner.publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """As the contract says."""
        with self._mapped("list", [prefix]):
            return self.inner.list(prefix)

    def stat(self, name: str, /) -> BlobInfo:
        """As the contract says."""
        with self._mapped("stat", [name]):
            return self.inner.stat(name)

    def delete(self, names: Sequence[str], /) -> None:
        """As the contract says."""
        with self._mapped("delete", names):
            self.inner.delete(names)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The wrapped backend's, each guarded as well."""
        with self._mapped("name its tiers", ()):
            return tuple(replace(t, backend=guarded(t.backend)) for t in self.inner.tiers)

    def free_bytes(self) -> int | None:
        """As the contract says."""
        with self._mapped("say how much is free", ()):
            return self.inner.free_bytes()

    def sweep(self, before_s: float, /) -> None:
        """As the contract says."""
        with self._mapped("sweep", ()):
            self.inner.sweep(before_s)

    def store_time_s(self) -> float:
        """As the contract says."""
        with self._mapped("tell the time", ()):
            return self.inner.store_time_s()

    def close(self) -> None:
        """Close the wrapped backend."""
        with self._mapped("close", ()):
            self.inner.close()

    @contextmanager
    def _mapped(self, what: str, names: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except (Exception, CancelledError) as error:
            raise self._as_ours(what, names, error) from error

    def _as_ours(self, what: str, names: Sequence[str], error: BaseException) -> StorageError:
        blobs = " ".join(dict.fromkeys(names))
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return StorageError(
            f"cannot {what}{blobs and ' '}{blobs} on {self.url}: backend {self.name!r} "
            f"({shipped_by(type(self.inner))}) failed with {text}"
        )

    def _broken(self, found: object, what: str, expected: str) -> StorageError:
        return StorageError(
            f"backend {self.name!r} ({shipped_by(type(self.inner))}) broke its contract: "
            f"{what} is {type(found).__name__}, not {expected}"
        )

    def _future(
        self, future: Future[None], names: Sequence[str], what: str = "write"
    ) -> Future[None]:
        """One that fails with our errors only, and is done when `future` is."""
        outer: Future[None] = Future()
        outer.set_running_or_notify_cancel()  # cancelling cannot take buffers back

        def done(inner: Future[None]) -> None:
            error = CancelledError() if inner.cancelled() else inner.exception()
            if error is None:
                outer.set_result(None)
            elif isinstance(error, Exception) and not isinstance(error, PenstockError):
                mapped = self._as_ours(what, names, error)
                mapped.__cause__ = error
                outer.set_exception(mapped)
            else:
                outer.set_exception(error)

        future.add_done_callback(done)
        return outer


class _GuardedWriter(BlobWriter):
    def __init__(self, backend: GuardedBackend, name: str, inner: BlobWriter) -> None:
        self.name = name
        self.inner = inner
        self._backend = backend

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        with self._backend._mapped("write", [self.name]):  # noqa: SLF001 - one unit of two
            self.inner.write(requests)

    def seal(self, length: int, /) -> None:
        with self._backend._mapped("seal", [self.name]):  # noqa: SLF001 - one unit of two
            self.inner.seal(length)

    def abort(self) -> None:
        try:
            self.inner.abort()
        except BaseException as error:  # noqa: BLE001 - `abort` never raises: others rely on it
            log.warning("%s could not be aborted on %s: %r", self.name, self._backend.url, error)

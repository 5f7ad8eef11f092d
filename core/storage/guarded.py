"""Guards third-party backends: every foreign exception becomes a StorageError.

Tested in `tests/integration/faults/test_foreign_errors.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from penstock.core.abc import Backend, BlobWriter, DelegatingBackend, DelegatingWriter, Tier
from penstock.core.abc.delegating import in_words
from penstock.core.errors import PenstockError, StorageError
from penstock.core.foreign import is_foreign, shipped_by
from penstock.core.types import BlobInfo, Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.core.abc.delegating import Operation
    from penstock.core.types import ReadRequest, WriteRequest

log = logging.getLogger("penstock")

T = TypeVar("T")


def _is_number(found: object) -> TypeGuard[float]:
    return isinstance(found, (int, float)) and not isinstance(found, bool)


_ANSWERS: Mapping[Operation, tuple[Callable[[object], bool], str]] = {
    "url": (
        lambda found: isinstance(found, str) and bool(found),
        "a str that shows its location",
    ),
    "capabilities": (lambda found: isinstance(found, Capabilities), "Capabilities"),
    "direct_io": (lambda found: isinstance(found, bool), "True or False"),
    "tiers": (lambda found: isinstance(found, tuple), "a tuple of Tier"),
    "create": (lambda found: isinstance(found, BlobWriter), "a BlobWriter"),
    "read_record": (lambda found: isinstance(found, bytes), "bytes"),
    "submit_write": (lambda found: isinstance(found, Future), "a Future"),
    "submit_read": (lambda found: isinstance(found, Future), "a Future"),
    "list": (lambda found: isinstance(found, Sequence), "a sequence of BlobInfo"),
    "stat": (lambda found: isinstance(found, BlobInfo), "a BlobInfo"),
    "free_bytes": (lambda found: found is None or type(found) is int, "an int or None"),
    "store_time_s": (_is_number, "a float"),
}
_PROPERTIES: frozenset[Operation] = frozenset(["url", "capabilities", "direct_io", "tiers"])


def guarded(backend: Backend) -> Backend:
    """Return a backend that raises only errors of our tree; return our own backends as is.

    Exceptions that are not `Exception`s, such as Ctrl-C and exits, pass unchanged.
    """
    if not is_foreign(backend):
        return backend
    return GuardedBackend(backend)


class _GuardedWriter(DelegatingWriter):
    def abort(self) -> None:
        try:
            self.inner.abort()
        except BaseException as error:  # noqa: BLE001 - logged: callers rely on `abort` to return, and then free memory
            log.warning("%s could not be aborted on %s: %r", self.name, self.backend.url, error)


class GuardedBackend(DelegatingBackend):
    """Delegates every call, maps foreign errors, and refuses results of wrong types.

    The errors name the wrapped backend and its distribution, so that users report its bugs to its
    authors.
    """

    writer_class = _GuardedWriter

    def __init__(self, inner: Backend, /) -> None:
        """Wrap `inner`; closing the wrapper closes `inner`."""
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # reports name the wrapped backend

    def around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], T], /) -> T:
        """Map the exception of a call, and check the type of its result."""
        try:
            found = call()
        except PenstockError:
            raise
        except (Exception, CancelledError) as error:
            raise self._as_ours(operation, names, error) from error
        fits, expected = _ANSWERS.get(operation, (lambda _: True, ""))
        if not fits(found):
            raise self._broken(found, _shown(operation, names), expected)
        return found

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Write as the contract requires, with checked results and errors."""
        assert isinstance(writer, _GuardedWriter)
        found = super().submit_write(writer, requests)
        return self._mapped_later("submit_write", (writer.name,), found)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read as the contract requires, with checked results and errors."""
        names = tuple(request.name for request in requests)
        return self._mapped_later("submit_read", names, super().submit_read(requests))

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List as the contract requires, with checked results and errors."""
        what = f"an item of {_shown('list', (prefix,))}"
        return [self._checked(info, what) for info in super().list(prefix)]

    def stat(self, name: str, /) -> BlobInfo:
        """Stat as the contract requires, with checked results and errors."""
        return self._checked(super().stat(name), _shown("stat", (name,)))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of the wrapped backend, each also guarded."""
        found: tuple[object, ...] = super().tiers
        for tier in found:
            if not isinstance(tier, Tier):
                raise self._broken(tier, "one of the tiers", "a Tier")
        return tuple(
            replace(tier, backend=guarded(tier.backend)) for tier in found if isinstance(tier, Tier)
        )

    def _as_ours(
        self, operation: Operation, names: tuple[str, ...], error: BaseException
    ) -> StorageError:
        blobs = " ".join(dict.fromkeys(names))
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return StorageError(
            f"cannot {in_words(operation)}{blobs and ' '}{blobs}{self._place()}: backend "
            f"{self.name!r} ({shipped_by(type(self.inner))}) failed with {text}"
        )

    def _place(self) -> str:
        try:
            found: object = self.inner.url
        except Exception:  # noqa: BLE001 - a broken `url` must not hide the error being reported
            return ""
        return f" on {found}" if isinstance(found, str) and found else ""

    def _checked(self, found: object, what: str) -> BlobInfo:
        if not isinstance(found, BlobInfo):
            raise self._broken(found, what, "a BlobInfo")
        for value, fine, name, expected in (
            (found.name, isinstance(found.name, str), "name", "a str"),
            (found.size_bytes, type(found.size_bytes) is int, "size_bytes", "an int"),
            (found.modified_s, _is_number(found.modified_s), "modified_s", "a float"),
        ):
            if not fine:
                raise self._broken(value, f"{name} of {what}", expected)
        return found

    def _broken(self, found: object, what: str, expected: str) -> StorageError:
        return StorageError(
            f"backend {self.name!r} ({shipped_by(type(self.inner))}) broke its contract: "
            f"{what} is {type(found).__name__}, not {expected}"
        )

    def _mapped_later(
        self, operation: Operation, names: tuple[str, ...], future: Future[None]
    ) -> Future[None]:
        """Return a future that mirrors `future`, and fails only with errors of our tree."""
        outer: Future[None] = Future()
        outer.set_running_or_notify_cancel()  # never cancelled: the store may still use buffers

        def done(inner: Future[None]) -> None:
            error = CancelledError() if inner.cancelled() else inner.exception()
            if error is None:
                outer.set_result(None)
            elif isinstance(error, Exception) and not isinstance(error, PenstockError):
                mapped = self._as_ours(operation, names, error)
                mapped.__cause__ = error
                outer.set_exception(mapped)
            else:
                outer.set_exception(error)

        future.add_done_callback(done)
        return outer


def _shown(operation: Operation, names: tuple[str, ...]) -> str:
    """Return a call as source code: `url`, `submit_read()`, `stat('index')`."""
    if operation in _PROPERTIES:
        return operation
    asked = operation in {"create", "read_record", "list", "stat"}
    return f"{operation}({names[0]!r})" if asked else f"{operation}()"

"""A tier that could not be opened when the run was: it is opened when it is there again."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from penstock.core.abc import Backend
from penstock.core.errors import CapabilityError, PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import BlobWriter
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest

log = logging.getLogger("penstock")

_PAUSE_S = 1.0


def open_or_wait(open_it: Callable[[], Backend], shown: str, /) -> Backend:
    """What `open_it` gives, or what opens it later, where the store does not answer.

    Args:
        open_it: Opens a tier.
        shown: What to call it until it is open; without credentials.

    Raises:
        CapabilityError: It answers, and will not do.
        PenstockError: Its configuration is wrong.
    """
    began_s = time.monotonic()
    try:
        return open_it()
    except CapabilityError:
        raise
    except StorageError as error:
        log.warning("a tier cannot be opened, going on without it until it can be: %s", str(error))
        return LateBackend(open_it, shown, error, time.monotonic() - began_s)


class LateBackend(Backend):
    """Delegates all to a backend that each call tries to open; fails as that does until it is."""

    def __init__(
        self, open_it: Callable[[], Backend], shown: str, failure: StorageError, took_s: float, /
    ) -> None:
        """Wait for another try; `failure` is that of the last one, which took `took_s`."""
        self.name = "late"  # type: ignore[misc] # the opened one's, once it is
        self._open_it = open_it
        self._shown = shown
        self.check: Callable[[Backend], None] = lambda _: None
        """Called with what was opened; what it raises is as if opening it had failed."""
        self._opening = threading.Lock()  # held during a try, which may hang
        self._lock = threading.Lock()  # guards the two below
        self._inner: Backend | None = None
        self._closed = False
        self._failure: PenstockError = failure
        self._again_s = time.monotonic() + _pause_s(took_s)

    @property
    def failure(self) -> PenstockError | None:
        """Why it is not open; None: it is."""
        return None if self._inner is not None else self._failure

    @property
    def url(self) -> str:
        """The opened one's, or what stands for it."""
        return self._shown if self._inner is None else self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The opened one's."""
        return self._opened().capabilities

    @property
    def direct_io(self) -> bool:
        """The opened one's."""
        return self._opened().direct_io

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """As the contract says."""
        return self._opened().create(name, size_hint=size_hint)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """As the contract says."""
        self._opened().read(requests)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """As the contract says."""
        return self._opened().read_record(name, limit_bytes=limit_bytes)

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """As the contract says."""
        return self._opened().submit_write(writer, requests)

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """As the contract says."""
        if self._inner is None:
            failed: Future[None] = Future()  # opening it may take long
            failed.set_exception(_again(self._failure))
            return failed
        return self._inner.submit_read(requests)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """As the contract says."""
        self._opened().publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """As the contract says."""
        return self._opened().list(prefix)

    def stat(self, name: str, /) -> BlobInfo:
        """As the contract says."""
        return self._opened().stat(name)

    def delete(self, names: Sequence[str], /) -> None:
        """As the contract says."""
        self._opened().delete(names)

    def free_bytes(self) -> int | None:
        """As the contract says."""
        return self._opened().free_bytes()

    def sweep(self, before_s: float, /) -> None:
        """As the contract says."""
        self._opened().sweep(before_s)

    def store_time_s(self) -> float:
        """As the contract says."""
        return self._opened().store_time_s()

    def close(self) -> None:
        """Close it, if it was opened; a try that is under way closes what it opens."""
        super().close()
        with self._lock:
            self._closed = True
            inner = self._inner
        if inner is not None:
            inner.close()

    def _opened(self) -> Backend:
        """The backend itself.

        Raises:
            StorageError: It cannot be opened.
        """
        with self._opening:
            if self._inner is not None:
                return self._inner
            if self._closed:
                raise self._is_closed()
            # Who waited for another's try is told of its end, and makes none of his own.
            if time.monotonic() < self._again_s:
                raise _again(self._failure)
            began_s = time.monotonic()
            try:
                inner = self._open_checked()
            except PenstockError as error:
                self._failure = error
                now_s = time.monotonic()
                self._again_s = now_s + _pause_s(now_s - began_s)
                raise _again(error) from error
            if not self._kept(inner):
                inner.close()
                raise self._is_closed()
            return inner

    def _kept(self, inner: Backend) -> bool:
        with self._lock:
            if self._closed:
                return False
            self.name = inner.name  # type: ignore[misc] # as in `__init__`
            self._inner = inner
            return True

    def _is_closed(self) -> StorageError:
        return StorageError(f"the backend {self._shown} is closed")

    def _open_checked(self) -> Backend:
        inner = self._open_it()
        try:
            self.check(inner)
        except BaseException:
            inner.close()
            raise
        return inner


def _pause_s(took_s: float) -> float:
    """How long to wait for another try: as long as the last one took, if that is more."""
    return max(_PAUSE_S, took_s)


def _again(error: PenstockError) -> StorageError:
    """The same error for another caller: no two may share a traceback."""
    return type(error)(str(error)) if isinstance(error, StorageError) else StorageError(str(error))

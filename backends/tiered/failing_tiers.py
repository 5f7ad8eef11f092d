"""A tier that could not be opened when the run was opened; later calls try to open it again."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from penstock.core.abc import Backend, Deadline, DelegatingBackend, current_timing
from penstock.core.errors import CapabilityError, PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Tier
    from penstock.core.types import ReadRequest

log = logging.getLogger("penstock")


def open_or_wait(open_it: Callable[[], Backend], shown: str, /) -> Backend:
    """Return an open backend, or a LateBackend if the store does not answer.

    Args:
        open_it: Opens the backend.
        shown: The URL, without credentials, to show until the backend is open.

    Raises:
        CapabilityError: The store answers, but cannot be used.
        PenstockError: The configuration is wrong.
    """
    attempt = Deadline(None, current_timing().clock)
    try:
        return open_it()
    except CapabilityError:
        raise
    except StorageError as error:
        log.warning("a tier cannot be opened, continuing without it for now: %s", str(error))
        return LateBackend(open_it, shown, error, attempt.taken_s())


class LateBackend(DelegatingBackend):
    """Delegates to a backend. Until the backend is open, each call tries to open it.

    If the try fails, the call raises its error. During the pause after a failed try, calls raise
    the error of that try, without another one.
    """

    def __init__(
        self, open_it: Callable[[], Backend], shown: str, failure: StorageError, took_s: float, /
    ) -> None:
        """Start the pause after a try that took `took_s` seconds and failed with `failure`."""
        self.name = "late"  # type: ignore[misc] # later the name of the open backend
        self._open_it = open_it
        self._shown = shown
        self.check: Callable[[Backend], None] = lambda _: None
        """Called with the opened backend; an error counts as a failure to open it."""
        self._opening = threading.Lock()  # held during a try, which may hang
        self._lock = threading.Lock()  # guards `_found` and `_closed`
        self._found: Backend | None = None
        self._closed = False
        self._failure: PenstockError = failure
        self._timing = current_timing()
        self._next_try = self._pause(took_s)

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last try; None if the backend is open."""
        return None if self._found is not None else self._failure

    @property
    def url(self) -> str:
        """The URL of the backend if it is open, else a description."""
        return self._shown if self._found is None else self._found.url

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Read if the backend is open, else fail at once."""
        if self._found is None:
            # The caller must not wait here, and opening may take long.
            future: Future[None] = Future()
            future.set_exception(_again(self._failure))
            return future
        return self._found.submit_read(requests)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Always empty: a backend with tiers of its own is never late."""
        return ()

    def check_writable(self) -> None:
        """Check the backend if it is open; otherwise `open_or_wait` has logged the outage."""
        if self._found is not None:
            self._found.check_writable()

    def close(self) -> None:
        """Close the backend if it is open. If a try in flight opens it later, the try closes it."""
        Backend.close(self)
        with self._lock:
            self._closed = True
            inner = self._found
        if inner is not None:
            inner.close()

    @property
    def inner(self) -> Backend:
        """The open backend. Tries to open it, except during the pause after a failed try.

        Raises:
            StorageError: The backend cannot be opened, or was closed.
        """
        with self._opening:
            if self._found is not None:
                return self._found
            if self._closed:
                raise self._is_closed()
            # Callers that waited for the lock during a try get its error, and begin no other try:
            # else each would wait for a store that hangs.
            if not self._next_try.is_over():
                raise _again(self._failure)
            attempt = Deadline(None, self._timing.clock)
            try:
                inner = self._open_checked()
            except PenstockError as error:
                self._failure = error
                self._next_try = self._pause(attempt.taken_s())
                raise _again(error) from error
            if not self._keep(inner):
                inner.close()
                raise self._is_closed()
            return inner

    def _keep(self, inner: Backend) -> bool:
        with self._lock:
            if self._closed:
                return False
            self.name = inner.name  # type: ignore[misc] # as in `__init__`
            self._found = inner
            return True

    def _pause(self, took_s: float) -> Deadline:
        """Return the pause before the next try, which is at least as long as the last try."""
        return Deadline(max(self._timing.tier_reopen_s, took_s), self._timing.clock)

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


def _again(error: PenstockError) -> StorageError:
    """Copy the error for another caller, since two threads must not share a traceback."""
    return type(error)(str(error)) if isinstance(error, StorageError) else StorageError(str(error))

"""A tier that could not be opened when the run was: it is opened when it is there again."""

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
    """What `open_it` gives, or what opens it later, where the store does not answer.

    Args:
        open_it: Opens a tier.
        shown: What to call it until it is open; without credentials.

    Raises:
        CapabilityError: It answers, and will not do.
        PenstockError: Its configuration is wrong.
    """
    trying = Deadline(None, current_timing().clock)
    try:
        return open_it()
    except CapabilityError:
        raise
    except StorageError as error:
        log.warning("a tier cannot be opened, going on without it until it can be: %s", str(error))
        return LateBackend(open_it, shown, error, trying.taken_s())


class LateBackend(DelegatingBackend):
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
        self._found: Backend | None = None
        self._closed = False
        self._failure: PenstockError = failure
        self._timing = current_timing()
        self._resting = self._rest(took_s)

    @property
    def failure(self) -> PenstockError | None:
        """Why it is not open; None: it is."""
        return None if self._found is not None else self._failure

    @property
    def url(self) -> str:
        """The opened one's, or what stands for it."""
        return self._shown if self._found is None else self._found.url

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """As the contract says."""
        if self._found is None:
            failed: Future[None] = Future()  # opening it may take long
            failed.set_exception(_again(self._failure))
            return failed
        return self._found.submit_read(requests)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """None: what has tiers of its own is opened at once, see `TieredBackend`."""
        return ()

    def check_writable(self) -> None:
        """As the contract says, once it is open: that a tier is away is said elsewhere."""
        if self._found is not None:
            self._found.check_writable()

    def close(self) -> None:
        """Close it, if it was opened; a try that is under way closes what it opens."""
        Backend.close(self)
        with self._lock:
            self._closed = True
            inner = self._found
        if inner is not None:
            inner.close()

    @property
    def inner(self) -> Backend:
        """The backend itself, which this tries to open where it is not open yet.

        Raises:
            StorageError: It cannot be opened.
        """
        with self._opening:
            if self._found is not None:
                return self._found
            if self._closed:
                raise self._is_closed()
            # Who waited for another's try is told of its end, and makes none of his own.
            if not self._resting.is_over():
                raise _again(self._failure)
            trying = Deadline(None, self._timing.clock)
            try:
                inner = self._open_checked()
            except PenstockError as error:
                self._failure = error
                self._resting = self._rest(trying.taken_s())
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
            self._found = inner
            return True

    def _rest(self, took_s: float) -> Deadline:
        """The time until another try: as long as the last one took, if that is more."""
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
    """The same error for another caller: no two may share a traceback."""
    return type(error)(str(error)) if isinstance(error, StorageError) else StorageError(str(error))

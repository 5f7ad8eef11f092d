"""Limits the time of foreground calls to a store that may hang.

Tested in `tests/integration/faults/test_hanging_store.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import Backend, DelegatingBackend
from penstock.core.abc.delegating import in_words
from penstock.core.concurrency.watchdog import NEVER, Deadline, call_with_deadline
from penstock.core.errors import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Tier
    from penstock.core.abc.delegating import Operation
    from penstock.core.concurrency.workers import Workers

log = logging.getLogger("penstock")

T = TypeVar("T")

_DELETED_AT_ONCE = 1000  # names per call, so that only one request has to fit into the limit
_SHOWN_NAMES = 3
# `url` and `tiers` do no I/O; saves and restores watch the progress of the other operations.
_UNLIMITED: frozenset[Operation] = frozenset(
    ["url", "tiers", "write", "seal", "sync", "abort", "submit_write", "submit_read"]
)
_WRITES: frozenset[Operation] = frozenset(["write", "seal", "sync"])


class TimeLimitedBackend(DelegatingBackend):
    """Delegates every call; gives up a call that blocks its caller for longer than `limit_s`.

    Each call with a limit runs on its own thread. If the store never answers, the thread and
    everything that it uses are abandoned. Background reads and writes have no limit, because saves
    and restores watch their own progress. For the same reason, other writes to blobs have a limit
    only with `limit_writes`. `sweep` may walk a whole store and has no limit either, but Ctrl-C
    ends the wait.
    """

    def __init__(
        self,
        inner: Backend,
        /,
        workers: Workers,
        limit_s: float,
        *,
        limit_writes: bool = False,
        unanswered: dict[object, Sequence[str]] | None = None,
    ) -> None:
        """Wrap `inner`, which the caller closes; all tiers share the deletions in `unanswered`."""
        super().__init__(inner)
        self._unlimited = _UNLIMITED - _WRITES if limit_writes else _UNLIMITED
        self.name = inner.name  # type: ignore[misc] # reports name the wrapped backend
        self._workers = workers
        self._limit_s = limit_s
        self._unanswered: dict[object, Sequence[str]] = {} if unanswered is None else unanswered

    def may_be_deleted(self, name: str) -> bool:
        """Return whether a deletion that is in flight or was given up may still delete `name`."""
        return any(name in names for names in list(self._unanswered.values()))

    def around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], T], /) -> T:
        """Return the result of `call`.

        Raises:
            StorageTimeoutError: The store did not answer for `limit_s`. It may still execute the
                call and write to the buffers of a `read`.
        """
        if operation in self._unlimited:
            return call()
        what = in_words(operation)

        def late() -> StorageTimeoutError:
            shown = " ".join(names[:_SHOWN_NAMES])
            if len(names) > _SHOWN_NAMES:
                shown += f" and {len(names) - _SHOWN_NAMES} more"
            return StorageTimeoutError(
                f"{self.url} did not answer for {self._limit_s:g} s (io_timeout_s) when asked to "
                f"{what}{shown and ' '}{shown}, which may still happen; is the store stuck, or "
                "the network down?"
            )

        timing = self._workers.timing
        deadline = Deadline(self._limit_s, timing.clock) if operation != "sweep" else NEVER
        name = what.split(maxsplit=1)[0]
        return call_with_deadline(name, call, deadline, late, timing=timing)

    def delete(self, names: Sequence[str], /) -> None:
        """Delete as the contract requires; a name may still be deleted after a timeout."""
        for at in range(0, len(names), _DELETED_AT_ONCE):
            some = names[at : at + _DELETED_AT_ONCE]
            key = object()
            self._unanswered[key] = some
            self.around("delete", tuple(some), partial(self._delete, key, some))

    def _delete(self, key: object, names: Sequence[str]) -> None:
        try:
            self.inner.delete(names)
        finally:
            del self._unanswered[key]  # here, so that a late answer ends the uncertainty too

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of the wrapped backend, each with the same limit, except for blob writes."""

        def limited(backend: Backend) -> Backend:
            return TimeLimitedBackend(
                backend, self._workers, self._limit_s, unanswered=self._unanswered
            )

        return tuple(replace(tier, backend=limited(tier.backend)) for tier in super().tiers)

    def close(self) -> None:
        """Do nothing: the caller closes the wrapped backend with `close_inner`."""

    def close_inner(self) -> None:
        """Close the wrapped backend; leave it open if a call that was given up hangs in it."""
        try:
            super().close()
        except StorageTimeoutError as error:
            log.warning("%s is left open: %s", self.url, str(error))

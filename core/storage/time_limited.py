"""A store that may hang: what is asked of it in the foreground ends, one way or the other."""

from __future__ import annotations

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

T = TypeVar("T")

_AT_ONCE = 1000  # names per call of `delete`, so that only one request has to fit into the limit
_SHOWN_NAMES = 3
_AS_LONG_AS_IT_TAKES: frozenset[Operation] = frozenset(
    ["url", "tiers", "write", "seal", "abort", "submit_write", "submit_read"]
)


class PatientBackend(DelegatingBackend):
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
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # reports are to name the wrapped one
        self._workers = workers
        self._limit_s = limit_s
        self._doubt: dict[object, Sequence[str]] = {} if doubt is None else doubt

    def may_go(self, name: str) -> bool:
        """Whether a deletion that was given up may still take what has this name."""
        return any(name in names for names in list(self._doubt.values()))

    def around(self, operation: Operation, names: tuple[str, ...], call: Callable[[], T], /) -> T:
        """What `call` gives.

        Raises:
            StorageTimeoutError: It gave nothing for `limit_s`; it may still be carried out. What
                `read` was to fill stays the store's.
        """
        if operation in _AS_LONG_AS_IT_TAKES:
            return call()
        what = in_words(operation)

        def late() -> StorageTimeoutError:
            shown = " ".join(names[:_SHOWN_NAMES])
            if len(names) > _SHOWN_NAMES:
                shown += f" and {len(names) - _SHOWN_NAMES} more"
            return StorageTimeoutError(
                f"{self.url} did not answer for {self._limit_s:g} s (io_timeout_s) when it was "
                f"to {what}{shown and ' '}{shown}, which may still happen; is the store stuck, or "
                "the network away?"
            )

        timing = self._workers.timing
        deadline = Deadline(self._limit_s, timing.clock) if operation != "sweep" else NEVER
        name = what.split(maxsplit=1)[0]
        return call_with_deadline(name, call, deadline, late, timing=timing)

    def delete(self, names: Sequence[str], /) -> None:
        """As the contract says; after a timeout any of them may still go."""
        for at in range(0, len(names), _AT_ONCE):
            some = names[at : at + _AT_ONCE]
            key = object()
            self._doubt[key] = some
            self.around("delete", tuple(some), partial(self._delete, key, some))

    def _delete(self, key: object, names: Sequence[str]) -> None:
        try:
            self.inner.delete(names)
        finally:
            del self._doubt[key]  # it has come to its end, however late

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The wrapped backend's, each as patient."""

        def patient(backend: Backend) -> Backend:
            return PatientBackend(backend, self._workers, self._limit_s, doubt=self._doubt)

        return tuple(replace(tier, backend=patient(tier.backend)) for tier in super().tiers)

    def close(self) -> None:
        """Nothing: the wrapped backend is not this one's."""

    def close_inner(self) -> None:
        """Close the wrapped backend, which waits for what is in flight."""
        super().close()

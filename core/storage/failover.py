"""Failover: reads a record that is damaged in one tier from another, and notifies an observer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import DelegatingBackend, copies_of, first_whole, place_text
from penstock.core.errors import DamagedError
from penstock.core.foreign import memory_permitting

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend

log = logging.getLogger("penstock")

T = TypeVar("T")


class ObservedBackend(DelegatingBackend):
    """Delegates every call, and holds the observer that `from_any_tier` calls at a failover.

    No backend call can report damage, because checksums detect it after the call has returned.
    """

    def __init__(self, inner: Backend, on_failover: Callable[[str, str], None], /) -> None:
        """Wrap `inner`; closing the wrapper closes `inner`.

        Args:
            inner: The backend to read from.
            on_failover: Called with the name of the damaged blob or record, and the name of the
                tier with a whole copy.
        """
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # reports name the wrapped backend
        self.on_failover = on_failover


def from_any_tier(backend: Backend, name: str, read: Callable[[Backend], T]) -> T:
    """Return the result of `read` for `backend`, or for its first tier with a whole record.

    Args:
        backend: The store.
        name: The name of the record, for messages.
        read: Reads the record from a store, and verifies it.

    Raises:
        DamagedError: The record is damaged in `backend`, and no tier returns a whole record; this
            is the error from `backend`.
        RestoreError: There was not enough memory.
    """
    with memory_permitting(name):
        try:
            return read(backend)
        except DamagedError as error:
            whole = first_whole(copies_of(backend), lambda tier: (tier.name, read(tier.backend)))
            if whole is None:
                raise
            tier_name, result = whole
            if not tier_name:
                return result
            where = place_text(tier_name)
            log.warning("%s; the good copy %s was read instead", str(error), where)
            if isinstance(backend, ObservedBackend):
                for damaged in error.damaged:
                    backend.on_failover(damaged, tier_name)
            return result

"""Reads what is damaged in one tier from another, and tells an observer of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from penstock.core.abc import DelegatingBackend
from penstock.core.errors import DamagedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend

log = logging.getLogger("penstock")

T = TypeVar("T")


class ObservedBackend(DelegatingBackend):
    """Delegates all; `from_any_tier` tells its observer which tier it had to use.

    That a copy is damaged is found by what reads it, by checksums, so no call shows it here.
    """

    def __init__(self, inner: Backend, on_failover: Callable[[str, str], None], /) -> None:
        """Wrap `inner`; closing this closes it.

        Args:
            inner: Where to read.
            on_failover: Called with the name of what is damaged, and of the tier that had it whole.
        """
        super().__init__(inner)
        self.name = inner.name  # type: ignore[misc] # reports are to name the wrapped one
        self.on_failover = on_failover


def from_any_tier(backend: Backend, read: Callable[[Backend], T]) -> T:
    """What `read` makes of `backend`, or of the first of its tiers where that is not damaged.

    Raises:
        DamagedError: As `read` raised it first.
    """
    try:
        return read(backend)
    except DamagedError as error:
        for tier in backend.tiers:
            try:
                found = read(tier.backend)
            except (DamagedError, StorageError):
                continue
            log.warning("%s; the copy in tier %s is good, and is used", str(error), tier.name)
            if isinstance(backend, ObservedBackend):
                for name in error.damaged:
                    backend.on_failover(name, tier.name)
            return found
        raise

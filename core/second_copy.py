"""Reads a record from another tier where the fastest one's copy is damaged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from penstock.core.errors import DamagedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend

log = logging.getLogger("penstock")

T = TypeVar("T")


def from_any_tier(
    backend: Backend, read: Callable[[Backend], T], rescued: list[tuple[str, str]] | None = None
) -> T:
    """What `read` makes of `backend`, or of the first of its tiers where that is not damaged.

    Args:
        backend: Where to read.
        read: Reads.
        rescued: Takes note of what is damaged, each with the name of the tier that had it whole.

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
            if rescued is not None:
                rescued += [(name, tier.name) for name in error.damaged]
            return found
        raise

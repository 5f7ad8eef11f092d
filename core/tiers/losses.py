"""What a tier lists, and has lost: another tier was read instead, and nothing failed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import is_whole
from penstock.core.errors import StorageError
from penstock.core.format.records import data_prefix
from penstock.core.suggest import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")


def lost_by_tiers(
    backend: Backend,
    record: CommitRecord,
    lengths: Mapping[str, int],
    *,
    known: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Blobs and records that tiers have lost, though they list the checkpoint; warns of them.

    A tier that does not list it has evicted it, and lacks nothing. Only tiers in front of the
    first that has all of it are looked at: reading has passed these over. One listing of each, as
    long as nothing is missing.

    Args:
        backend: What was read; without tiers nothing can be missing unnoticed.
        record: Commit record of the checkpoint.
        lengths: Bytes of its blobs and records by name.
        known: Names of which the log has spoken.

    Returns:
        Each name with that of the first tier which has it.
    """
    lost: set[str] = set()
    for tier in backend.tiers[:-1]:
        missing = _lost_by(tier, record, lengths)
        if missing is None:
            continue
        if not missing:
            break
        lost |= missing
        if said := sorted(missing.difference(known)):
            log.warning(
                "step %d: tier %s lists it, but has lost %s, or the end of it; the next tier that "
                "has it was read",
                record.step,
                tier.name,
                listed(said),
            )
    return list(_found(backend, record, lengths, lost)) if lost else []


def _lost_by(tier: Tier, record: CommitRecord, lengths: Mapping[str, int]) -> set[str] | None:
    """What one tier has lost; None: it does not list the checkpoint, or does not answer."""
    try:
        missing = _missing(tier.backend, record, lengths)
        if missing:
            # Its record goes first when it is evicted, and comes last when it is brought: so what
            # is missing between two looks at that was lost.
            if not is_whole(tier.backend, record):
                return None
            missing = _missing(tier.backend, record, lengths)
            if not is_whole(tier.backend, record):
                return None
    except StorageError as error:  # reading has said so
        log.debug("step %d: what tier %s has lost: %s", record.step, tier.name, str(error))
        return None
    return missing


def _found(
    backend: Backend, record: CommitRecord, lengths: Mapping[str, int], lost: Collection[str]
) -> Iterator[tuple[str, str]]:
    left = set(lost)
    for tier in backend.tiers:
        missing = _lost_by(tier, record, lengths)
        if missing is not None:
            yield from ((name, tier.name) for name in sorted(left - missing))
            left &= missing


def _missing(backend: Backend, record: CommitRecord, lengths: Mapping[str, int]) -> set[str]:
    sizes = {info.name: info.size_bytes for info in backend.list(data_prefix(record.uid))}
    return {name for name, length in lengths.items() if sizes.get(name) != length}

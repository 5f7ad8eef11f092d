"""Finds checkpoints that slower tiers have lost, and blobs that any tier has lost.

Neither loss makes a read or a save fail, because another tier has the data. So without this search
users would not learn of a loss, and no copy or repair would begin.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import is_whole, read_commit, sizes_of
from penstock.core.errors import BlobNotFoundError, FormatError, StorageError
from penstock.core.format.records import COMMIT_PREFIX, parse_commit_name
from penstock.core.suggest import listed
from penstock.core.tiers.whereabouts import by_age, is_marked, mark, note_staying, stays

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.places import TierRoots

log = logging.getLogger("penstock")
left_log = logging.getLogger(__name__)  # names steps that are not copied, for `penstock drain`


# -- checkpoints -----------------------------------------------------------------------------------


def mark_lost(tiers: Sequence[Tier], roots: TierRoots) -> tuple[list[CommitRecord], dict[str, str]]:
    """Mark the checkpoints that slower tiers have lost, so that they are copied again.

    A tier may have been restored from an older backup, or replaced by an empty one.

    Returns:
        The marked checkpoints, and the tiers that do not answer, each with the reason.
    """
    marked: list[CommitRecord] = []
    silent: dict[str, str] = {}
    for number, tier in enumerate(tiers[:-1]):
        try:
            behind = roots.behind(number)
            lost = _lost_behind(tiers, number, behind)
            staying = _not_lost(tiers, number, lost, roots)
            for record in staying:
                note_staying(tier.backend, record.uid, record.step, behind)
            uids = {record.uid for record in staying}
            lost = [record for record in lost if record.uid not in uids]
            for record in lost:
                mark(tier.backend, record.uid, record.step)
        except StorageError as error:
            log.debug("tier %s: cannot compare slower tiers: %s", tier.name, str(error))
            silent |= _silent(tiers[number:])
            continue
        marked += lost
        if lost:
            log.warning(
                "no tier slower than %s has step %s any more: it is copied again. Was a tier "
                "restored from an older backup, or replaced?",
                tier.name,
                _steps(lost),
            )
    return marked, silent


def _not_lost(
    tiers: Sequence[Tier], number: int, lost: Sequence[CommitRecord], roots: TierRoots
) -> Sequence[CommitRecord]:
    """Return the checkpoints in `lost` that slower tiers lack on purpose, and log them."""
    tier, slower = tiers[number], tiers[number + 1 :]
    if roots.was_used_before(number):
        if roots.is_before_older(number):
            return ()
        staying = _saved_behind_since(tiers, number, lost)
        why = "was deleted from slower tiers, to which others have saved since"
    elif tier.drain_every and not any(one.backend.list(COMMIT_PREFIX) for one in slower):
        # `drain_every` never leaves out the first save. So nothing was copied from here or left
        # out: the slower tiers are new.
        return ()
    else:
        # Earlier versions did not record which saves `drain_every` has left out.
        staying = list(lost)
        why = "`drain_every` of an earlier version may have left it out, without recording that"
    if staying:
        left_log.warning(
            "step %s is in tier %s, and %s: it is not copied to a slower tier. If that is wrong, "
            "use `penstock copy`",
            _steps(staying),
            tier.name,
            why,
        )
    return staying


def _lost_behind(tiers: Sequence[Tier], number: int, behind: Collection[str]) -> list[CommitRecord]:
    """Return the checkpoints that tier `number` has copied and all slower tiers have lost.

    Leaves out checkpoints with a note that they stay, if the note covers the roots `behind`.
    """
    backend = tiers[number].backend
    here = {info.name for info in backend.list(COMMIT_PREFIX)}
    slower: set[str] = set()
    for tier in tiers[number + 1 :]:
        slower |= {info.name for info in tier.backend.list(COMMIT_PREFIX)}
    newest: dict[int, int] = {}
    parsed = {name: found for name in here | slower if (found := parse_commit_name(name))}
    for step, generation in parsed.values():
        newest[step] = max(generation, newest.get(step, generation))
    lost = []
    for name in sorted(here - slower):
        step, generation = parsed.get(name, (-1, -1))
        if newest.get(step) != generation:
            continue  # an overwrite has replaced it, or it is not a commit record
        with suppress(BlobNotFoundError, FormatError):
            record = read_commit(backend, name)
            if not is_marked(backend, record.uid) and not stays(backend, record.uid, behind):
                lost.append(record)
    return lost


def _saved_behind_since(
    tiers: Sequence[Tier], number: int, records: Collection[CommitRecord]
) -> list[CommitRecord]:
    """Return tier `number`'s `records` that are older than a save that only slower tiers have.

    The host that made that save has seen the checkpoints of the slower tier. So a checkpoint that
    is missing there, and is older than that save, was deleted on purpose.
    """
    if not records:
        return []
    here = {record.uid for record in by_age(tiers[number].backend)}
    behind = [record for tier in tiers[number + 1 :] for record in by_age(tier.backend)]
    newest = max((record.created for record in behind if record.uid not in here), default="")
    return [record for record in records if record.created < newest]


def _silent(tiers: Sequence[Tier]) -> dict[str, str]:
    """Return the tiers that do not list their checkpoints, each with the reason."""
    silent = {}
    for tier in tiers:
        try:
            tier.backend.list(COMMIT_PREFIX)
        except StorageError as error:
            silent[tier.name] = str(error)
    return silent


def _steps(records: Iterable[CommitRecord]) -> str:
    return listed([str(record.step) for record in records])


# -- blobs -----------------------------------------------------------------------------------------


def lost_by_tiers(
    backend: Backend,
    record: CommitRecord,
    lengths: Mapping[str, int],
    *,
    known: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Return what the tiers have lost of a checkpoint that they list, and warn about it.

    A tier that does not list the checkpoint has evicted it, and has lost no data. Checks only the
    tiers before the first with all data, because only these made reads continue with the next
    tier. Lists each tier once, unless it has lost data.

    Args:
        backend: The backend that was read. Without tiers the result is empty, because a read of
            lost data then raises.
        record: The commit record of the checkpoint.
        lengths: The lengths of its blobs and records in bytes, by name.
        known: The names that were logged before.

    Returns:
        The name of each lost blob and record, with the name of the first tier that has it.
    """
    lost: set[str] = set()
    for tier in backend.tiers[:-1]:
        missing = _lost_by(tier, record, lengths)
        if missing is None:
            continue
        if not missing:
            break
        lost |= missing
        if news := sorted(missing.difference(known)):
            log.warning(
                "step %d: tier %s lists it, but has lost all or the end of %s; the next tier with "
                "a copy was read",
                record.step,
                tier.name,
                listed(news),
            )
    return list(_found(backend, record, lengths, lost)) if lost else []


def _lost_by(tier: Tier, record: CommitRecord, lengths: Mapping[str, int]) -> set[str] | None:
    """Return what one tier has lost; None if it does not answer or list the checkpoint."""
    try:
        missing = _missing(tier.backend, record, lengths)
        if missing:
            # Eviction deletes the commit record first, and a copy publishes it last. So data that
            # is missing between two reads of the record was lost, not evicted.
            if not is_whole(tier.backend, record):
                return None
            missing = _missing(tier.backend, record, lengths)
            if not is_whole(tier.backend, record):
                return None
    except StorageError as error:  # the read has already warned about it
        log.debug("step %d: cannot check tier %s: %s", record.step, tier.name, str(error))
        return None
    return missing


def _found(
    backend: Backend, record: CommitRecord, lengths: Mapping[str, int], lost: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield each lost name with the first tier that has it."""
    left = set(lost)
    for tier in backend.tiers:
        missing = _lost_by(tier, record, lengths)
        if missing is not None:
            yield from ((name, tier.name) for name in sorted(left - missing))
            left &= missing


def _missing(backend: Backend, record: CommitRecord, lengths: Mapping[str, int]) -> set[str]:
    sizes = sizes_of(backend, record)
    return {name for name, length in lengths.items() if sizes.get(name) != length}

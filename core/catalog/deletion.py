"""Deletes checkpoints: first their commit records, durably, then the data that nothing needs.

A deleted checkpoint whose blobs another one borrows keeps its blobs, but loses its record, intent,
index and parts. Its intent must go: a copy of that checkpoint in flight checks for the intent
before it commits, and a remaining intent would keep the blobs that the deleted checkpoint had
borrowed. Savers in flight need only the blobs. The blobs are deleted with the last checkpoint that
borrows them.

No store has conditional deletes, so each step checks again what it is about to delete. The steps
are in such an order that a deletion that is interrupted leaves at worst orphans for `prune`.

Tested in `tests/core/catalog/test_catalog.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.abc import host_roots
from penstock.core.catalog.notes import delete_notes
from penstock.core.catalog.survey import places_of, records_named, survey_run, uids_named
from penstock.core.errors import ConfigError
from penstock.core.format.records import (
    COMMIT_PREFIX,
    blob_uid,
    data_prefix,
    intent_name,
    lease_name,
    parse_commit_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.catalog.survey import Survey
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import BlobInfo

_LANDINGS = 3  # how often a deletion checks again for copies in flight that landed after it


def check_same(tiers: Sequence[Tier], steps: Iterable[int]) -> None:
    """Refuse steps at which two tiers have different checkpoints; the user must choose a tier.

    Raises:
        ConfigError: Two tiers differ at a step; the message says what to do.
    """
    listed = [(tier, [info.name for info in tier.backend.list(COMMIT_PREFIX)]) for tier in tiers]
    for step in steps:
        owners: dict[str, dict[str, str]] = {}
        for tier, names in listed:
            here = [name for name in names if (parse_commit_name(name) or (-1,))[0] == step]
            for name, uid in uids_named(tier.backend, here).items():
                if uid is not None:
                    owners.setdefault(name, {}).setdefault(uid, tier.name)
        for one in owners.values():
            if len(one) > 1:
                msg = (
                    f"step {step} is not the same checkpoint in tiers {' and '.join(one.values())};"
                    " nothing was deleted. Choose the tier to delete it from: `penstock delete URL "
                    f"{step} --tier NAME`"
                )
                raise ConfigError(msg)


def delete_data(backend: Backend, uid: str, blobs: Iterable[BlobInfo]) -> None:
    """Delete the data of a save, the intent first, so that a slow saver does not commit.

    Deletes a lease with the intent, so that a copy in flight that writes blobs of this uid stops.
    """
    names = [blob.name for blob in blobs]
    first = [intent_name(uid), *({lease_name(uid)} & set(names))]
    backend.delete(first)
    backend.delete([name for name in names if name not in first])


def delete_manifest(backend: Backend, uid: str, blobs: Iterable[BlobInfo]) -> None:
    """Delete all files of a save except its blobs, which others need; delete the intent first.

    A lease stays too, since it lists which of the blobs are durable.
    """
    first = intent_name(uid)
    backend.delete([first])
    backend.delete([blob.name for blob in manifest_of(uid, blobs) if blob.name != first])


def manifest_of(uid: str, blobs: Iterable[BlobInfo]) -> list[BlobInfo]:
    """Return a save's files except its blobs and lease."""
    lease = lease_name(uid)
    return [blob for blob in blobs if blob_uid(blob.name) is None and blob.name != lease]


def delete_lent(
    backend: Backend, surveys: Sequence[Survey], lent: Collection[str], *, gone: Collection[str]
) -> None:
    """Delete the data of saves without a record if nothing borrows from them any more.

    Data that has an intent is left for `prune` to delete: a save or copy of that uid may be in
    flight, or may have ended without a record.

    Args:
        backend: The run, with all its tiers.
        surveys: Surveys of all places, made after the borrowers' records were deleted.
        lent: The candidate uids.
        gone: The uids whose intents were deleted since.
    """
    stays = {uid for survey in surveys for uid in survey.needed_without(gone)}
    for uid in sorted(set(lent) - stays.union(*(survey.intents for survey in surveys))):
        delete_data(backend, uid, backend.list(data_prefix(uid)))


def delete_records(
    backend: Backend,
    names: Iterable[str],
    *,
    uids: Mapping[str, str | None] | None = None,
    before: Callable[[Collection[str]], None] = lambda _: None,
    failed: Callable[[Collection[str]], None] = lambda _: None,
) -> list[str]:
    """Delete commit records durably, in the given order, then the data that only they needed.

    That data may include blobs of checkpoints that were deleted earlier, from which these
    checkpoints borrowed.

    Skips a record whose uid has changed since it was chosen: a deleted step can be saved again
    under the same name, and each tier may have another save there. No store has conditional
    deletes, so a race between reading the uid and the deletion remains. While any other record of
    the run is unreadable, all data is left to `prune`.

    Args:
        backend: The run, with all its tiers.
        names: The names of the records.
        uids: The uids that these records named when the caller chose them; default: all uids that
            they name in any tier now.
        before: Called with these uids before anything is deleted, so that other work of this
            process on them can stop.
        failed: Called with these uids after an error: some of the checkpoints may remain, and the
            other work on them may continue.

    Returns:
        The names of the deleted records.
    """
    names = list(names)
    for roots in host_roots(backend).values():
        roots.check_may_delete()  # the most durable place is the first to delete
    chosen = (
        _all_named(backend, names)
        if uids is None
        else {name: frozenset([uids.get(name)]) for name in names}
    )
    doomed = {uid for found in chosen.values() for uid in found if uid is not None}
    before(doomed)
    try:
        return _delete_chosen(backend, names, chosen, doomed)
    except BaseException:
        failed(doomed)
        raise


def _places(backend: Backend) -> list[Backend]:
    """Return the places of a run, the most durable first.

    A deletion in this order cannot fail at the durable tier after it has deleted the checkpoint
    from the faster ones.
    """
    return places_of(backend)[::-1]


def _all_named(backend: Backend, names: Collection[str]) -> dict[str, frozenset[str | None]]:
    found = [uids_named(place, names) for place in _places(backend)]
    return {name: frozenset(one[name] for one in found if name in one) for name in names}


def _delete_chosen(
    backend: Backend,
    names: Iterable[str],
    chosen: Mapping[str, frozenset[str | None]],
    doomed: set[str],
) -> list[str]:
    # Durably one by one: a power cut may undo any of several deletions in flight, and an
    # overwritten generation would come back.
    gone: list[CommitRecord] = []
    deleted = [name for name in names if _delete_if(backend, name, chosen[name], gone)]
    _delete_unneeded(backend, doomed, gone)
    for _ in range(_LANDINGS if backend.tiers else 0):
        # A copy to another tier may have been in flight, and have published after the deletion.
        # Intent and data are gone now, so no further copy can begin to publish.
        landed = [_delete_if(backend, name, chosen[name] - {None}, gone) for name in deleted]
        if not any(landed):
            break
        _delete_unneeded(backend, doomed, gone)
    return deleted


def _delete_if(
    backend: Backend, name: str, uids: Collection[str | None], gone: list[CommitRecord]
) -> bool:
    """Delete a record in every tier where it names one of `uids`; return whether any tier had it.

    Deletes unreadable copies in other tiers too, since they would keep the step listed. Adds the
    deleted records to `gone`.
    """
    found = [(place, records_named(place, [name])) for place in _places(backend)]
    listed = [there[name] for _, there in found if name in there]
    if not any(_uid(record) in uids for record in listed):
        return False
    gone += [r for r in listed if r is not None and r.uid in uids]
    for place, there in found:
        # Also deletes where the record is not listed: a copy may be about to land there, and a tier
        # that refuses deletions must refuse before the faster tiers have deleted the record.
        if _uid(there.get(name)) in {None, *uids}:
            place.delete([name])
    return True


def _uid(record: CommitRecord | None) -> str | None:
    return None if record is None else record.uid


def _delete_unneeded(backend: Backend, doomed: set[str], deleted: Sequence[CommitRecord]) -> None:
    """Delete data that nothing needs any more; delete nothing while a record is unreadable.

    An unreadable record does not count if another tier has it readable, since it can be repaired
    from there.

    Args:
        backend: The run, with all its tiers.
        doomed: The uids of the deleted checkpoints.
        deleted: Their records, whose notes and borrowed blobs may be deleted too.
    """
    if not doomed:
        return
    # Each tier separately: two tiers may have different checkpoints under one name.
    surveys = [survey_run(place) for place in _places(backend)]
    readable = {name for survey in surveys for name in survey.records}
    if not {name for survey in surveys for name in survey.unreadable} - readable:
        gone = doomed.difference(*(survey.named for survey in surveys))
        kept = {record.origin for survey in surveys for record in survey.records.values()}
        delete_notes(backend, {record.origin for record in deleted} - kept)
        # The intents of `gone` are deleted too, and no longer keep the blobs that they reference.
        needed = {uid for survey in surveys for uid in survey.needed_without(gone)}
        for uid in sorted(gone):
            delete = delete_manifest if uid in needed else delete_data
            delete(backend, uid, backend.list(data_prefix(uid)))
        lent = {uid for record in deleted for uid in record.references}
        delete_lent(backend, surveys, lent - doomed, gone=gone)

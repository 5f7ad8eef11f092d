"""Prune: deletes the data of saves that no checkpoint and no save in flight can need.

Tested in `tests/core/catalog/test_catalog.py`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.core.abc import host_roots, read_root
from penstock.core.catalog.deletion import (
    delete_data,
    delete_lent,
    delete_manifest,
    delete_records,
    manifest_of,
)
from penstock.core.catalog.notes import delete_notes, notes_by_origin
from penstock.core.catalog.survey import (
    data_by_uid,
    first_logged,
    has_data,
    places_of,
    read_intent,
    survey_run,
    unrecorded,
)
from penstock.core.concurrency.processes import is_over
from penstock.core.errors import BlobNotFoundError, DamagedError, FormatError
from penstock.core.format.records import data_prefix, index_name, intent_name
from penstock.core.format.segment import uid_of_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from penstock.core.abc import Backend
    from penstock.core.catalog.survey import Look, Survey
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import BlobInfo

log = logging.getLogger("penstock")

CLOCK_PREFIX = "clock/"
GRACE_S = 24 * 3600.0
"""Data without a record is kept for this many seconds, by the store's clock."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """The result of a prune, or of its dry run.

    Attributes:
        uids: The uids whose data or notes were (or would be) deleted, ascending; borrowed blobs
            stay.
        names: The number of blobs and records that were (or would be) deleted.
        size_bytes: The total size of these blobs and records.
        superseded: The commit records of overwritten generations, left by a crash, that were (or
            would be) deleted too. The figures above exclude their data.
        refused: The reasons why nothing was deleted: the error of each unreadable record, that the
            run has no record at all, or that hosts of the last job are absent.
        unrecorded: The uids that were kept because their commit records may still arrive, for
            example in a copy of the run that writes its data first.
        dry_run: Whether this was a dry run, which deletes nothing.
    """

    uids: tuple[str, ...] = ()
    names: int = 0
    size_bytes: int = 0
    superseded: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    unrecorded: tuple[str, ...] = ()
    dry_run: bool = False


def prune(
    backend: Backend,
    *,
    grace_s: float = GRACE_S,
    own_uids: Collection[str] = (),
    dry_run: bool = False,
    everything: bool = False,
    look: Look = has_data,
) -> PruneReport:
    """Delete the data of saves that no checkpoint and no save in flight can need.

    A uid is deleted only if no record names it or borrows its blobs, only intents of deleted uids
    reference it, it is not one of `own_uids`, and all its data is older than `grace_s` by the
    store's clock. A saver that could not refresh its intent for half that time never publishes, so
    no deleted uid can be committed later. The intent is deleted first. Data that a crash leaves
    keeps its age, and the next prune deletes it.

    If no record names a uid, but its blobs are borrowed, everything except the blobs is deleted. A
    deletion that was killed after it deleted the record leaves such a uid; a remaining intent would
    keep the blobs that this uid had borrowed.

    Nothing is deleted while any record of the run is unreadable, since that record may need any
    data. A run without any record is kept, and so is a save that lacks only its record while no
    later checkpoint exists: the run may be a copy in flight that writes its data first.
    With `everything`, these are deleted too.

    Older generations of a step are deleted at any age, as the saver of the newest one would have
    done.
    They stay if the newest generation lacks its data: its saver may have stalled until it was
    pruned, and will delete its own record.
    """
    how = _How(
        grace_s=grace_s,
        keep=frozenset(own_uids),
        dry_run=dry_run,
        everything=everything,
        look=look,
    )
    return _prune_tiers(backend, how) if backend.tiers else _prune_one(backend, how)


def take_dead(backend: Backend, *, own_uids: Collection[str] = ()) -> list[str]:
    """Delete unfinished saves, of any age, whose processes on this machine have ended.

    The intent must show that the save's process has ended, and that it saved to this place. The
    save must have no index: after the index, a record that the dead process sent may still arrive.
    The run must have a commit record, since a run without one may be a copy in flight; and all its
    records must be readable, since an unreadable record may need any data.

    Also deletes blobs of deleted checkpoints that only such a save was going to borrow.

    Returns:
        The uids of these saves.
    """
    places = places_of(backend)
    dead = [(place, uid) for place in places for uid in _unfinished(place) if uid not in own_uids]
    dead = [(place, uid) for place, uid in dead if _is_of_dead_saver(place, uid)]
    if not dead:
        return []
    surveys = [survey_run(place) for place in places]
    if any(survey.unreadable for survey in surveys) or not any(s.records for s in surveys):
        return []
    needed = {uid for survey in surveys for uid in survey.needed}
    taken = []
    for place, uid in dead:
        if uid not in needed:
            log.info("deleting data/%s: its saver was killed before it committed", uid)
            delete_data(place, uid, place.list(data_prefix(uid)))
            taken.append(uid)
    lent = {
        u for s in surveys for uid in taken if uid in s.intents for u in s.intents[uid].references
    }
    delete_lent(backend, surveys, lent, gone=taken)
    return taken


def _unfinished(place: Backend) -> list[str]:
    names = {uid: {blob.name for blob in blobs} for uid, blobs in data_by_uid(place).items()}
    return [uid for uid, there in names.items() if index_name(uid) not in there]


def _is_of_dead_saver(place: Backend, uid: str) -> bool:
    try:
        intent = read_intent(place, uid)
    except (BlobNotFoundError, DamagedError):
        return False
    return intent.place == place.url and is_over(intent.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """The options for pruning one place.

    Attributes:
        grace_s: The age in seconds below which data stays.
        keep: The uids that always stay.
        lent: The uids whose blobs stay because of other tiers.
        dry_run: Whether to change nothing.
        everything: Whether to also delete saves that may lack only their commit record.
        look: Returns whether a place has all data of a checkpoint.
        latest: The highest step in any tier; None if no tier has a checkpoint.
    """

    grace_s: float
    keep: frozenset[str]
    dry_run: bool
    everything: bool
    look: Look
    lent: frozenset[str] = frozenset()
    latest: int | None = None


def _prune_tiers(backend: Backend, how: _How) -> PruneReport:
    """Prune each tier by its own records and clock; an intent in any tier counts in all."""
    places = places_of(backend)
    reports: list[PruneReport] = []
    freed: set[tuple[int, str, int]] = set()
    while True:
        surveys = [survey_run(place) for place in places]
        readable = {name for survey in surveys for name in survey.records}.union(
            *(map(intent_name, survey.intents) for survey in surveys)
        )
        unreadable = {
            n: why for s in surveys for n, why in s.unreadable.items() if n not in readable
        }
        if unreadable:
            reports.append(_refused(unreadable, dry_run=how.dry_run))
            break
        steps = [survey.latest for survey in surveys if survey.latest is not None]
        latest = max(steps, default=None)
        newest = {r.uid for s in surveys for r in s.records.values() if r.step == latest}
        # A tier that holds the log of the newest checkpoint may have evicted the checkpoint.
        logs = {
            uid_of_segment(b.name) for s in surveys for uid in newest for b in s.data.get(uid, ())
        }
        kept = replace(how, keep=how.keep | (newest & logs), latest=latest)
        found = [
            _prune_one(place, replace(kept, lent=frozenset(lent)))
            for place, lent in zip(places, _lent_to_others(places, surveys, how), strict=True)
        ]
        reports += found
        # Blobs that only deleted attempts and generations referenced may now go from all tiers.
        new = {
            (i, gone, report.names)
            for i, report in enumerate(found)
            for gone in (*report.uids, *report.superseded)
        } - freed
        if how.dry_run or not new:
            break
        freed |= new
    return PruneReport(
        uids=tuple(sorted({uid for report in reports for uid in report.uids})),
        names=sum(report.names for report in reports),
        size_bytes=sum(report.size_bytes for report in reports),
        superseded=tuple(dict.fromkeys(n for report in reports for n in report.superseded)),
        refused=tuple(dict.fromkeys(why for report in reports for why in report.refused)),
        unrecorded=tuple(sorted({uid for report in reports for uid in report.unrecorded})),
        dry_run=how.dry_run,
    )


def _lent_to_others(
    places: Sequence[Backend], surveys: Sequence[Survey], how: _How
) -> list[set[str]]:
    """Return, for each tier, the uids whose blobs stay because of other tiers.

    An intent keeps the blobs that it references in all tiers. A record keeps borrowed blobs only in
    its own tier, so that eviction can delete them elsewhere. But if that tier has lost part of the
    checkpoint, the record keeps them in all tiers.
    """
    of_intents = {u for s in surveys for intent in s.intents.values() for u in intent.references}
    kept = []
    for survey in surveys:
        spare = survey.data.keys() - survey.needed - of_intents
        others = [
            (place, record)
            for place, other in zip(places, surveys, strict=True)
            for record in other.records.values()
            if other is not survey and not spare.isdisjoint(record.references)
        ]
        lacking = [record for place, record in others if not how.look(place, record)]
        kept.append(of_intents.union(*(record.references for record in lacking)))
    return kept


def _refused(unreadable: Mapping[str, DamagedError], *, dry_run: bool) -> PruneReport:
    refused = tuple(str(error) for error in unreadable.values())
    log.debug("prune: keeps all data, since %d record(s) cannot be read", len(refused))
    return PruneReport(refused=refused, dry_run=dry_run)


def _prune_one(backend: Backend, how: _How) -> PruneReport:
    # The clock is read before the records are listed: data that was old *then* cannot have been
    # committed since. If a pruner stalled in between and read the clock afterwards, data
    # committed meanwhile would look old. A dry run writes nothing, not even the record by which
    # some stores measure their time.
    limit_s = (time.time() if how.dry_run else backend.store_time_s()) - how.grace_s
    survey = survey_run(backend)
    if survey.unreadable:
        return _refused(survey.unreadable, dry_run=how.dry_run)
    if how.latest is None and not how.everything:
        how = replace(how, keep=how.keep | _logs_of_evicted(backend, survey))
    steps = [step for step in (survey.latest, how.latest) if step is not None]
    waiting: Collection[str] = ()
    if not how.everything:
        unnamed = survey.data.keys() - survey.needed - how.keep - how.lent
        old = [uid for uid in unnamed if _is_old(survey.data[uid], limit_s)]
        if old and not steps:
            return _refused_without_records(backend, old, dry_run=how.dry_run)
        waiting = unrecorded(survey.data, survey.intents, max(steps, default=None))
    superseded = _superseded(backend, survey.records, lambda record: how.look(backend, record))
    if superseded and how.dry_run:
        survey = _survey_without(survey, superseded)
    elif superseded:
        seen = {name: survey.records[name].uid for name in superseded}
        delete_records(backend, superseded, uids=seen)
        # Surveyed again: now only a dead attempt may keep the blobs that these borrowed.
        survey = survey_run(backend)
        if survey.unreadable:
            return replace(_refused(survey.unreadable, dry_run=False), superseded=superseded)
    stays = how.keep.union(waiting)
    log.debug(
        "prune: of %d attempts, %d stay: a record names or references them, they are our own or "
        "another tier's, or they lack only their record",
        len(survey.data),
        len(survey.data.keys() & survey.needed.union(stays)),
    )
    probes = backend.list(CLOCK_PREFIX)  # records that a killed `store_time_s` left
    if not how.dry_run:
        backend.delete([probe.name for probe in probes if probe.modified_s < limit_s])
        backend.sweep(limit_s)
    gone = _take_all(backend, survey, stays, limit_s, how)
    if steps or how.everything:  # else the run may be a copy in flight that got its notes first
        _take_notes(backend, survey, stays, limit_s, how, gone)
    return PruneReport(
        tuple(sorted(gone)),
        sum(len(sizes) for sizes in gone.values()),
        sum(size for sizes in gone.values() for size in sizes.values()),
        superseded,
        unrecorded=tuple(sorted(set(waiting) - how.keep)),
        dry_run=how.dry_run,
    )


def _logs_of_evicted(backend: Backend, survey: Survey) -> set[str]:
    """Return the uids whose log may continue the newest checkpoint of other tiers.

    If this place is one of several tiers and is pruned alone, it may have evicted that checkpoint,
    but not the log.
    """
    logs = {
        uid: first_logged(backend, blob)
        for uid in survey.data.keys() - survey.named
        for blob in reversed(survey.data[uid])
        if uid_of_segment(blob.name) is not None
    }
    with suppress(FormatError):  # with a damaged root record, the place may be a tier
        root = read_root(backend) if logs else None
        if root is None or not root.tiers:
            return set()
    last = -1 if survey.latest is None else survey.latest
    return {uid for uid, first in logs.items() if first is None or first > last}


def _take_all(
    backend: Backend, survey: Survey, stays: AbstractSet[str], limit_s: float, how: _How
) -> dict[str, dict[str, int]]:
    """Delete old data that nothing needs; return its sizes in bytes, by uid and name."""
    gone: defaultdict[str, dict[str, int]] = defaultdict(dict)
    taken: set[str] = set()
    idle = survey.data.keys() - survey.named - stays
    while True:
        # Attempts deleted so far have lost their intents, and no longer need their references.
        lent = survey.needed_without(gone) | how.lent
        found = _take(backend, idle - lent - taken, limit_s, how)
        taken |= found.keys()
        if not found:
            found = _take(backend, idle & lent - gone.keys(), limit_s, how, blobs_stay=True)
        if not found:
            return gone
        for uid, blobs in found.items():
            gone[uid].update((blob.name, blob.size_bytes) for blob in blobs)


def _take_notes(  # noqa: PLR0917 - the parameters of `_take_all`, and its result
    backend: Backend,
    survey: Survey,
    stays: AbstractSet[str],
    limit_s: float,
    how: _How,
    gone: dict[str, dict[str, int]],
) -> None:
    """Delete old notes that belong to no checkpoint and no copy in flight; add them to `gone`.

    Such notes remain if a deletion was killed, or if a note or a copy arrived right after it.
    """
    copied = survey.intents.keys() - gone.keys()
    kept = {record.origin for record in survey.records.values()}.union(copied, stays)
    for origin, notes in notes_by_origin(backend).items():
        if origin not in kept and _is_old(notes, limit_s):
            if not how.dry_run:
                delete_notes(backend, [origin])
            sizes = {note.name: note.size_bytes for note in notes}
            gone[origin] = gone.get(origin, {}) | sizes


def _survey_without(survey: Survey, superseded: Collection[str]) -> Survey:
    """Return `survey` as it will be after `delete_records` deletes these records."""
    records = {name: record for name, record in survey.records.items() if name not in superseded}
    gone = [survey.records[name] for name in superseded]
    lent = {uid for record in gone for uid in record.references} - survey.intents.keys()
    left = replace(survey, records=records)
    taken = lent.union(record.uid for record in gone) - left.needed
    data = {uid: blobs for uid, blobs in survey.data.items() if uid not in taken}
    return replace(left, data=data)


def _take(
    backend: Backend,
    candidates: Iterable[str],
    limit_s: float,
    how: _How,
    *,
    blobs_stay: bool = False,
) -> dict[str, list[BlobInfo]]:
    """Delete the data of candidates that are old enough; return the deleted files, by uid."""
    taken: dict[str, list[BlobInfo]] = {}
    for uid in sorted(candidates):
        # Listed again: since the survey its saver may have woken up and refreshed the intent.
        blobs = backend.list(data_prefix(uid))
        if not _is_old(blobs, limit_s):
            log.debug("prune: skips data/%s: already gone, or younger than %g s", uid, how.grace_s)
            continue
        if not (going := manifest_of(uid, blobs) if blobs_stay else blobs):
            continue
        log.debug("prune: data/%s goes: %d of %d names", uid, len(going), len(blobs))
        if not how.dry_run:
            (delete_manifest if blobs_stay else delete_data)(backend, uid, blobs)
        taken[uid] = list(going)
    return taken


def _is_old(blobs: Sequence[BlobInfo], limit_s: float) -> bool:
    return bool(blobs) and max(blob.modified_s for blob in blobs) < limit_s


def _refused_without_records(
    backend: Backend, uids: Collection[str], *, dry_run: bool
) -> PruneReport:
    number = "an attempt" if len(uids) == 1 else f"{len(uids)} attempts"
    why = (
        f"{backend.url} has data of {number} to save, but no commit record: is the run a copy that "
        "lacks the folder `commits`, or gets it last? If it never had a checkpoint, `penstock "
        "prune --all`, or `prune(everything=True)`, deletes the data"
    )
    log.debug("prune: keeps all data, since there is no commit record")
    return PruneReport(refused=(why,), unrecorded=tuple(sorted(uids)), dry_run=dry_run)


def _superseded(
    backend: Backend,
    records: Mapping[str, CommitRecord],
    is_whole: Callable[[CommitRecord], bool],
) -> tuple[str, ...]:
    """Return, lowest first, the older records of each step whose newest generation is whole.

    Returns none of them if hosts copy each other's files: others may have no copy yet of the newest
    generation.
    """
    if any(roots.copies for roots in host_roots(backend).values()):
        return ()
    newest: dict[int, CommitRecord] = {}
    for record in records.values():
        if record.generation >= newest.get(record.step, record).generation:
            newest[record.step] = record
    older = [
        (record.step, record.generation, name)
        for name, record in records.items()
        if record.generation < newest[record.step].generation
    ]
    whole = {step for step in {step for step, _, _ in older} if is_whole(newest[step])}
    return tuple(name for step, _, name in sorted(older) if step in whole)

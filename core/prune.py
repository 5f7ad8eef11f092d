"""Deletes the data of attempts that no checkpoint and no save under way can need."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.manifest import data_prefix
from penstock.core.survey import delete_data, delete_records, survey_run

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.core.abc import Backend
    from penstock.core.manifest import CommitRecord
    from penstock.core.survey import Survey

log = logging.getLogger("penstock")

CLOCK_PREFIX = "clock/"
GRACE_S = 24 * 3600.0
"""How long data of an attempt that nobody names is left alone, by the store's clock."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune` did, or would do.

    Attributes:
        uids: Attempts whose data was (or would be) deleted, ascending.
        names: How many blobs and records that was.
        size_bytes: And how many bytes.
        superseded: Commit records that a later overwrite of their step replaced; a crash had
            come before their deletion. Their data is not in the figures above.
        refused: Why nothing was collected: what is wrong with each record that cannot be read.
        dry_run: Whether nothing was really deleted.
    """

    uids: tuple[str, ...] = ()
    names: int = 0
    size_bytes: int = 0
    superseded: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    dry_run: bool = False


def prune(
    backend: Backend,
    *,
    grace_s: float = GRACE_S,
    own_uids: Collection[str] = (),
    dry_run: bool = False,
) -> PruneReport:
    """Delete the data of attempts that no checkpoint and no save under way can need.

    A uid is taken only if no record names or references it, no intent references it, it is not
    one of `own_uids`, and everything of it is older than `grace_s` by the store's clock. A saver
    that could not refresh its intent for half that time never publishes, so nothing that is taken
    can come to be committed. The intent is deleted first; what a crash leaves behind is as old as
    before, and goes the next time.

    While any record of the run is unreadable nothing is taken: it may need anything.

    Older generations of a step are deleted at once: whoever published the newest one had meant to.
    """
    if backend.tiers:
        return _prune_tiers(backend, grace_s=grace_s, own_uids=own_uids, dry_run=dry_run)
    return _prune_one(backend, grace_s=grace_s, keep=own_uids, dry_run=dry_run)


def _prune_tiers(
    backend: Backend, *, grace_s: float, own_uids: Collection[str], dry_run: bool
) -> PruneReport:
    """Each tier by its own records and its own clock, but for what any of them references."""
    survey = survey_run(backend)
    if survey.unreadable:
        return _refused(survey, dry_run=dry_run)
    keep = survey.references.union(own_uids)
    reports = [
        _prune_one(tier.backend, grace_s=grace_s, keep=keep, dry_run=dry_run)
        for tier in backend.tiers
    ]
    return PruneReport(
        uids=tuple(sorted({uid for report in reports for uid in report.uids})),
        names=sum(report.names for report in reports),
        size_bytes=sum(report.size_bytes for report in reports),
        superseded=tuple(dict.fromkeys(n for report in reports for n in report.superseded)),
        refused=tuple(why for report in reports for why in report.refused),
        dry_run=dry_run,
    )


def _refused(survey: Survey, *, dry_run: bool) -> PruneReport:
    refused = tuple(str(error) for error in survey.unreadable.values())
    log.debug("prune: all stays, since %d record(s) cannot be read", len(refused))
    return PruneReport(refused=refused, dry_run=dry_run)


def _prune_one(
    backend: Backend, *, grace_s: float, keep: Collection[str], dry_run: bool
) -> PruneReport:
    # Before the records are listed: what was old *then* cannot have been committed since.
    # A dry run writes nothing, not even the record by which some stores tell their time.
    limit_s = (time.time() if dry_run else backend.store_time_s()) - grace_s
    survey = survey_run(backend)
    if survey.unreadable:
        return _refused(survey, dry_run=dry_run)
    superseded = _superseded(survey.records)
    if superseded and not dry_run:
        seen = {name: survey.records[name].uid for name in superseded}
        delete_records(backend, superseded, uids=seen)
    candidates = sorted(survey.data.keys() - survey.needed.union(keep))
    named = len(survey.data.keys() & survey.needed)
    log.debug(
        "prune: of %d attempts %d stay, being named or referenced by a record, %d as our own or "
        "another tier's",
        len(survey.data),
        named,
        len(survey.data) - named - len(candidates),
    )
    probes = backend.list(CLOCK_PREFIX)  # what `store_time_s` leaves where it is cut short
    if not dry_run:
        backend.delete([probe.name for probe in probes if probe.modified_s < limit_s])
        backend.sweep(limit_s)
    taken: list[str] = []
    names = size_bytes = 0
    for uid in candidates:
        # Listed again: its saver may have come back to life since the survey.
        blobs = backend.list(data_prefix(uid))
        if not blobs or max(blob.modified_s for blob in blobs) >= limit_s:
            log.debug("prune: data/%s stays: it is gone, or younger than %g s", uid, grace_s)
            continue
        log.debug("prune: data/%s goes: %d names", uid, len(blobs))
        if not dry_run:
            delete_data(backend, uid, blobs)
        taken.append(uid)
        names += len(blobs)
        size_bytes += sum(blob.size_bytes for blob in blobs)
    return PruneReport(tuple(taken), names, size_bytes, superseded, dry_run=dry_run)


def _superseded(records: Mapping[str, CommitRecord]) -> tuple[str, ...]:
    """Names of all but the newest generation of each step, older ones first."""
    newest: dict[int, int] = {}
    for record in records.values():
        newest[record.step] = max(record.generation, newest.get(record.step, 0))
    older = [(r.step, r.generation, name) for name, r in records.items()]
    return tuple(name for step, number, name in sorted(older) if number < newest[step])

"""The tiers that hold each checkpoint whole, and the copies that are still pending.

A tier holds a checkpoint if it lists the commit record, which a copy publishes last. So no journal
of locations is needed. Only pending copies are recorded, as a mark `data/<uid>/drain.json` next to
the data in the tier to copy from. The mark exists from before the commit until the next tier has
the checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import is_listed, read_commit, survey_records
from penstock.core.errors import BlobNotFoundError, FormatError
from penstock.core.format.commit_record import seal, unseal
from penstock.core.format.records import (
    DATA_PREFIX,
    commit_name,
    data_uid,
    mark_name,
    staying_name,
)
from penstock.core.format.strict_json import check_texts

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord

_NOTE_LIMIT_BYTES = 1 << 20


def mark(backend: Backend, uid: str, step: int, replaces: Collection[str] | None = None) -> None:
    """Record, before the commit of a save, that it must be copied to the next tier.

    Args:
        backend: The tier to copy from.
        uid: The uid of the save.
        step: The step of the save.
        replaces: The uids of that step's checkpoints that the saver knew and meant to replace; None
            if unknown.
    """
    _publish_note(backend, mark_name(uid), uid, step, replaces=replaces)


def note_staying(
    backend: Backend, uid: str, step: int, behind: Collection[str] | None = None
) -> None:
    """Record that a save must not be copied to the next tier.

    A checkpoint with neither a mark nor this note was copied. If no slower tier has it, slower
    tiers have lost it.

    Args:
        backend: The tier that has the checkpoint.
        uid: The uid of the save.
        step: The step of the save.
        behind: The slower roots for which this note counts, and no others. None if the saver itself
            decided not to copy; the note then counts for all roots.
    """
    _publish_note(backend, staying_name(uid), uid, step, roots=behind)


def _publish_note(
    backend: Backend, name: str, uid: str, step: int, **ids: Collection[str] | None
) -> None:
    body: dict[str, object] = {"uid": uid, "step": step}
    body |= {key: sorted(uids) for key, uids in ids.items() if uids is not None}
    backend.publish(name, seal(body))


def _read_note(backend: Backend, name: str, key: str) -> frozenset[str] | None:
    """Return the ids under `key` in a mark or a note; None if it has no such key.

    Raises:
        BlobNotFoundError: There is no such note.
        FormatError: The note cannot be read.
        StorageError: The tier does not answer.
    """
    body = unseal(backend.read_record(name, limit_bytes=_NOTE_LIMIT_BYTES), name)
    if type(body) is not dict or key not in body:
        return None
    return frozenset(check_texts(body[key], name))


def stays(backend: Backend, uid: str, behind: Collection[str]) -> bool:
    """Return whether a note excludes a save from copies to the slower roots `behind`."""
    try:
        noted = _read_note(backend, staying_name(uid), "roots")
    except BlobNotFoundError:
        return False
    except FormatError:
        return True
    return noted is None or set(behind) <= noted


def marked_replaces(backend: Backend, uid: str) -> frozenset[str] | None:
    """Return the uids that a marked save replaces; None if its mark is gone or names none.

    Raises:
        StorageError: The tier does not answer.
    """
    try:
        return _read_note(backend, mark_name(uid), "replaces")
    except (BlobNotFoundError, FormatError):
        return None


def at_step(backend: Backend, step: int) -> list[CommitRecord]:
    """Return the readable commit records of one step, lowest generation first.

    Raises:
        StorageError: The store does not answer.
    """
    records = []
    for info in backend.list(commit_name(step, 0).rpartition("-")[0] + "-"):
        with suppress(BlobNotFoundError, FormatError):
            records.append(read_commit(backend, info.name))
    return sorted(records, key=lambda record: record.generation)


def replaceable(source: Backend, target: Backend, record: CommitRecord) -> frozenset[str]:
    """Return the uids of the target's checkpoints that `record`, an overwrite, may replace.

    A higher generation alone does not allow a replacement. It may be left over from a host that was
    away while another host overwrote the same step at the target. So `record` replaces only
    checkpoints that its saver knew.

    Raises:
        StorageError: A store does not answer.
    """
    known = marked_replaces(source, record.uid)
    if known is not None:
        return known
    # Marks of earlier versions and of repairs name no uids: then the time of the save decides.
    return frozenset(r.uid for r in at_step(target, record.step) if r.created <= record.created)


def in_the_way(source: Backend, target: Backend, record: CommitRecord) -> CommitRecord | None:
    """Return the target's checkpoint of this step that `record` may not replace, if any.

    Raises:
        StorageError: A store does not answer.
    """
    others = [
        other
        for other in at_step(target, record.step)
        if record.uid not in {other.uid, other.compacts}
    ]
    if not others:
        return None
    lower = replaceable(source, target, record) if record.generation else frozenset()
    return next(
        (
            other
            for other in others
            if other.generation >= record.generation
            or lower.isdisjoint({other.uid, other.compacts})
        ),
        None,
    )


def compacted(backend: Backend, record: CommitRecord) -> bool:
    """Return whether a tier has a compaction of this checkpoint.

    Raises:
        StorageError: The tier does not answer.
    """
    return any(other.compacts == record.uid for other in at_step(backend, record.step))


def is_marked(backend: Backend, uid: str) -> bool:
    """Return whether a save still waits for its copy from this tier to the next."""
    return is_listed(backend, mark_name(uid))


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The tiers that have one checkpoint.

    Attributes:
        record: The commit record.
        tiers: The numbers of the tiers that have the whole checkpoint, ascending.
        waiting: The numbers of the tiers with a pending copy to the next tier.
    """

    record: CommitRecord
    tiers: tuple[int, ...]
    waiting: tuple[int, ...]


def whereabouts(tiers: Sequence[Tier]) -> dict[str, Whereabouts]:
    """Return the tiers of each readable checkpoint, by uid.

    Raises:
        StorageError: A tier does not answer.
    """
    records: dict[str, CommitRecord] = {}
    having: dict[str, list[int]] = {}
    waiting: dict[str, list[int]] = {}
    for number, tier in enumerate(tiers):
        marked = _marked(tier.backend)
        for record in survey_records(tier.backend).records.values():
            records[record.uid] = record
            having.setdefault(record.uid, []).append(number)
            if record.uid in marked:
                waiting.setdefault(record.uid, []).append(number)
    return {
        uid: Whereabouts(record, tuple(having[uid]), tuple(waiting.get(uid, ())))
        for uid, record in records.items()
    }


def pending(backend: Backend) -> list[CommitRecord]:
    """Return one tier's checkpoints with pending copies, lowest step first.

    Raises:
        StorageError: The tier does not answer.
    """
    marked = _marked(backend)
    if not marked:
        return []
    return [record for record in by_age(backend) if record.uid in marked]


def _marked(backend: Backend) -> set[str]:
    infos = backend.list(DATA_PREFIX)
    names = {(data_uid(info.name), info.name) for info in infos}
    return {uid for uid, name in names if uid is not None and name == mark_name(uid)}


def by_age(backend: Backend) -> list[CommitRecord]:
    """Return all readable commit records of one tier, lowest step and generation first."""
    records = survey_records(backend).records.values()
    return sorted(records, key=lambda record: (record.step, record.generation))

"""Checkpoints in several tiers: where each is whole, and which have yet to be copied.

A tier holds a checkpoint if the tier itself lists its commit record, which is published there last
(see `copying`); so nothing here needs a journal of what is where. Only what is *still to be*
copied is written down: `data/<uid>/drain.json` stands beside the data in the tier to copy from,
from before the commit until the next tier has it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import is_listed, read_commit, survey_records
from penstock.core.errors import BlobNotFoundError, FormatError
from penstock.core.format.records import (
    COMMIT_PREFIX,
    DATA_PREFIX,
    commit_name,
    data_uid,
    mark_name,
    parse_commit_name,
    staying_name,
)
from penstock.core.format.strict_json import check_texts, load_json

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord


_MARK_LIMIT_BYTES = 1 << 20


def mark(backend: Backend, uid: str, step: int, replaces: Collection[str] | None = None) -> None:
    """Write down that an attempt is to be copied to the next tier, before it is committed.

    Args:
        backend: The tier to copy from.
        uid: Name of the attempt.
        step: Its step.
        replaces: Uids of the checkpoints of that step that its saver knew, and meant to replace;
            None: that is not known.
    """
    body: dict[str, object] = {"uid": uid, "step": step}
    if replaces is not None:
        body["replaces"] = sorted(replaces)
    backend.publish(mark_name(uid), json.dumps(body).encode())


def note_staying(
    backend: Backend, uid: str, step: int, behind: Collection[str] | None = None
) -> None:
    """Write down that an attempt is not to be copied to the next tier.

    What is neither marked nor noted so was copied: if no slower tier has it, it was lost there.

    Args:
        backend: The tier that has it.
        uid: Name of the attempt.
        step: Its step.
        behind: The slower roots from which this was concluded: at any other one it does not count.
            None: the saver wants it so, wherever it would be copied.
    """
    body: dict[str, object] = {"uid": uid, "step": step}
    if behind is not None:
        body["behind"] = sorted(behind)
    backend.publish(staying_name(uid), json.dumps(body).encode())


def _stays(backend: Backend, uid: str, behind: Collection[str]) -> bool:
    """Whether `note_staying` has said so of an attempt, of the roots that are behind it now."""
    name = staying_name(uid)
    try:
        found = load_json(backend.read_record(name, limit_bytes=_MARK_LIMIT_BYTES), name)
        if type(found) is not dict or "behind" not in found:
            return True
        return set(behind) <= set(check_texts(found["behind"], name))
    except BlobNotFoundError:
        return False
    except FormatError:
        return True


def lost_behind(
    tiers: Sequence[Tier], number: int, behind: Collection[str] = ()
) -> list[CommitRecord]:
    """Checkpoints that tier `number` has copied, and that no slower tier has any more.

    Args:
        tiers: From the fastest on.
        number: Of the tier.
        behind: The slower roots, as `note_staying` has them.

    Raises:
        StorageError: One of these tiers does not answer.
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
            continue  # replaced, or no record of ours
        with suppress(BlobNotFoundError, FormatError):
            record = read_commit(backend, name)
            if not is_marked(backend, record.uid) and not _stays(backend, record.uid, behind):
                lost.append(record)
    return lost


def saved_behind_since(
    tiers: Sequence[Tier], number: int, records: Collection[CommitRecord]
) -> list[CommitRecord]:
    """Those of `records`, all of tier `number`, that are older than what others saved behind it.

    Another node that has gone on there has seen what there was; so what is missing it has deleted.

    Raises:
        StorageError: One of these tiers does not answer.
    """
    if not records:
        return []
    here = {record.uid for record in by_age(tiers[number].backend)}
    behind = [record for tier in tiers[number + 1 :] for record in by_age(tier.backend)]
    newest = max((record.created for record in behind if record.uid not in here), default="")
    return [record for record in records if record.created < newest]


def marked_replaces(backend: Backend, uid: str) -> frozenset[str] | None:
    """What `mark` was told of the checkpoints that an attempt replaces; None: nothing.

    Raises:
        StorageError: The tier does not answer.
    """
    name = mark_name(uid)
    try:
        found = load_json(backend.read_record(name, limit_bytes=_MARK_LIMIT_BYTES), name)
        if type(found) is not dict or "replaces" not in found:
            return None
        return frozenset(check_texts(found["replaces"], name))
    except (BlobNotFoundError, FormatError):
        return None


def at_step(backend: Backend, step: int) -> list[CommitRecord]:
    """The readable commit records of one step, the lowest generation first.

    Raises:
        StorageError: The store does not answer.
    """
    found = []
    for info in backend.list(commit_name(step, 0).rpartition("-")[0] + "-"):
        with suppress(BlobNotFoundError, FormatError):
            found.append(read_commit(backend, info.name))
    return sorted(found, key=lambda record: record.generation)


def replaceable(source: Backend, target: Backend, record: CommitRecord) -> frozenset[str]:
    """Uids of checkpoints at the target that make way for `record`, an overwrite.

    A higher generation alone does not say so: a node that was away may have left it, while another
    one has overwritten the same step at the target. So the saver has to have known them.

    Raises:
        StorageError: A store does not answer.
    """
    known = marked_replaces(source, record.uid)
    if known is not None:
        return known
    # Marks of earlier versions, and of repairs, do not say it: then time decides.
    return frozenset(r.uid for r in at_step(target, record.step) if r.created <= record.created)


def in_the_way(source: Backend, target: Backend, record: CommitRecord) -> CommitRecord | None:
    """The checkpoint that the target has at the step of `record`, and that does not make way.

    Raises:
        StorageError: A store does not answer.
    """
    others = [other for other in at_step(target, record.step) if other.uid != record.uid]
    if not others:
        return None
    lower = replaceable(source, target, record) if record.generation else frozenset()
    return next(
        (o for o in others if o.generation >= record.generation or o.uid not in lower), None
    )


def is_marked(backend: Backend, uid: str) -> bool:
    """Whether an attempt has yet to be copied from one tier to the next."""
    return is_listed(backend, mark_name(uid))


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Which tiers have one checkpoint.

    Attributes:
        record: Its commit record.
        tiers: Numbers of the tiers that have it whole, ascending.
        waiting: Those of them that have yet to copy it to the next one.
    """

    record: CommitRecord
    tiers: tuple[int, ...]
    waiting: tuple[int, ...]


def whereabouts(tiers: Sequence[Tier]) -> dict[str, Whereabouts]:
    """Where each readable checkpoint is, by uid.

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
    """Checkpoints of one tier that have yet to be copied, lowest step first.

    Raises:
        StorageError: The tier does not answer.
    """
    marked = _marked(backend)
    if not marked:
        return []
    return [record for record in by_age(backend) if record.uid in marked]


def _marked(backend: Backend) -> set[str]:
    infos = backend.list(DATA_PREFIX)
    found = {(data_uid(info.name), info.name) for info in infos}
    return {uid for uid, name in found if uid is not None and name == mark_name(uid)}


def by_age(backend: Backend) -> list[CommitRecord]:
    """All readable commit records of one tier, the oldest first."""
    records = survey_records(backend).records.values()
    return sorted(records, key=lambda record: (record.step, record.generation))

"""Checkpoints in several tiers: where each is whole, which may go, where the next one fits.

A tier holds a checkpoint if the tier itself lists its commit record, which is published there last
(see `copying`); so nothing here needs a journal of what is where. Only what is *still to be*
copied is written down: `data/<uid>/drain.json` stands beside the data in the tier to copy from,
from before the commit until the next tier has it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.errors import StorageError
from penstock.core.manifest import (
    DATA_PREFIX,
    commit_name,
    data_uid,
    mark_name,
)
from penstock.core.survey import delete_records, is_listed, is_whole, survey_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.manifest import CommitRecord

log = logging.getLogger("penstock")

REPEAT_LOG_S = 600.0

_MARGIN_BYTES = 8 << 20  # part, index, records, and what a file system keeps for itself


def mark(backend: Backend, uid: str, step: int) -> None:
    """Write down that an attempt is to be copied to the next tier, before it is committed."""
    backend.publish(mark_name(uid), json.dumps({"uid": uid, "step": step}).encode())


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
    return [record for record in _by_age(backend) if record.uid in marked]


def _marked(backend: Backend) -> set[str]:
    infos = backend.list(DATA_PREFIX)
    found = {(data_uid(info.name), info.name) for info in infos}
    return {uid for uid, name in found if uid is not None and name == mark_name(uid)}


class Rooms:
    """Makes room in tiers by evicting what a later tier has, whole."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def make_room(self, number: int, need_bytes: int) -> bool:
        """Evict from a tier, oldest first, until `need_bytes` fit; False: they do not.

        Raises:
            StorageError: The tier itself does not answer.
        """
        backend = self._tiers[number].backend
        need_bytes += _MARGIN_BYTES
        free = backend.free_bytes()
        if free is None or free >= need_bytes:
            return True
        try:
            candidates = self._evictable(number, _by_age(backend))
        except StorageError as error:
            log.warning("nothing is evicted from %s: %s", backend.url, str(error))
            return False
        for record in candidates:
            self.evict(number, record)
            free = backend.free_bytes()
            if free is None or free >= need_bytes:
                return True
        return False

    def trim(self, number: int) -> None:
        """Evict all but the newest `keep_last` of what a later tier has.

        Raises:
            StorageError: A tier does not answer.
        """
        keep = self._tiers[number].keep_last
        if keep is None:
            return
        here = _by_age(self._tiers[number].backend)
        for record in self._evictable(number, here[: max(len(here) - keep, 0)]):
            self.evict(number, record)

    def evict(self, number: int, record: CommitRecord, *, unreadable: bool = False) -> None:
        """Delete one tier's copy: its record first, durably, then its data.

        Unless another's record has that name by now; with `unreadable`, one that can be read.
        """
        tier = self._tiers[number]
        name = commit_name(record.step, record.generation)
        delete_records(tier.backend, [name], uids={name: None if unreadable else record.uid})
        log.debug("evicted step %d from tier %s", record.step, tier.name)

    def _evictable(self, number: int, here: Sequence[CommitRecord]) -> list[CommitRecord]:
        """Those of `here` that wait for nothing in their tier, and that a later one has whole.

        Later tiers are asked for these alone: they may hold many more.
        """
        marked = _marked(self._tiers[number].backend) if here else set()
        later = [tier.backend for tier in self._tiers[number + 1 :]]
        return [
            record
            for record in here
            if record.uid not in marked and any(is_whole(backend, record) for backend in later)
        ]


def _by_age(backend: Backend) -> list[CommitRecord]:
    """All readable commit records of one tier, the oldest first."""
    records = survey_records(backend).records.values()
    return sorted(records, key=lambda record: (record.step, record.generation))

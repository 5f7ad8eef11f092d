"""Checkpoints in several tiers: where each is whole, which may go, where the next one fits.

A tier holds a checkpoint if the tier itself lists its commit record, which is published there last
(see `copying`); so nothing here needs a journal of what is where. Only what is *still to be*
copied is written down: `data/<uid>/drain.json` stands beside the data in the tier to copy from,
from before the commit until the next tier has it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.core.catalog import Catalog
from penstock.core.errors import StorageError, StorageTimeoutError
from penstock.core.manifest import (
    DATA_PREFIX,
    commit_name,
    data_uid,
    mark_name,
    parse_commit_name,
)
from penstock.core.survey import delete_records, is_listed, is_whole, survey_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.manifest import CommitRecord
    from penstock.core.workers import Workers

log = logging.getLogger("penstock")

T = TypeVar("T")

REPEAT_LOG_S = 600.0

_SILENCE_S = (60.0, 600.0)  # a tier that did not answer is left alone, longer each time
_SILENT = "it did not answer a while ago, and is not asked again yet"
_LONG_S = 0.5  # an error that comes sooner costs a save nothing
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


class Answers:
    """Asks tiers from the thread that trains, which must not hang where one of them does."""

    def __init__(self, workers: Workers, limit_s: float) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._silent: dict[int, tuple[float, float]] = {}  # until when, and for how long
        self._said_s: dict[int, dict[str, float]] = {}

    def ask(self, number: int, call: Callable[[], T]) -> T:
        """What `call` gives; one that hangs, or took long to fail, is left alone for a while.

        Raises:
            StorageError: Tier `number` does not answer.
        """
        began_s = time.monotonic()
        if began_s < self._silent.get(number, (0.0, 0.0))[0]:
            raise StorageTimeoutError(_SILENT)

        def check() -> None:
            if time.monotonic() - began_s > self._limit_s:
                msg = f"no answer for {self._limit_s:g} s"
                raise StorageTimeoutError(msg)

        try:
            return self._workers.apart(
                "ask", call, cancel=lambda: None, check=check, patience_s=0.0
            )
        except StorageError:
            if time.monotonic() - began_s > min(_LONG_S, self._limit_s):
                self._leave_alone(number)
            raise

    def is_any_silent(self) -> bool:
        """Whether a tier is left alone at the moment, since it did not answer."""
        now_s = time.monotonic()
        return any(now_s < until_s for until_s, _ in self._silent.values())

    def _leave_alone(self, number: int) -> None:
        first_s, most_s = _SILENCE_S
        _, before_s = self._silent.get(number, (0.0, 0.0))
        silence_s = min(2 * before_s, most_s) if before_s else first_s
        self._silent[number] = time.monotonic() + silence_s, silence_s

    def missed(self, number: int, name: str, error: StorageError) -> None:
        """Warn that tier `number` does not answer: of each reason once, then every ten minutes."""
        if str(error) == _SILENT:  # no news
            return
        said_s = self._said_s.setdefault(number, {})
        now_s = time.monotonic()
        if now_s - said_s.get(str(error), -math.inf) >= REPEAT_LOG_S:
            said_s[str(error)] = now_s
            log.warning("tier %s does not answer, going on without it: %s", name, str(error))

    def answered(self, number: int) -> None:
        """The next outage of tier `number` is news, and it is asked as ever."""
        self._said_s.pop(number, None)
        self._silent.pop(number, None)


def known_entries(tiers: Sequence[Tier], answers: Answers, *, strict: bool) -> dict[int, list[str]]:
    """As `Catalog.entries`, of all tiers that answer; warns of those that do not.

    For who is about to save: an outage of one tier must not stop it.

    Raises:
        StorageError: No tier answers, or (`strict`) one does not.
    """
    names: dict[int, set[str]] = {}
    failure: StorageError | None = None
    count = 0
    for number, tier in enumerate(tiers):
        try:
            found = answers.ask(number, Catalog(tier.backend).entries)
        except StorageError as error:
            failure = error
            answers.missed(number, tier.name, error)
            continue
        answers.answered(number)
        count += 1
        for step, some in found.items():
            names.setdefault(step, set()).update(some)
    if failure is not None and (strict or not count):
        raise failure
    return {step: sorted(names[step], key=_generation) for step in sorted(names)}


def _generation(name: str) -> int:
    parsed = parse_commit_name(name)
    return -1 if parsed is None else parsed[1]

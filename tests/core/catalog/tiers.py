"""Savers to two tiers, drains and compactions as actors of the search in `protocol.py`.

It runs the product's own code: the claim of a generation, the mark, the save, the clean-up, one
copy by a link, the look-up of a checkpoint that is gone, and of a compaction the steps before and
after its commit. Both tiers are in one store, each below a prefix.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

from tests.core.catalog.protocol import (
    Actor,
    Job,
    ModelClock,
    copy_by,
    one_stored,
    silent,
    word_of,
)

from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.abc import Backend
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.retention import clean_up_after
from penstock.core.copy.compaction import Compactor, _Compaction
from penstock.core.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    PenstockError,
)
from penstock.core.format.commit_record import decode_commit, seal
from penstock.core.format.records import (
    BlobRecord,
    borrowed_from,
    commit_name,
    compacted_generation,
    mark_name,
    parse_commit_name,
)
from penstock.core.save.prepare import claim_generation
from penstock.core.save.request import Destination, SaveSurroundings
from penstock.core.tiers.drains import Drains
from penstock.core.tiers.link import _PERMANENT, DrainLink
from penstock.core.tiers.whereabouts import at_step, mark

FAST, DURABLE = "fast/", "durable/"
GRACE_S = 4.0


class Place(Backend):
    """One tier of the store, as an actor sees it."""

    name = "place"

    def __init__(self, turn, prefix):
        self._turn, self._prefix = turn, prefix

    @property
    def url(self):
        return f"model://{self._prefix}"

    @property
    def capabilities(self):
        return self._turn.capabilities

    def publish(self, name, data, /, *, exclusive=False):
        self._turn.publish(self._prefix + name, data, exclusive=exclusive)

    def read_record(self, name, /, *, limit_bytes):
        return self._turn.read_record(self._prefix + name, limit_bytes=limit_bytes)

    def list(self, prefix, /):
        found = self._turn.list(self._prefix + prefix)
        return tuple(replace(info, name=info.name.removeprefix(self._prefix)) for info in found)

    def stat(self, name, /):
        info = self._turn.stat(self._prefix + name)
        return replace(info, name=name)

    def delete(self, names, /):
        self._turn.delete([self._prefix + name for name in names])

    def store_time_s(self):
        return self._turn.store_time_s()

    def create(self, name, /, *, size_hint=None):
        raise NotImplementedError

    def read(self, requests, /):
        self._turn.read(requests)


def places_of(turn):
    """Return the fast tier, the durable tier, and both as one run."""
    fast, durable = Place(turn, FAST), Place(turn, DURABLE)
    config = TieredConfig(fast="memory://", durable="memory://")
    return fast, durable, TieredBackend(config, fast=fast, durable=durable)


def clean_up(report, run):
    clean_up_after(
        report, Catalog(run), overwrite=report.generation > 0, retention=None, protect=(),
        events=silent,
    )  # fmt: skip


class _Drained(Actor):
    """An actor whose checkpoint must reach the durable tier, or stay there as a compaction."""

    words = frozenset({"success", "durable"})

    def drain(self, turn, record):
        """Copy a checkpoint as its link does, and note what its handle would report."""
        fast, durable, run = places_of(turn)
        ended = []
        drains = Drains.__new__(Drains)
        drains._tiers, drains.durable = run.tiers, 1
        drains._outages = SimpleNamespace(ask=lambda _, call: call())
        drains.repairs = SimpleNamespace(is_withdrawn=lambda _: False)
        drains.end = lambda _, error: ended.append(error)
        link = DrainLink.__new__(DrainLink)
        link._source, link._target = run.tiers
        link._number, link._prepared, link._done_bytes = 0, "", 0
        link._changed = threading.Condition()
        link._drains = SimpleNamespace(
            roots=SimpleNamespace(check=lambda _: None),
            eviction=SimpleNamespace(
                make_room=lambda *_, **__: True, note_verified=lambda *_: None
            ),
            prepare=lambda *_: False,
        )
        link._copier = SimpleNamespace(
            copy=lambda record, *, replace, **_: copy_by(
                turn, fast, durable, record, replace=replace
            )
        )
        try:
            there = copied_in_the_end(link, record)
            if not there:
                drains.end_gone(1, record)
        except PenstockError as error:
            ended.append(error)
        error = ended[0] if ended else None
        turn.note(told="durable" if error is None else word_of(error))


@dataclass(frozen=True)
class TierSaver(_Drained):
    """Overwrites a step in the fast tier, and drains it."""

    saves = True

    uid: str
    step: int

    def run(self, turn):
        fast, _, run = places_of(turn)
        entries = Catalog(run).entries()
        generation = claim_generation(self.step, entries, url=run.url, overwrite=True)
        replaces = {record.uid for tier in run.tiers for record in at_step(tier.backend, self.step)}
        job = Job(
            turn, ModelClock(turn, stopped=True), SaveSurroundings(), place=fast, uid=self.uid,
            step=self.step, generation=generation, grace_s=GRACE_S, batches=1, borrowed=(),
            base=None,
        )  # fmt: skip
        records = []

        def prepare(record):
            records.append(record)
            mark(fast, record.uid, record.step, replaces)

        job._finish._destination = Destination(fast, SimpleNamespace(prepare=prepare))
        turn.note(name=FAST + commit_name(self.step, generation), uid=self.uid)
        job._run()
        if job.handle.durable.exception() is None:
            clean_up(job.report, run)
            self.drain(turn, records[0])
            clean_up(job.report, run)

    def violations_at_the_end(self, store, notes):
        newest = newest_of(store, DURABLE, self.step)
        if notes.get("told") == "durable" and newest.uid != self.uid:
            yield f"the overwrite {self.uid} is told durable, and {newest.uid} counts there"


@dataclass(frozen=True)
class Drainer(_Drained):
    """Drains a checkpoint waiting in the fast tier."""

    uid: str
    step: int
    borrows: tuple[str, ...] = ()

    def run(self, turn):
        files, name = one_stored(self.step, 0, self.uid, self.borrows)
        self.drain(turn, decode_commit(files[name][0], name))

    def violations_at_the_end(self, store, notes):
        newest = newest_of(store, DURABLE, self.step)
        if newest is None or self.uid not in {newest.uid, newest.compacts}:
            yield f"{self.uid} is not in the durable tier, nor is a compaction of it"


@dataclass(frozen=True)
class CompactingProcess(Actor):
    """Compacts a step in the durable tier."""

    words = frozenset({"success", "gone", "none"})
    saves = True

    uid: str
    step: int

    def run(self, turn):
        _, durable, run = places_of(turn)
        catalog = Catalog(run)
        compactor = Compactor.__new__(Compactor)
        compactor._catalog, compactor._backend = catalog, run
        try:
            record = catalog.record(self.step)
            before = compactor._uids(catalog.entries().get(self.step, ()))
        except CheckpointNotFoundError:
            turn.note(told="none")
            return
        if not record.references:
            turn.note(told="none")
            return
        housekeeper = SimpleNamespace(before_save=lambda *_, **__: None)
        generation = compacted_generation(record.generation)
        job = Job(
            turn, ModelClock(turn, stopped=True), _Compaction(catalog, record, housekeeper),
            place=durable, uid=self.uid, step=self.step, generation=generation, grace_s=GRACE_S,
            batches=1, borrowed=(), base=None, compacts=record.uid,
        )  # fmt: skip
        turn.note(name=DURABLE + commit_name(self.step, generation), uid=self.uid)
        job._run()
        if job.handle.durable.exception() is None:
            try:
                compactor._settle(record, job.report, before)
            except CheckpointGoneError:
                turn.note(told="gone")


def copied_in_the_end(link, record):
    """Copy a checkpoint; retry once what a retry can fix."""
    try:
        return link._copy_once(record)
    except _PERMANENT:
        raise
    except PenstockError:
        return link._copy_once(record)


def newest_of(store, prefix, step):
    found = {}
    for full, (data, _) in store.items():
        name = full.removeprefix(prefix)
        parsed = parse_commit_name(name)
        if parsed is not None and parsed[0] == step:
            found[parsed[1]] = decode_commit(data, name)
    return found[max(found)] if found else None


@lru_cache(None)
def stored_in_tiers(both, waiting):
    """Checkpoints in both tiers, and those that wait in the fast one to be copied."""
    store = {}
    for checkpoint in (*both, *waiting):
        files, _ = one_stored(*checkpoint)
        for prefix in (FAST, DURABLE) if checkpoint in both else (FAST,):
            store |= {prefix + name: found for name, found in files.items()}
    for step, _, uid, *_ in waiting:
        store[FAST + mark_name(uid)] = (seal({"uid": uid, "step": step}), 0.0)
    return store


def borrowed(base, uid):
    return borrowed_from([BlobRecord(f"data/{base}/blobs/0.raw", 32)], uid)

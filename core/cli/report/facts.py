"""What a report shows: checkpoints, the objects of one of them, and times of saves."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import NotesOfRun
from penstock.core.catalog.survey import places_of, read_intent
from penstock.core.cli.commands.ls import Listed, list_run, list_tiers
from penstock.core.cli.commands.show import Shown, describe
from penstock.core.cli.output.runs_on_disk import tiers_quiet
from penstock.core.errors import BlobNotFoundError, ConfigError, DamagedError
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """How long a save took, from its event.

    Attributes:
        blocked_s: How long training stood still.
        total_s: From the call until the checkpoint was durable.
    """

    blocked_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The contents of a report.

    Attributes:
        url: The URL of the run.
        listed: Every step, ascending.
        tiers: The names of the tiers, the fastest first; empty for a run in one place.
        silent: The reason, by name, why a tier does not answer.
        step: The step of the checkpoint whose objects are shown.
        objects: Its objects, in tree order.
        commit_s: By uid, of saves without an event, the time from the record with which a save
            begins to write to its commit.
        times: By uid, the times in events.
        unread: How many lines of the files of events are no events.
    """

    url: str
    listed: tuple[Listed, ...]
    tiers: tuple[str, ...]
    silent: dict[str, str]
    step: int
    objects: tuple[Shown, ...]
    commit_s: dict[str, float]
    times: dict[str, SaveTimes]
    unread: int

    @property
    def records(self) -> list[CommitRecord]:
        """The readable commit records, ascending by step."""
        return [one.record for one in self.listed if one.record is not None]


def gather(url: str, step: int | None, events: Sequence[str]) -> RunFacts:
    """Read a run, and files of events.

    Args:
        url: The URL of the run.
        step: The step of the checkpoint whose objects are shown; None: the latest.
        events: Files of events, a line of JSON for each, as `JsonLinesSink` writes them.

    Raises:
        PenstockError: The run cannot be read, or has no checkpoint; or there is no such file.
    """
    times, unread = read_events(events)
    with tiers_quiet(), closing(open_backend(url, must_exist=True, light=True)) as backend:
        silent = dict[str, str]()
        listed = list_tiers(backend.tiers, silent) if backend.tiers else list_run(backend)
        answering = [tier.backend for tier in backend.tiers if tier.name not in silent]
        notes = NotesOfRun(answering or [backend])
        listed = [
            replace(one, notes=None if one.record is None else notes.read(one.record))
            for one in listed
        ]
        number = Catalog(backend).require_latest() if step is None else step
        contents = Checkpoint.open(backend, number).contents
        objects = tuple(describe(one, contents) for one in contents.objects())
        without = [one for one in listed if one.record and one.record.uid not in times]
        commit_s = _commit_seconds(answering or places_of(backend), without)
        tiers = tuple(tier.name for tier in backend.tiers)
        return RunFacts(
            backend.url, tuple(listed), tiers, silent, number, objects, commit_s, times, unread
        )


def read_events(files: Sequence[str]) -> tuple[dict[str, SaveTimes], int]:
    """Read the times of durable saves by uid; return as well how many lines are no events.

    A process that was killed leaves half a line.

    Raises:
        ConfigError: A file cannot be read.
    """
    times: dict[str, SaveTimes] = {}
    unread = 0
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            msg = f"--events {file}: {error.strerror or error}"
            raise ConfigError(msg) from error
        for line in lines:
            try:
                event = json.loads(line)
                if event["kind"] == "durable":
                    seconds = event["seconds"]
                    blocked_s, total_s = float(seconds["blocked"]), float(seconds["total"])
                    times[event["uid"]] = SaveTimes(blocked_s, total_s)
            except (ValueError, TypeError, KeyError, RecursionError):
                unread += 1
    return times, unread


def created_s(record: CommitRecord) -> float:
    """Return the time of a commit, in seconds since 1970."""
    return datetime.fromisoformat(record.created).timestamp()


def _commit_seconds(places: Sequence[Backend], listed: Sequence[Listed]) -> dict[str, float]:
    found: dict[str, float] = {}
    for record in (one.record for one in listed if one.record is not None):
        for place in places:
            try:
                started = datetime.fromisoformat(read_intent(place, record.uid).started)
            except (BlobNotFoundError, DamagedError):
                continue
            seconds = created_s(record) - started.timestamp()
            if seconds >= 0:  # the intent of a copy is younger than the commit
                found[record.uid] = seconds
                break
    return found

"""Retention: deletes old checkpoints after a commit, and makes room before a save."""

from __future__ import annotations

import logging
import time
from math import isfinite
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.prune import take_dead
from penstock.core.catalog.survey import places_of
from penstock.core.errors import StorageFullError
from penstock.core.reporting.events import DeleteEvent
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.core.abc import Backend
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.config.model import Retention
    from penstock.core.reporting.events import EventStream
    from penstock.core.reporting.reports import SaveReport

log = logging.getLogger("penstock")

_MARGIN_BYTES = 4 << 20  # for part, index, records, and the gaps between frames


def worst_first(metadata: Mapping[int, Mapping[str, Any]], metric: str, mode: str) -> list[int]:
    """Return the steps that have a metric, from worst to best; of equal values the newest is last.

    Leaves out steps whose metric is missing, not a number, infinite or NaN.

    Args:
        metadata: The metadata of each step.
        metric: The key of the metric.
        mode: `min` or `max`: which value is best.
    """
    sign = {"min": -1, "max": 1}[mode]
    values = {step: found.get(metric) for step, found in metadata.items()}
    # By exact type: a bool is an int, and `isfinite` fails for large ones.
    numbers = {
        step: sign * value
        for step, value in values.items()
        if type(value) is int or (type(value) is float and isfinite(value))
    }
    return sorted(numbers, key=lambda step: (numbers[step], step))


def younger_than(age_s: float, times: Mapping[int, float]) -> set[int]:
    """Return the steps that are at most `age_s` seconds older than the newest.

    Counts back from the newest checkpoint, not from now, so that a pause of a week deletes nothing.
    A time in the future, from a wrong clock, counts as now.

    Args:
        age_s: The age in seconds.
        times: The publish time of each step.
    """
    now_s = min(time.time(), max(times.values(), default=0.0))
    return {step for step, published_s in times.items() if now_s - published_s <= age_s}


def clean_up_after(
    report: SaveReport,
    catalog: Catalog,
    *,
    overwrite: bool,
    retention: Retention | None,
    protect: Collection[int],
    events: EventStream,
) -> None:
    """Delete the checkpoints that a commit has replaced, and the steps that retention drops.

    A commit replaces the older generations of its step, and incomplete checkpoints of later steps.
    Runs on rank 0. Logs failures, and never fails the save.
    """
    try:
        catalog.delete_incomplete_after(report.step)
        if overwrite:
            catalog.delete_older_generations(report.step, report.generation)
        if retention is not None:
            gone = catalog.apply_retention(retention, protect={report.step, *protect})
            if gone:
                events.emit(DeleteEvent("deleted", tuple(gone), "retention"))
    except Exception as error:  # noqa: BLE001 - a task's boundary: recorded in the log
        log.warning("cleaning up after step %d failed: %s", report.step, str(error))


class Housekeeper:
    """Makes room for a save: applies overdue retention, and deletes the data of dead savers.

    Retention runs after a commit. If a process is repeatedly killed right after its commits, the
    disk fills up, and then no save gets far enough to delete anything. So the housekeeper runs
    before a save. It does not run when a run is opened, since the user may want to restore any
    checkpoint. Only the save thread uses it.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        *,
        retention: Retention | None,
        grace_s: float,
        events: EventStream,
    ) -> None:
        """Create the housekeeper of a run.

        Args:
            backend: The backend of the run, with all its tiers.
            catalog: The catalog of the run.
            retention: The checkpoints to keep; None keeps all.
            grace_s: The grace time of `prune`, in seconds.
            events: Receives the deletions by retention.
        """
        self._backend = backend
        self._catalog = catalog
        self._retention = retention
        self._grace_s = grace_s
        self._events = events
        self._began = False
        # `protect` is passed with each call: a callback would refer to the checkpointer, which
        # would then keep its staging memory until the next garbage collection.

    def before_save(self, url: str, need_bytes: int, *, protect: Collection[int]) -> None:
        """Make room for a save at the place `url`; keep all steps in `protect`.

        Runs before the first save, and before a later save if too little space is free. Logs
        failures, and never fails the save.
        """
        try:
            if self._began and not self._is_short(url, need_bytes):
                return
            self._began = True
            self._make_room(protect)
        except Exception as error:  # noqa: BLE001 - a task's boundary: recorded in the log
            log.warning("making room before a save failed: %s", str(error))

    def when_full(
        self, error: StorageFullError, uid: str, *, protect: Collection[int]
    ) -> StorageFullError:
        """Make room after a save fills the store; return the error to raise, with advice.

        The save still fails: its blob is unusable after a failed write.
        """
        try:
            advice = self._what_was_freed(uid, protect) + self._what_prune_would_free(uid)
        except Exception as other:  # noqa: BLE001 - a task's boundary: recorded in the log
            log.warning("making room on a full store failed: %s", str(other))
            return error
        if not advice:
            return error
        explained = StorageFullError(f"{error}. {'. '.join(advice)}")
        explained.__cause__ = error
        return explained

    def _make_room(self, protect: Collection[int], own_uids: Collection[str] = ()) -> bool:
        taken = take_dead(self._backend, own_uids=own_uids)
        gone: list[int] = []
        if self._retention is not None:
            gone = self._catalog.apply_retention(self._retention, protect=protect)
        if gone:
            self._events.emit(DeleteEvent("deleted", tuple(gone), "retention"))
        return bool(taken or gone)

    def _is_short(self, url: str, need_bytes: int) -> bool:
        for place in places_of(self._backend):
            if place.url == url:
                free = place.free_bytes()
                return free is not None and free < need_bytes + _MARGIN_BYTES
        return False

    def _what_was_freed(self, uid: str, protect: Collection[int]) -> list[str]:
        if not self._make_room(protect, [uid]):
            return []
        return ["Data of old checkpoints or dead savers has been deleted: save again"]

    def _what_prune_would_free(self, uid: str) -> list[str]:
        command = "penstock prune"
        if not self._backend.tiers:
            command += f" {self._backend.url}"
        old = self._catalog.prune(grace_s=self._grace_s, own_uids=[uid], dry_run=True)
        every = self._catalog.prune(grace_s=0.0, own_uids=[uid], dry_run=True)
        more, way = every.size_bytes - old.size_bytes, f"{command} --grace 0s"
        if every.refused and every.unrecorded:  # no save of this run has ever committed
            every = self._catalog.prune(grace_s=0.0, own_uids=[uid], dry_run=True, everything=True)
            more, way = every.size_bytes, f"{command} --all --grace 0s"
        advice = []
        if old.size_bytes:
            advice.append(f"{size_text(old.size_bytes)} could be freed by `{command}`")
        if more:
            advice.append(
                f"{size_text(more)} could be freed by `{way}`, if no other process saves or copies "
                "there"
            )
        return advice

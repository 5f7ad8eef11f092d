"""Telling a caller what happens to the checkpoints of a run.

Every event carries the very report that the call returns; the log's lines are made from it too.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.core.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.prune import PruneReport
    from penstock.core.reports import (
        Outcome,
        RestoreReport,
        SaveHandle,
        SaveReport,
        VerifyReport,
    )

log = logging.getLogger("penstock")


class _Told:
    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The event as JSON-ready data, without a live object.

        Fields of the report stand beside those of the event. Of a tuple in a report there is the
        length, of an error its type and text; paths and values of a restore are left out.
        """
        found: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type] # each event is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, BaseException):
                value = f"{type(value).__name__}: {value}"
            if field.name == "report":
                found |= {} if value is None else _figures(value)
            else:
                found[field.name] = list(value) if isinstance(value, tuple) else value
        return found


def _figures(report: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(report):
        value = getattr(report, field.name)
        if isinstance(value, tuple):
            value = len(value)
        elif isinstance(value, Mapping):
            if field.name != "seconds":
                continue
            value = dict(value)
        found[field.name] = value
    return found


@dataclass(frozen=True, slots=True)
class SaveEvent(_Told):
    """Something that happened to a save.

    Attributes:
        kind: `started`, `captured`, `committed`, `durable`, `failed` or `skipped`.
        step: Of the save.
        report: With `committed` and `durable`.
        error: With `failed`.
    """

    kind: str
    step: int
    report: SaveReport | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RestoreEvent(_Told):
    """Something that happened to a restore or a load.

    Attributes:
        kind: `restore_started`, `restore_done`, `restore_failed`, or the same with `load`.
        step: Of the checkpoint. With `on_damage="fallback"` every one that is tried starts.
        report: With `restore_done` and `load_done`; the latter without `values`.
        error: With `restore_failed` and `load_failed`.
    """

    kind: str
    step: int
    report: RestoreReport | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class VerifyEvent(_Told):
    """A verification came to its end. `kind` is `verified`, whatever it found."""

    kind: str
    step: int
    report: VerifyReport


@dataclass(frozen=True, slots=True)
class DeleteEvent(_Told):
    """Checkpoints are gone.

    Attributes:
        kind: `deleted`.
        steps: Which, ascending.
        why: `retention`, `rewind` or `delete`.
    """

    kind: str
    steps: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class PruneEvent(_Told):
    """What nobody can need is gone. `kind` is `pruned`."""

    kind: str
    report: PruneReport


Event = SaveEvent | RestoreEvent | VerifyEvent | DeleteEvent | PruneEvent


class EventStream:
    """Everything that happens to a run: into the log, then to `on_event`.

    Calls come from whatever thread it happens on. What `on_event` raises is logged as text, since
    who keeps log records would keep an error, its frames, and all that they hold.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """Tell of one event."""
        _log(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - the caller's code: recorded in the log
            steps = "" if isinstance(event, DeleteEvent | PruneEvent) else f" of step {event.step}"
            trace = traceback.format_exc()
            log.error("on_event raised at %s%s:\n%s", event.kind, steps, trace)  # noqa: TRY400

    def announce(self, handle: SaveHandle) -> None:
        """Tell of everything that happens to a save, from its start on."""
        if self._on_event is None and not log.isEnabledFor(logging.DEBUG):
            return
        step = handle.step
        told = _InOrder(self.emit)
        captured = SaveEvent("captured", step)

        def ended(kind: str, future: Outcome[Any]) -> None:
            error = future.peek_error()
            if error is None:
                told.tell(captured, SaveEvent(kind, step, report=Future.result(future, 0)))
            elif kind == "durable":  # a failure is one event, not three
                told.tell(SaveEvent("failed", step, error=error))

        self.emit(SaveEvent("started", step))
        handle.captured.add_done_callback(
            lambda _: told.tell(captured) if handle.captured.peek_error() is None else None
        )
        handle.committed.add_done_callback(lambda _: ended("committed", handle.committed))
        handle.durable.add_done_callback(lambda _: ended("durable", handle.durable))


class _InOrder:
    """Tells each event of a save once, one after the other: by whichever thread comes first.

    The capture and the commit end on different threads; neither waits for what the other tells.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()  # guards what follows; not held while telling
        self._seen: set[str] = set()
        self._waiting: deque[SaveEvent] = deque()
        self._telling = False

    def tell(self, *events: SaveEvent) -> None:
        """Tell those of `events` that were not told, and whatever comes meanwhile."""
        with self._lock:
            self._waiting += [event for event in events if event.kind not in self._seen]
            self._seen.update(event.kind for event in events)
            if self._telling:
                return
            self._telling = True
        try:
            while (event := self._next()) is not None:
                self._emit(event)
        except BaseException:
            self._telling = False
            raise

    def _next(self) -> SaveEvent | None:
        with self._lock:
            if not self._waiting:
                self._telling = False
                return None
            return self._waiting.popleft()


_PAST = {"restore_done": "restored", "load_done": "loaded"}


def _log(event: Event) -> None:
    """One line; those on the end of a save are written where its thread ends it."""
    match event:
        case RestoreEvent(report=report) if report is not None:
            log.info(
                "%s %d objects of step %d: %s in %.2f s",
                _PAST[event.kind],
                len(report.restored),
                report.step,
                size_text(report.bytes_read),
                report.seconds["total"],
            )
        case RestoreEvent(error=error) if error is not None:
            log.debug("%s of step %d: %s", event.kind, event.step, str(error))
        case VerifyEvent(report=report):
            log.debug(
                "verified step %d: %d objects, %d frames, %d bytes read in %.2f s, %d damaged",
                event.step,
                report.objects,
                report.frames,
                report.bytes_read,
                report.seconds,
                len(report.damaged),
            )
        case DeleteEvent():
            log.debug("deleted by %s: steps %s", event.why, ", ".join(map(str, event.steps)))
        case PruneEvent(report=report):
            log.debug(
                "pruned: %d attempts, %d names, %d bytes, %d superseded records; dry_run=%s",
                len(report.uids),
                report.names,
                report.size_bytes,
                len(report.superseded),
                report.dry_run,
            )
        case SaveEvent() | RestoreEvent():
            log.debug("step %d: %s", event.step, event.kind)

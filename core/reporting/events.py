"""Defines the events of a run's checkpoints, and passes them to `on_event` and to the log.

An event carries the report that the call returns. Log lines are made from the event, so the event,
the report and the log always agree.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.catalog.prune import PruneReport
    from penstock.core.reporting.reports import (
        Outcome,
        RestoreReport,
        SaveHandle,
        SaveReport,
        VerifyReport,
    )

log = logging.getLogger("penstock")


class _EventBase:
    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the event as JSON-ready data without live objects.

        Fields of the report are merged into those of the event. A tuple in a report becomes its
        length, and an error becomes its type and text. Of the mappings of a report, only `seconds`
        is kept; the others, such as the values of a restore, are left out.
        """
        data: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type] # each event is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, BaseException):
                value = f"{type(value).__name__}: {value}"
            if field.name == "report":
                data |= {} if value is None else _figures(value)
            else:
                data[field.name] = list(value) if isinstance(value, tuple) else value
        return data


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
        elif is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        found[field.name] = value
    return found


@dataclass(frozen=True, slots=True)
class SaveEvent(_EventBase):
    """An event of a save.

    Attributes:
        kind: `started`, `captured`, `committed`, `durable`, `failed` or `skipped`.
        step: The step of the save.
        report: The report, with `committed` and `durable`.
        error: The error, with `failed`.
    """

    kind: str
    step: int
    report: SaveReport | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RestoreEvent(_EventBase):
    """An event of a restore or a load.

    Attributes:
        kind: `restore_started`, `restore_done`, `restore_failed`, or the same kinds with `load`.
        step: The step of the checkpoint. With `on_damage="fallback"` each attempted checkpoint has
            its own `restore_started`.
        report: The report, with `restore_done` and `load_done`; the latter without `values`.
        error: The error, with `restore_failed` and `load_failed`.
    """

    kind: str
    step: int
    report: RestoreReport | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class VerifyEvent(_EventBase):
    """The end of a verification. `kind` is `verified`, with or without damage."""

    kind: str
    step: int
    report: VerifyReport


@dataclass(frozen=True, slots=True)
class DeleteEvent(_EventBase):
    """A deletion of checkpoints.

    Attributes:
        kind: `deleted`.
        steps: The deleted steps, ascending.
        why: `retention`, `rewind` or `delete`.
    """

    kind: str
    steps: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class PruneEvent(_EventBase):
    """The end of a prune, which deleted data that no checkpoint needs. `kind` is `pruned`."""

    kind: str
    report: PruneReport


Event = SaveEvent | RestoreEvent | VerifyEvent | DeleteEvent | PruneEvent


class EventStream:
    """Passes the events of a run to the log, then to `on_event`.

    Calls `on_event` on the thread where the event occurs. Logs exceptions of `on_event` as text,
    because a handler that keeps log records would otherwise keep the exception, its frames and
    their tensors.
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """Pass on one event."""
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
        """Pass on every event of a save, from its start."""
        # Without a listener, add no callbacks to the futures of a save.
        if self._on_event is None and not log.isEnabledFor(logging.DEBUG):
            return
        step = handle.step
        stream = _InOrder(self.emit)
        captured = SaveEvent("captured", step)

        def ended(kind: str, future: Outcome[Any]) -> None:
            error = future.peek_error()
            if error is None:
                # After `captured`, whose callback on another thread may run later.
                stream.add(captured, SaveEvent(kind, step, report=Future.result(future, 0)))
            elif kind == "durable":  # the same error is in all three futures: one event
                stream.add(SaveEvent("failed", step, error=error))

        self.emit(SaveEvent("started", step))
        handle.captured.add_done_callback(
            lambda _: stream.add(captured) if handle.captured.peek_error() is None else None
        )
        handle.committed.add_done_callback(lambda _: ended("committed", handle.committed))
        handle.durable.add_done_callback(lambda _: ended("durable", handle.durable))


class _InOrder:
    """Passes on each event of a save once, one at a time.

    The capture and the commit end on different threads. The first thread passes on the events of
    both, so that neither thread waits for a callback on the other.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._lock = threading.Lock()  # guards the fields below; not held during callbacks
        self._seen: set[str] = set()
        self._waiting: deque[SaveEvent] = deque()
        self._emitting = False

    def add(self, *events: SaveEvent) -> None:
        """Pass on the new events, and those that other threads add in the meantime."""
        with self._lock:
            self._waiting += [event for event in events if event.kind not in self._seen]
            self._seen.update(event.kind for event in events)
            if self._emitting:
                return
            self._emitting = True
        try:
            while (event := self._next()) is not None:
                self._emit(event)
        except BaseException:
            self._emitting = False
            raise

    def _next(self) -> SaveEvent | None:
        with self._lock:
            if not self._waiting:
                self._emitting = False
                return None
            return self._waiting.popleft()


_PAST = {"restore_done": "restored", "load_done": "loaded"}


def _log(event: Event) -> None:
    """Log one line for an event. The save thread itself logs the end of a save."""
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

"""Telling a caller what happens to his saves."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from penstock.core.reports import SaveEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.reports import Outcome, SaveHandle

log = logging.getLogger("penstock")


def announce(handle: SaveHandle, on_event: Callable[[SaveEvent], None]) -> None:
    """Call `on_event` with everything that happens to a save, from its start on."""
    step = handle.step

    def emit(event: SaveEvent) -> None:
        try:
            on_event(event)
        except Exception:
            log.exception("on_event raised at %s of step %d", event.kind, event.step)

    def tell(kind: str, future: Outcome[Any]) -> None:
        error = future.peek_error()
        if error is None:
            emit(SaveEvent(kind, step, Future.result(future, 0), None))
        elif kind == "durable":  # a failure is one event, not three
            emit(SaveEvent("failed", step, None, error))

    emit(SaveEvent("started", step, None, None))
    handle.captured.add_done_callback(lambda _: tell("captured", handle.captured))
    handle.committed.add_done_callback(lambda _: tell("committed", handle.committed))
    handle.durable.add_done_callback(lambda _: tell("durable", handle.durable))

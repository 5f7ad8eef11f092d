"""Spans and metrics of saves and restores for OpenTelemetry.

Only its API is needed: which SDK and exporter take them is the user's choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.integrations.events.figures import curves
from penstock.integrations.events.hosts import host
from penstock.integrations.events.sinks import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

_BEGINNINGS = {"started": "save", "restore_started": "restore", "load_started": "load"}
_ENDS = {
    "durable": "save",
    "failed": "save",
    "restore_done": "restore",
    "restore_failed": "restore",
    "load_done": "load",
    "load_failed": "load",
}
_ATTRIBUTES = ("uid", "engine", "objects", "bytes_raw", "bytes_stored", "bytes_read", "ranks")


class OpenTelemetrySink(Sink):
    """Makes a span of each save, restore and load, and metrics of their figures.

    The span of a save is from the call until the checkpoint is durable, or the save has failed. It
    has no parent: the thread that ends it is not the one that began it.
    """

    def __init__(self, *, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        """Choose the providers; default: the global ones.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        trace, metrics = host("opentelemetry.trace", "otel"), host("opentelemetry.metrics", "otel")
        self._tracer = trace.get_tracer("penstock", tracer_provider=tracer_provider)
        self._status = trace.Status
        self._error_code = trace.StatusCode.ERROR
        meter = metrics.get_meter("penstock", meter_provider=meter_provider)
        self._events = meter.create_counter("penstock.events", description="Events, by kind.")
        self._seconds = {
            what: meter.create_histogram(f"penstock.{what}.duration", unit="s")
            for what in ("save", "restore")
        }
        self._bytes = {
            name: meter.create_counter(f"penstock.{name.replace('/', '.')}", unit="By")
            for name in ("save/bytes_raw", "save/bytes_stored", "restore/bytes_read")
        }
        self._began_s: dict[tuple[str, int], float] = {}

    def write(self, event: Mapping[str, Any]) -> None:
        """Count an event, and end the span of what it ends."""
        kind = event["kind"]
        self._events.add(1, {"kind": kind})
        if kind in _BEGINNINGS:
            self._began_s[_BEGINNINGS[kind], event["step"]] = event["time"]
        elif kind in _ENDS:
            self._span(_ENDS[kind], event)
        for name, value in curves(event).items():
            what, _, figure = name.partition("/")
            if name in self._bytes:
                self._bytes[name].add(int(value))
            elif what in self._seconds and figure.endswith("_s"):
                self._seconds[what].record(value, {"phase": figure.removesuffix("_s")})

    def _span(self, what: str, event: Mapping[str, Any]) -> None:
        ended_s = event["time"]
        began_s = self._began_s.pop((what, event["step"]), ended_s)
        attributes = {f"penstock.{name}": event[name] for name in _ATTRIBUTES if name in event}
        attributes["penstock.step"] = event["step"]
        span = self._tracer.start_span(
            f"penstock.{what}", start_time=int(began_s * 1e9), attributes=attributes
        )
        if event.get("error"):
            span.set_status(self._status(self._error_code, event["error"]))
        span.end(end_time=int(ended_s * 1e9))

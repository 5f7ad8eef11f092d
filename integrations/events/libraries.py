"""Sinks for other libraries: TensorBoard, Weights & Biases, OpenTelemetry.

Each sink imports its library when it is made. OpenTelemetry needs only its API: the user chooses
the SDK and the exporter.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from penstock import ConfigError
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


def host(module: str, extra: str) -> Any:
    """Import a module of a sink's library.

    Raises:
        ConfigError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"{module} cannot be imported ({error}): pip install 'penstock[{extra}]'"
        raise ConfigError(msg) from error


def curves(event: Mapping[str, Any]) -> dict[str, float]:
    """Return an event's figures by name; empty if it has none.

    Times are seconds. The bytes of a save are the total of all ranks.
    """
    match event["kind"]:
        case "durable":
            total = event["total"]
            raw, stored = total["bytes_raw"], total["bytes_stored"]
            figures = {f"save/{phase}_s": seconds for phase, seconds in event["seconds"].items()}
            figures |= {"save/bytes_raw": raw, "save/bytes_stored": stored}
            return figures | ({"save/ratio": raw / stored} if stored else {})
        case "restore_done" | "load_done":
            figures = {f"restore/{phase}_s": seconds for phase, seconds in event["seconds"].items()}
            return figures | {"restore/bytes_read": event["bytes_read"]}
        case "verified":
            return {"verify/total_s": event["seconds"], "verify/damaged": event["damaged"]}
    return {}


class TensorBoardSink(Sink):
    """Writes scalars `penstock/...` by step, into its own event files.

    It does not use the training loop's writer, which may be in use on another thread.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        """Open the writer.

        Args:
            logdir: The folder, best beside the training's folder: `runs/tb/penstock`.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        module = host("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(os.fspath(logdir))

    def write(self, event: Mapping[str, Any]) -> None:
        """Write the figures of an event."""
        figures = curves(event)
        for name, value in figures.items():
            self._writer.add_scalar(f"penstock/{name}", value, event["step"], event["time"])
        if figures:
            self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


class WandbSink(Sink):
    """Logs `penstock/...` to a run of Weights & Biases, against the step metric `penstock/step`.

    A save becomes durable some training steps later, and W&B drops figures for a step below its own
    counter. So these figures have their own step metric. They are logged without a commit: W&B adds
    them to the row that the training loop commits next, and they never advance the counter of the
    loop's own `log(..., step=...)`.
    """

    def __init__(self, run: Any = None) -> None:
        """Choose the run.

        Args:
            run: The run that `wandb.init` returned; default: the active run.

        Raises:
            ConfigError: W&B is not installed, or no run is active.
        """
        active = host("wandb", "wandb").run if run is None else run
        if active is None:
            msg = "WandbSink: no run is active; call wandb.init first, or pass the run"
            raise ConfigError(msg)
        self._run = active
        self._run.define_metric("penstock/step", hidden=True)
        self._run.define_metric("penstock/*", step_metric="penstock/step")

    def write(self, event: Mapping[str, Any]) -> None:
        """Log the figures of an event."""
        figures = {f"penstock/{name}": value for name, value in curves(event).items()}
        if figures:
            self._run.log({**figures, "penstock/step": event["step"]}, commit=False)


class OpenTelemetrySink(Sink):
    """Makes a span of each save, restore and load, and metrics of their figures.

    A save's span lasts from the call until the checkpoint is durable or the save fails. It has no
    parent, because one thread begins it and another ends it.
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
        """Count an event, and make a span if it ends an operation."""
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

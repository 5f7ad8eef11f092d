"""Sinks that write text: a log, a file of JSON lines, and a file in Prometheus' text format.

The node exporter's textfile collector reads the Prometheus file, without a port or a library.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import ConfigError
from penstock.integrations.events.libraries import curves
from penstock.integrations.events.sinks import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

_FAMILIES = {
    "penstock_events_total": ("counter", "Events of checkpoints, by kind."),
    "penstock_last_durable_step": ("gauge", "The newest durable step."),
    "penstock_last_durable_timestamp_seconds": (
        "gauge",
        "When the newest durable step became durable.",
    ),
    "penstock_raw_bytes_total": ("counter", "Bytes of saved state, without codecs."),
    "penstock_stored_bytes_total": ("counter", "Bytes of blobs that saves wrote."),
    "penstock_read_bytes_total": ("counter", "Bytes of blobs that restores read."),
    "penstock_save_seconds": ("summary", "Seconds of durable saves, by phase."),
    "penstock_restore_seconds": ("summary", "Seconds of restores and loads, by phase."),
    "penstock_last_verify_damaged": ("gauge", "Damage that the last verification found."),
}
_TOTALS = {
    "save/bytes_raw": "penstock_raw_bytes_total",
    "save/bytes_stored": "penstock_stored_bytes_total",
    "restore/bytes_read": "penstock_read_bytes_total",
}


class LogSink(Sink):
    """Logs each event as one line of JSON, for collectors that read logs."""

    def __init__(self, logger: str = "penstock.events", level: int = logging.INFO) -> None:
        """Choose the logger and the level."""
        self._log = logging.getLogger(logger)
        self._level = level

    def write(self, event: Mapping[str, Any]) -> None:
        """Log an event."""
        self._log.log(self._level, "%s", json.dumps(event))


class JsonLinesSink(Sink):
    """Appends each event to a file as one line of JSON; `penstock report --events` reads it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Choose the file; its folder is created if needed.

        Raises:
            ConfigError: The file cannot be opened.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            msg = f"JsonLinesSink: {file} cannot be opened: {error.strerror or error}"
            raise ConfigError(msg) from error

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event; on return the line is in the file, but not necessarily on disk."""
        self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PrometheusSink(Sink):
    """Keeps a file of metrics up to date. Counters begin at zero with each process."""

    def __init__(
        self, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None
    ) -> None:
        """Choose the file.

        Args:
            path: The file, in an existing folder; the node exporter reads names that end in
                `.prom`. Each event replaces it by a rename, so no reader sees half of it.
            labels: Labels of every figure, such as `{"run": "gpt"}`.

        Raises:
            ConfigError: There is no such folder, or the name of a label is invalid.
        """
        self._path = Path(path)
        if not self._path.parent.is_dir():
            msg = f"PrometheusSink: there is no folder {self._path.parent}; make it first"
            raise ConfigError(msg)
        self._labels = dict(labels or {})
        for name in self._labels:
            if not (name.isascii() and name.isidentifier()) or name in {"kind", "phase"}:
                msg = f"PrometheusSink: {name!r} cannot be a label; use letters, digits and _"
                raise ConfigError(msg)
        self._figures: defaultdict[tuple[str, str], float] = defaultdict(float)

    def write(self, event: Mapping[str, Any]) -> None:
        """Count an event, and replace the file.

        Raises:
            OSError: The file cannot be written.
        """
        self._figures["penstock_events_total", self._shown(kind=event["kind"])] += 1
        if event["kind"] == "durable":
            self._set("penstock_last_durable_step", event["step"])
            self._set("penstock_last_durable_timestamp_seconds", event["time"])
        for name, value in curves(event).items():
            self._count(name, value)
        # Not `.prom`, so that no exporter reads it.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(self._text(), encoding="utf-8")
        temporary.replace(self._path)

    def _set(self, name: str, value: float) -> None:
        self._figures[name, self._shown()] = value

    def _count(self, name: str, value: float) -> None:
        what, _, figure = name.partition("/")
        if name == "verify/damaged":
            self._set("penstock_last_verify_damaged", value)
        elif name in _TOTALS:
            self._figures[_TOTALS[name], self._shown()] += value
        elif what in {"save", "restore"} and figure.endswith("_s"):
            labels = self._shown(phase=figure.removesuffix("_s"))
            self._figures[f"penstock_{what}_seconds_sum", labels] += value
            self._figures[f"penstock_{what}_seconds_count", labels] += 1

    def _shown(self, **more: str) -> str:
        labels = {**self._labels, **more}
        shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        return f"{{{shown}}}" if shown else ""

    def _text(self) -> str:
        lines = []
        for family, (kind, about) in _FAMILIES.items():
            names = {family, f"{family}_sum", f"{family}_count"}
            rows = [
                f"{name}{labels} {value!r}"
                for (name, labels), value in self._figures.items()
                if name in names
            ]
            if rows:
                lines += [f"# HELP {family} {about}", f"# TYPE {family} {kind}", *rows]
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

"""Events as lines of JSON, in the log or in a file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import ConfigError
from penstock.integrations.events.sinks import Sink

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


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
        """Choose the file; its folder is made if needed.

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
        """Append an event; the line is in the file when this returns, not necessarily on disk."""
        self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

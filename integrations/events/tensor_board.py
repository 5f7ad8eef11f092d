"""Curves of saves and restores for TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.integrations.events.figures import curves
from penstock.integrations.events.hosts import host
from penstock.integrations.events.sinks import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping


class TensorBoardSink(Sink):
    """Writes scalars `penstock/...` by step, into its own event files.

    The writer of the training loop is left alone: it may be in use on another thread.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        """Open the writer.

        Args:
            logdir: The folder, best one beside that of the training: `runs/tb/penstock`.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        module = host("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(os.fspath(logdir))

    def write(self, event: Mapping[str, Any]) -> None:
        """Write the figures of an event."""
        found = curves(event)
        for name, value in found.items():
            self._writer.add_scalar(f"penstock/{name}", value, event["step"], event["time"])
        if found:
            self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

"""Curves of saves and restores for Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import ConfigError
from penstock.integrations.events.figures import curves
from penstock.integrations.events.hosts import host
from penstock.integrations.events.sinks import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping


class WandbSink(Sink):
    """Logs `penstock/...` to a run of Weights & Biases, over the step metric `penstock/step`.

    A save becomes durable when training is some steps further, and W&B drops what is logged for an
    earlier step of its own counter. So figures have their own step metric. They are logged
    without a commit: they go into the row that the training loop commits next, and never advance
    the counter that the loop's own `log(..., step=...)` refers to.
    """

    def __init__(self, run: Any = None) -> None:
        """Choose the run.

        Args:
            run: The run that `wandb.init` returned; default: the one that is active.

        Raises:
            ConfigError: W&B is not installed, or no run is active.
        """
        found = host("wandb", "wandb").run if run is None else run
        if found is None:
            msg = "WandbSink: no run is active; call wandb.init first, or pass the run"
            raise ConfigError(msg)
        self._run = found
        self._run.define_metric("penstock/step", hidden=True)
        self._run.define_metric("penstock/*", step_metric="penstock/step")

    def write(self, event: Mapping[str, Any]) -> None:
        """Log the figures of an event."""
        found = {f"penstock/{name}": value for name, value in curves(event).items()}
        if found:
            self._run.log({**found, "penstock/step": event["step"]}, commit=False)

"""Options of `tiered`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from penstock.core.abc import PluginConfig, SizeBytes

Place: TypeAlias = str | dict[str, Any]


class TieredConfig(PluginConfig):
    """A fast place that saves go to, and a durable place to which they are copied.

    Attributes:
        fast: The path, URL or table of any backend, even of another `tiered`.
        durable: The same for the durable place.
        durable_means: The place that has to have the whole checkpoint for `handle.durable`.
        drain_every: Copies every N-th save; 0 copies none, but saves that find no room in
            `fast` still go to `durable`.
        drain_bytes_per_s: The most bytes to copy per second; None sets no limit.
        drain_in: Where copies run: on a `thread` of the trainer, or in a `process` of its own,
            which slows training less; `auto` takes a process for checkpoints of 64 MiB and more.
        keep_fast: The number of checkpoints that stay in `fast` once `durable` has them too; None
            keeps as many as there is room for.
        on_full: The end of a save that finds no room in `fast`, even after eviction, while
            `durable` does not answer: `skip` the save, `block` training until one of the places
            has room, or `raise` StorageFullError.
        roots: Whether to `check` that each place is the one that the others were used with, or to
            `accept` the places as they are, and record them, once.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    fast: Place = Field(repr=False)  # may hold credentials
    durable: Place = Field(repr=False)
    durable_means: Literal["fast", "durable"] = "durable"
    drain_every: int = Field(default=1, ge=0)
    drain_bytes_per_s: SizeBytes | None = Field(default=None, gt=0)
    drain_in: Literal["auto", "process", "thread"] = "auto"
    keep_fast: int | None = Field(default=None, ge=0)
    on_full: Literal["block", "skip", "raise"] = "skip"
    roots: Literal["check", "accept"] = "check"

"""Options of `tiered`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from penstock.core.abc import PluginConfig, SizeBytes

Place: TypeAlias = str | dict[str, Any]


class TieredConfig(PluginConfig):
    """A fast place that saves go to, and a durable one to which they are copied.

    Attributes:
        fast: Path, URL or table of any backend; another `tiered` too.
        durable: Likewise.
        durable_means: In which of the two a checkpoint has to be whole for `handle.durable`.
        drain_every: Every how many saves is copied; 0: none, but those that have no room in `fast`.
        drain_bytes_per_s: Most that is copied per second; None: as fast as it goes.
        drain_in: Who copies: a `thread` of the trainer, or a `process` of its own, which training
            notices less; `auto`: the latter, for checkpoints of 64 MiB and more.
        keep_fast: How many checkpoints stay in `fast` once `durable` has them too; None: as many
            as there is room for.
        on_full: What a save does for which `fast` has no room, though all was evicted that
            `durable` has, and while `durable` does not answer: `skip` itself, `block` training
            until one of them changes, or `raise` StorageFullError.
        roots: `check` that each place is the one that the others were used with; `accept` it
            whatever they say, and note that, for once.
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

"""`penstock drain`."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.core.bars import ProgressBar
from penstock.core.cli.render import print_json, print_line, visible
from penstock.core.draining import Drains
from penstock.core.errors import ConfigError
from penstock.core.opening import open_backend
from penstock.core.prune import GRACE_S
from penstock.core.reports import Progress
from penstock.core.sizes import size_text
from penstock.core.tiers import pending
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from penstock.core.drain_state import DrainState

_POLL_S = 0.2


def run(url: str, *, timeout_s: float | None, as_json: bool) -> bool:
    """Copy to slower tiers what was left to be copied.

    Returns:
        Whether nothing is left.

    Raises:
        PenstockError: The run cannot be looked at.
    """
    with closing(open_backend(url, must_exist=True)) as backend:
        if not backend.tiers:
            msg = (
                f"{backend.url} is one place; `drain` copies from tier to tier: give it "
                "tiered://?fast=...&durable=..., or the configuration file of the run"
            )
            raise ConfigError(msg)
        tiers = backend.tiers[:-1]
        total = sum(r.bytes_stored for tier in tiers for r in pending(tier.backend))
        began = time.monotonic()
        with closing(Workers(min(4, os.cpu_count() or 1))) as workers:
            drains = Drains(backend.tiers, workers=workers, grace_s=GRACE_S)
            try:
                found = drains.resume()
                _watch(drains, total, began, timeout_s)
            finally:
                states = drains.states()
                drains.close()
        left = [r.step for tier in tiers for r in pending(tier.backend)]
        _print(
            {
                "url": backend.url,
                "found": found,
                "left": left,
                "bytes": total,
                "seconds": time.monotonic() - began,
                "links": [asdict(state) for state in states],
            },
            states,
            as_json=as_json,
        )
        return not left


def _watch(drains: Drains, total: int, began: float, timeout_s: float | None) -> None:
    bar = ProgressBar("drain", transient=True)
    try:
        while not drains.settle(_POLL_S):
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                return
            bar(Progress(sum(state.bytes_moved for state in drains.states()), total, "copy"))
    finally:
        bar.close()


def _print(found: dict[str, Any], states: list[DrainState], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for state in states:
        for step, why in state.lost.items():
            print_line(
                f"step {step} cannot be copied to {state.target}: {visible(why)}", style="red"
            )
        if state.error:
            print_line(f"{state.source} to {state.target}: {visible(state.error)}", style="red")
    done = found["found"] - len(found["left"])
    if not found["found"] and not found["left"]:
        print_line("nothing was left to copy")
        return
    print_line(f"copied {done} checkpoint(s), {size_text(found['bytes'])}")
    if found["left"]:
        steps = ", ".join(map(str, found["left"]))
        print_line(f"still to be copied: steps {steps}; the same command goes on", style="yellow")

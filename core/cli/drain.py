"""`penstock drain`."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.core.bars import ProgressBar
from penstock.core.cli.render import print_json, print_line, visible
from penstock.core.draining import Drains
from penstock.core.errors import ConfigError
from penstock.core.manifest import commit_name
from penstock.core.opening import open_backend
from penstock.core.prune import GRACE_S
from penstock.core.reports import Progress
from penstock.core.sizes import size_text
from penstock.core.survey import uids_named
from penstock.core.tiers import pending
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.drain_state import DrainState
    from penstock.core.manifest import CommitRecord

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
        before = _waiting(backend)
        total = sum(record.bytes_stored for record in before)
        began = time.monotonic()
        with closing(Workers(min(4, os.cpu_count() or 1))) as workers:
            drains = Drains(backend.tiers, workers=workers, grace_s=GRACE_S)
            try:
                found = drains.resume()
                _watch(drains, total, began, timeout_s)
            finally:
                states = drains.states()
                drains.close()
        left = _waiting(backend)
        if as_json:
            print_json(
                {
                    "url": backend.url,
                    "found": found,
                    "left": [record.step for record in left],
                    "bytes": total,
                    "seconds": time.monotonic() - began,
                    "links": [asdict(state) for state in states],
                }
            )
        else:
            _print(before, left, states, _in_the_way(backend.tiers))
        return not left


def _waiting(backend: Backend) -> list[CommitRecord]:
    """What has yet to be copied from any tier."""
    return [record for tier in backend.tiers[:-1] for record in pending(tier.backend)]


def _in_the_way(tiers: Sequence[Tier]) -> dict[int, tuple[str, str]]:
    """Of steps that wait in a tier though the next one has another save of them, both tiers."""
    found = {}
    for tier, following in pairwise(tiers):
        for record in pending(tier.backend):
            name = commit_name(record.step, record.generation)
            uid = uids_named(following.backend, [name]).get(name)
            if uid not in {None, record.uid}:
                found[record.step] = tier.name, following.name
    return found


def _watch(drains: Drains, total: int, began: float, timeout_s: float | None) -> None:
    bar = ProgressBar("drain", transient=True)
    try:
        while not drains.settle(_POLL_S):
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                return
            bar(Progress(sum(state.bytes_moved for state in drains.states()), total, "copy"))
    finally:
        bar.close()


def _print(
    before: Sequence[CommitRecord],
    left: Sequence[CommitRecord],
    states: Sequence[DrainState],
    in_the_way: Mapping[int, tuple[str, str]],
) -> None:
    for state in states:
        for step, why in state.lost.items():
            print_line(
                f"step {step} cannot be copied to {state.target}: {visible(why)}", style="red"
            )
        if state.error:
            print_line(f"{state.source} to {state.target}: {visible(state.error)}", style="red")
    if not before and not left:
        print_line("nothing was left to copy")
        return
    uids = {record.uid for record in left}
    done = {record.uid: record.bytes_stored for record in before if record.uid not in uids}
    if done:
        print_line(f"copied {len(done)} checkpoint(s), {size_text(sum(done.values()))}")
    for step, (here, there) in in_the_way.items():
        print_line(
            f"step {step} is another checkpoint in tier {there}: `penstock delete URL {step}` with "
            f"`--tier {here}` gives up the one that waits, with `--tier {there}` the other one, "
            "and `penstock drain` then copies this one",
            style="yellow",
        )
    lost = {step for state in states for step in state.lost}
    for steps, what in (
        (sorted({r.step for r in left if r.step not in lost}), "; the same command goes on"),
        (sorted({r.step for r in left if r.step in lost}), ", once the cause is removed"),
    ):
        if steps:
            print_line(
                f"still to be copied: steps {', '.join(map(str, steps))}{what}", style="yellow"
            )

"""`penstock drain`."""

from __future__ import annotations

import logging
import os
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.core.bars import ProgressBar
from penstock.core.cli.app import debugging
from penstock.core.cli.deadline import Deadline
from penstock.core.cli.render import print_json, print_line, visible
from penstock.core.draining import Drains
from penstock.core.errors import ConfigError, StorageError, StorageTimeoutError
from penstock.core.manifest import commit_name
from penstock.core.opening import open_backend
from penstock.core.prune import GRACE_S
from penstock.core.reports import Progress
from penstock.core.sizes import size_text
from penstock.core.survey import uids_named
from penstock.core.tiers import pending
from penstock.core.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.drain_state import DrainState
    from penstock.core.manifest import CommitRecord

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it.

    Attributes:
        url: Of the run.
        found: How many checkpoints were queued.
        before: What was to be copied.
        left: What still is, as far as is known.
        states: Of each link.
        in_the_way: Of steps of which the next tier has another save, both tiers.
        silent: Why tiers do not answer, by name: what is left there is not known.
        stuck: Whether a copy did not come to its end when the time was over.
        seconds: How long it took.
    """

    url: str
    found: int
    before: Sequence[CommitRecord]
    left: Sequence[CommitRecord]
    states: Sequence[DrainState]
    in_the_way: Mapping[int, tuple[str, str]]
    silent: Mapping[str, str]
    stuck: bool
    seconds: float


def run(url: str, *, timeout_s: float | None, as_json: bool) -> bool:
    """Copy to slower tiers what was left to be copied.

    Args:
        url: Of the run.
        timeout_s: Stop after so long, also where a tier hangs: it is left behind.
        as_json: For programs.

    Returns:
        Whether nothing is left, as far as every tier has said.

    Raises:
        PenstockError: The run cannot be looked at.
    """
    with closing(Workers(min(4, os.cpu_count() or 1))) as workers:
        deadline = Deadline(workers, timeout_s)
        backend = deadline.ask("opening the tiers", lambda: open_backend(url, must_exist=True))
        try:
            if not backend.tiers:
                msg = (
                    f"{backend.url} is one place; `drain` copies from tier to tier: give it "
                    "tiered://?fast=...&durable=..., or the configuration file of the run"
                )
                raise ConfigError(msg)
            outcome = _drain(backend, workers, deadline)
        finally:
            with suppress(StorageTimeoutError):
                deadline.ask("closing", backend.close, ending=True)
    if as_json:
        _print_json(outcome)
    else:
        _print(outcome)
    return not (outcome.left or outcome.silent or outcome.stuck)


def _drain(backend: Backend, workers: Workers, deadline: Deadline) -> Outcome:
    silent: dict[str, str] = {}
    before = _waiting(backend, deadline, silent)
    drains = Drains(backend.tiers, workers=workers, grace_s=GRACE_S)
    found, stuck = 0, False
    with _said_here():
        try:
            with suppress(StorageTimeoutError):
                found = deadline.ask("looking what is left", drains.resume)
            _watch(drains, sum(record.bytes_stored for record in before), deadline)
        finally:
            states = drains.states()
            try:
                deadline.ask("ending what is under way", drains.close, ending=True)
            except StorageTimeoutError:
                stuck = True
    steps = {step for state in states for step in (*state.unfinished(), *state.lost)}
    left = [record for record in before if record.step in steps]  # if nobody says more
    in_the_way: dict[int, tuple[str, str]] = {}
    if not stuck:
        known = silent.copy()
        looked = _waiting(backend, deadline, known, ending=True)
        left = looked if known == silent else left
        silent = known
        with suppress(StorageError):
            in_the_way = deadline.ask(
                "asking the next tier", lambda: _in_the_way(backend.tiers), ending=True
            )
    return Outcome(
        url=backend.url,
        found=found,
        before=before,
        left=left,
        states=states,
        in_the_way=in_the_way,
        silent=silent,
        stuck=stuck,
        seconds=deadline.taken_s(),
    )


@contextmanager
def _said_here() -> Iterator[None]:
    """What the log says of copies is printed in the end: nobody needs it twice."""
    logger = logging.getLogger("penstock")
    level = logger.level
    if not debugging.wanted:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _waiting(
    backend: Backend, deadline: Deadline, silent: dict[str, str], *, ending: bool = False
) -> list[CommitRecord]:
    """What has yet to be copied from any tier that answers; why others do not goes to `silent`."""
    found: list[CommitRecord] = []
    for tier in backend.tiers[:-1]:
        if tier.name in silent:
            continue
        try:
            found += deadline.ask(
                f"asking {tier.backend.url}", partial(pending, tier.backend), ending=ending
            )
        except StorageError as error:
            silent[tier.name] = str(error)
    return found


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


def _watch(drains: Drains, total: int, deadline: Deadline) -> None:
    bar = ProgressBar("drain", transient=True)
    try:
        while not drains.settle(_POLL_S):
            if deadline.is_over():
                return
            bar(Progress(sum(state.bytes_moved for state in drains.states()), total, "copy"))
    finally:
        bar.close()


def _print_json(outcome: Outcome) -> None:
    print_json(
        {
            "url": outcome.url,
            "found": outcome.found,
            "left": [record.step for record in outcome.left],
            "bytes": sum(record.bytes_stored for record in outcome.before),
            "seconds": outcome.seconds,
            "links": [asdict(state) for state in outcome.states],
            "silent": dict(outcome.silent),
        }
    )


def _print(outcome: Outcome) -> None:
    _print_failures(outcome)
    before, left, states = outcome.before, outcome.left, outcome.states
    if not before and not left:
        if not outcome.silent:
            print_line("nothing was left to copy")
        return
    uids = {record.uid for record in left}
    done = {record.uid: record.bytes_stored for record in before if record.uid not in uids}
    if done:
        print_line(f"copied {len(done)} checkpoint(s), {size_text(sum(done.values()))}")
    for step, (here, there) in outcome.in_the_way.items():
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


def _print_failures(outcome: Outcome) -> None:
    for state in outcome.states:
        for step, why in state.lost.items():
            print_line(
                f"step {step} cannot be copied to {state.target}: {visible(why)}", style="red"
            )
        if state.error:
            print_line(f"{state.source} to {state.target}: {visible(state.error)}", style="red")
        if state.step is not None:
            done = f"{size_text(state.bytes_done)} of {size_text(state.bytes_total)}"
            hangs = f"; does tier {state.source} hang, or {state.target}?" if outcome.stuck else ""
            print_line(f"step {state.step} was on its way to tier {state.target}: {done}{hangs}")
    for name, why in outcome.silent.items():
        print_line(
            f"tier {name} does not answer, so what is left there is not known: {visible(why)}",
            style="red",
        )

"""The `penstock drain` command."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.core.catalog.prune import GRACE_S
from penstock.core.cli.app import AsGiven, Json, backend_of, command, errors, time_of
from penstock.core.cli.job import joined
from penstock.core.cli.output.render import print_json, print_line
from penstock.core.cli.output.runs_on_disk import quiet, tiers_quiet
from penstock.core.cli.output.shares import hosts_seen
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline, call_with_deadline
from penstock.core.concurrency.workers import Workers, default_workers
from penstock.core.errors import ConfigError, StorageError, StorageTimeoutError
from penstock.core.reporting.progress import ProgressBar
from penstock.core.reporting.reports import Progress
from penstock.core.storage.open import open_backend
from penstock.core.tiers.drains import Drains
from penstock.core.tiers.losses import left_log
from penstock.core.tiers.whereabouts import in_the_way, pending
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.link import DrainState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DrainOutcome:
    """The result of a drain.

    Attributes:
        url: The URL of the run.
        found: The number of checkpoints that were queued.
        before: The checkpoints that were pending at the beginning.
        left: The checkpoints that are still pending, as far as known.
        states: The state of each link between two tiers.
        in_the_way: By pending step, the names of the tier that has it, and of the next tier, which
            has a different save of that step.
        silent: By tier, the reason why it could not be read or compared with the other tiers.
        stuck: Whether a copy was still in flight when the command gave up.
        seconds: The duration of the command.
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


class CommandDeadline(Deadline):
    """Limits the time of the command (`--timeout`), even if a store hangs."""

    def ask(self, what: str, call: Callable[[], T], *, ending: bool = False) -> T:
        """Return the result of `call` if it ends before the deadline.

        Args:
            what: Names the call in error messages.
            call: The call, made in its own thread if there is a limit.
            ending: Whether to allow `Timing.command_end_s` more, for cleanup after the deadline.

        Raises:
            StorageTimeoutError: The deadline passed first; the thread of `call` keeps running.
        """
        if self.limit_s == math.inf:
            return call()

        def late() -> StorageTimeoutError:
            msg = f"{what} did not end within the {self.limit_s:g} s of --timeout"
            return StorageTimeoutError(msg)

        timing = current_timing()
        extra_s = timing.command_end_s if ending else 0.0
        left = Deadline(max(0.0, self.limit_s + extra_s - self.taken_s()), timing.clock)
        return call_with_deadline("ask", call, left, late, timing=timing, patience_s=0.0)


@command("drain")
def drain(
    url: AsGiven,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=time_of, help="Stop after this time: 90s, 30min."),
    ] = None,
    as_json: Json = False,
) -> bool:
    r"""Copy the pending checkpoints in a run's faster tiers to slower ones.

    A process that saves to the run does this in the background; use the command if no such process
    will run. Leaves out checkpoints that such a process is copying. Exits with 1 if a checkpoint is
    still pending, or if a tier could not be checked. If the fast tier is `hosts`, run it under
    torchrun on all of them.

    Examples:
      penstock drain penstock.toml
      penstock drain \
        'tiered://?fast=/nvme/run&durable=/lustre/run'
    """
    with tiers_quiet(), closing(Workers(default_workers())) as workers:
        deadline = CommandDeadline(timeout, workers.timing.clock)
        backend = deadline.ask(
            "opening the tiers", lambda: open_backend(backend_of(url), must_exist=True)
        )
        try:  # not `closing`: a tier that hangs would hang the command in its `close`
            if not backend.tiers:
                msg = (
                    f"{backend.url} has no tiers to copy between: give `drain` "
                    "tiered://?fast=...&durable=..., or the configuration file of the run"
                )
                raise ConfigError(msg)
            with joined(url, backend):
                seen = hosts_seen(backend)
                if seen is not None and seen.absent and len(seen.shown) == 1:
                    raise StorageError(seen.note())
                outcome = _drain(backend, workers, deadline)
        finally:
            with suppress(StorageTimeoutError):
                deadline.ask("closing", backend.close, ending=True)
    if as_json:
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
    else:
        _print(outcome)
    # A tier that does not answer, or an empty folder in its place, shows no pending checkpoint, so
    # an empty `left` means success only if every tier was read.
    return not (outcome.left or outcome.silent or outcome.stuck)


def _drain(backend: Backend, workers: Workers, deadline: CommandDeadline) -> DrainOutcome:
    silent: dict[str, str] = {}
    before = _waiting(backend, deadline, silent)
    drains = Drains(backend.tiers, workers=workers, grace_s=GRACE_S)
    found, stuck = 0, False
    away = {backend.tiers[-1].name: "there was no time to compare it with the other tiers"}
    with ExitStack() as stack:
        if not errors.debug:  # the command prints the same at the end
            stack.enter_context(quiet("penstock", logging.CRITICAL))
            stack.enter_context(quiet(left_log.name, logging.WARNING))  # what is never copied
        try:
            with suppress(StorageTimeoutError):
                found = deadline.ask("looking for pending copies", drains.resume)
                # Finds checkpoints that are marked as copied but that the next tier has lost. Runs
                # after the first copies are queued, since reading every tier may take long.
                marked, away = deadline.ask("comparing the tiers", drains.reconcile)
                before += marked
                found += deadline.ask("looking for pending copies", drains.resume)
            _watch(drains, sum(record.bytes_needed for record in before), deadline)
        finally:
            states = drains.states()
            try:
                deadline.ask("ending the copy in flight", drains.close, ending=True)
            except StorageTimeoutError:
                stuck = True
    steps = {step for state in states for step in (*state.unfinished(), *state.lost)}
    left = [record for record in before if record.step in steps]  # used if tiers do not answer
    in_the_way: dict[int, tuple[str, str]] = {}
    if not stuck:
        known = silent.copy()
        looked = _waiting(backend, deadline, known, ending=True)
        # A tier that fell silent meanwhile lists nothing, which does not mean that nothing is left.
        left = looked if known == silent else left
        silent = known | away
        with suppress(StorageError):
            in_the_way = deadline.ask(
                "asking the next tier", lambda: _in_the_way(backend.tiers), ending=True
            )
    return DrainOutcome(
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


def _waiting(
    backend: Backend, deadline: CommandDeadline, silent: dict[str, str], *, ending: bool = False
) -> list[CommitRecord]:
    """Return the pending checkpoints of tiers that answer; add the other tiers to `silent`."""
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
    """Return `DrainOutcome.in_the_way`."""
    found = {}
    for tier, following in pairwise(tiers):
        for record in pending(tier.backend):
            if in_the_way(tier.backend, following.backend, record) is not None:
                found[record.step] = tier.name, following.name
    return found


def _watch(drains: Drains, total: int, deadline: CommandDeadline) -> None:
    with closing(ProgressBar("drain", transient=True)) as bar:
        # By polling, not by one long wait: the bar has to move, and the deadline has to hold.
        while not drains.settle(current_timing().progress_interval_s):
            if deadline.is_over():
                return
            bar(Progress(sum(state.bytes_moved for state in drains.states()), total, "copy"))


def _print(outcome: DrainOutcome) -> None:
    _print_failures(outcome)
    before, left, states = outcome.before, outcome.left, outcome.states
    if not before and not left:
        if not outcome.silent:
            print_line("nothing was left to copy")
        return
    uids = {record.uid for record in left}
    done = {record.uid: record.bytes_stored for record in before if record.uid not in uids}
    if done:
        print_line(f"copied {counted(len(done), 'checkpoint')}, {size_text(sum(done.values()))}")
    for step, (here, there) in outcome.in_the_way.items():
        print_line(
            f"step {step} is a different checkpoint in tier {there}: `penstock delete URL {step} "
            f"--tier {here}` deletes the waiting one; `--tier {there}` deletes the other one, "
            "and `penstock drain` then copies the waiting one",
            style="yellow",
        )
    lost = {step for state in states for step in state.lost}
    for steps, what in (
        (
            sorted({r.step for r in left if r.step not in lost}),
            "; run the command again to continue",
        ),
        (sorted({r.step for r in left if r.step in lost}), "; remove the reported cause first"),
    ):
        if steps:
            print_line(
                f"still to be copied: steps {', '.join(map(str, steps))}{what}", style="yellow"
            )


def _print_failures(outcome: DrainOutcome) -> None:
    for state in outcome.states:
        for step, why in state.lost.items():
            print_line(f"step {step} cannot be copied to {state.target}: {why}", style="red")
        if state.error:
            print_line(f"{state.source} to {state.target}: {state.error}", style="red")
        if state.step is not None:
            done = f"{size_text(state.bytes_done)} of {size_text(state.bytes_total)}"
            hangs = f"; does tier {state.source} hang, or {state.target}?" if outcome.stuck else ""
            print_line(f"step {state.step} was on its way to tier {state.target}: {done}{hangs}")
    for name, why in outcome.silent.items():
        print_line(
            f"tier {name} could not be checked, so more may be left to copy: {why}",
            style="red",
        )

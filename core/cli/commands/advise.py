"""The command `penstock advise`: how often a run should save, from what it has stored.

Tested in `tests/core/cli/test_advise.py`.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.catalog.survey import places_of
from penstock.core.cli.app import AsGiven, Json, backend_of, command, is_configuration, time_of
from penstock.core.cli.commands.ls import created_s, list_places
from penstock.core.cli.commands.report import SaveTimes, commit_seconds, read_events
from penstock.core.cli.output.render import Column, print_json, print_line, print_table
from penstock.core.cli.output.runs_on_disk import tiers_quiet
from penstock.core.config.explain import validated
from penstock.core.config.model import Schedule, load_config
from penstock.core.errors import ConfigError
from penstock.core.schedule.interval import Measured, interval_of
from penstock.core.storage.open import open_backend
from penstock.core.units import counted, duration_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.reporting.reports import SaveInterval

_NEWEST = 9
"""The number of newest saves whose times count: older ones may be of another store or state."""


@dataclass(frozen=True, slots=True)
class Input:
    """A time that the advice rests on, and its origin: measured, given or assumed."""

    seconds: float
    origin: str


@command("advise")
def advise(
    url: AsGiven,
    *,
    mtbf: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=time_of, help="Mean time between failures: 3h."),
    ] = None,
    overhead: Annotated[
        float | None,
        typer.Option(
            help="Largest share of training time that saves may cost; default: the "
            "configuration's, or 0.01."
        ),
    ] = None,
    step_s: Annotated[float | None, typer.Option(min=0, help="Seconds of a step.")] = None,
    blocked_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds for which a save blocks training.")
    ] = None,
    log_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for which logging a step blocks training."),
    ] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Save events from a JsonLinesSink; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute how often a run should save, and what a crash then loses.

    The rule is that of `schedule.every = "auto"` in a training run. The times come from the
    checkpoints of the run and from --events; a time given as an option replaces them.

    Examples:
      penstock advise runs/gpt --mtbf 3h --blocked-s 0.04
      penstock advise runs/gpt --events events.jsonl
    """
    schedule = load_config(url).schedule if is_configuration(url) else Schedule()
    options = {"overhead": overhead, "mtbf_s": mtbf}
    options = {key: value for key, value in options.items() if value is not None}
    schedule = validated(
        Schedule, {**schedule.model_dump(), **options, "every": "auto"}, what="the options"
    )
    shown, inputs = _inputs(backend_of(url), events or [])
    given = {"step_s": step_s, "blocked_s": blocked_s, "log_s": log_s}
    inputs |= {key: Input(value, "given") for key, value in given.items() if value is not None}
    inputs.setdefault("log_s", Input(0.0, "assumed"))
    for key, what in (("step_s", "a step takes"), ("blocked_s", "a save blocks training")):
        if key not in inputs:
            option = f"--{key.replace('_', '-')}"
            msg = f"{shown} does not show how long {what}: give {option} SECONDS, or --events FILE"
            raise ConfigError(msg)
    inputs.setdefault("duration_s", replace(inputs["blocked_s"], origin="assumed"))
    measured = Measured(
        **{key: inputs[key].seconds for key in ("step_s", "blocked_s", "duration_s")}
    )
    plans = {
        "saves": interval_of(measured, schedule),
        "saves and a log": interval_of(replace(measured, log_s=inputs["log_s"].seconds), schedule),
    }
    if as_json:
        found = {"url": shown, "overhead": schedule.overhead, "mtbf_s": schedule.mtbf_s}
        found |= {"inputs": {key: asdict(value) for key, value in inputs.items()}}
        print_json(found | {"plans": [{"what": k, **asdict(v)} for k, v in plans.items()]})
        return
    print_table(_COLUMNS, list(plans.items()))
    for key, text in _TEXTS.items():
        origin = inputs[key].origin
        print_line(f"{text} {duration_text(inputs[key].seconds)}: {origin}")
    if schedule.mtbf_s is None:
        print_line(
            "these are the shortest intervals that the overhead and the time of a save allow; pass "
            "--mtbf to fit them to the failures of the job"
        )


def _lost(steps: float) -> str:
    return "at most 1 step" if steps <= 1 else f"{steps:.3g} steps"


_TEXTS = {
    "step_s": "a step takes",
    "blocked_s": "a save blocks training for",
    "duration_s": "a save is durable after",
    "log_s": "logging a step blocks training for",
}

_COLUMNS: tuple[Column[tuple[str, SaveInterval]], ...] = (
    Column("WITH", lambda plan: plan[0]),
    Column(
        "SAVE EVERY",
        lambda plan: f"{counted(plan[1].steps, 'step')} ({duration_text(plan[1].seconds)})",
    ),
    Column("OVERHEAD", lambda plan: f"{100 * plan[1].overhead:.2g}%", right=True),
    Column(
        "A CRASH LOSES",
        lambda plan: f"{_lost(plan[1].lost_steps)} ({duration_text(plan[1].lost_seconds)})",
    ),
    Column("BECAUSE OF", lambda plan: plan[1].why, flexible=True),
)


def _inputs(url: str, events: Sequence[str]) -> tuple[str, dict[str, Input]]:
    """Return the URL of a run, and the times found in it and in its events."""
    reported, _ = read_events(events)
    newest = list(reported.values())[-_NEWEST:]
    with tiers_quiet(), closing(open_backend(url, must_exist=True, light=True)) as backend:
        listed, *_ = list_places(backend)
        records = [one.record for one in listed if one.record is not None]
        found = _of_events(newest)
        if "duration_s" not in found:
            with_record = [one for one in listed if one.record is not None]
            took = list(commit_seconds(places_of(backend), with_record[-_NEWEST:]).values())
            if took:
                text = f"median of {counted(len(took), 'save')}, in whole seconds"
                found["duration_s"] = Input(max(1.0, statistics.median(took)), text)
        gaps = [
            (created_s(after) - created_s(before)) / (after.step - before.step)
            for before, after in pairwise(records)
            if created_s(after) > created_s(before)
        ]
        if gaps and "step_s" not in found:
            text = f"median of {counted(len(gaps), 'gap')} between checkpoints"
            found["step_s"] = Input(statistics.median(gaps), text)
        return backend.url, found


def _of_events(newest: Sequence[SaveTimes]) -> dict[str, Input]:
    if not newest:
        return {}
    text = f"median of {counted(len(newest), 'event')}"
    found = {
        "blocked_s": Input(statistics.median(one.blocked_s for one in newest), text),
        "duration_s": Input(statistics.median(one.total_s for one in newest), text),
    }
    steps = [one.step_s for one in newest if one.step_s is not None]
    if steps:
        found["step_s"] = Input(statistics.median(steps), text)
    return found

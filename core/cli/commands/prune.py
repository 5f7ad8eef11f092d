"""The `penstock prune` command."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.prune import GRACE_S
from penstock.core.catalog.survey import survey_run, uids_named
from penstock.core.cli.app import DryRun, Json, Url, Yes, command
from penstock.core.cli.commands.delete import data_bytes
from penstock.core.cli.output.render import print_json, print_line, visible
from penstock.core.cli.prompt import ask
from penstock.core.plugins.registry import default_registry
from penstock.core.restore.inspector import Inspector
from penstock.core.storage.open import open_backend
from penstock.core.units import SECONDS, counted, seconds_of, size_text

if TYPE_CHECKING:
    from penstock.core.abc import Backend
    from penstock.core.catalog.prune import PruneReport


@command(
    "prune",
    epilog="""\b
Examples:
  penstock prune runs/gpt --dry-run
  penstock prune runs/gpt
  penstock prune runs/gpt --grace 1h
""",
)
def prune(
    url: Url,
    *,
    dry_run: DryRun = False,
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="Leave alone what is younger: 90s, 30min, 24h, 2d. Less than 24h asks first.",
        ),
    ] = "24h",
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also what may lack only its commit record: data of a run without any, and of "
            "saves that broke off right before theirs.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> bool:
    """Delete the data that crashed saves left behind, and say how much was freed.

    Checkpoints are never touched. While any commit record is unreadable nothing is deleted, since
    that checkpoint may need anything, nor where there is none at all, since the run may have been
    copied data first: then the exit code is 1.
    """
    try:
        grace_s = seconds_of(grace)
    except ValueError as error:
        msg = f"--grace: {error}"
        raise typer.BadParameter(msg) from None
    with closing(open_backend(url, must_exist=True, light=True)) as backend:
        catalog = Catalog(backend, look=Inspector(default_registry()).is_whole)
        report = catalog.prune(grace_s=grace_s, dry_run=True, everything=everything)
        # The report counts no bytes of overwritten generations, whose records go as well: they are
        # measured here, before and after.
        replaced = {uid for uid in uids_named(backend, report.superseded).values() if uid}
        before = data_bytes(backend, replaced)
        superseded_bytes = before
        if not dry_run and not report.refused:
            _ask(backend, report, grace_s, everything=everything, yes=yes)
            report = catalog.prune(grace_s=grace_s, everything=everything)
            superseded_bytes = before - data_bytes(backend, replaced)
        survey = survey_run(backend)
        told = {*report.uids, *report.unrecorded}
        young = sorted(survey.data.keys() - survey.needed - told)
        found = {
            "url": backend.url,
            "grace_s": grace_s,
            **asdict(report),
            "superseded_bytes": superseded_bytes,
            "younger": young,
            "younger_bytes": data_bytes(backend, young),
        }
    if as_json:
        print_json(found)
        return not report.refused
    _print(report, superseded_bytes, grace_s)
    if young and not report.refused:
        size = size_text(found["younger_bytes"])
        print_line(
            f"left alone, since a save may be under way: {counted(len(young), 'attempt')} younger "
            f"than {_time_text(grace_s)} ({size})"
        )
    return not report.refused


def _ask(
    backend: Backend, report: PruneReport, grace_s: float, *, everything: bool, yes: bool
) -> None:
    if not report.uids:
        return
    if everything:
        attempts = counted(len(report.uids), "attempt")
        question = (
            f"The data of {attempts} goes, although commit records may be still to come if the run "
            f"was copied. Prune {visible(backend.url)}"
        )
        ask(question, yes=yes)
    elif grace_s < GRACE_S:
        question = (
            f"A save under way that has not written for {_time_text(grace_s)} would lose "
            f"its data and fail. Prune {visible(backend.url)}"
        )
        ask(question, yes=yes)


def _print(report: PruneReport, superseded_bytes: int, grace_s: float) -> None:
    if report.refused:
        no_record = bool(report.unrecorded)
        why = "without a single commit record" if no_record else "while a record cannot be read"
        print_line(f"nothing is deleted {why}:", style="bold red")
        for problem in report.refused:
            print_line(f"  {visible(problem)}")
        if not no_record:
            print_line("delete that checkpoint, or bring its record back, and prune again")
        return
    if report.unrecorded:
        print_line(
            f"left alone, since only the commit record is missing, which may be still to come: "
            f"{counted(len(report.unrecorded), 'attempt')}; a later checkpoint, or --all, ends that"
        )
    if not report.uids and not report.superseded:
        print_line(f"nothing to prune: no leftovers older than {_time_text(grace_s)}")
        return
    for uid in report.uids:
        print_line(f"  data/{uid}")
    for name in report.superseded:
        print_line(f"  {name} (overwritten)")
    verb = "would be freed" if report.dry_run else "freed"
    size = size_text(report.size_bytes + superseded_bytes)
    what = []
    if report.uids:
        what.append(f"{counted(len(report.uids), 'attempt')} with {counted(report.names, 'file')}")
    if report.superseded:
        what.append(counted(len(report.superseded), "overwritten generation"))
    print_line(f"{size} {verb}: {', '.join(what)}")


def _time_text(seconds: float) -> str:
    for unit in ("d", "h", "min"):
        # One day stays `24 h`, as the option and its documentation write the default.
        if seconds >= SECONDS[unit] * (2 if unit == "d" else 1) and not seconds % SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"

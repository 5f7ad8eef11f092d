"""The arguments and help of the commands that free room: `prune`, `delete` and `compact`.

A command's own module is imported when it runs, so that `penstock --help` loads none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.core.cli.app import DryRun, Json, Url, Yes, app, step_of


@app.command(
    "prune",
    short_help="Delete what crashed saves left behind.",
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
) -> None:
    """Delete the data that crashed saves left behind, and say how much was freed.

    Checkpoints are never touched. While any commit record is unreadable nothing is deleted, since
    that checkpoint may need anything, nor where there is none at all, since the run may have been
    copied data first: then the exit code is 1.
    """
    from penstock.core.cli.commands.prune import PruneOptions, run  # noqa: PLC0415
    from penstock.core.units import seconds_of  # noqa: PLC0415

    try:
        grace_s = seconds_of(grace)
    except ValueError as error:
        msg = f"--grace: {error}"
        raise typer.BadParameter(msg) from None
    how = PruneOptions(grace_s, everything, dry_run, yes, as_json)
    if not run(url, how):
        raise typer.Exit(1)


@app.command(
    "delete",
    short_help="Delete checkpoints.",
    epilog="""\b
Examples:
  penstock delete runs/gpt 100 200
  penstock delete runs/gpt 100 --dry-run
  penstock delete runs/gpt 100 --yes
""",
)
def delete(
    url: Url,
    steps: Annotated[
        list[int], typer.Argument(metavar="STEP", parser=step_of, help="Which checkpoints.")
    ],
    *,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also pinned checkpoints, and even if no whole one would be left."
        ),
    ] = False,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            metavar="NAME",
            help="From this tier alone: fast, durable.",
            show_default="all",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete checkpoints for good, and say how much was freed. Asks first.

    Either all of the steps are there, or none is deleted. Data that another checkpoint uses stays.
    """
    from penstock.core.cli.commands.delete import DeleteOptions, run  # noqa: PLC0415

    run(url, steps, DeleteOptions(dry_run, yes, force, tier, as_json))


@app.command(
    "compact",
    short_help="Make checkpoints of a chain stand alone.",
    epilog="""\b
Examples:
  penstock compact runs/gpt --dry-run
  penstock compact runs/gpt
  penstock compact runs/gpt 100 200
""",
)
def compact(
    url: Url,
    steps: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="STEP",
            parser=step_of,
            help="Which checkpoints.",
            show_default="those because of which data of deleted ones is kept",
        ),
    ] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Every checkpoint that needs data of others.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Rewrite checkpoints that need data of others so that they stand alone, under the same step.

    They restore to the same as before; data that nothing needs any more is freed. The run may take
    more room afterwards: --dry-run says about how much. Exits with 1 if a checkpoint could not be
    compacted; it is then as it was.
    """
    from penstock.core.cli.commands.compact import CompactOptions, run  # noqa: PLC0415

    if everything and steps:
        msg = "--all takes every checkpoint of a chain; leave out the steps"
        raise typer.BadParameter(msg)
    if not run(url, steps or None, CompactOptions(everything, dry_run, as_json)):
        raise typer.Exit(1)

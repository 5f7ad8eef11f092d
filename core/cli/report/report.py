"""The `penstock report` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.cli.app import Json, Step, Url, command
from penstock.core.cli.output.render import print_json, print_line, visible
from penstock.core.cli.report.gather import gather
from penstock.core.cli.report.page import page_of, plotly_html
from penstock.core.errors import ConfigError, StorageError
from penstock.core.units import counted


@command(
    "report",
    epilog="""\b
Examples:
  penstock report runs/gpt gpt.html
  penstock report runs/gpt gpt.html --overwrite \\
    --events events.jsonl
""",
)
def report(
    url: Url,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The HTML file to write.")],
    *,
    step: Step = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            "--events",
            metavar="FILE",
            help="Events of saves, from a JsonLinesSink: times, blocked ones too; repeatable.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Write one page with charts on a run: sizes by path and by step, times, gaps, chains, tiers.

    The page needs no network and no server. Reads the records of the run, and the manifest of one
    checkpoint. Needs plotly: pip install 'penstock[report]'.
    """
    place = Path(out)
    if place.exists() and not overwrite:
        msg = f"{out} is there already; --overwrite replaces it"
        raise ConfigError(msg)
    plotly_html()  # it is missing more often than anything else, and reading a run takes time
    facts = gather(url, step, events or [])
    _replace(place, page_of(facts))
    if as_json:
        steps = [one.step for one in facts.listed]
        print_json({"url": facts.url, "out": out, "step": facts.step, "steps": steps})
        return
    print_line(
        f"{visible(out)}: {counted(len(facts.listed), 'checkpoint')}, and the objects of step "
        f"{facts.step}",
        style="green",
    )


def _replace(out: Path, text: str) -> None:
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        msg = f"the page cannot be written to {out}: {error.strerror or error}"
        raise StorageError(msg) from error

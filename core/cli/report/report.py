"""The `penstock report` command: one HTML file that needs no network, and shows texts as text."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.cli.app import Json, Step, Url, command
from penstock.core.cli.output.render import metadata_text, print_json, print_line, ratio_text
from penstock.core.cli.report.charts import (
    boxes_of,
    chains,
    gaps,
    gaps_of,
    save_times,
    shown,
    size_map,
    sizes,
    tiers,
    unit_of,
)
from penstock.core.cli.report.facts import gather
from penstock.core.errors import ConfigError, StorageError
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.cli.commands.ls import Listed
    from penstock.core.cli.report.charts import Chart
    from penstock.core.cli.report.facts import RunFacts

_ROWS = 500  # of the table of checkpoints; the newest ones
_TITLES = (
    "step",
    "created",
    "state",
    "raw",
    "stored",
    "ratio",
    "base",
    "tiers",
    "tags",
    "metadata",
)

# The policy keeps the page from loading anything, should some text become markup after all.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
 script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #22303c; background: #fff;
  max-width: 1200px; margin: 0 auto; padding: 16px; }}
h1 {{ font-size: 1.4em; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1em; margin: 2em 0 0; }}
p {{ margin: .3em 0 .6em; max-width: 75ch; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 2px 12px 2px 0; white-space: nowrap; vertical-align: top; }}
th {{ border-bottom: 1px solid #9aa5b1; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


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
        f"{out}: {counted(len(facts.listed), 'checkpoint')}, and the objects of step {facts.step}",
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


def plotly_html() -> Any:
    """Import the part of plotly that makes HTML.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        return importlib.import_module("plotly.io")
    except ImportError as error:
        msg = f"a report needs plotly ({error}): pip install 'penstock[report]'"
        raise ConfigError(msg) from error


def page_of(facts: RunFacts) -> str:
    """Return the page of a report.

    Raises:
        ConfigError: plotly is not installed.
    """
    plotly, body = plotly_html(), list[str]()
    for number, (title, text, chart) in enumerate(_sections(facts)):
        html = plotly.to_html(
            chart,
            full_html=False,
            include_plotlyjs=number == 0,
            config={"responsive": True, "displayModeBar": False},
            default_height=f"{chart['layout']['height']}px",
            div_id=f"chart-{number}",
        )
        body.append(f"<section><h2>{shown(title)}</h2>\n<p>{shown(text)}</p>\n{html}</section>")
    lines = [f"<p>{shown(line)}</p>" for line in _summary(facts)]
    body = [*lines, *body, _table(facts)]
    return _PAGE.format(title=shown(f"Report on {facts.url}"), body="\n".join(body))


def _summary(facts: RunFacts) -> Iterator[str]:
    records = facts.records
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    stored = size_text(sum(record.bytes_stored for record in records))
    yield f"{counted(len(facts.listed), 'checkpoint')}, {stored} stored. Made on {now}."
    for name, why in facts.silent.items():
        yield f"Tier {name} does not answer, so what it alone has is not shown: {why}"
    for one in facts.listed:
        if one.error:
            yield f"Step {one.step} is damaged: {one.error}"


def _sections(facts: RunFacts) -> Iterator[tuple[str, str, Chart]]:
    text = (
        "Areas are bytes in memory, colors how many times smaller they are stored. Click on a box "
        "to go into it."
    )
    boxes = boxes_of(facts.objects, f"step {facts.step}")
    yield f"Sizes by path, step {facts.step}", text, size_map(boxes)
    text = (
        "Stored is what the checkpoint's own blobs take, alignment gaps included; borrowed is what "
        "it needs from blobs of other checkpoints."
    )
    yield "Sizes over steps", text, sizes(facts)
    yield "Times of saves", _about_times(facts), save_times(facts)
    if gaps_of(facts):
        yield "Gaps", _about_gaps(facts), gaps(facts)
    if any(record.base is not None for record in facts.records):
        text = "How many saves each checkpoint is away from one that stands alone."
        yield "Chains of deltas", text, chains(facts)
    if facts.tiers:
        yield "Tiers", "Which tier has which checkpoint whole.", tiers(facts)


def _about_times(facts: RunFacts) -> str:
    records = facts.records
    reported = sum(record.uid in facts.times for record in records)
    text = (
        f"How long training was blocked, and the save went on in the background, is known from "
        f"events for {reported} of {counted(len(records), 'checkpoint')}. "
        if reported
        else "How long saves blocked training is not stored with a checkpoint: give a file of "
        "events (JsonLinesSink) by --events to see it. "
    )
    if reported < len(records):
        text += (
            "Gray bars show what the run itself has: the time from the record with which a save "
            "begins to write to its commit, in whole seconds, without blocked time before and "
            "copies to slower tiers after. Copied checkpoints have none. "
        )
    if facts.unread:
        text += f"{counted(facts.unread, 'line')} of the files of events could not be read."
    return text


def _about_gaps(facts: RunFacts) -> str:
    step, longest = max(gaps_of(facts), key=lambda gap: gap[1])
    unit, length = unit_of(longest)
    return (
        "The time from commit to commit of the checkpoints that are there; deleted ones between "
        f"two of them make it longer. The longest is {longest / length:.3g} {unit}, before step "
        f"{step}."
    )


def _table(facts: RunFacts) -> str:
    rows = [_row(one) for one in reversed(facts.listed[-_ROWS:])]
    left_out = len(facts.listed) - len(rows)
    more = f"<p>and {counted(left_out, 'older one')}</p>" if left_out else ""
    head = "".join(f"<th>{title}</th>" for title in _TITLES)
    cells = "\n".join(
        "<tr>" + "".join(f"<td>{shown(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f'<div class="wide"><table><tr>{head}</tr>\n{cells}</table></div>'
    return f"<section><h2>Checkpoints</h2>\n{table}{more}</section>"


def _row(one: Listed) -> list[str]:
    record, notes = one.record, one.notes
    if record is None or notes is None:
        return [str(one.step), "", "damaged", *[""] * (len(_TITLES) - 3)]
    return [
        str(one.step),
        record.created,
        "ok",
        size_text(record.bytes_raw),
        size_text(record.bytes_stored),
        ratio_text(record.bytes_raw, record.bytes_stored),
        "" if record.base is None else str(record.base.step),
        " ".join(one.tiers) + (" (to copy)" if one.waiting else ""),
        " ".join(notes.tags),
        metadata_text(notes.metadata),
    ]

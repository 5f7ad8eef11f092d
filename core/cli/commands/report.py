"""The `penstock report` command: one HTML file with charts, which needs no network.

Escapes all stored texts, since they may hold markup, and plotly renders some HTML in chart texts.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from datetime import datetime
from html import escape
from itertools import count, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import read_intent
from penstock.core.cli.app import AsGiven, Json, Step, command
from penstock.core.cli.commands.ls import (
    Listed,
    columns_of,
    created_s,
    list_places,
    of_record,
    with_details,
)
from penstock.core.cli.commands.show import Shown, describe
from penstock.core.cli.job import open_run
from penstock.core.cli.output.figures import Sum, grown, total
from penstock.core.cli.output.render import (
    Cell,
    print_json,
    print_line,
    ratio_text,
    visible,
)
from penstock.core.cli.output.runs_on_disk import tiers_quiet
from penstock.core.cli.output.shares import hosts_seen
from penstock.core.errors import BlobNotFoundError, ConfigError, DamagedError, StorageError
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.types import show_segment
from penstock.core.units import SECONDS, counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.cli.output.figures import Branch
    from penstock.core.cli.output.shares import HostNames, HostShare
    from penstock.core.format.records import CommitRecord

Chart = dict[str, Any]
Points = defaultdict[str, list[tuple[int, str]]]
"""Steps and places, by state."""

_GREY, _BLUE, _OCHRE, _RED = "#9aa5b1", "#1f6f8b", "#d19a3c", "#b5412f"
_TIERS = {"whole": (_BLUE, "square"), "to be copied": (_OCHRE, "square")}
_SHARES = {
    "holds its files": (_BLUE, "square"),
    "has to copy files": (_OCHRE, "square"),
    "missed the last job": (_GREY, "square"),
    "absent": (_RED, "x"),
}
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TICKS = 8
_LEAST_PART = 1 / 1000  # of the whole: smaller boxes look like lines, and may be millions
_ROWS = 500  # the newest checkpoints, in the table

# The policy keeps the page from loading anything, in case some text becomes markup.
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


@command("report")
def report(
    url: AsGiven,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The HTML file to write.")],
    *,
    step: Step = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Save events from a JsonLinesSink: times, including blocked time; repeatable.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: Json = False,
) -> None:
    r"""Write one page with charts of a run: sizes by path and by step, times, gaps, chains, tiers.

    The page needs no network and no server. Reads the records of the run, and the manifest of one
    checkpoint. Needs plotly: pip install 'penstock[report]'.

    Examples:
      penstock report runs/gpt gpt.html
      penstock report runs/gpt gpt.html --overwrite \
        --events events.jsonl
    """
    place = Path(out)
    if place.exists() and not overwrite:
        msg = f"{out} already exists; --overwrite replaces it"
        raise ConfigError(msg)
    plotly_html()  # fail early: plotly is often missing, and reading a run takes time
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
    """Return a report as an HTML page.

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
        yield f"Tier {name} does not answer, so checkpoints only there are not shown: {why}"
    for one in facts.listed:
        if one.error:
            yield f"Step {one.step} is damaged: {one.error}"


def _sections(facts: RunFacts) -> Iterator[tuple[str, str, Chart]]:
    text = (
        "Areas are bytes in memory; colors show how many times smaller the stored bytes are. Click "
        "a box to zoom in."
    )
    boxes = boxes_of(facts.objects, f"step {facts.step}")
    yield f"Sizes by path, step {facts.step}", text, size_map(boxes)
    text = (
        "Stored is the size of the checkpoint's own blobs, including alignment gaps; borrowed is "
        "what it needs from blobs of other checkpoints."
    )
    yield "Sizes over steps", text, sizes(facts)
    yield "Times of saves", _about_times(facts), save_times(facts)
    if gaps_of(facts):
        yield "Gaps", _about_gaps(facts), gaps(facts)
    if any(record.base is not None for record in facts.records):
        text = "For each checkpoint, how many saves earlier the last one without a base was made."
        yield "Chains of deltas", text, chains(facts)
    if facts.tiers:
        yield "Tiers", "The tiers that have a whole copy of each checkpoint.", tiers(facts)
    if any(one.spread for one in facts.listed):
        yield "Hosts", _about_hosts(facts), hosts(facts)


def _about_times(facts: RunFacts) -> str:
    records = facts.records
    reported = sum(record.uid in facts.times for record in records)
    text = (
        f"Events give the blocked time and the background time for {reported} of "
        f"{counted(len(records), 'checkpoint')}. "
        if reported
        else "Checkpoints do not store how long saves blocked training: to see it, pass a file of "
        "events (JsonLinesSink) with --events. "
    )
    if reported < len(records):
        text += (
            "Gray bars show what the run itself records: the time from start of writing until "
            "commit, in whole seconds. It excludes the blocked time before, and later copies to "
            "slower tiers. Copied checkpoints have no bar. "
        )
    if facts.unread:
        text += f"{counted(facts.unread, 'line')} of the event files could not be read."
    return text


def _about_gaps(facts: RunFacts) -> str:
    step, longest = max(gaps_of(facts), key=lambda gap: gap[1])
    unit, length = unit_of(longest)
    return (
        "The time between the commits of neighboring checkpoints; deleted ones between them "
        f"make it longer. The longest is {longest / length:.3g} {unit}, before step {step}."
    )


def _about_hosts(facts: RunFacts) -> str:
    states = Counter(one.spread.state for one in facts.listed if one.spread)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    note = "" if facts.hosts is None else facts.hosts.note()
    return (
        "The hosts that hold files of each checkpoint, and those that must still copy some. The "
        f"records of a host that missed the last job do not count. Checkpoints: {counts}."
        + (f" {note.capitalize()}." if note else "")
    )


def _table(facts: RunFacts) -> str:
    listed = facts.listed[-_ROWS:]
    columns = [
        # A page is read later, so it shows no ages.
        of_record("CREATED", 0, lambda record: record.created) if column.title == "AGE" else column
        for column in columns_of(listed, facts.records, tiered=bool(facts.tiers))
    ]
    left_out = len(facts.listed) - len(listed)
    more = f"<p>and {counted(left_out, 'older one')}</p>" if left_out else ""
    head = "".join(f"<th>{shown(column.title)}</th>" for column in columns)
    rows = [[column.cell(one) for column in columns] for one in reversed(listed)]
    cells = "\n".join(
        "<tr>"
        + "".join(f"<td>{shown(c.text if isinstance(c, Cell) else c)}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    table = f'<div class="wide"><table><tr>{head}</tr>\n{cells}</table></div>'
    return f"<section><h2>Checkpoints</h2>\n{table}{more}</section>"


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """The times of a save, as its event reports them, in seconds.

    Attributes:
        blocked_s: The time for which training was blocked.
        total_s: The time from the call of `save` until the checkpoint was durable.
        step_s: The duration of a training step; None if the run did not use `Checkpointer.due`.
    """

    blocked_s: float
    total_s: float
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The contents of a report.

    Attributes:
        url: The URL of the run.
        listed: Every step, ascending.
        tiers: The names of the tiers, the fastest first; empty for a run without tiers.
        silent: By name, the reason why a tier does not answer.
        step: The step of the checkpoint whose objects are shown.
        objects: Its objects, in tree order.
        commit_s: By uid, for saves without an event, the seconds from the start of writing to the
            commit.
        times: By uid, the times in events.
        unread: The number of lines in the event files that are not events.
        hosts: The hosts whose roots are open; None for a run that has no roots on hosts.
    """

    url: str
    listed: tuple[Listed, ...]
    tiers: tuple[str, ...]
    silent: dict[str, str]
    step: int
    objects: tuple[Shown, ...]
    commit_s: dict[str, float]
    times: dict[str, SaveTimes]
    unread: int
    hosts: HostNames | None = None

    @property
    def records(self) -> list[CommitRecord]:
        """The readable commit records, ascending by step."""
        return [one.record for one in self.listed if one.record is not None]


def gather(url: str, step: int | None, events: Sequence[str]) -> RunFacts:
    """Read a run, and files of events.

    Args:
        url: The URL of the run.
        step: The step of the checkpoint whose objects are shown; default: the latest.
        events: Files of events, one line of JSON each, as written by `JsonLinesSink`.

    Raises:
        PenstockError: The run or a file cannot be read, or the run has no checkpoint.
    """
    times, unread = read_events(events)
    with tiers_quiet(), open_run(url) as backend:
        listed, places, silent = list_places(backend)
        listed = with_details(listed, backend, places)
        number = Catalog(backend).require_latest() if step is None else step
        contents = Checkpoint.open(backend, number).contents
        objects = tuple(describe(one, contents) for one in contents.objects())
        without = [one for one in listed if one.record and one.record.uid not in times]
        commit_s = commit_seconds(places, without)
        tiers = tuple(tier.name for tier in backend.tiers)
        return RunFacts(
            backend.url,
            tuple(listed),
            tiers,
            silent,
            number,
            objects,
            commit_s,
            times,
            unread,
            hosts_seen(backend),
        )


def read_events(files: Sequence[str]) -> tuple[dict[str, SaveTimes], int]:
    """Return the times of durable saves by uid, and the number of lines that are not events.

    Such a line is no error: a process that was killed may have written only half of it.

    Raises:
        ConfigError: A file cannot be read.
    """
    times: dict[str, SaveTimes] = {}
    unread = 0
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            msg = f"--events {file}: {error.strerror or error}"
            raise ConfigError(msg) from error
        for line in lines:
            try:
                event = json.loads(line)
                if event["kind"] == "durable":
                    seconds = event["seconds"]
                    blocked_s, total_s = float(seconds["blocked"]), float(seconds["total"])
                    interval = event.get("interval")
                    step_s = float(interval["seconds"]) / interval["steps"] if interval else None
                    times[event["uid"]] = SaveTimes(blocked_s, total_s, step_s)
            except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
                unread += 1
    return times, unread


def commit_seconds(places: Sequence[Backend], listed: Sequence[Listed]) -> dict[str, float]:
    """Return, by uid, the seconds from the start of writing to the commit, where they are known."""
    found: dict[str, float] = {}
    for record in (one.record for one in listed if one.record is not None):
        for place in places:
            try:
                started = datetime.fromisoformat(read_intent(place, record.uid).started)
            except (BlobNotFoundError, DamagedError):
                continue
            seconds = created_s(record) - started.timestamp()
            if seconds >= 0:  # the intent of a copy is younger than the commit
                found[record.uid] = seconds
                break
    return found


def shown(text: str) -> str:
    """Return a stored text for HTML: control characters visible, markup escaped."""
    return escape(visible(text))


def size_map(boxes: Sequence[Box]) -> Chart:
    """Return the treemap of objects: areas are raw bytes, colors are ratios."""
    ratios = [one.bytes_raw / one.bytes_stored if one.bytes_stored else None for one in boxes]
    about = [_about(one) for one in boxes]
    trace = {
        "type": "treemap",
        "ids": [one.id for one in boxes],
        "parents": [one.parent for one in boxes],
        "labels": [shown(one.group) for one in boxes],
        "values": [one.bytes_raw for one in boxes],
        "text": about,
        "branchvalues": "total",
        "texttemplate": "%{label}<br>%{text}",
        "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "marker": {
            "colors": ratios,
            "colorscale": [[0, "#e8ecef"], [1, _BLUE]],
            "cmin": 1,
            "cmax": max([2.0, *(ratio for ratio in ratios if ratio is not None)]),
            "colorbar": {"title": {"text": "ratio"}, "thickness": 12},
        },
    }
    return _chart([trace], height=460, margin={"l": 0, "r": 0, "t": 24, "b": 0})


def _about(box: Box) -> str:
    lines = [
        counted(box.objects, "object"),
        size_text(box.bytes_raw),
        f"{size_text(box.bytes_stored)} stored ({ratio_text(box.bytes_raw, box.bytes_stored)})",
        *([f"{size_text(box.bytes_borrowed)} borrowed"] if box.bytes_borrowed else []),
    ]
    return "<br>".join(lines)


def sizes(facts: RunFacts) -> Chart:
    """Return a chart of each checkpoint's bytes: in memory, in its own blobs, and borrowed."""
    records = facts.records
    steps = [str(record.step) for record in records]
    figures = [
        (_bars, "stored", [record.bytes_stored for record in records], _BLUE),
        (_bars, "borrowed from others", [record.bytes_borrowed for record in records], _OCHRE),
        (_line, "state in memory", [record.bytes_raw for record in records], _GREY),
    ]
    figures = [figure for figure in figures if any(figure[2])]
    unit = size_text(max((n for figure in figures for n in figure[2]), default=0)).split()[1]
    length = 1024 ** _SIZES.index(unit)
    traces = []
    for kind, name, values, color in figures:
        trace = kind(name, steps, [value / length for value in values], color)
        trace["customdata"] = [size_text(value) for value in values]
        trace["hovertemplate"] = "step %{x}: %{customdata}"
        traces.append(trace)
    return _chart(traces, barmode="stack", yaxis={"title": {"text": unit}})


def save_times(facts: RunFacts) -> Chart:
    """Return a chart of the seconds of each save: from its event, or else from `commit_s`."""
    records = facts.records
    reported = [record for record in records if record.uid in facts.times]
    unreported = [r for r in records if r.uid not in facts.times and r.uid in facts.commit_s]
    steps = [str(record.step) for record in reported]
    times = [facts.times[record.uid] for record in reported]
    blocked = [one.blocked_s for one in times]
    background = [max(0.0, one.total_s - one.blocked_s) for one in times]
    writing = [facts.commit_s[record.uid] for record in unreported]
    traces = []
    if reported:
        traces.append(_bars("training blocked", steps, blocked, _RED))
        traces.append(_bars("in the background", steps, background, _BLUE))
    if unreported:
        only = [str(record.step) for record in unreported]
        traces.append(_bars("from start of writing until commit", only, writing, _GREY))
    for trace in traces:
        trace["hovertemplate"] = "step %{x}: %{y:.3g} s"
    order = {"categoryorder": "array", "categoryarray": [str(record.step) for record in records]}
    return _chart(traces, barmode="stack", yaxis={"title": {"text": "s"}}, xaxis=order)


def gaps_of(facts: RunFacts) -> list[tuple[int, float]]:
    """Return, for each step except the first, the seconds since the previous commit."""
    pairs = pairwise(facts.records)
    return [(late.step, created_s(late) - created_s(early)) for early, late in pairs]


def gaps(facts: RunFacts) -> Chart:
    """Return a chart of the time between consecutive commits."""
    found = gaps_of(facts)
    unit, length = unit_of(max((seconds for _, seconds in found), default=0.0))
    trace = _bars(
        "since the one before", [str(s) for s, _ in found], [t / length for _, t in found], _BLUE
    )
    trace["hovertemplate"] = f"step %{{x}}: %{{y:.3g}} {unit}<extra></extra>"
    axis = {"title": {"text": unit}, "rangemode": "tozero"}
    return _chart([trace], yaxis=axis, showlegend=False)


def chains(facts: RunFacts) -> Chart:
    """Return a chart of each checkpoint's distance, in saves, from one without a base."""
    records = facts.records
    ages = [0 if record.base is None else record.base.age for record in records]
    trace = _line("age", [str(record.step) for record in records], ages, _BLUE)
    trace["mode"] = "lines+markers"
    trace["line"]["shape"] = "hv"
    trace["customdata"] = [
        "no base" if record.base is None else f"encoded against step {record.base.step}"
        for record in records
    ]
    trace["hovertemplate"] = "step %{x}: %{customdata}<extra></extra>"
    whole = {"tick0": 0, "dtick": 1 + max(ages) // _TICKS, "rangemode": "tozero"}
    axis = {"title": {"text": "saves since one without a base"}, **whole}
    return _chart([trace], yaxis=axis, showlegend=False)


def tiers(facts: RunFacts) -> Chart:
    """Return a chart of the tiers that have each checkpoint."""
    points: Points = defaultdict(list)
    for one in facts.listed:
        for tier in one.tiers:
            waits = one.waiting and tier == one.tiers[-1]
            points["to be copied" if waits else "whole"].append((one.step, tier))
    return _places(points, _TIERS, facts.tiers, height=200)


def hosts(facts: RunFacts) -> Chart:
    """Return a chart of the hosts that hold files of each checkpoint."""
    points: Points = defaultdict(list)
    names: set[str] = set()
    for one in facts.listed:
        for share in one.spread.shares if one.spread else ():
            names.add(share.host)
            if state := _share_state(share):
                points[state].append((one.step, share.host))
    for one, host in product(facts.listed, facts.hosts.absent if facts.hosts else ()):
        names.add(host)
        points["absent"].append((one.step, host))
    return _places(points, _SHARES, sorted(names), height=max(200, 120 + 24 * len(names)))


def _places(
    points: Points, looks: Mapping[str, tuple[str, str]], names: Sequence[str], *, height: int
) -> Chart:
    """Return a chart of the places that have each checkpoint, with a marker for each state."""
    traces = []
    for state, (color, symbol) in looks.items():
        if points[state]:
            marker = {"symbol": symbol, "size": 11, "color": color}
            xs, ys = [str(x) for x, _ in points[state]], [shown(y) for _, y in points[state]]
            trace = {"type": "scatter", "mode": "markers", "name": state, "x": xs, "y": ys}
            traces.append({**trace, "marker": marker})
    order = [shown(name) for name in reversed(names)]
    axis = {"type": "category", "categoryorder": "array", "categoryarray": order}
    return _chart(traces, yaxis=axis, height=height)


def _share_state(share: HostShare) -> str:
    if share.missing:
        return "has to copy files"
    if not share.bytes_held:
        return ""
    return "holds its files" if share.current else "missed the last job"


def unit_of(seconds: float) -> tuple[str, int]:
    """Return the unit in which to show a duration, and its length in seconds."""
    unit = next((unit for unit in ("h", "min") if seconds >= SECONDS[unit]), "s")
    return unit, SECONDS[unit]


def _bars(name: str, x: Sequence[str], y: Sequence[float], color: str) -> Chart:
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": color}}


def _line(name: str, x: Sequence[str], y: Sequence[float], color: str) -> Chart:
    mode = "lines+markers"
    trace = {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y)}
    return {**trace, "line": {"color": color}}


def _chart(traces: list[Chart], **layout: Any) -> Chart:
    # Steps are categories, not numbers: a run may save at uneven steps; each gets the same space.
    steps = {"type": "category", "title": {"text": "step"}, **layout.pop("xaxis", {})}
    margin = {"l": 56, "r": 8, "t": 8, "b": 48}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    plain: Chart = {"template": "plotly_white", "height": 300, "margin": margin, "legend": legend}
    plain["dragmode"] = False  # else scrolling the page with a finger would zoom
    return {"data": traces, "layout": {**plain, "xaxis": steps, **layout}}


@dataclass(frozen=True, slots=True)
class Box(Sum):
    """A box of the treemap; its group is the last segment of its path, as shown.

    Attributes:
        id: Its number.
        parent: The number of the box around it; empty for the outermost one.
    """

    id: str
    parent: str


def boxes_of(objects: Sequence[Shown], name: str) -> list[Box]:
    """Return the treemap's boxes, small ones merged; the first is the outermost, called `name`."""
    numbers = map(str, count())
    outer = _box(next(numbers), "", name, objects)
    tree = grown((one.record.path, one) for one in objects)
    return [outer, *_inside(tree, outer, outer.bytes_raw * _LEAST_PART, numbers)]


def _inside(tree: Branch[Shown], outer: Box, least: float, numbers: Iterator[str]) -> Iterator[Box]:
    small: list[Shown] = []
    for branch in tree.below.values():
        leaves = list(branch.leaves())
        box = _box(next(numbers), outer.id, show_segment(branch.segment), leaves)
        if box.bytes_raw < least:
            small += leaves
            continue
        yield box
        if branch.below:
            yield from _inside(branch, box, least, numbers)
    if small:
        yield _box(next(numbers), outer.id, f"{len(small)} small", small)


def _box(number: str, parent: str, name: str, objects: Sequence[Shown]) -> Box:
    whole = total(name, [one.as_sum() for one in objects])
    return Box(**asdict(whole), id=number, parent=parent)

"""The charts of a report, described as plotly takes them: plain data.

plotly shows some HTML in the texts of a chart, so every text that was stored is escaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from penstock.core.cli.output.render import ratio_text, visible
from penstock.core.cli.output.sums import Sum, grown
from penstock.core.cli.report.facts import created_s
from penstock.core.types import show_segment
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.cli.commands.ls import Listed
    from penstock.core.cli.commands.show import Shown
    from penstock.core.cli.output.sums import Branch
    from penstock.core.cli.report.facts import RunFacts

Chart = dict[str, Any]

_GREY, _BLUE, _OCHRE, _RED = "#9aa5b1", "#1f6f8b", "#d19a3c", "#b5412f"
_TIMES = (("h", 3600), ("min", 60), ("s", 1))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TICKS = 8

_LEAST_PART = 1 / 1000  # of the whole: smaller boxes are no more than a line, and may be millions


def shown(text: str) -> str:
    """Return a stored text for HTML: control characters visible, and nothing of it is markup."""
    return escape(visible(text))


def size_map(boxes: Sequence[Box]) -> Chart:
    """Return the treemap of objects: areas are raw bytes, colours ratios."""
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
    """Return the bytes of each checkpoint: in memory, in its own blobs, and borrowed."""
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
    """Return the seconds of each save: from events, or, without any, what the records show."""
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
        traces.append(_bars("begin of writing to commit", only, writing, _GREY))
    for trace in traces:
        trace["hovertemplate"] = "step %{x}: %{y:.3g} s"
    order = {"categoryorder": "array", "categoryarray": [str(record.step) for record in records]}
    return _chart(traces, barmode="stack", yaxis={"title": {"text": "s"}}, xaxis=order)


def gaps_of(facts: RunFacts) -> list[tuple[int, float]]:
    """Return, for each step but the first, the seconds from the commit before to its own."""
    pairs = pairwise(facts.records)
    return [(late.step, created_s(late) - created_s(early)) for early, late in pairs]


def gaps(facts: RunFacts) -> Chart:
    """Return the time between the commits of neighboring checkpoints."""
    found = gaps_of(facts)
    unit, length = unit_of(max((seconds for _, seconds in found), default=0.0))
    trace = _bars(
        "since the one before", [str(s) for s, _ in found], [t / length for _, t in found], _BLUE
    )
    trace["hovertemplate"] = f"step %{{x}}: %{{y:.3g}} {unit}<extra></extra>"
    axis = {"title": {"text": unit}, "rangemode": "tozero"}
    return _chart([trace], yaxis=axis, showlegend=False)


def chains(facts: RunFacts) -> Chart:
    """Return how many saves each checkpoint is away from one without a base."""
    records = facts.records
    ages = [0 if record.base is None else record.base.age for record in records]
    trace = _line("age", [str(record.step) for record in records], ages, _BLUE)
    trace["mode"] = "lines+markers"
    trace["line"]["shape"] = "hv"
    trace["customdata"] = [
        "stands alone" if record.base is None else f"encoded against step {record.base.step}"
        for record in records
    ]
    trace["hovertemplate"] = "step %{x}: %{customdata}<extra></extra>"
    whole = {"tick0": 0, "dtick": 1 + max(ages) // _TICKS, "rangemode": "tozero"}
    axis = {"title": {"text": "saves since one without a base"}, **whole}
    return _chart([trace], yaxis=axis, showlegend=False)


def tiers(facts: RunFacts) -> Chart:
    """Return which tiers have which checkpoint."""
    traces = []
    for name, color, wanted in (("whole", _BLUE, False), ("to be copied on", _OCHRE, True)):
        points = [
            (str(one.step), tier)
            for one in facts.listed
            for tier in one.tiers
            if _waits(one, tier) == wanted
        ]
        if points:
            marker = {"symbol": "square", "size": 11, "color": color}
            xs, ys = [x for x, _ in points], [shown(y) for _, y in points]
            trace = {"type": "scatter", "mode": "markers", "name": name, "x": xs, "y": ys}
            traces.append({**trace, "marker": marker})
    axis = {"type": "category", "categoryorder": "array"}
    names = [shown(name) for name in reversed(facts.tiers)]
    return _chart(traces, yaxis={**axis, "categoryarray": names}, height=200)


def _waits(one: Listed, tier: str) -> bool:
    return one.waiting and tier == one.tiers[-1]


def unit_of(seconds: float) -> tuple[str, int]:
    """Return the unit, and its seconds, in which a duration is shown."""
    return next(((unit, length) for unit, length in _TIMES if seconds >= length), _TIMES[-1])


def _bars(name: str, x: Sequence[str], y: Sequence[float], color: str) -> Chart:
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": color}}


def _line(name: str, x: Sequence[str], y: Sequence[float], color: str) -> Chart:
    mode = "lines+markers"
    trace = {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y)}
    return {**trace, "line": {"color": color}}


def _chart(traces: list[Chart], **layout: Any) -> Chart:
    # Steps are names, not numbers: a run may save at any of them.
    steps = {"type": "category", "title": {"text": "step"}, **layout.pop("xaxis", {})}
    margin = {"l": 56, "r": 8, "t": 8, "b": 48}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    plain: Chart = {"template": "plotly_white", "height": 300, "margin": margin, "legend": legend}
    plain["dragmode"] = False  # a finger that scrolls the page would zoom instead
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
    """Return the boxes, the outermost one, called `name`, first; small ones are put together."""
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
    return Box(
        group=name,
        objects=len(objects),
        bytes_raw=sum(one.nbytes for one in objects),
        bytes_stored=sum(one.bytes_stored for one in objects),
        bytes_borrowed=sum(one.bytes_borrowed for one in objects),
        id=number,
        parent=parent,
    )

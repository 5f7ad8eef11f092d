"""Put the results of `compare.py` and `blocked.py` into docs/benchmarks.md: tables and a chart.

Text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced, all else is left alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from matplotlib import pyplot as plt
from tables import (
    BACKGROUND_COLUMNS,
    LOOP_COLUMNS,
    OURS,
    RATE_COLUMNS,
    RAW,
    Row,
    Summary,
    background_cells,
    copy_cells,
    insert,
    loop_cells,
    markdown_table,
    rate_cells,
    summarize,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "assets" / "benchmarks.svg"
RESULTS = ROOT / "build" / "benchmarks.json"
LOOP = ROOT / "build" / "blocked.json"
_BUSY_LOAD = 2.0
OUR_COLOUR, PEER_COLOUR, RAW_COLOUR = "#00897b", "#90a4ae", "#cfd8dc"


def main(
    results: Annotated[Path, typer.Option(help="What compare.py wrote.")] = RESULTS,
    loop: Annotated[Path, typer.Option(help="What blocked.py wrote; may be missing.")] = LOOP,
    page: Annotated[Path, typer.Option(help="The page with the markers.")] = PAGE,
    chart: Annotated[Path, typer.Option(help="SVG to write.")] = CHART,
) -> None:
    """Update the tables and the chart of the documentation."""
    run = json.loads(results.read_text())
    summary = summarize(run)
    text = page.read_text()
    text = insert(text, "setting", _setting(run, summary))
    for name, rows in (("save", summary.save), ("restore", summary.restore)):
        cells = [rate_cells(rows, row) for row in rows]
        text = insert(text, name, markdown_table(RATE_COLUMNS, cells))
    cells = [background_cells(row) for row in summary.background]
    if summary.copy:
        cells.append(copy_cells(summary.copy))
    text = insert(text, "background", markdown_table(BACKGROUND_COLUMNS, cells))
    if loop.exists():
        text = insert(text, "loop", _loop(json.loads(loop.read_text())))
    page.write_text(text)
    _draw(summary, chart)
    typer.echo(f"Updated {page} and {chart}")


def _setting(run: dict[str, Any], summary: Summary) -> str:
    note = ""
    if run["machine"]["load_during"] > _BUSY_LOAD:
        note = (
            "\n\n!!! warning\n\n    The machine was busy with other work during this run. Whoever "
            "needs more CPU suffered more, so the ratios to peers are larger than on an idle one."
        )
    machine, options = run["machine"], run["options"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"- State: {summary.size_gb:.2f} GB of fp32 in {summary.tensors} tensors.\n"
        f"- Machine: {machine['cores']} cores ({machine['cpu']}), {machine['memory_gb']:.0f} GB of "
        f"memory, Linux {machine['kernel']}, {machine['file_system']}.\n"
        f"- Versions: Python {machine['python']}, {versions}, {machine['fio'] or 'no fio'}.\n"
        f"- {options['rounds']} rounds, {run['made'][:10]}. Load average: {machine['load_before']} "
        f"before, {machine['load_during']} during the run (an idle machine shows about 1).{note}"
    )


def _loop(found: dict[str, Any]) -> str:
    options = found["options"]
    about = (
        f"State {options['bytes'] / 1e9:.2f} GB, one save per {options['steps']} steps, "
        f"{options['rounds']} saves of each kind, {options['threads']} thread(s) of torch."
    )
    cells = [loop_cells(name, values) for name, values in found["results"].items()]
    return f"{about}\n\n{markdown_table(LOOP_COLUMNS, cells)}"


def _draw(summary: Summary, chart: Path) -> None:
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "penstock", "font.family": "sans-serif"})
    figure, axes = plt.subplots(
        1, 3, figsize=(12, 3.6), width_ratios=(4, 4, 5), layout="constrained"
    )
    _rates(axes[0], summary.save, "Blocking save, GB/s")
    _rates(axes[1], summary.restore, "Cold restore, GB/s")
    _blocked(axes[2], summary)
    chart.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chart, facecolor="white", metadata={"Date": None})


def _rates(axis: Any, rows: list[Row], title: str) -> None:
    values = [row.values["rate"] for row in rows]
    names = ["fio, best point" if row.system == RAW else row.system for row in rows]
    errors = [
        [row.values["rate"] - row.lowest for row in rows],
        [row.highest - row.values["rate"] for row in rows],
    ]
    bars = axis.barh(
        names, values, xerr=errors, color=[_colour(r.system) for r in rows], ecolor="#546e7a"
    )
    axis.bar_label(bars, [f"{v:.2f}" for v in values], label_type="edge", padding=8)
    axis.set_xlim(right=1.25 * max(row.highest for row in rows))
    _finish(axis, title)


def _blocked(axis: Any, summary: Summary) -> None:
    rows = summary.background
    names = [row.system.replace(", kept", ",\nkept") for row in rows]
    calls = [row.values["later_s"] * 1e3 for row in rows]
    fenced = [row.values["later_fenced_s"] * 1e3 for row in rows]
    axis.barh(names, calls, color=[_colour(row.system) for row in rows])
    for name, call, total in zip(names, calls, fenced, strict=True):
        hidden = total - call  # by the forward and backward that follow, where they are long enough
        label = f"{call:.0f}"
        if hidden > 1:
            axis.barh(name, hidden, left=call, color="none", edgecolor=OUR_COLOUR, hatch="////")
            label += f", and up to {hidden:.0f} at the fence"
        axis.text(total, name, f"  {label}", va="center")
    axis.set_xlim(right=1.25 * max(fenced))
    _finish(axis, "Background save: blocked, ms")


def _finish(axis: Any, title: str) -> None:
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(left=False)
    axis.grid(axis="x", color="#eceff1")
    axis.set_axisbelow(True)


def _colour(system: str) -> str:
    if system == RAW:
        return RAW_COLOUR
    return OUR_COLOUR if system.startswith(OURS) else PEER_COLOUR


if __name__ == "__main__":
    typer.run(main)

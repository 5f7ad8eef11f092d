"""Medians of a run, and the rows of the tables that show them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.table import Table

OURS = "Penstock"
RAW = "fio"

RATE_COLUMNS = ("", "GB/s", "lowest to highest", "seconds", "CPU s", "extra MB", f"{OURS} is")
BACKGROUND_COLUMNS = (
    "milliseconds",
    "first call",
    "later calls",
    "first, fenced",
    "later, fenced",
    "durable",
    "extra MB",
)
LOOP_COLUMNS = ("milliseconds", "save()", "fence", "step", "while writing", "cost of a save")

Results = dict[tuple[str, str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One system: medians over the rounds, and the span of what its rank rests on."""

    system: str
    values: dict[str, float]
    lowest: float
    highest: float


@dataclass(frozen=True)
class Summary:
    """All of one run, best first."""

    save: list[Row]
    restore: list[Row]
    background: list[Row]
    copy: Row | None
    size_gb: float
    tensors: int
    rounds: int


def summarize(run: dict[str, Any]) -> Summary:
    """Medians over the rounds. Of fio, the best point of each round counts."""
    groups: Results = defaultdict(list)
    for result in run["results"]:
        if "error" not in result:
            groups[result["kind"], result["system"]].append(result)
    sizes = [r for results in groups.values() for r in results if "tensors" in r]
    copies = _medians(groups, "copy", ("first_s", "later_s"))
    return Summary(
        save=_rates(groups, "save"),
        restore=_rates(groups, "restore"),
        background=sorted(
            _medians(
                groups,
                "background",
                (
                    "first_s",
                    "later_s",
                    "first_fenced_s",
                    "later_fenced_s",
                    "durable_s",
                    "extra_memory_bytes",
                ),
            ),
            key=lambda row: row.values["later_fenced_s"],
        ),
        copy=copies[0] if copies else None,
        size_gb=sizes[0]["bytes"] / 1e9 if sizes else 0.0,
        tensors=sizes[0]["tensors"] if sizes else 0,
        rounds=run["options"]["rounds"],
    )


def _rates(groups: Results, kind: str) -> list[Row]:
    rows = []
    for (found, system), results in groups.items():
        if found != kind:
            continue
        chosen = _best_of_each_round(results) if system == RAW else results
        rates = [r["bytes"] / r["seconds"] / 1e9 for r in chosen]
        values = {"rate": statistics.median(rates)}
        for name in ("seconds", "cpu_s", "extra_memory_bytes"):
            if all(name in r for r in chosen):
                values[name] = statistics.median(r[name] for r in chosen)
        rows.append(Row(system, values, min(rates), max(rates)))
    return sorted(rows, key=lambda row: -row.values["rate"])


def _best_of_each_round(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rounds: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        rounds[result["round"]].append(result)
    return [max(points, key=lambda r: r["bytes"] / r["seconds"]) for points in rounds.values()]


def _medians(groups: Results, kind: str, names: tuple[str, ...]) -> list[Row]:
    rows = []
    for (found, system), results in groups.items():
        if found == kind:
            values = {n: statistics.median(r[n] for r in results) for n in names}
            every = [r["later_s"] for r in results]
            rows.append(Row(system, values, min(every), max(every)))
    return rows


def rate_cells(rows: list[Row], row: Row) -> list[str]:
    """Cells under `RATE_COLUMNS`."""
    values = row.values
    ours = next((r.values["rate"] for r in rows if r.system == OURS), None)
    return [
        "fio, best point" if row.system == RAW else row.system,
        f"{values['rate']:.2f}",
        f"{row.lowest:.2f} to {row.highest:.2f}",
        f"{values['seconds']:.2f}",
        f"{values['cpu_s']:.2f}" if "cpu_s" in values else "",
        f"{values['extra_memory_bytes'] / 1e6:.0f}" if "extra_memory_bytes" in values else "",
        f"{ours / values['rate']:.2f}x" if ours and row.system != OURS else "",
    ]


def background_cells(row: Row) -> list[str]:
    """Cells under `BACKGROUND_COLUMNS`."""
    names = ("first_s", "later_s", "first_fenced_s", "later_fenced_s", "durable_s")
    return [
        row.system,
        *(_ms(row.values[name]) for name in names),
        f"{row.values['extra_memory_bytes'] / 1e6:.0f}",
    ]


def copy_cells(row: Row) -> list[str]:
    """Cells under `BACKGROUND_COLUMNS`, for the copy that everything is measured against."""
    return ["one copy in memory", _ms(row.values["first_s"]), _ms(row.values["later_s"])]


def loop_cells(name: str, values: dict[str, Any]) -> list[str]:
    """Cells under `LOOP_COLUMNS`."""
    quiet, busy = values["quiet_step_s"], values["busy_step_s"]
    saves = values["saves"]
    return [
        name,
        _ms(values["call_s"]) if saves else "",
        _ms(values["fence_s"]) if saves else "",
        _ms(values["step_s"]),
        f"{_ms(busy)} ({busy / quiet - 1:+.0%})" if busy else "",
        _ms(values["cost_s"]) if saves else "",
    ]


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.1f}" if abs(value) < 20 else f"{value:.0f}"


def terminal_tables(summary: Summary) -> list[Table]:
    """The results of `compare.py`, for rich."""
    what = f"{summary.size_gb:.2f} GB in {summary.tensors} tensors; medians of {summary.rounds}"
    tables = []
    for title, rows in (("Blocking save", summary.save), ("Cold restore", summary.restore)):
        if rows:
            cells = [rate_cells(rows, row) for row in rows]
            tables.append(terminal_table(f"{title}: {what}", RATE_COLUMNS, cells))
    if summary.background:
        cells = [background_cells(row) for row in summary.background]
        if summary.copy:
            cells.append(copy_cells(summary.copy))
        tables.append(terminal_table(f"Background save: {what}", BACKGROUND_COLUMNS, cells))
    return tables


def terminal_table(title: str, columns: tuple[str, ...], cells: list[list[str]]) -> Table:
    """A table whose own rows stand out."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    for row in cells:
        table.add_row(*row, style="bold" if row[0].startswith(OURS) else None)
    return table


def markdown_table(columns: tuple[str, ...], cells: list[list[str]]) -> str:
    """The same for a page."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for row in cells:
        padded = row + [""] * (len(columns) - len(row))
        if padded[0].startswith(OURS):
            padded[0] = f"**{padded[0]}**"
        lines.append("| " + " | ".join(padded) + " |")
    return "\n".join(lines)


def insert(text: str, name: str, body: str) -> str:
    """Return the text of a page with what stands between two markers replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if begin not in text or end not in text:
        message = f"the page lacks {begin} ... {end}"
        raise SystemExit(message)
    head, rest = text.split(begin, 1)
    tail = rest.split(end, 1)[1]
    return f"{head}{begin}\n\n{body}\n\n{end}{tail}"

"""The page of benchmarks, made from the JSON of a run: its tables, its charts, and their text.

    python benchmarks/page.py                                # from recorded/run.json
    python benchmarks/page.py build/a.json build/b.json      # parts of one commit, put together

`page.md` is the page without its figures. The README and the home page get three of them. Figures
of a GPU are of another machine and an earlier run, so they are kept as they were, in
`recorded/gpu.json`. Those of a log of gradients are from `log.py`, in `recorded/log.json`, and
those of hosts from `hosts.py`, in `recorded/hosts.json`; the pages about them get these.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import textwrap
from pathlib import Path

from bench import FAILED, ROOT, as_json, figure, rows_of, table

HERE = Path(__file__).resolve().parent
RUN, GPU = "benchmarks/recorded/run.json", "benchmarks/recorded/gpu.json"
LOG, HOSTS = "benchmarks/recorded/log.json", "benchmarks/recorded/hosts.json"
PAGE, CHARTS = "docs/benchmarks.md", "docs/assets/benchmarks"
QUOTING = ("README.md", "docs/index.md")  # have `numbers` between two comments
NUMBERS = re.compile(r"(<!-- numbers -->\n).*?(<!-- /numbers -->)", re.DOTALL)
FP32, BF16 = "Penstock, AdamW in fp32", "Penstock, AdamW in bf16 with clip"
INTERVALS = (1, 2, 5, 10, 20, 50, 100)  # steps between two saves
ASYNC, KEPT = "Penstock, async", "DCP async_save, kept stager"
COPY, FIO = "plain copy in memory", "fio"
SIZES = ("state of 0.1 GB", "state of 0.3 GB", "state", "state of 3 GB")
RANKS = (1, 2, 4, 8)


class Run:
    """What was measured, in one commit."""

    def __init__(self, documents):
        commits = {one["about"]["commit"] for one in documents}
        if len(commits) != 1:
            raise SystemExit(f"measured in different commits: {', '.join(sorted(commits))}")
        seconds = sum(one["about"]["seconds"] for one in documents)
        self.about = documents[0]["about"] | {"seconds": seconds}
        self.parts = {name: part for one in documents for name, part in one["parts"].items()}
        self.document = {"about": self.about, "parts": self.parts}

    def rows(self, part, *names):
        """What `table` takes: all names of a part, or some."""
        rows = rows_of(self.parts[part]["results"])
        return {name: rows[name] for name in names} if names else rows

    def rounds(self, *parts):
        """How many rounds the parts have."""
        rows = [row for part in parts for row in self.parts[part]["results"].values()]
        counts = sorted({len(row["rounds"]) for row in rows if FAILED not in row})
        if counts == [1]:
            return "one round"
        return f"medians of {' to '.join(str(count) for count in counts)} rounds"

    def option(self, part, key):
        return self.parts[part]["options"][key]


# -- tables --------------------------------------------------------------------------------------


def standstill(run):
    large = f"first call of {run.option('state of 3 GB', 'gb'):g} GB, s"
    rows, limits = run.rows("state"), run.rows("limits")
    for name, values in run.rows("state of 3 GB").items():
        if isinstance(values, dict) and isinstance(rows[name], dict):
            rows[name][large] = values["first call, s"]
    if isinstance(limits[FIO], dict):
        limits[FIO] = {"later durable, s": limits[FIO]["durable, s"]}
    columns = ("first call, s", "later call, s*", "later fenced, s", "later durable, s*")
    return table(rows | limits, (*columns, large, "first durable, MB"), ASYNC)


def restores(run):
    columns = ("restore, s*", "restore, CPU s", "restore, MB", "restore of the model, s*")
    return table(restored_by(run) | run.rows("limits", FIO), columns, "Penstock")


def restored_by(run):
    """One row for each library."""
    state = run.rows("state")
    return {
        "Penstock": state["Penstock, blocking"],
        "safetensors": state["safetensors"],
        "torch.load": state["torch.save"],
        "dcp.load": state["DCP save"],
        "TorchSnapshot": state["TorchSnapshot async_take"],
    }


def plain(columns, *parts, base="", names=()):
    """A table of some parts. A part's title may come with an option that its rows then show."""

    def made(run):
        lines = []
        for part, shown in parts:
            suffix = shown.format(**run.parts[part]["options"])
            rows = {name + suffix: values for name, values in run.rows(part, *names).items()}
            lines += table(rows, columns, base + suffix).splitlines()[2 if lines else 0 :]
        return "\n".join(lines)

    return made


def about(run):
    of = run.about
    commit, changed = of["commit"].rstrip("+"), " with changes" * of["commit"].endswith("+")
    during = "{} (median) and {} (highest) during it".format(*of["load during"])
    versions = ", ".join(f"{name} {version}" for name, version in of["versions"].items())
    lines = [
        f"- Commit `{commit}`{changed}, {of['made']}, {of['seconds'] / 60:.0f} minutes for all.",
        f"- {of['cpu']}, {of['memory']} of memory, {of['system']}.",
        f"- Load: {of['load before']} before the run, {during}.",
        f"- {versions}.",
    ]
    return "\n".join(lines)


def trial(run):
    if not run.about["trial"]:
        return ""
    return (
        '!!! warning "A trial, not a measurement"\n'
        f"    States have {run.about['scale']:g} of their usual size, and the machine was busy."
        " They show the form of this page only.\n"
    )


def gpu(recorded):
    parts = [f"Recorded on {recorded['made']}: {recorded['machine']}."]
    for one in recorded["tables"]:
        lines = [
            f"|  | {' | '.join(one['columns'])} |",
            "|---" + "|---:" * len(one["columns"]) + "|",
        ]
        lines += [f"| {' | '.join(row)} |" for row in one["rows"]]
        parts += [one["text"], "\n".join(lines)]
    parts.append("\n".join(f"- {note}" for note in recorded["notes"]))
    return "\n\n".join(parts)


def numbers(run):
    """Three figures beside DCP's, as a user meets them."""
    state, many = run.rows("state"), run.rows("5,000 tensors")
    gb, tensors = run.option("state", "gb"), run.option("5,000 tensors", "small")
    pairs = {
        f"the call to save {gb:g} GB in the background (lazy) takes": (
            state["Penstock, lazy"]["later call, s"],
            state[KEPT]["later call, s"],
        ),
        f"a restore of {gb:g} GB from a cold disk takes": (
            state["Penstock, blocking"]["restore, s"],
            state["DCP save"]["restore, s"],
        ),
        f"a save of {tensors:,} small tensors, until durable, takes": (
            many[ASYNC]["later durable, s"],
            many[KEPT]["later durable, s"],
        ),
    }
    lines = ["|  | Penstock | DCP |", "|---|---:|---:|"]
    for name, (ours, theirs) in pairs.items():
        lines.append(f"| {name} | **{figure(ours)} s** | {figure(theirs)} s |")
    return "\n".join(lines)


def log_bytes(run, interval):
    """Bytes per parameter and step, by what is written, with a full save every few steps."""
    of = run.rows("bytes")[FP32]
    delta = of[f"delta, {interval} step{'s' * (interval > 1)}"]
    logged = of["floatsplit"] + (interval - 1) * of["log"]
    whole = {
        "full saves": of["raw"],
        "full saves, floatsplit": of["floatsplit"],
        "deltas": delta,
        "full saves, floatsplit, and a log": logged,
    }
    return {name: value / interval for name, value in whole.items()}


def log_verdict(run):
    """When a log pays, as the page about logs says it."""
    of, bf16 = run.rows("bytes")[FP32], run.rows("bytes")[BF16]
    trained = run.rows("training")["Penstock"]
    foreach = run.rows("replay")["Penstock, foreach"]
    raw, split, deltas, _ = log_bytes(run, 1).values()
    *_, tenth = log_bytes(run, 10).values()
    twice = max(1, round(foreach["cold, 2x after"]))
    fewer = math.ceil(of["raw"] / of["log"])
    text = f"""
        An entry has {of["log"]:.1f} bytes per parameter with AdamW in fp32, {bf16["log"]:.1f} in
        bf16 with clipped gradients. With a full save every 10 steps, a run with a log writes
        {tenth:.1f} bytes per parameter and step. Saving every step writes {raw:.0f}, with
        `floatsplit` {split:.1f}, as deltas {deltas:.1f}. So a log pays if a crash may cost one
        step at most. If it may cost {fewer} steps or more, lazy full saves write less and are
        simpler. Logging a step, with the copy of its gradients, takes
        {100 * trained["log, share"]:.1f} % of a step of {1000 * trained["step, s"]:.0f} ms, a lazy
        save {100 * trained["lazy, share"]:.1f} %. On two cores, training with a log at every
        step takes {trained["log, wall"]:.2f} times as long as without, with a lazy save at every
        step {trained["lazy, wall"]:.2f} times. Replaying an entry takes as long as
        {foreach["cold entry, steps"]:.2f} steps, which the picture includes; with {twice}
        entr{"y" if twice == 1 else "ies"} a restore takes twice as long (`benchmarks/log.py`).
    """
    return filled(text)


def hosts_verdict(run):
    """What a recovery from hosts takes, and what copies between them cost."""
    restored, trained = run.rows("recovery"), run.rows("training")
    lost, all_lost = (restored[f"Penstock, {n} lost"] for n in ("one host", "all hosts"))
    ours, other = (trained[f"Penstock, {n}"] for n in ("copies", "other process"))
    alone = trained["Penstock, no copies"]["step, s"]
    rise = run.rows("memory")["Penstock, copies = 1"]["rise, MB"]
    count, gb = run.option("recovery", "ranks"), run.option("recovery", "gb")
    text = f"""
        After the loss of one of {count} hosts, all on one machine with two cores, a restore of
        {gb:g} GB takes {lost["restore, s"]:.1f} s, and reads
        {lost["read from the store, MB"]:.0f} MB from the durable tier. If all are lost, it takes
        {all_lost["restore, s"]:.1f} s from a store that reads
        {run.option("recovery", "store_mb_per_s"):g} MB/s. While each host copies
        {run.option("training", "copy_mb_per_s"):g} MB/s, a step of {1000 * alone:.0f} ms takes
        {100 * max(0, ours["step, s"] / alone - 1):.1f} % longer, and
        {100 * max(0, other["step, s"] / alone - 1):.1f} % longer beside another process that copies
        as many bytes. Copies take {rise:.0f} MB of memory (`benchmarks/hosts.py`).
    """
    return filled(text)


def filled(text):
    """One paragraph, in lines of the page."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False)


# -- charts --------------------------------------------------------------------------------------

FONT = "DejaVu Sans"  # comes with matplotlib; a browser may have to take another one
OURS, OURS_LIGHT, PEER, PEER_LIGHT, INK = "#00796b", "#80cbc4", "#546e7a", "#b0bec5", "#263238"


def drawing(height, panels=1):
    """A figure that reads well at the width of a phone; the text stays text."""
    import matplotlib as mpl  # noqa: PLC0415 - only a page needs it

    mpl.use("svg")
    mpl.rcParams.update(
        {
            "svg.hashsalt": "penstock",
            "svg.fonttype": "none",
            "font.family": FONT,
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.color": INK,
            "axes.edgecolor": "#90a4ae",
        }
    )
    from matplotlib import figure as figures  # noqa: PLC0415

    made = figures.Figure(figsize=(4.2, height), layout="constrained", facecolor="white")
    return made, made.subplots(panels, squeeze=False)[:, 0]


def svg(made):
    file = io.StringIO()
    made.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace(f"'{FONT}'", f"'{FONT}', Verdana, sans-serif")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def bars(rows, first, second, legend):
    """Two horizontal bars for each name that has figures, the shortest on top."""
    known = {n: v for n, v in rows.items() if isinstance(v, dict) and second in v}
    names = sorted(known, key=lambda name: -known[name][second])
    made, (axes,) = drawing(0.6 + 0.42 * len(names))
    longest = max(known[name].get(key, 0) for name in names for key in (first, second))
    for place, name in enumerate(names):
        ours = name.startswith("Penstock")
        pairs = ((first, 0.2, (OURS_LIGHT, PEER_LIGHT)), (second, -0.2, (OURS, PEER)))
        for key, offset, colors in pairs:
            value = known[name].get(key)
            if value is not None:
                axes.barh(place + offset, value, 0.38, color=colors[not ours])
                at = max(value, 0) + longest / 80
                axes.text(at, place + offset, figure(value), va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.tick_params(length=0, colors=INK)
    axes.set_xlim(0, longest * 1.18)
    axes.set_xlabel(f"seconds\n{legend}", color=INK)
    return svg(made)


def lines(panels):
    """Panels below each other, each with logarithmic axes."""
    from matplotlib import ticker  # noqa: PLC0415

    more = len(panels[0][-1]) - 2  # names that need space above
    made, all_axes = drawing(1.9 * len(panels) + 0.2 * more, len(panels))
    for axes, (title, label, unit, xs, series) in zip(all_axes, panels, strict=True):
        for name, values, color in series:
            points = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
        axes.set(xscale="log", yscale="log")
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_xlabel(label, color=INK)
        axes.set_ylabel(unit, color=INK)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.grid(color="#eceff1")
        axes.tick_params(colors=INK)
    made.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    return svg(made)


def growth(run):
    sizes = [run.option(part, "gb") for part in SIZES]
    by_size = [run.rows(part, ASYNC, KEPT) for part in SIZES]
    by_rank = [run.rows(f"ranks, {count}", ASYNC, KEPT) for count in RANKS]
    names = ((ASYNC, OURS), (KEPT, PEER))

    def series(table_of, key):
        return [
            (
                name,
                [
                    rows[name].get(key) if isinstance(rows[name], dict) else None
                    for rows in table_of
                ],
                color,
            )
            for name, color in names
        ]

    return lines(
        [
            (
                "A first save, until durable",
                "GB of state",
                "seconds",
                sizes,
                series(by_size, "first durable, s"),
            ),
            ("A cold restore", "GB of state", "seconds", sizes, series(by_size, "restore, s")),
            (
                "A later save by ranks, until durable",
                "ranks",
                "seconds",
                RANKS,
                series(by_rank, "durable, s"),
            ),
        ]
    )


def log_chart(run):
    """Bytes and lost work over the interval between two full saves."""
    by_interval = [log_bytes(run, interval) for interval in INTERVALS]
    colors = (PEER, PEER_LIGHT, OURS_LIGHT, OURS)
    entry = run.rows("replay")["Penstock, foreach"]["cold entry, steps"]
    replayed = [1 + (interval - 1) * entry for interval in INTERVALS]
    label = "steps between two full saves or deltas"
    return lines(
        [
            (
                "Written per parameter and step",
                label,
                "bytes",
                INTERVALS,
                [
                    (name, [row[name] for row in by_interval], color)
                    for name, color in zip(by_interval[0], colors, strict=True)
                ],
            ),
            (
                "Lost to a crash at most (gray: any without a log)",
                label,
                "steps",
                INTERVALS,
                [("any without a log", INTERVALS, PEER), ("with a log", replayed, OURS)],
            ),
        ]
    )


def charts(run):
    """SVG by file name."""
    state = run.rows("state") | run.rows("limits", COPY)
    return {
        "standstill.svg": bars(
            state, "first call, s", "later call, s", "light: first save, dark: later ones"
        ),
        "restore.svg": bars(
            restored_by(run),
            "restore of the model, s",
            "restore, s",
            "light: the model alone, dark: all",
        ),
        "loop.svg": bars(
            run.rows("loop"),
            "call, s",
            "cost of a save, s",
            "light: the call, dark: the whole cost",
        ),
        "growth.svg": growth(run),
    }


# -- the page ------------------------------------------------------------------------------------

TABLES = {
    "about": about,
    "trial": trial,
    "standstill": standstill,
    "restores": restores,
    "staging": plain(
        ("first call, s", "later call, s*", "later durable, s*", "first durable, MB"),
        ("staging", ""),
        base=ASYNC,
    ),
    "loop": plain(
        ("cost of a save, s*", "call, s", "fence, s", "step, s", "step meanwhile, s"),
        ("loop", ""),
        base=ASYNC,
    ),
    "size": plain(
        ("first call, s*", "first durable, s*", "later call, s", "later durable, s", "restore, s*"),
        *((part, ", {gb:g} GB") for part in SIZES),
        base=ASYNC,
        names=(ASYNC, KEPT),
    ),
    **{
        part: plain(
            ("first call, s", "later call, s*", "later durable, s*", "restore, s*"),
            (part, ""),
            base=ASYNC,
        )
        for part in ("5,000 tensors", "50,000 tensors")
    },
    "one of many": plain(
        ("save, s", "restore, s", "load, s", "open, cache warm, s"), ("one of many", "")
    ),
    "ranks": plain(
        ("call, s*", "durable, s*", "restore, s*"),
        *((f"ranks, {count}", ", ranks: {ranks}") for count in RANKS),
        base=ASYNC,
    ),
    **{
        part: plain(
            ("save, s", "save, x rate", "restore, s", "restore, x rate", "one, MB sent"), (part, "")
        )
        for part in ("s3", "s3, far")
    },
    "tiers": plain(("call, s", "committed, s", "durable, s"), ("tiers", "")),
    "files": plain(("export, s", "copy, s", "import, s"), ("files", "")),
    "auto": plain(
        ("first, s", "later, s", "smaller by"),
        ("auto, disk", ", disk"),
        ("auto, 200 MB per s", ", 200 MB/s"),
    ),
    "frozen": plain(("blocked, s", "stored/raw"), ("frozen", "")),
    "chain": plain(("restore, s", "MB read", "raw bytes, s"), ("chain", "")),
}


def page(run, recorded):
    """The page's text. `{{table NAME}}`, `{{rounds PART}}` and `{{PART: OPTION}}` are replaced."""

    def filled(match):
        kind, _, name = " ".join(match[1].split()).partition(" ")  # a line may end in it
        if kind == "table":
            return gpu(recorded) if name == "gpu" else TABLES[name](run)
        if kind == "rounds":
            return run.rounds(*name.split("; "))
        part, _, option = f"{kind} {name}".partition(": ")
        return f"{run.option(part, option):,g}"

    text = (HERE / "page.md").read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\{\{(.+?)\}\}", filled, text, flags=re.DOTALL))


def made(paths):
    """The files of a page, by their places in the repository, from the JSON of a run."""
    run = Run([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])
    try:
        text = page(run, json.loads((ROOT / GPU).read_text(encoding="utf-8")))
        logged = Run([json.loads((ROOT / LOG).read_text(encoding="utf-8"))])
        hosts = Run([json.loads((ROOT / HOSTS).read_text(encoding="utf-8"))])
        verdicts = {"docs/logs.md": log_verdict(logged), "docs/hosts.md": hosts_verdict(hosts)}
        drawn = charts(run) | {"log.svg": log_chart(logged)}
    except KeyError as missing:
        raise SystemExit(f"not measured: {missing}; run all parts") from missing
    pages = {RUN: as_json(run.document), PAGE: text}
    quoted = dict.fromkeys(QUOTING, numbers(run)) | verdicts
    for name, quote in quoted.items():
        before = (ROOT / name).read_text(encoding="utf-8")
        pages[name] = NUMBERS.sub(rf"\g<1>{quote}\n\g<2>", before)
    return pages | {f"{CHARTS}/{n}": t for n, t in drawn.items()}


def publish(paths, root=ROOT):
    """Write the page, its charts and its JSON, once all of them are made."""
    files = {root / name: text for name, text in made(paths).items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print("written:", *files, sep="\n  ")


if __name__ == "__main__":
    publish(sys.argv[1:] or [ROOT / RUN])

"""The `penstock bench` and `penstock tune` commands: a store's speed, and the best options."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer
from pydantic import TypeAdapter, ValidationError

from penstock.core.cli.app import (
    AsGiven,
    Json,
    backend_of,
    command,
    is_configuration,
    size_of,
    time_of,
)
from penstock.core.cli.bench.measurement import SWEPT, Report, label_of, run_sweep
from penstock.core.cli.bench.scratch import spec_with
from penstock.core.cli.bench.verdict import NOISE, choices, limit_of, raw_limits
from penstock.core.cli.output.render import Column, bar_text, print_json, print_line, print_table
from penstock.core.config.model import load_config, read_file
from penstock.core.config.plugin_choice import scheme_of
from penstock.core.errors import ConfigError
from penstock.core.reporting.progress import ProgressBar
from penstock.core.storage.open import open_backend
from penstock.core.units import counted, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.cli.bench.measurement import Figures
    from penstock.core.cli.bench.verdict import Choice

_BAR_CELLS = 10

_Size = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=size_of,
        help="The bytes of the state to save; less than 1MiB counts as 1MiB.",
        show_default="what fits into store, memory and time, at most 1GiB",
    ),
]
_Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="How often to measure each case.")]
_Seconds = Annotated[
    float,
    typer.Option(
        "--seconds", metavar="TIME", parser=time_of, help="Begin no further case after this time."
    ),
]


@command("bench")
def bench(
    url: AsGiven,
    *,
    size: _Size = None,
    rounds: _Rounds = 3,
    seconds: _Seconds = 90.0,
    as_json: Json = False,
) -> None:
    """Measure how fast checkpoints are saved to URL and restored, and find the limit.

    The engine saves, restores and reads random tensors, with one option changed at a time. A plain
    loop of large writes and reads gives the limit. Everything is written under a separate name in
    the store, and removed at the end.

    Examples:
      penstock bench /nvme/new-run
      penstock bench s3://bucket/gpt --size 256MiB
      penstock bench runs/gpt --json > bench.json
    """
    report = _measured(url, size, rounds, seconds)
    if as_json:
        print_json({**asdict(report), "limit": limit_of(report)})
    else:
        _print(report)


@command("tune")
def tune(
    url: AsGiven,
    *,
    size: _Size = None,
    rounds: _Rounds = 3,
    seconds: _Seconds = 90.0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Use this output of `bench --json` instead of measuring."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the configuration to this file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out.")] = False,
    as_json: Json = False,
) -> None:
    """Write the best configuration for runs at URL, with the reasons.

    Measures like `penstock bench`. Sets an option if it made saves, restores or partial reads
    faster by more than 5 % and by more than the rounds differ, and none of them slower by more
    than 5 %.

    Examples:
      penstock tune /nvme/new-run --out penstock.toml
      penstock tune runs/gpt --from bench.json
    """
    if out is not None and out.exists() and not force:
        msg = f"{out} exists: choose another name, or replace it with --force"
        raise ConfigError(msg)
    report = _measured(url, size, rounds, seconds) if source is None else _read(source, url)
    found = choices(report)
    text = _configuration(url, report, found)
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if as_json:
        table = {"url": report.url, "configuration": text, "out": None if out is None else str(out)}
        print_json({**table, "choices": [asdict(choice) for choice in found]})
    elif out is None:
        sys.stdout.write(text)
    else:
        names = ", ".join(label_of(c.row.option, c.row.value) for c in found) or "no option"
        print_line(f"{out} is written; it sets {names}", style="green")


def _measured(url: str, size: int | None, rounds: int, seconds: float) -> Report:
    spec = backend_of(url)
    options: dict[str, Any] = {}
    if is_configuration(url):
        given = load_config(url)
        options = {name: getattr(given, name) for name in SWEPT if name in given.model_fields_set}
    with closing(ProgressBar("bench", every_s=None, transient=True)) as bar:
        return run_sweep(spec, options, size=size, rounds=rounds, seconds=seconds, on_progress=bar)


# -- the table of bench ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    title: str
    save: float
    restore: float
    figures: Figures | None = None

    def partial(self) -> str:
        return "-" if self.figures is None else f"{self.figures.partial_s * 1000:.1f} ms"

    def cores(self) -> str:
        if self.figures is None:
            return "-"
        return f"{self.figures.save_cores:.1f} / {self.figures.restore_cores:.1f}"


def _print(report: Report) -> None:
    how = "direct I/O" if report.direct_io else "page cache"
    print_line(f"{report.url}: {report.engine}, {how}, {size_text(report.bytes)} of random bytes")
    loop = "plain loop" if report.local else "backend alone"
    lines = [
        _Line(f"{loop}, {counted(raw.blobs, 'blob')}", raw.write_bytes_per_s, raw.read_bytes_per_s)
        for raw in report.raw
    ]
    for row in report.rows:
        found = row.median
        title = label_of(row.option, row.value)
        lines.append(_Line(title, found.save_bytes_per_s, found.restore_bytes_per_s, found))
    print_table(_columns(*raw_limits(report)), lines)
    counts = sorted({len(row.rounds) for row in report.rows})
    rounds = counted(counts[-1], "round") + (f" (some cases: {counts[0]})" if counts[1:] else "")
    print_line(f"medians of {rounds}; PARTIAL: reading 1 MiB; CORES: busy in a save / a restore")
    if not report.rows[1:]:
        print_line("there was no time to measure other options: raise --seconds")
    if not report.cold:
        print_line("restores may have read from a cache that could not be dropped")
    print_line("")
    print_line(limit_of(report))


def _columns(write: float, read: float) -> list[Column[_Line]]:
    columns: list[Column[_Line]] = [
        Column("CASE", lambda line: line.title),
        Column("SAVE", lambda line: f"{size_text(line.save)}/s", right=True),
        Column("OF RAW", lambda line: f"{line.save / write:.0%}", right=True),
        Column("", lambda line: bar_text(line.save / write, _BAR_CELLS), keep=1),
        Column("RESTORE", lambda line: f"{size_text(line.restore)}/s", right=True),
        Column("OF RAW", lambda line: f"{line.restore / read:.0%}", right=True),
        Column("", lambda line: bar_text(line.restore / read, _BAR_CELLS), keep=1),
        Column("PARTIAL", _Line.partial, right=True, keep=3),
        Column("CORES", _Line.cores, right=True, keep=2),
    ]
    # A bar draws the share beside it: a pipe needs none.
    return columns if sys.stdout.isatty() else [column for column in columns if column.title]


# -- the configuration of tune --------------------------------------------------------------------


def _read(path: Path, url: str) -> Report:
    """Read the output of `bench --json`.

    Raises:
        ConfigError: The file cannot be read, is not such output, or is for another store than
            `url`.
    """
    try:
        report = TypeAdapter(Report).validate_json(path.read_bytes())
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigError(msg) from error
    except ValidationError as error:
        odd = sorted({str(one["loc"][0]) for one in error.errors() if one["loc"]})
        why = f"missing or wrong: {', '.join(odd)}" if odd else "it is not a JSON object"
        msg = f"{path} is not the output of `penstock bench --json`: {why}"
        raise ConfigError(msg) from error
    with closing(open_backend(backend_of(url))) as backend:
        if backend.url != report.url:
            msg = (
                f"{path} holds measurements of {report.url}, not of {backend.url}: to measure that "
                "store, leave out --from"
            )
            raise ConfigError(msg)
    return report


def _configuration(url: str, report: Report, found: Sequence[Choice]) -> str:
    """Return the configuration as TOML, with a comment that gives the reason for each option."""
    default = report.rows[0].median
    lines = [
        f"# Measured with {size_text(report.bytes)} by `penstock bench`, each option alone.",
        (
            f"# The default saves {size_text(default.save_bytes_per_s)}/s, "
            f"and restores {size_text(default.restore_bytes_per_s)}/s."
        ),
    ]
    twice = [label_of(r.option, r.value) for r in report.rows[1:] if len(r.rounds) > 1]
    if not twice:
        lines.append("# No option was measured twice, so none is set: raise --seconds or --rounds.")
    elif not found:
        shown = ", ".join(twice)
        lines.append(f"# None of these was clearly better (by more than {NOISE:.0%}): {shown}.")
    for choice in found:
        row, gains = choice.row, choice.gains
        times = ", ".join(f"{work} {gain:.2f}" for work, gain in gains.items())
        lines += ["", f"# {label_of(row.option, row.value)}; speed relative to default: {times}"]
        if row.kind == "engine":
            lines.append(f"{row.option} = {_toml(row.value)}")
    changes = {c.row.option: c.row.value for c in found if c.row.kind == "backend" and c.row.option}
    return "\n".join([*lines, f"backend = {_toml(_backend(url, changes))}", ""])


def _backend(url: str, changes: dict[str, Any]) -> object:
    """Return the backend for the configuration, as the user wrote it, with additional options."""
    if is_configuration(url):  # unchanged from the file: `${NAME}` may hold a secret
        raw = read_file(Path(url))["backend"]
        if not isinstance(raw, str):
            return {**raw, **changes}
        if scheme_of(raw) not in {"", "file"}:
            return raw + (("&" if "?" in raw else "?") + urlencode(changes) if changes else "")
    spec = backend_of(url)
    with closing(open_backend(spec)) as backend:
        spec_text = spec_with(spec, backend, changes)
    assert isinstance(spec_text, str)
    return spec_text.replace("$", "$$")


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON's strings, numbers and booleans are valid TOML, except escaped pairs of surrogates.
    return json.dumps(value, ensure_ascii=False)

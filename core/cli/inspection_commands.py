"""The arguments and help of the commands that read: `ls`, `show`, `verify`, `doctor` and more.

A command's own module is imported when it runs, so that `penstock --help` loads none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.core.cli.app import (
    AsGiven,
    Exclude,
    Include,
    Json,
    Step,
    Url,
    app,
    backend_of,
    is_configuration,
    whole_number,
)


def _depth(text: str) -> int:
    return whole_number(text, "depth", 1)


def _last(text: str) -> int:
    return whole_number(text, "number of checkpoints", 1)


@app.command(
    "ls",
    short_help="List the checkpoints of a run.",
    epilog="""\b
Examples:
  penstock ls runs/gpt
  penstock ls runs/gpt --last 5 --metrics loss,eval.mmlu
  penstock ls runs/gpt --metadata
  penstock ls runs/gpt --json |
    jq '.checkpoints[] | select(.state == "ok") | .step'
""",
)
def ls(
    url: Url,
    *,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Print all of each checkpoint's metadata.")
    ] = False,
    metrics: Annotated[
        str,
        typer.Option(
            "--metrics",
            metavar="KEY,...",
            help="Columns for these keys of metadata, `a.b` for one inside another.",
            show_default="up to three that most checkpoints have",
        ),
    ] = "",
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="N", parser=_last, help="Only the N newest steps."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run: step, generation, age, sizes, ratio, state, metrics.

    The state is `ok`, or `damaged` where the commit record cannot be read; what a checkpoint
    holds is looked at by `penstock verify`. Reads one small record for each checkpoint.

    STORED is the size of the blobs, including the gaps that direct I/O needs; RATIO is RAW over
    STORED; `penstock show` counts what the objects themselves take.
    """
    from penstock.core.cli.commands.ls import ListOptions, run  # noqa: PLC0415

    wanted = tuple(filter(None, metrics.split(",")))
    run(url, ListOptions(metadata, wanted, last, as_json))


@app.command(
    "show",
    short_help="Show the objects of one checkpoint.",
    epilog="""\b
Examples:
  penstock show runs/gpt --depth 1
  penstock show runs/gpt --step 300
  penstock show runs/gpt --include 'model/*.bias'
  penstock show runs/gpt --by codec
  penstock show runs/gpt --include model --stats |
    grep -v ' 0 *0$'
""",
)
def show(  # noqa: PLR0913 - its options
    url: AsGiven,
    *,
    step: Step = None,
    include: Include = None,
    exclude: Exclude = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Read the selected tensors: min, max, mean, std, nan and inf of each."
        ),
    ] = False,
    tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--flat",
            help="Indented, with sums; or one line with the whole path for each object.",
            show_default="a tree in a terminal, flat in a pipe",
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="N", parser=_depth, help="Fold the tree below N levels."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="WHAT",
            help="Sums instead of objects: by `codec`, `rule`, `role` or `dtype`.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the objects of one checkpoint: type, shape, bytes, ratio, codecs, role.

    Reads the manifest only, unless --stats is given. A pattern is a path with `*` (within one
    segment), `**` (any number), `?`, `[..]`; a bare prefix takes all that is below it.

    STORED is what an object takes without the gaps between objects, RATIO is BYTES over STORED;
    `penstock ls` counts the gaps, too. BORROWED is what it needs of the blobs of other checkpoints.
    """
    from penstock.core.cli.commands.show import GROUPINGS, ShowOptions, run  # noqa: PLC0415

    if depth is not None and (tree is False or as_json):
        msg = "--depth folds the tree; leave out --flat and --json"
        raise typer.BadParameter(msg)
    if by is not None:
        if by not in GROUPINGS:
            msg = f"--by: {by!r} is none of {', '.join(GROUPINGS)}"
            raise typer.BadParameter(msg)
        if tree is not None or depth is not None or stats:
            msg = "--by prints no objects; leave out --tree, --flat, --depth and --stats"
            raise typer.BadParameter(msg)
        if by == "rule" and not is_configuration(url):
            msg = "--by rule: a checkpoint stores no rules; give their configuration file as URL"
            raise typer.BadParameter(msg)
    how = ShowOptions(tree=tree, depth=depth, stats=stats, as_json=as_json, by=by, rules=url)
    run(backend_of(url), step=step, include=include, exclude=exclude, how=how)


@app.command(
    "report",
    short_help="Write a page with charts on a run.",
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
    from penstock.core.cli.report.report import run  # noqa: PLC0415

    run(url, out, step=step, events=events or [], overwrite=overwrite, as_json=as_json)


@app.command(
    "verify",
    short_help="Compare every checksum.",
    epilog="""\b
Examples:
  penstock verify runs/gpt
  penstock verify runs/gpt --all --quick
  penstock verify penstock.toml --all --repair
  penstock verify runs/gpt --step 300 --json |
    jq -r '.reports[].damaged[].what'
""",
)
def verify(
    url: Url,
    *,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint.")] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep/--quick",
            help="Read and decode every frame, or check only the manifest's digests and the sizes.",
        ),
    ] = True,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="With tiers: bring damaged copies anew from a good one, read first."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare every checksum of a checkpoint; exits with 1 if anything is damaged.

    All damage is listed, not only the first, by the path of the object or the name of the record.
    With --repair, 1 means that something still is.
    """
    from penstock.core.cli.commands.verify import VerifyOptions, run  # noqa: PLC0415

    if every and step is not None:
        msg = "--all verifies every step; leave out --step"
        raise typer.BadParameter(msg)
    if not run(url, step=step, every=every, how=VerifyOptions(deep, repair, as_json)):
        raise typer.Exit(1)


@app.command(
    "doctor",
    short_help="Say what this machine and store can do.",
    epilog="""\b
Examples:
  penstock doctor runs/gpt
  penstock doctor /nvme/new-run --no-probe
  penstock doctor runs/gpt --json |
    jq '.checks[] | select(.status != "ok")'
""",
)
def doctor(
    url: Url,
    *,
    probe: Annotated[
        bool,
        typer.Option("--probe/--no-probe", help="Measure how fast the store writes and reads."),
    ] = True,
    probe_size: Annotated[
        str,
        typer.Option("--probe-size", metavar="SIZE", help="The most to write for it."),
    ] = "256MiB",
    as_json: Json = False,
) -> None:
    """Look at what this machine and this store can do for a run, and say what to change.

    The run need not exist yet, and nothing stays behind. Exits with 1 if a save would fail.
    """
    from penstock.core.cli.doctor.doctor import run  # noqa: PLC0415
    from penstock.core.config.model import parse_size  # noqa: PLC0415

    try:
        size = parse_size(probe_size)
    except ValueError as error:
        msg = f"--probe-size: {probe_size!r} is {error}"
        raise typer.BadParameter(msg) from None
    assert isinstance(size, int)
    if not run(url, probe_bytes=size if probe else 0, as_json=as_json):
        raise typer.Exit(1)


@app.command("plugins", short_help="List providers, codecs and backends.")
def plugins(
    *,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import and try each; exits with 1 if one is broken."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the installed providers, codecs and backends, and why one cannot be used."""
    from penstock.core.cli.commands.plugins import run  # noqa: PLC0415

    if not run(check=check, as_json=as_json):
        raise typer.Exit(1)


@app.command(
    "schema",
    short_help="Print the schema of configurations.",
    epilog="""\b
Example:
  penstock schema > penstock.schema.json
""",
)
def schema(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="What is printed is JSON in any case.")
    ] = False,
) -> None:
    """Print the JSON Schema of configuration files, for editors and other tools.

    It holds the options of every backend and codec that is installed here.
    """
    del as_json
    from penstock.core.cli.commands.schema import run  # noqa: PLC0415

    run()

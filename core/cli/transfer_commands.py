"""The arguments and help of the commands over two places: `copy`, `diff` and `drain`.

A command's own module is imported when it runs, so that `penstock --help` loads none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.core.cli.app import (
    Exclude,
    Include,
    Json,
    Url,
    app,
    backend_of,
    exits,
    size_of,
    step_or_latest,
)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # `not >=` also refuses `nan`
        msg = f"{text!r} is no time: give seconds, such as 90 or 0.5"
        raise typer.BadParameter(msg)
    return seconds


@app.command(
    "copy",
    short_help="Copy checkpoints to another place.",
    epilog="""\b
Examples:
  penstock copy runs/gpt s3://bucket/gpt
  penstock copy runs/gpt /backup/gpt --step all
  penstock copy runs/gpt /share/weights --include model \\
    --codec zstd
""",
)
def copy(  # noqa: PLR0913 - its options
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM",
            help="Root of the run to copy from: a path, a URL, or a configuration file.",
            callback=backend_of,
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help="Root of the run to copy to, likewise; made if needed.",
            callback=backend_of,
        ),
    ],
    *,
    step: Annotated[
        str, typer.Option("--step", metavar="STEP", help="A step, `latest`, or `all`.")
    ] = "latest",
    include: Include = None,
    exclude: Exclude = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            metavar="CODEC",
            help="Encode again with this codec; repeatable, in the order of encoding. With delta a "
            "copy is encoded against the newest earlier step that TO has.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Store again without any codec.")] = False,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            metavar="FILE",
            help="Encode again by the [[rules]] and [deltas] of this file.",
        ),
    ] = None,
    flatten: Annotated[
        bool,
        typer.Option(
            "--flatten", help="Make the copy stand alone, without data of other checkpoints."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another checkpoint at that step.")
    ] = False,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="SIZE", help="The most to copy per second: 200MiB."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Do not read again what an interrupted copy has brought there."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy checkpoints to another run, by default the latest one.

    Without options that select or encode, the copy is the same byte for byte. Every checksum is
    compared on the way, and the checkpoint appears at the target when it is whole and durable
    there, not before. When a copy was interrupted the same command goes on.
    """
    from penstock.core.cli.commands.copy import CopyOptions, run, wanted_rules  # noqa: PLC0415

    if step not in {"latest", "all"} and not (step.isascii() and step.isdecimal()):
        msg = (
            f"--step: {step!r} is no step: give a whole number of at least 0, or `latest`, or `all`"
        )
        raise typer.BadParameter(msg)
    if sum((codec is not None, raw, rules is not None)) > 1:
        msg = "--codec, --raw and --rules each say how to encode; pass one of them"
        raise typer.BadParameter(msg)
    how = CopyOptions(
        include=include or None,
        exclude=exclude or None,
        rules=wanted_rules(codec, rules, raw=raw),
        rules_from=rules or "--codec",
        overwrite=overwrite,
        bytes_per_s=None if rate is None else float(size_of(rate, "--rate")),
        trust_sealed=trust,
        flatten=flatten,
    )
    if how.encodes and (trust or rate is not None):
        option = "--trust" if trust else "--rate"
        msg = f"{option} is for copies byte for byte; leave out what selects or encodes"
        raise typer.BadParameter(msg)
    if not run(source, target, step, how, as_json=as_json):
        raise typer.Exit(1)


@app.command(
    "diff",
    short_help="Say what differs between two checkpoints.",
    epilog="""\b
Examples:
  penstock diff runs/gpt              the two newest
  penstock diff runs/gpt --step-a 100 --step-b 200
  penstock diff runs/gpt /backup/gpt --include model
  penstock diff runs/gpt --norms --json |
    jq '.changes[] | select(.norms)'
""",
)
def diff(
    url_a: Annotated[
        str,
        typer.Argument(metavar="A", help="Root of a run: a path, a URL, or a configuration file."),
    ],
    url_b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Root of another run.", show_default="the same run"),
    ] = None,
    *,
    step_a: Annotated[
        int | None,
        typer.Option(
            "--step-a",
            metavar="STEP",
            parser=step_or_latest,
            help="Which checkpoint of A.",
            show_default="latest; of one run, the one before B's",
        ),
    ] = None,
    step_b: Annotated[
        int | None,
        typer.Option(
            "--step-b",
            metavar="STEP",
            parser=step_or_latest,
            help="Which checkpoint of B.",
            show_default="latest",
        ),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    norms: Annotated[
        bool,
        typer.Option("--norms", help="Read tensors that differ, and say how far they are apart."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what differs between two checkpoints, of one run or of two.

    Objects that only one of them has; kinds, dtypes and shapes; bytes, by their stored checksums
    where these tell, else by reading both; values, kinds of containers, metadata. Exits with 0
    if nothing differs, 1 if something does, 2 if it went wrong.
    """
    exits.trouble = 2  # as diff(1): 1 says that they differ
    from penstock.core.cli.commands.diff import Where, run  # noqa: PLC0415

    where = Where(
        backend_of(url_a),
        None if url_b is None else backend_of(url_b),
        step_a,
        step_b,
    )
    if not run(
        where,
        include=include or None,
        exclude=exclude or None,
        norms=norms,
        as_json=as_json,
    ):
        raise typer.Exit(1)


@app.command(
    "drain",
    short_help="Copy to slower tiers what was left to be copied.",
    epilog="""\b
Examples:
  penstock drain penstock.toml
  penstock drain \\
    'tiered://?fast=/nvme/run&durable=/lustre/run'
""",
)
def drain(
    url: Url,
    *,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", parser=_seconds, help="Stop after this time."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy what saves have left in the fast tier of a run and what has yet to go to the next one.

    A process that saves there does the same in the background; this is for when none will. While
    one does, what it is just copying is left to it. Exits with 1 if something is still left.
    """
    from penstock.core.cli.commands.drain import run  # noqa: PLC0415

    if not run(url, timeout_s=timeout, as_json=as_json):
        raise typer.Exit(1)

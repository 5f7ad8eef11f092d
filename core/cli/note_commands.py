"""The arguments and help of the commands that add to a checkpoint: `annotate`, `pin` and `unpin`.

A command's own module is imported when it runs, so that `penstock --help` loads none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.core.cli.app import Json, Url, app, step_of

_Tag = Annotated[str, typer.Argument(metavar="TAG", help="Letters, digits, and any of . _ -")]
_Step = Annotated[int, typer.Argument(metavar="STEP", parser=step_of, help="Which checkpoint.")]


@app.command(
    "annotate",
    short_help="Add metadata to a checkpoint.",
    epilog="""\b
Examples:
  penstock annotate runs/gpt 100 val_loss=2.31
  penstock annotate runs/gpt 100 'eval={"mmlu": 0.61}'
""",
)
def annotate(
    url: Url,
    step: _Step,
    pairs: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="JSON; what is no JSON is text.")
    ],
    *,
    as_json: Json = False,
) -> None:
    """Add metadata to a checkpoint, such as a metric that is known only later.

    A key that the checkpoint has already gets the new value. Prints all metadata it has then.
    """
    from penstock.core.cli.commands.annotate import parse_pairs, run  # noqa: PLC0415

    try:
        metadata = parse_pairs(pairs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    run(url, step, metadata, {}, as_json=as_json)


@app.command(
    "pin",
    short_help="Give a checkpoint a tag; retention spares it.",
    epilog="""\b
Examples:
  penstock pin runs/gpt 100 best
  penstock pin runs/gpt 300 paper-v2
""",
)
def pin(url: Url, step: _Step, tag: _Tag, *, as_json: Json = False) -> None:
    """Give a checkpoint a tag: retention deletes no checkpoint that has one.

    `penstock delete` does so with --force alone. `penstock ls` shows the tags.
    """
    from penstock.core.cli.commands.annotate import run  # noqa: PLC0415

    run(url, step, {}, {tag: True}, as_json=as_json)


@app.command(
    "unpin",
    short_help="Take a tag from a checkpoint.",
    epilog="""\b
Example:
  penstock unpin runs/gpt 100 best
""",
)
def unpin(url: Url, step: _Step, tag: _Tag, *, as_json: Json = False) -> None:
    """Take a tag from a checkpoint, whether or not it has it."""
    from penstock.core.cli.commands.annotate import run  # noqa: PLC0415

    run(url, step, {}, {tag: False}, as_json=as_json)

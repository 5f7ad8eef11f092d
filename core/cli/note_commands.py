"""The arguments and help of the commands that add to a checkpoint: `annotate`.

A command's own module is imported when it runs, so that `penstock --help` loads none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.core.cli.app import Json, Url, app, step_of

_Step = Annotated[int, typer.Argument(metavar="STEP", parser=step_of, help="Which checkpoint.")]


@app.command(
    "annotate",
    short_help="Add metadata to a checkpoint.",
    epilog="""\b
Examples:
  penstock annotate runs/gpt 100 val_loss=2.31
  penstock annotate runs/gpt 100 by=ada 'eval={"mmlu": 0.61}'
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

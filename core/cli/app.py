"""The command as a whole: its options, and the arguments that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  penstock ls runs/gpt                        which checkpoints there are
  penstock show runs/gpt --include optimizer  what the newest one holds
  penstock verify runs/gpt --all              compare every checksum
  penstock prune runs/gpt --dry-run           what crashed saves left behind
  penstock doctor /nvme/new-run               what this machine can do there

\b
URL is the root of a run: a path, or a URL such as posix:///data/run.
Every command takes --json. Exit codes: 0 all is well, 1 something failed or
is damaged, 2 the command was called wrongly.
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Root of the run: a path, or a URL such as posix://.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Step = Annotated[
    int | None, typer.Option("--step", min=0, help="Which checkpoint.", show_default="latest")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]


@dataclass(slots=True)
class Debugging:
    """Whether errors are shown with tracebacks: `main` asks when the context is gone."""

    wanted: bool = False


debugging = Debugging()


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__  # noqa: PLC0415

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def _set_debug(wanted: bool) -> None:
    debugging.wanted = wanted
    if wanted:
        import logging  # noqa: PLC0415

        logging.basicConfig(level=logging.DEBUG)


@app.callback(epilog=EXAMPLES)
def penstock(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", callback=_set_debug, help="Show tracebacks of errors, and logs."),
    ] = False,
) -> None:
    """Look at the checkpoints of a run, check them, and clean up."""

"""The command as a whole: its options, and the arguments that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

# Examples are not wrapped: with two cells of indentation they have to fit 60.
EXAMPLES = """\b
Examples:
  penstock ls runs/gpt                    what is there
  penstock show runs/gpt --include model  what it holds
  penstock verify runs/gpt --all          check all bytes
  penstock copy runs/gpt s3://bucket/gpt  copy the newest
  penstock diff runs/gpt                  what changed
  penstock prune runs/gpt --dry-run       crash leftovers
  penstock doctor /nvme/new-run           try the machine

URL is the root of a run: a path, a URL such as posix:///data/run, or the
configuration file of the run.

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


def backend_of(url: str) -> str:
    """A configuration file stands for the backend in it.

    Raises:
        ConfigError: It cannot be read, or is wrong.
    """
    if "://" in url or Path(url).is_dir():
        return url
    if not url.endswith((".toml", ".yaml", ".yml", ".json")):
        return url
    from penstock.core.config import load_config  # noqa: PLC0415

    # A table passes as it is: whoever opens a backend takes either.
    return cast("str", load_config(url).backend)


Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Root of the run: a path, a URL such as posix://, or a configuration file.",
        callback=backend_of,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def whole_number(text: str, what: str, least: int) -> int:
    """The number that `text` is: `what` is what it stands for.

    Raises:
        typer.BadParameter: It is none, or less than `least`.
    """
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        msg = f"{text!r} is no {what}: give a whole number of at least {least}"
        raise typer.BadParameter(msg)
    return int(text)


def step_of(text: str) -> int:
    """The number of a step.

    Raises:
        typer.BadParameter: It is none.
    """
    return whole_number(text, "step", 0)


def step_or_latest(text: str) -> int | None:
    """The number of a step; None for `latest`.

    Raises:
        typer.BadParameter: It is neither.
    """
    if text == "latest":
        return None
    try:
        return step_of(text)
    except typer.BadParameter as error:
        msg = f"{error}, or `latest`"
        raise typer.BadParameter(msg) from None


Step = Annotated[
    int | None,
    typer.Option(
        "--step",
        metavar="STEP",
        parser=step_or_latest,
        help="Which checkpoint.",
        show_default="latest",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]


@dataclass(slots=True)
class Debugging:
    """Whether errors are shown with tracebacks: `main` asks when the context is gone."""

    wanted: bool = False


debugging = Debugging()


@dataclass(slots=True)
class Exits:
    """With what the command exits when something went wrong: `diff` means another thing by 1."""

    trouble: int = 1


exits = Exits()


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
        for name in ("botocore", "urllib3", "s3transfer", "aiobotocore"):
            logging.getLogger(name).setLevel(logging.INFO)  # below, they print session tokens


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

"""The `penstock` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from penstock.core.errors import PenstockError

app = typer.Typer(
    help="Look at the checkpoints of a run.",
    no_args_is_help=True,
    add_completion=False,
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


def main() -> None:
    """Run the command; errors of ours are one message, without a traceback.

    Exits with 0, 1 after an error, 2 when it was called wrongly.
    """
    try:
        try:
            app(prog_name="penstock")
        finally:
            sys.stdout.flush()
    except OSError as error:
        _end_output(error)
    except PenstockError as error:
        from penstock.core.cli.render import visible  # noqa: PLC0415

        lines = [visible(line) for line in str(error).splitlines()] or [type(error).__name__]
        sys.stderr.write("\n".join([f"penstock: {lines[0]}", *lines[1:]]) + "\n")
        sys.exit(1)


def _end_output(error: OSError) -> NoReturn:
    # What is still buffered must not be tried again, with a traceback, when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno != errno.EPIPE:  # whoever stopped reading needs no message
        what = error.filename or "standard output"
        sys.stderr.write(f"penstock: {what}: {error.strerror or error}\n")
    sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__  # noqa: PLC0415

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look at the checkpoints of a run."""


@app.command("ls")
def ls(url: Url, *, as_json: Json = False) -> None:
    """List the checkpoints of a run."""
    from penstock.core.cli.ls import run  # noqa: PLC0415

    run(url, as_json=as_json)


@app.command("show")
def show(
    url: Url,
    *,
    step: Step = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Only objects that match this pattern; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="No objects that match this pattern; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the objects of one checkpoint."""
    from penstock.core.cli.show import run  # noqa: PLC0415

    run(url, step=step, include=include, exclude=exclude, as_json=as_json)


@app.command("verify")
def verify(
    url: Url,
    *,
    step: Step = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep/--quick",
            help="Read and decode every frame, or check only the manifest and the sizes.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Compare every checksum of one checkpoint; exits with 1 if it is damaged."""
    from penstock.core.cli.verify import run  # noqa: PLC0415

    if not run(url, step=step, deep=deep, as_json=as_json):
        raise typer.Exit(1)


@app.command("plugins")
def plugins(
    *,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import and validate each; exits with 1 if one is broken."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the installed providers, codecs and backends."""
    from penstock.core.cli.plugins import run  # noqa: PLC0415

    if not run(check=check, as_json=as_json):
        raise typer.Exit(1)

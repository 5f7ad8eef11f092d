"""Runs the `penstock` command, and says what went wrong."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

from penstock.core.cli import between, looking, tidying  # noqa: F401 - they declare the commands
from penstock.core.cli.app import app, debugging, exits
from penstock.core.errors import PenstockError


def main() -> None:
    """Run the command; errors are one message, without a traceback unless `--debug` is given.

    Exits with 0, 1 after an error (but see `exits`), 2 when it was called wrongly.
    """
    exits.trouble = 1
    try:
        try:
            app(_debug_first(sys.argv[1:]), prog_name="penstock")
        finally:
            sys.stdout.flush()
    except OSError as error:
        _show_traceback()
        _end_output(error)
    except PenstockError as error:
        _show_traceback()
        _complain(str(error) or type(error).__name__)
    except Exception as error:  # noqa: BLE001 - the outermost boundary: ends the process
        _show_traceback()
        hint = (
            ""
            if debugging.wanted
            else "; run `penstock --debug ...` for the traceback, and report it"
        )
        _complain(f"unexpected {type(error).__name__}: {error}{hint}")


def _debug_first(arguments: list[str]) -> list[str]:
    """`--debug` is an option of the whole; people write it behind the command that failed."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--debug" not in options:
        return arguments
    rest = [a for a in options if a != "--debug"] + arguments[len(options) :]
    return ["--debug", *rest]


def _complain(message: str) -> NoReturn:
    from penstock.core.cli.render import visible  # noqa: PLC0415

    lines = [visible(line) for line in message.splitlines()]
    sys.stderr.write("\n".join([f"penstock: {lines[0]}", *lines[1:]]) + "\n")
    sys.exit(exits.trouble)


def _show_traceback() -> None:
    if debugging.wanted:
        import traceback  # noqa: PLC0415

        traceback.print_exc()


def _end_output(error: OSError) -> NoReturn:
    # What is still buffered must not be tried again, with a traceback, when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno != errno.EPIPE:  # whoever stopped reading needs no message
        what = error.filename or "standard output"
        sys.stderr.write(f"penstock: {what}: {error.strerror or error}\n")
    sys.exit(exits.trouble)

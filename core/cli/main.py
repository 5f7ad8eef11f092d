"""The entry point of the `penstock` command, and the boundary that prints its errors.

Tested in `tests/core/cli/test_cli.py`.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from typing import NoReturn

from penstock.core.cli.app import app, errors, log_visibly
from penstock.core.cli.job import ending_job
from penstock.core.cli.output.render import visible, visible_lines, wrapped
from penstock.core.cli.output.runs_on_disk import OPENING, quiet
from penstock.core.errors import PenstockError


def main() -> None:
    """Run the command; print an error as one message, with a traceback only under `--debug`.

    Exits with 0; with 1 after an error or if the command returned False; or with 2 after a usage
    error. For `diff`, see `ErrorHandling`.
    """
    errors.exit_code = 1  # a program may call `main` again after `diff`, which sets 2
    log_visibly()
    with ending_job():
        _run()


def _run() -> None:
    try:
        try:
            # The warning about a missing io_uring does not help here: `doctor` checks for it, and
            # `bench` names the engine.
            with quiet(OPENING, logging.ERROR):
                app(_in_order(sys.argv[1:]), prog_name="penstock")
        finally:
            # Flushed here: if this failed at exit, Python would print "Exception ignored" and exit
            # with 120.
            sys.stdout.flush()
    except OSError as error:
        _show_traceback()
        _end_output(error)
    except PenstockError as error:
        _show_traceback()
        notes = getattr(error, "__notes__", ())
        _complain("\n  ".join([str(error) or type(error).__name__, *notes]))
    except Exception as error:  # noqa: BLE001 - the outermost boundary: ends the process
        _show_traceback()
        hint = (
            "" if errors.debug else "; run `penstock --debug ...` for the traceback, and report it"
        )
        _complain(f"unexpected {type(error).__name__}: {error}{hint}")


def _in_order(arguments: list[str]) -> list[str]:
    """Move `--debug` before the command and `--json` after it, where typer expects them.

    Users append `--debug`, an option of the application, to the command that failed, and write
    `--json`, an option of each command, before the command.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = arguments[:end], arguments[end:]
    if "--debug" in options:
        options = ["--debug", *(a for a in options if a != "--debug")]
    command = next((n for n, a in enumerate(options) if not a.startswith("-")), 0)
    if "--json" in options[:command]:
        first = [a for a in options[:command] if a != "--json"]
        options = [*first, *options[command:], "--json"]
    return [*options, *rest]


def _complain(message: str) -> NoReturn:
    lines = visible_lines(f"penstock: {message}")
    if sys.stderr.isatty():
        width = max(20, shutil.get_terminal_size().columns)
        lines = [wrapped(line, width) for line in lines]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.exit(errors.exit_code)


def _show_traceback() -> None:
    if errors.debug:
        import traceback  # noqa: PLC0415

        text = traceback.format_exc()
        sys.stderr.write("\n".join(map(visible, text.split("\n"))))


def _end_output(error: OSError) -> NoReturn:
    # Python flushes standard output again when it exits, and would print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno != errno.EPIPE:  # no error: `penstock ls | head` closes the pipe early
        what = error.filename or "standard output"
        sys.stderr.write(f"penstock: {what}: {error.strerror or error}\n")
    sys.exit(errors.exit_code)

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
            app(_in_order(sys.argv[1:]), prog_name="penstock")
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


def _in_order(arguments: list[str]) -> list[str]:
    """What people write on the other side of the command.

    `--debug` is an option of the whole, and is written behind the command that failed; `--json`
    one of each command, and is written before it.
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
    from penstock.core.cli.render import visible  # noqa: PLC0415

    lines = [visible(line) for line in f"penstock: {message}".splitlines()]
    if sys.stderr.isatty():
        lines = [_wrapped(line) for line in lines]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.exit(exits.trouble)


def _wrapped(line: str) -> str:
    import shutil  # noqa: PLC0415
    import textwrap  # noqa: PLC0415

    width = max(20, shutil.get_terminal_size().columns)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


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

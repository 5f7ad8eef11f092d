"""The typer application: the commands, their shared options and arguments, and confirmations.

Tested in `tests/core/cli/test_cli.py`.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperGroup

from penstock.core.cli.output.render import visible, visible_lines
from penstock.core.cli.output.runs_on_disk import OPENING
from penstock.core.units import seconds_of

F = TypeVar("F", bound=Callable[..., object])

# `\b` keeps typer from wrapping the examples, so each line must fit the narrowest terminal:
# 60 cells with the indentation of two.
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

Every command takes --json. Exit codes: 0 success, 1 something failed or is
damaged, 2 wrong usage (for `diff`: see its help).
"""

TASKS = {
    "Look": {
        "ls": ("commands.ls", "List the checkpoints of a run."),
        "show": ("commands.show", "Show the objects of one checkpoint."),
        "diff": ("commands.diff", "Show what differs between two checkpoints."),
        "report": ("commands.report", "Write a page with charts of a run."),
    },
    "Move": {
        "copy": ("commands.copy", "Copy checkpoints to another place."),
        "export": ("commands.files", "Write a checkpoint as files of another tool."),
        "import": ("commands.files", "Save files of another tool as a checkpoint."),
        "drain": ("commands.drain", "Copy pending checkpoints to slower tiers."),
    },
    "Keep": {
        "annotate": ("commands.annotate", "Add metadata to a checkpoint."),
        "pin": ("commands.annotate", "Tag a checkpoint, so that retention keeps it."),
        "unpin": ("commands.annotate", "Remove a tag from a checkpoint."),
    },
    "Check and repair": {
        "verify": ("commands.verify", "Compare every checksum."),
        "doctor": ("commands.doctor", "Check what this machine and store can do."),
        "bench": ("commands.bench", "Measure a store, and find its limit."),
    },
    "Set up": {
        "plugins": ("commands.plugins", "List providers, codecs, backends and replayers."),
        "advise": ("commands.advise", "Compute how often a run should save."),
        "tune": ("commands.bench", "Write the configuration that is best here."),
        "schema": ("commands.plugins", "Print the schema of configurations."),
    },
    "Delete": {
        "prune": ("commands.delete", "Delete the leftovers of crashed saves."),
        "delete": ("commands.delete", "Delete checkpoints."),
        "compact": ("commands.compact", "Make checkpoints of a chain stand alone."),
    },
}
"""Each command's module and its line in `--help`, in the order of a user's tasks: commands that
delete or rewrite come last."""


class _Commands(TyperGroup):
    """Lists the commands of `TASKS` by task, and imports only the module of the running one."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        width = max(map(len, self.commands))
        for task, names in TASKS.items():
            with formatter.section(task):
                formatter.write_dl(
                    [
                        (f"{cmd.name:{width}}", cmd.get_short_help_str(formatter.width - width - 6))
                        for cmd in map(self.commands.__getitem__, names)
                    ]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if name is None or listed is None else load_command(name), rest


def _exit(ok: bool | None, **_: object) -> None:
    if ok is False:
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=_exit,
)


def _listed() -> None:
    """Act as a placeholder for a command whose module is not imported."""


for _commands in TASKS.values():
    for _name, (_, _short_help) in _commands.items():
        app.command(_name, short_help=_short_help)(_listed)

_declared: dict[str, typer.Typer] = {}


def command(name: str) -> Callable[[F], F]:
    """Declare a function as the command `name`, which `TASKS` must list with its module.

    The docstring is the help text, with `Examples:` last. The parameters are the arguments and
    options. A command that returns False exits with 1.
    """

    def declare(function: F) -> F:
        text, heading, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
        # `\b` keeps typer from wrapping the examples.
        epilog = f"\b\nExamples:\n{examples}" if heading else None
        _declared[name] = typer.Typer(add_completion=False, rich_markup_mode=None)
        _declared[name].command(name, help=text, epilog=epilog)(function)
        return function

    return declare


def load_command(name: str) -> Any:
    """Import the module of a command, and return the command with its arguments and options."""
    module = next(commands[name][0] for commands in TASKS.values() if name in commands)
    import_module(f"penstock.core.cli.{module}")
    return typer.main.get_command(_declared[name])


def is_configuration(url: str) -> bool:
    """Return whether `url` names a configuration file."""
    # A folder whose name ends in `.json` is a run, so the name alone does not decide.
    named = url.endswith((".toml", ".yaml", ".yml", ".json"))
    return named and "://" not in url and not Path(url).is_dir()


def backend_of(url: str) -> str:
    """Return `url`; if it names a configuration file, return the backend in that file.

    Also makes this process prefer the plugins that the file's `prefer` chooses.

    Raises:
        ConfigError: The configuration file cannot be read, or is wrong.
    """
    if not is_configuration(url):
        return url
    from penstock.core.config.model import load_config  # noqa: PLC0415
    from penstock.core.plugins.registry import default_registry  # noqa: PLC0415

    config = load_config(url)
    # Changing the registry of the whole process is safe here: a command handles one configuration.
    default_registry().prefer(config.prefer.choices)
    # typer declares the argument as a string, but `open_backend` takes a table too.
    return cast("str", config.backend)


def root(metavar: str, of: str, **more: Any) -> Any:
    """Return an argument that names the root of a run."""
    text = f"Root of {of}: a path, a URL such as posix://, or a configuration file."
    return typer.Argument(metavar=metavar, help=text, **more)


Url = Annotated[str, root("URL", "the run", callback=backend_of)]
AsGiven = Annotated[str, root("URL", "the run")]
"""Like `Url`, for a command that needs the configuration file itself and calls `backend_of`."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def size_of(text: str) -> int:
    """Parse a size such as `200MiB`, and return it in bytes.

    Raises:
        typer.BadParameter: `text` is not a size above zero.
    """
    from penstock.core.config.model import parse_size  # noqa: PLC0415

    try:
        size = parse_size(text)
    except ValueError as error:
        msg = f"{text!r} is {error}"
        raise typer.BadParameter(msg) from None
    if not isinstance(size, int) or size <= 0:
        msg = f"{text!r} is not a size above zero"
        raise typer.BadParameter(msg)
    return size


def time_of(text: str) -> float:
    """Parse a time such as `90`, `90s` or `24h`, and return it in seconds.

    Raises:
        typer.BadParameter: `text` is not a time.
    """
    try:
        return seconds_of(str(text))  # typer also parses a default, which is a number
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def step_or_latest(text: str) -> int | None:
    """Parse a step number; return None for `latest`.

    Raises:
        typer.BadParameter: `text` is neither a number nor `latest`.
    """
    if text == "latest":
        return None
    # `int` alone would take `1_000`, ` 7 ` and digits of other scripts.
    if text.isascii() and text.isdecimal():
        return int(text)
    msg = f"{text!r} is not a step: give a whole number of at least 0, or `latest`"
    raise typer.BadParameter(msg)


def which_step(of: str = "", default: str = "latest") -> Any:
    """Return an option that names a checkpoint by its step."""
    text = f"Which checkpoint{of}."
    return typer.Option(metavar="STEP", parser=step_or_latest, help=text, show_default=default)


Step = Annotated[int | None, which_step()]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include", metavar="PATTERN", help="Only objects that match this pattern; repeatable."
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="PATTERN", help="Skip objects that match this pattern; repeatable."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]


@dataclass(slots=True)
class ErrorHandling:
    """Tells `main` how to handle errors; global, since typer has dropped its context by then.

    Attributes:
        debug: Whether errors are shown with tracebacks (`--debug`).
        exit_code: The exit code after an error: 1, but 2 in `diff`, which exits with 1 if
            something differs.
    """

    debug: bool = False
    exit_code: int = 1


errors = ErrorHandling()

_TALKATIVE = ("botocore", "urllib3", "s3transfer", "aiobotocore", "fsspec", "aiohttp", "s3fs")
"""Libraries kept at INFO: their DEBUG logs hold session tokens and URLs with passwords."""


class _VisibleFormatter(logging.Formatter):
    """Escapes control characters, because messages quote names that another user stored."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        # A traceback keeps all its line breaks. A message keeps only those before an indented line
        # (see `visible_lines`): any other may be part of a stored name, and is escaped.
        lines = text.split("\n") if record.exc_info else None
        return "\n".join(visible_lines(text) if lines is None else map(visible, lines))


def log_visibly(level: int = logging.WARNING, form: str = "%(message)s") -> None:
    """Send logs to standard error, as Python does by default, with control characters escaped.

    Changes nothing if a program that calls the command has set up its own handlers.
    """
    ours = [h for h in logging.root.handlers if isinstance(h.formatter, _VisibleFormatter)]
    if logging.root.handlers and not ours:
        return
    for handler in ours:
        logging.root.removeHandler(handler)
    handler = logging.StreamHandler()
    handler.setFormatter(_VisibleFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__  # noqa: PLC0415

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def _set_debug(wanted: bool) -> None:
    errors.debug = wanted
    if wanted:
        log_visibly(level=logging.DEBUG, form=logging.BASIC_FORMAT)
        logging.getLogger(OPENING).setLevel(logging.NOTSET)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.INFO)


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
        typer.Option("--debug", callback=_set_debug, help="Show logs, and tracebacks of errors."),
    ] = False,
) -> None:
    """Inspect the checkpoints of a run, check them, and clean up."""


def ask(question: str, *, yes: bool) -> None:
    """Ask the user on standard error; return only if the answer is yes.

    Args:
        question: The question, without its question mark.
        yes: Whether `--yes` was given; it answers yes, and nothing is asked.

    Raises:
        typer.BadParameter: Standard input is not a terminal, so no user can answer.
        typer.Abort: The answer is no.
    """
    if yes:
        return
    question = visible(question)
    # Input from a pipe does not count: only a user, or `--yes`, may decide to delete.
    if sys.stdin is None or not sys.stdin.isatty():
        msg = f"cannot ask without a terminal; pass --yes to confirm, or try --dry-run: {question}?"
        raise typer.BadParameter(msg)
    typer.confirm(question + "?", abort=True, err=True)

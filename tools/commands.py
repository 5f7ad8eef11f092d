"""Put the help of commands into the documentation: mkdocs calls this.

A comment on a page marks the place of a command's help, or of the list of all commands:

    <!-- command: ls -->
    <!-- commands -->
"""

from __future__ import annotations

import re
from typing import Any

from penstock.core.cli.app import TASKS, load_command

PLACE = re.compile(r"^<!-- command: (\w+) -->$", re.MULTILINE)
LIST = "<!-- commands -->"
CODE = re.compile(r"`[^`]*`|(?<![\w`])--[a-z][a-z-]*|'penstock\[\w+\]'")


def text_of(paragraph: str) -> str:
    """Return a help text as Markdown: options and patterns as code."""
    joined = " ".join(paragraph.split()).replace("|", "\\|")
    return CODE.sub(lambda match: match[0] if match[0][0] == "`" else f"`{match[0]}`", joined)


def default_of(parameter: Any) -> str:
    """Return the default of an option or argument as text; empty if there is none."""
    if isinstance(parameter.show_default, str):  # written for the user instead of the value
        return parameter.show_default
    default = parameter.default
    if default is None or default is False or default in ((), []):
        return ""
    if default is True:
        return f"`{parameter.opts[0]}`"
    return f"{default:g}" if isinstance(default, float) else str(default)


def name_of(parameter: Any) -> str:
    """Return an option with its value, or the name of an argument, as code."""
    if parameter.param_type_name == "argument":
        repeated = "..." if parameter.nargs != 1 else ""
        return f"`{parameter.metavar or parameter.name.upper()}{repeated}`"
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    names = [*reversed(parameter.opts), *parameter.secondary_opts]
    return ", ".join(f"`{name}{value}`" for name in names)


def table_of(parameters: list[Any]) -> str:
    """Return a table of arguments and options, in the order of the command."""
    lines = ["| | default | |", "|---|---|---|"]
    lines += [
        f"| {name_of(parameter)} | {default_of(parameter)} | {text_of(parameter.help)} |"
        for parameter in parameters
    ]
    return "\n".join(lines)


def usage_of(name: str, parameters: list[Any]) -> str:
    """Return the usage line of a command."""
    words = [f"penstock {name} [OPTIONS]"]
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            shown = name_of(parameter).strip("`")
            words.append(shown if parameter.required else f"[{shown}]")
    return " ".join(words)


def help_of(name: str) -> str:
    """Return usage, help, arguments, options and examples of a command, as Markdown."""
    command = load_command(name)
    parameters = [param for param in command.params if param.name != "help"]
    shown = [param for param in parameters if "--json" not in param.opts]
    examples = (command.epilog or "").partition("Examples:\n")[2].rstrip()
    parts = [
        f"```text\n{usage_of(name, parameters)}\n```",
        *map(text_of, (command.help or "").split("\n\n")),
        table_of(shown) if shown else "",
        f"```bash\n{re.sub('^  ', '', examples, flags=re.MULTILINE)}\n```" if examples else "",
    ]
    return "\n\n".join(filter(None, parts))


def list_of_commands() -> str:
    """Return a table of all commands by task."""
    lines = ["| | | |", "|---|---|---|"]
    for task, commands in TASKS.items():
        for name, (_, text) in commands.items():
            lines.append(f"| {task} | [`{name}`](#{name}) | {text_of(text)} |")
            task = ""  # noqa: PLW2901 - shown once
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments of a page: mkdocs calls this."""
    listed = markdown.replace(LIST, list_of_commands()) if LIST in markdown else markdown
    return PLACE.sub(lambda place: help_of(place[1]), listed)

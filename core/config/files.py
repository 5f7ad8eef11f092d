"""Fills `${NAME}` in the text of configuration files from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from typing import Any

_VARIABLE = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{|\$[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def filled(value: Any, environment: Mapping[str, str], *, what: str) -> Any:
    """Return `value` with each `${NAME}` in its texts replaced.

    `${NAME:-text}` has a default; `$$` stands for `$`. A text that looks like a variable written in
    another way is refused: else it would become the name of a folder.

    Args:
        value: The content of a configuration file.
        environment: Variables by name.
        what: Name of the file, for error messages.

    Raises:
        ConfigError: Variables are not set, or not written `${NAME}`; lists every problem.
    """
    problems: list[str] = []
    result = _filled(value, environment, "", problems)
    if problems:
        raise ConfigError(f"{what}:\n  " + "\n  ".join(problems))
    return result


def _filled(value: Any, environment: Mapping[str, str], place: str, problems: list[str]) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _one(match, environment, place, problems), value)
    if isinstance(value, Mapping):
        return {
            key: _filled(inner, environment, f"{place}.{key}" if place else str(key), problems)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [
            _filled(inner, environment, f"{place}[{number}]", problems)
            for number, inner in enumerate(value)
        ]
    return value


def _one(
    match: re.Match[str], environment: Mapping[str, str], place: str, problems: list[str]
) -> str:
    if match[0] == "$$":
        return "$"
    text, problem = _looked_up(match, environment)
    if problem:
        problems.append(f"{place}: {problem}")
    return text


def _looked_up(match: re.Match[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the text that replaces a variable, and the problem with the variable if any."""
    written, inner = match[0], match[1]
    if inner is None:
        if written == "${":
            return "", "${ has no } of its own; write ${NAME}, or $${ for the text itself"
        form = f"${{{written[1:]}}}"
        return "", (
            f"{written} is not filled in; write {form} for the variable, or ${written} for the "
            "text itself"
        )
    named = _NAME.fullmatch(inner)
    if named is None:
        return "", f"{written} is no variable; write ${{NAME}} or ${{NAME:-text}}"
    if named[1] in environment:
        return environment[named[1]], ""
    if named[2] is not None:
        return named[2], ""
    return "", (
        f"the environment variable {named[1]} is not set; set it, or give a default "
        f"with ${{{named[1]}:-text}}"
    )

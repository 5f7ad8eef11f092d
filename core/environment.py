"""Fills `${NAME}` in the text of configuration files from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from typing import Any

_VARIABLE = re.compile(r"\$\$|\$\{([^{}]*)\}")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def filled(value: Any, environment: Mapping[str, str], *, what: str) -> Any:
    """`value` with each `${NAME}` in its texts replaced.

    `${NAME:-text}` has a default; `$$` stands for `$`.

    Args:
        value: What a configuration file holds.
        environment: Variables by name.
        what: The file, for complaints.

    Raises:
        ConfigError: Variables that are not set, or what is no name; lists every problem.
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
    if match[1] is None:
        return "$"
    named = _NAME.fullmatch(match[1])
    if named is None:
        problems.append(f"{place}: {match[0]} is no variable; write ${{NAME}} or ${{NAME:-text}}")
        return ""
    if named[1] in environment:
        return environment[named[1]]
    if named[2] is None:
        problems.append(
            f"{place}: the environment variable {named[1]} is not set; set it, or give a default "
            f"with ${{{named[1]}:-text}}"
        )
        return ""
    return named[2]

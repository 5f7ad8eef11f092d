"""The API version, options and sizes that all contracts of plugins share.

Tested in `tests/core/config/test_model.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

API_VERSION = 1


def says_its_version(cls: type, /) -> bool:
    """Return whether `cls`, or a base class from outside Penstock, declares an API version.

    A version inherited from the installed Penstock would hide a mismatch. Penstock's own classes
    are released with the contract and may inherit the version.
    """
    foreign = [c for c in cls.__mro__ if c.__module__.split(".")[0] != "penstock"]
    return cls not in foreign or any("api_version" in vars(c) for c in foreign)


class PluginConfig(BaseModel):
    """Base class of every plugin's options. Refuses unknown keys; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def without_credentials(url: str, /) -> str:
    """Return `url` without user, password, query and fragment, for messages.

    A password may contain an unquoted `/`, `?`, `#` or `@`. So if an `@` follows what looks like a
    host with a password, the result keeps only the text after the last `@`.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    host = _HOST_END.split(rest, maxsplit=1)[0]
    head, at, tail = rest.rpartition("@")
    if at and ":" in host and len(head) >= len(host):
        rest = f"***@{tail}"
    elif "@" in host:
        rest = rest[host.rindex("@") + 1 :]
    return f"{scheme}://{_QUERY.split(rest, maxsplit=1)[0]}"


_HOST_END = re.compile(r"[/?#]")
_QUERY = re.compile(r"[?#]")
_UNITS = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate(["", "K", "M", "G", "T"])}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate(["K", "M", "G", "T"], start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> object:
    """Convert text such as `"4 GiB"` to bytes, for pydantic; return other types unchanged.

    Raises:
        ValueError: The text is not a number with a known unit.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        msg = f"not a size: give bytes, or a number with one of {', '.join(filter(None, _UNITS))}"
        raise ValueError(msg)
    return round(float(match[1]) * units[match[2].lower()])


SizeBytes: TypeAlias = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt]?[iI]?[bB])?\s*$"},
            ]
        }
    ),
]
"""Bytes, or text such as `"4 GiB"`."""

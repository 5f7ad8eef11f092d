"""What all three contracts share."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

API_VERSION = 1


def says_its_version(cls: type, /) -> bool:
    """Whether `cls` itself says for which version of its contract it was written.

    An inherited number is always that of the Penstock that happens to be installed: a mismatch
    would never be noticed. Our own classes are released with the contract, and may inherit.
    """
    foreign = [c for c in cls.__mro__ if c.__module__.split(".")[0] != "penstock"]
    return cls not in foreign or any("api_version" in vars(c) for c in foreign)


class PluginConfig(BaseModel):
    """Base of every plugin's options: unknown keys are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


_UNITS = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate(["", "K", "M", "G", "T"])}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate(["K", "M", "G", "T"], start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> object:
    """Bytes of `"4 GiB"`; what is not a string is left to pydantic.

    Raises:
        ValueError: Not a number with a known unit.
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

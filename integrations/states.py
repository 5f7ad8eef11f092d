"""Code that adapters share: names for several objects of a kind."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def named(name: str, values: list[T]) -> dict[str, T]:
    """Return the values below `name` if there is one, else below `name_0`, `name_1` and so on."""
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}_{number}": value for number, value in enumerate(values)}

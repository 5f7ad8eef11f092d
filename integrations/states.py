"""Code that adapters share: names for several objects of one kind."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def named(name: str, values: list[T]) -> dict[str, T]:
    """Return one value under `name`, or several under `name_0`, `name_1` and so on."""
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}_{number}": value for number, value in enumerate(values)}

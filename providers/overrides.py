"""Overrides: whether a method is torch's own or the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def is_override(
    method: Callable[..., Any], base: Callable[..., Any], *, but: str = "torch."
) -> bool:
    """Return whether `method` is neither `base` nor from a module whose name starts with `but`."""
    function = getattr(method, "__func__", method)
    return function is not base and not module_of(function).startswith(but)


def module_of(function: Callable[..., Any]) -> str:
    """Return the name of the Python module that defines `function`; empty if it has none."""
    return getattr(function, "__module__", None) or ""

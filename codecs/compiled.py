"""Loops that numba compiles, for codecs; importing this module takes numba, which is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numba  # pyright: ignore[reportMissingImports]
from numba import types  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from collections.abc import Callable

    Function: TypeAlias = Callable[..., Any]

inlined: Callable[[Function], Function] = numba.njit(nogil=True, inline="always")


def given(element: Any) -> Any:
    """Return the type of arrays that are read; frames and chunks begin at any address."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)


def filled(element: Any) -> Any:
    """Return the type of arrays that are written."""
    return types.Array(element, 1, "C", aligned=False)


def compiled(*signatures: Any) -> Callable[[Function], Function]:
    """Compile a function for the signatures, and keep it on disk where that is possible."""

    def compile_(function: Function) -> Function:
        try:
            made: Function = numba.njit(list(signatures), nogil=True, cache=True)(function)
        except RuntimeError:  # there is no folder that numba may write to
            made = numba.njit(list(signatures), nogil=True)(function)
        return made

    return compile_

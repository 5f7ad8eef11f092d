"""Results of the last save, kept for the next one, which usually gets the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class Known:
    """Results of the last save, each with its basis: everything that it depends on.

    A save whose state has the names and shapes of the last one need not make its paths, nodes and
    cuts again. A basis has names, shapes and numbers, never tensors or other state, which would
    keep the user's memory alive. Nothing changes a basis or a result once it is here.

    Each save has its own `Known`: another thread, or a signal handler, may describe meanwhile, and
    sees either all results of the last save or all of the previous one.

    Args:
        last: The `Known` of the last save; None: nothing is known.
    """

    def __init__(self, last: Known | None = None) -> None:
        self._before = {} if last is None else last._now  # noqa: SLF001 - of this class
        self._now: dict[Hashable, tuple[object, object]] = {}

    def recall(self, place: Hashable, basis: object, make: Callable[[], T]) -> T:
        """Return the last result of `make` at this place if its basis was equal, else call it.

        Args:
            place: Names the result, and its part of the tree.
            basis: All that the result depends on, besides `place`.
            make: Makes the result.
        """
        known = self._before.get(place)
        if known is None or known[0] != basis:
            known = basis, make()
        self._now[place] = known
        return cast("T", known[1])

"""Results of the last save, kept because the next save usually needs the same results."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class Known:
    """Results of the last save, each with its basis: everything that it depends on.

    If the state has the same names and shapes as at the last save, its paths, nodes and cuts are
    not computed again. A basis has names, shapes and numbers. It never has tensors or other state,
    since that would keep the user's memory alive. No code changes a basis or a result that is
    stored here.

    Each save has its own `Known`. Another thread, or a signal handler, may describe a state during
    a save. It sees either all results of this save, or all results of the one before.

    Args:
        last: The `Known` of the last save, if any.
    """

    def __init__(self, last: Known | None = None) -> None:
        self._before = {} if last is None else last._now  # noqa: SLF001 - of this class
        self._now: dict[Hashable, tuple[object, object]] = {}

    def recall(self, place: Hashable, basis: object, make: Callable[[], T]) -> T:
        """Return the last save's result at this place if its basis was equal, else a new result.

        Args:
            place: The name of the result, and its part of the tree.
            basis: Everything that the result depends on, besides `place`.
            make: Makes the result.
        """
        known = self._before.get(place)
        if known is None or known[0] != basis:
            known = basis, make()
        self._now[place] = known
        return cast("T", known[1])

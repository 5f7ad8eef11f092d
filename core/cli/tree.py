"""Paths as a tree. Knows nothing of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


@dataclass(slots=True)
class Branch(Generic[T]):
    """A segment of paths, what stands there, and what stands below."""

    segment: str
    item: T | None = None
    below: dict[str, Branch[T]] = field(default_factory=dict)

    def leaves(self) -> Iterator[T]:
        """Everything here and below, in order."""
        if self.item is not None:
            yield self.item
        for branch in self.below.values():
            yield from branch.leaves()


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One line of the tree: an item, or (None) a branch that is the sum of its leaves."""

    level: int
    branch: Branch[T]
    item: T | None

    @property
    def segment(self) -> str:
        """Last segment of its path."""
        return self.branch.segment


def grown(items: Iterable[tuple[tuple[str, ...], T]]) -> Branch[T]:
    """The tree of items by path; branches stand where their first item does."""
    root: Branch[T] = Branch("")
    for path, item in items:
        branch = root
        for segment in path:
            if segment not in branch.below:
                branch.below[segment] = Branch(segment)
            branch = branch.below[segment]
        branch.item = item
    return root


def rows_of(root: Branch[T], depth: int | None) -> Iterator[Row[T]]:
    """Lines from the top down, the root itself left out; branches at `depth` are folded."""
    for branch in root.below.values():
        yield from _rows(branch, 0, depth)


def _rows(branch: Branch[T], level: int, depth: int | None) -> Iterator[Row[T]]:
    if branch.item is not None:
        yield Row(level, branch, branch.item)
    if branch.below:
        yield Row(level, branch, None)
        if depth is None or level + 1 < depth:
            for inner in branch.below.values():
                yield from _rows(inner, level + 1, depth)

"""A tree of items by path, and its lines. Knows nothing of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


@dataclass(slots=True)
class Branch(Generic[T]):
    """A node of the tree: the item at a path, if any, and the branches below."""

    segment: str
    item: T | None = None
    below: dict[str, Branch[T]] = field(default_factory=dict)

    def leaves(self) -> Iterator[T]:
        """Yield the items here and below, in order."""
        if self.item is not None:
            yield self.item
        for branch in self.below.values():
            yield from branch.leaves()


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One line of the tree: an item, or with item None a branch that sums up its leaves."""

    level: int
    branch: Branch[T]
    item: T | None

    @property
    def segment(self) -> str:
        """The last segment of the branch's path."""
        return self.branch.segment


def grown(items: Iterable[tuple[tuple[str, ...], T]]) -> Branch[T]:
    """Build the tree of items by path; a branch stands where its first item stood."""
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
    """Yield the lines from the top down, without the root; branches at `depth` are folded."""
    for branch in root.below.values():
        yield from _rows(branch, 0, depth)


def _rows(branch: Branch[T], level: int, depth: int | None) -> Iterator[Row[T]]:
    # Both: one path may hold an object and be the beginning of longer paths.
    if branch.item is not None:
        yield Row(level, branch, branch.item)
    if branch.below:
        yield Row(level, branch, None)
        if depth is None or level + 1 < depth:
            for inner in branch.below.values():
                yield from _rows(inner, level + 1, depth)

"""Objects in a tree by path, and sums over groups of them. Knows nothing of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.core.cli.output.render import Column, print_table, ratio_text
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum over one group.

    Attributes:
        group: The name of the group.
        objects: The number of objects, tied ones included.
        bytes_raw: Their bytes; tied tensors count once.
        bytes_stored: Their bytes in the blobs of the checkpoint itself.
        bytes_borrowed: The bytes that they need from blobs of other saves.
    """

    group: str
    objects: int
    bytes_raw: int
    bytes_stored: int
    bytes_borrowed: int


def sums_of(sums: Iterable[Sum]) -> list[Sum]:
    """Add up the sums of each group; return one for each, the group of most bytes first."""
    found: dict[str, Sum] = {}
    for one in sums:
        before = found.get(one.group)
        if before is not None:
            one = replace(  # noqa: PLW2901
                before,
                objects=before.objects + one.objects,
                bytes_raw=before.bytes_raw + one.bytes_raw,
                bytes_stored=before.bytes_stored + one.bytes_stored,
                bytes_borrowed=before.bytes_borrowed + one.bytes_borrowed,
            )
        found[one.group] = one
    return sorted(found.values(), key=lambda one: -one.bytes_raw)


def print_sums(title: str, sums: Sequence[Sum]) -> None:
    """Print a line for each sum, under a title for the groups."""
    columns: list[Column[Sum]] = [
        Column(title, lambda one: one.group, flexible=True),
        Column("OBJECTS", lambda one: str(one.objects), right=True),
        Column("BYTES", lambda one: size_text(one.bytes_raw), right=True),
        Column("STORED", lambda one: size_text(one.bytes_stored), right=True),
        Column("RATIO", lambda one: ratio_text(one.bytes_raw, one.bytes_stored), right=True),
    ]
    if any(one.bytes_borrowed for one in sums):
        columns.append(
            Column("BORROWED", lambda one: size_text(one.bytes_borrowed), right=True, keep=1)
        )
    print_table(columns, sums)


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

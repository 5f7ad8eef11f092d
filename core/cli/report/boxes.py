"""The objects of a checkpoint, folded to the boxes of a treemap."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from penstock.core.cli.output.sums import Sum
from penstock.core.cli.output.tree import grown
from penstock.core.types import show_segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.cli.commands.show import Shown
    from penstock.core.cli.output.tree import Branch

_LEAST_PART = 1 / 1000  # of the whole: smaller boxes are no more than a line, and may be millions


@dataclass(frozen=True, slots=True)
class Box(Sum):
    """A box of the treemap; its group is the last segment of its path, as shown.

    Attributes:
        id: Its number.
        parent: The number of the box around it; empty for the outermost one.
    """

    id: str
    parent: str


def boxes_of(objects: Sequence[Shown], name: str) -> list[Box]:
    """Return the boxes, the outermost one, called `name`, first; small ones are put together."""
    numbers = map(str, count())
    outer = _box(next(numbers), "", name, objects)
    tree = grown((one.record.path, one) for one in objects)
    return [outer, *_inside(tree, outer, outer.bytes_raw * _LEAST_PART, numbers)]


def _inside(tree: Branch[Shown], outer: Box, least: float, numbers: Iterator[str]) -> Iterator[Box]:
    small: list[Shown] = []
    for branch in tree.below.values():
        leaves = list(branch.leaves())
        box = _box(next(numbers), outer.id, show_segment(branch.segment), leaves)
        if box.bytes_raw < least:
            small += leaves
            continue
        yield box
        if branch.below:
            yield from _inside(branch, box, least, numbers)
    if small:
        yield _box(next(numbers), outer.id, f"{len(small)} small", small)


def _box(number: str, parent: str, name: str, objects: Sequence[Shown]) -> Box:
    return Box(
        group=name,
        objects=len(objects),
        bytes_raw=sum(one.nbytes for one in objects),
        bytes_stored=sum(one.bytes_stored for one in objects),
        bytes_borrowed=sum(one.bytes_borrowed for one in objects),
        id=number,
        parent=parent,
    )

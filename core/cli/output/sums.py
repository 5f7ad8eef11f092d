"""Sums over groups of objects: how many there are, and how many bytes they have and take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.core.cli.output.render import Column, print_table, ratio_text, visible
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_COLUMNS = (
    Column("OBJECTS", right=True),
    Column("BYTES", right=True),
    Column("STORED", right=True),
    Column("RATIO", right=True),
)
_BORROWED = Column("BORROWED", right=True, keep=1)


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
    columns = [Column(title, flexible=True), *_COLUMNS]
    borrowing = any(one.bytes_borrowed for one in sums)
    if borrowing:
        columns.append(_BORROWED)
    rows = [
        [
            visible(one.group),
            str(one.objects),
            size_text(one.bytes_raw),
            size_text(one.bytes_stored),
            ratio_text(one.bytes_raw, one.bytes_stored),
            *([size_text(one.bytes_borrowed)] if borrowing else []),
        ]
        for one in sums
    ]
    print_table(columns, rows)

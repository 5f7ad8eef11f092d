"""Sums over groups of objects: how many there are, and how many bytes they have and take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.core.cli.output.render import Column, print_table, ratio_text
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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

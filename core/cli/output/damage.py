"""Damage, grouped for printing: one bad blob may hit thousands of objects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.core.cli.output.render import print_wrapped, visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.reporting.reports import Damage

_BLOB = re.compile(r"data/[0-9a-f]{32}/blobs/[A-Za-z0-9._-]*[A-Za-z0-9]")
_TIER = re.compile(r"in tier [^ ]+: ")
_SHOWN = 5


@dataclass(slots=True)
class Group:
    """The damage in one blob: dicts with keys only, since a dict keeps its order.

    Attributes:
        causes: The details that were found there, each once.
        hit: The objects and records that lie there, each once.
    """

    causes: dict[str, None] = field(default_factory=dict)
    hit: dict[str, None] = field(default_factory=dict)


def grouped(damaged: Iterable[Damage]) -> list[Group]:
    """Group damage by the blob of one tier; damage that names no blob, by its detail."""
    groups: dict[tuple[str, str], Group] = {}
    for one in damaged:
        tier = _TIER.match(one.detail)
        # Damage names an object and, in the detail, the blob; only damage of a whole blob names it
        # as the subject.
        blob = _BLOB.fullmatch(one.what) or _BLOB.search(one.detail)
        where = (tier[0] if tier else "", blob[0]) if blob else ("", one.detail)
        group = groups.setdefault(where, Group())
        if blob is None or blob[0] != one.what:
            group.causes[one.detail] = None
            group.hit[one.what] = None
        else:  # the damage is the blob's own, and not every detail names the blob
            named = one.what in one.detail
            group.causes[one.detail if named else f"{one.what}: {one.detail}"] = None
    return list(groups.values())


def print_damage(damaged: Iterable[Damage]) -> None:
    """Print the causes in each blob, then the objects hit: the first few of each, and a count."""
    for group in grouped(damaged):
        for cause in list(group.causes)[:_SHOWN]:
            print_wrapped(visible(cause))
        if len(group.causes) > _SHOWN:
            print_wrapped(f"and {len(group.causes) - _SHOWN} more such places in this blob")
        for name in list(group.hit)[:_SHOWN]:
            print_wrapped(visible(name), indent=4, style="red")
        if len(group.hit) > _SHOWN:
            more = len(group.hit) - _SHOWN
            print_wrapped(f"and {more} more: --json names all", indent=4, style="red")

"""A checkpoint's objects and nodes, as a restore sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import Node, StoredObject
    from penstock.core.types import ObjectPath


@dataclass(frozen=True)
class StoredTree:
    """A checkpoint in memory, after renaming.

    Attributes:
        objects: Every object, tied ones included, in stored order.
        nodes: Every node.
        values: Bytes of the selected value objects.
        aliases: Path of a tied object -> path of the one whose bytes it shares.
    """

    objects: Sequence[StoredObject]
    nodes: Sequence[Node] = ()
    values: Mapping[ObjectPath, bytes] = field(default_factory=dict)
    aliases: Mapping[ObjectPath, ObjectPath] = field(default_factory=dict)


def children_of(paths: Sequence[ObjectPath]) -> dict[ObjectPath, dict[str, None]]:
    """Next segments below every path, in order."""
    children: dict[ObjectPath, dict[str, None]] = {}
    for path in paths:
        here = path
        while here:
            parent, last = here[:-1], here[-1]
            known = children.setdefault(parent, {})
            if last in known:
                break
            known[last] = None
            here = parent
    return children

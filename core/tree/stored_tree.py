"""The objects and nodes of a checkpoint, renamed for a restore."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.abc import Node, StoredObject
    from penstock.core.types import ObjectPath


@dataclass(frozen=True)
class StoredTree:
    """A checkpoint in memory, after renaming.

    Attributes:
        objects: All objects, tied ones included, in stored order.
        nodes: All nodes.
        values: Bytes of the selected value objects.
        aliases: Path of a tied object -> path of its owner, whose bytes it shares.
        providers: Providers that the save used, with their versions.
        plugins: Third-party plugins that the save used, such as `"provider acme"`, with their
            distributions.
        whole: Returns everything at and below a path, selected or not; None if this tree has
            everything.
    """

    objects: Sequence[StoredObject]
    nodes: Sequence[Node] = ()
    values: Mapping[ObjectPath, bytes] = field(default_factory=dict)
    aliases: Mapping[ObjectPath, ObjectPath] = field(default_factory=dict)
    providers: Mapping[str, int] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)
    whole: Callable[[ObjectPath], StoredTree] | None = None


class PathTree:
    """Finds the children of each path, in the order of the paths.

    The memory is proportional to the text of the paths. A set of all their prefixes would grow with
    the square of their depth: 10 KB of stored paths took 1.3 GB.

    Args:
        paths: The paths, in the order in which `children` returns their segments.
    """

    def __init__(self, paths: Iterable[ObjectPath]) -> None:
        # Maps a segment to what is below it: None for nothing, the whole path if only one path
        # continues, else a dict of the same kind.
        self._root: dict[str, _Below] = {}
        for path in paths:
            self._add(path)

    def children(self, path: ObjectPath) -> tuple[str, ...]:
        """Return the segments right below `path`."""
        return self._find(path) or ()

    def has(self, path: ObjectPath) -> bool:
        """Return whether `path`, or something below it, is one of the paths."""
        return self._find(path) is not None

    def __contains__(self, path: object) -> bool:
        """Return whether something is below `path`."""
        return isinstance(path, tuple) and bool(self._find(path))

    def _add(self, path: ObjectPath) -> None:
        here = self._root
        for depth, segment in enumerate(path, 1):
            alone = path if depth < len(path) else None
            below = here.setdefault(segment, alone)
            if below is alone or alone is None:
                return
            if isinstance(below, tuple):  # two paths continue from here
                fork: dict[str, _Below] = {}
                fork[below[depth]] = below if depth + 1 < len(below) else None
                here[segment] = below = fork
            elif below is None:
                here[segment] = alone
                return
            here = below

    def _find(self, path: ObjectPath) -> tuple[str, ...] | None:
        here = self._root
        for segment in path:
            if segment not in here:
                return None
            below = here[segment]
            if isinstance(below, tuple):
                return below[len(path) :][:1] if below[: len(path)] == path else None
            here = below or {}
        return tuple(here) if here or path else None


_Below: TypeAlias = "ObjectPath | dict[str, _Below] | None"

"""Finds paths where ranks with different structures have incompatible entries. Sans-IO.

No rank can restore a checkpoint that holds both an object at `ema` and objects below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.core.abc import ranks_of
from penstock.core.errors import SaveError
from penstock.core.ranks.structure import shown_ranks
from penstock.core.tree.containers import CONTAINERS
from penstock.core.tree.paths import paths_above, show_path
from penstock.core.types import with_article

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Node
    from penstock.core.types import Kind, ObjectPath

_PER_RANK = "penstock.PerRank"

# A module is stored like a dict of its tensors, and either can be restored as the other.
_LIKE_A_DICT = frozenset({"dict", "module"})


class _Container(NamedTuple):
    form: str
    ranks: Sequence[int]


class _Object(NamedTuple):
    kind: Kind
    ranks: Sequence[int]
    is_absence: bool


class Contradictions:
    """Collects each structure's entries by path, and refuses incompatible entries."""

    def __init__(self, nothing: Collection[str] = ()) -> None:
        """Start without ranks.

        Args:
            nothing: The shown paths where a rank's value counts as nothing, from `nothing_in`.
        """
        self.absent: set[ObjectPath] = set()
        """The objects that count as absent: some ranks have nothing where others have a container.
        """
        self._nothing = nothing
        self._objects: dict[ObjectPath, _Object] = {}
        self._containers: dict[ObjectPath, _Container] = {}

    def add(
        self, ranks: Sequence[int], objects: Mapping[ObjectPath, Kind], nodes: Iterable[Node]
    ) -> None:
        """Add the entries of ranks with the same structure.

        Args:
            ranks: The ranks.
            objects: The kinds of their objects, by path.
            nodes: Their nodes.

        Raises:
            SaveError: They are incompatible with earlier entries; the message names path and ranks.
        """
        by_path = {node.path: node for node in nodes}
        above = paths_above([*objects, *by_path]) | by_path.keys()
        containers = {path: _Container(_form(by_path.get(path)), ranks) for path in above}
        # Within a provider's subtree, the provider distinguishes None from a container.
        providers = {path for path, node in by_path.items() if node.form not in CONTAINERS}
        found = {
            path: _Object(kind, ranks, self._is_absence(path, providers))
            for path, kind in objects.items()
        }
        for path in sorted(found.keys() & self._containers.keys()):
            self._settle(path, found[path], self._containers[path])
        for path in sorted(self._objects.keys() & containers.keys()):
            self._settle(path, self._objects[path], containers[path])
        for path in sorted(containers.keys() & self._containers.keys()):
            one, other = self._containers[path], containers[path]
            if one.form != other.form and not {one.form, other.form} <= _LIKE_A_DICT:
                raise _contradiction(path, (one, other))
        self._objects |= found
        self._containers = containers | self._containers

    def _is_absence(self, path: ObjectPath, providers: Collection[ObjectPath]) -> bool:
        if not self._nothing or show_path(path) not in self._nothing:
            return False
        return not any(path[:depth] in providers for depth in range(len(path)))

    def _settle(self, path: ObjectPath, one: _Object, container: _Container) -> None:
        if not one.is_absence:
            raise _contradiction(path, (one, container))
        self.absent.add(path)


def _form(node: Node | None) -> str:
    if node is None:
        return "dict"
    return node.form if ranks_of(node) is None else _PER_RANK


def _contradiction(path: ObjectPath, two: tuple[_Object | _Container, _Container]) -> SaveError:
    first, second = sorted(two, key=lambda entry: entry.ranks[0])
    return SaveError(
        f"{show_path(path)} is {_in_words(first)} on {shown_ranks(first.ranks)}, and "
        f"{_in_words(second)} on {shown_ranks(second.ranks)}: a path must be of one kind on all "
        "ranks that have it; use different keys, or None on ranks that have nothing there"
    )


def _in_words(entry: _Object | _Container) -> str:
    if isinstance(entry, _Object):
        return f"a {entry.kind}"
    more = " of objects" if entry.form in CONTAINERS else ""
    return f"{with_article(entry.form)}{more}"

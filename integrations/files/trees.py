"""Trees of plain dicts from other tools' files, and the selection and renaming of leaves."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import SelectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock import Rename, Selection


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is still in a file, so that an unselected value is never read."""

    load: Callable[[], object]


def moved(tree: dict[str, Any], selection: Selection, rename: Rename) -> dict[str, Any]:
    """Return the selected leaves of a tree under their new paths.

    Everything except a dict with string keys is a leaf, so items of a list cannot be selected.

    Raises:
        SelectionError: A pattern matches nothing, nothing is selected, two leaves would get one
            path, or one would be below another.
    """
    if selection.everything and rename.identity:
        return tree
    leaves = dict(_leaves(tree, ()))
    selection.check_used(leaves)
    kept = [path for path in leaves if selection.selects(path)]
    if not kept:
        msg = "nothing is selected"
        raise SelectionError(msg)
    places = {new: old for old, new in rename.apply(kept).items()}
    result: dict[str, Any] = {}
    for new, old in places.items():
        if not new or any(new[:end] in places for end in range(1, len(new))):
            msg = (
                f"rename puts {'/'.join(old)!r} at {'/'.join(new)!r}, which is the root, or below "
                "another object"
            )
            raise SelectionError(msg)
        inner = result
        for key in new[:-1]:
            inner = inner.setdefault(key, {})
        inner[new[-1]] = leaves[old]
    return result


def loaded(tree: Any) -> Any:
    """Return a tree with all unread values read."""
    if isinstance(tree, Unread):
        return tree.load()
    if type(tree) is dict:
        return {key: loaded(value) for key, value in tree.items()}
    if type(tree) is list:
        return [loaded(value) for value in tree]
    return tree


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    is_inner = type(tree) in {dict, OrderedDict} and tree and all(type(k) is str for k in tree)
    if not is_inner:
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*path, key))

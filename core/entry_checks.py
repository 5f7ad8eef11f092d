"""Checks of what a provider yields while it describes: what no checkpoint could hold is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.core.abc import Node, StateObject
from penstock.core.types import show_path
from penstock.core.validation import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from penstock.core.types import ObjectPath


class BrokenEntryError(Exception):
    """What is wrong with an entry; whoever knows the provider makes an error of ours of it."""


def checked_entries(
    entries: Iterable[object], path: ObjectPath, forms: AbstractSet[str], /
) -> Iterator[StateObject | Node]:
    """Pass on what one call of `describe` yields, as long as core can store it.

    Args:
        entries: Of a value at `path`; those of its children pass here too.
        path: Where the value stands.
        forms: All that somebody can build again.

    Raises:
        BrokenEntryError: An entry is not one, or none that could be stored and built again, or
            its path was yielded before. No user of the provider could mend that.
    """
    seen: set[ObjectPath] = set()
    for entry in entries:
        if not isinstance(entry, (StateObject, Node)):
            msg = f"describe yields {type(entry).__name__}, no StateObject or Node"
            raise BrokenEntryError(msg)
        _check_path(entry.path, path)
        if entry.path in seen:
            msg = f"describe yields the path {show_path(entry.path) or 'of the root'} twice"
            raise BrokenEntryError(msg)
        seen.add(entry.path)
        if entry.form not in forms:
            what = "Node" if isinstance(entry, Node) else "StateObject"
            msg = (
                f"describe yields the {what} {show_path(entry.path)} of the form {entry.form!r}, "
                "which no provider could build again: take one of the provider's own `forms`"
                f"{nearest(str(entry.form), forms)}"
            )
            raise BrokenEntryError(msg)
        if isinstance(entry, Node) and entry.meta != {}:
            _check_meta(entry)
        yield entry


def _check_path(here: object, path: ObjectPath) -> None:
    depth = len(path)
    # Not by a generator expression: this runs for each of a million objects.
    if type(here) is not tuple or not all([isinstance(part, str) for part in here[depth:]]):  # noqa: C419
        msg = f"describe yields the path {here!r}, which is no tuple of strings"
        raise BrokenEntryError(msg)
    if here[:depth] != path:
        msg = (
            f"describe yields {show_path(here) or 'the root'}, which is outside of its part of "
            "the tree: it describes what is at and below the path that it was given"
        )
        raise BrokenEntryError(msg)


def _check_meta(node: Node) -> None:
    """What a checkpoint gives back of `meta` is what was put in."""
    why = "it is no dict"
    if type(node.meta) is dict:
        try:
            if json.loads(json.dumps(node.meta, allow_nan=False)) == node.meta:
                return
            why = "it does not come back equal (a tuple as a list, a key as a string)"
        except (TypeError, ValueError, RecursionError) as error:
            why = str(error)
    msg = (
        f"the meta of the Node {show_path(node.path) or 'at the root'} cannot be stored as JSON: "
        f"{why}; take dicts with string keys, lists, strings, finite numbers, booleans and None"
    )
    raise BrokenEntryError(msg)

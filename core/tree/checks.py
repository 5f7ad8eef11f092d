"""Checks the entries that a provider describes; refuses those that no checkpoint could hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

from penstock.core.abc import Node, StateObject
from penstock.core.errors import UnsupportedStateError
from penstock.core.limits import (
    MAX_DIMENSIONS,
    MAX_INT,
    MAX_ITEMSIZE,
    MAX_METADATA_DEPTH,
    MAX_PATH_CHARS,
    MAX_SAVED_SEGMENTS,
    depth_of,
)
from penstock.core.suggest import nearest
from penstock.core.types import show_path, show_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from penstock.core.types import ObjectPath, TensorSpec


class BrokenEntryError(Exception):
    """An entry breaks the contract; the caller knows the provider and raises a PluginError."""


def checked_entries(
    entries: Iterable[object], path: ObjectPath, forms: AbstractSet[str], /
) -> Iterator[StateObject | Node]:
    """Pass on the entries that one call of `describe` yields, if core can store them.

    Args:
        entries: The entries of a value at `path`, those of its children included.
        path: Where the value stands.
        forms: All forms that a provider can build again.

    Raises:
        BrokenEntryError: An entry is of a wrong type, cannot be stored or built again, or has a
            path that was yielded before. Only the provider's author can mend that.
    """
    seen: set[ObjectPath] = set()
    for entry in entries:
        if not isinstance(entry, (StateObject, Node)):
            msg = f"describe yields {type(entry).__name__}, no StateObject or Node"
            raise BrokenEntryError(msg)
        here = entry.path
        if here is not path:  # most leaves are at the path itself
            _check_path(here, path)
        if here in seen:
            msg = f"describe yields the path {show_path(here) or 'of the root'} twice"
            raise BrokenEntryError(msg)
        seen.add(here)
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


def check_path(path: ObjectPath) -> None:
    """Check the path of an entry against the limits of the format, before anything is stored.

    Raises:
        UnsupportedStateError: It is beyond a limit; names the path and a remedy.
    """
    if len(path) > MAX_SAVED_SEGMENTS:
        _refuse(path, f"is nested more than {MAX_SAVED_SEGMENTS} levels deep: flatten the state")
    if sum(map(len, path)) > MAX_PATH_CHARS:
        _refuse(path, f"has a path of more than {MAX_PATH_CHARS} characters: use shorter keys")


def check_spec(spec: TensorSpec, path: ObjectPath) -> None:
    """Check what the object at `path` is against the limits of the format.

    Raises:
        UnsupportedStateError: It is beyond a limit; names the path and a remedy.
    """
    if len(spec.shape) > MAX_DIMENSIONS:
        many = len(spec.shape)
        _refuse(path, f"has {many} dimensions, of {MAX_DIMENSIONS} that can be stored: reshape it")
    if not 1 <= spec.itemsize <= MAX_ITEMSIZE:
        _refuse(
            path,
            f"has elements of {spec.itemsize} bytes ({show_text(spec.dtype)}), and those of 1 to "
            f"{MAX_ITEMSIZE} can be stored: save it as bytes, a string, or a list of them",
        )
    if spec.shape and max(spec.shape) > MAX_INT:
        _refuse(path, f"has a dimension of {max(spec.shape)}, of 2^62 - 1 that can be stored")


def _refuse(path: ObjectPath, what: str) -> NoReturn:
    shown = show_path(path) or "the root"
    msg = f"{show_text(shown)} {what}"
    raise UnsupportedStateError(msg)


def _check_path(here: object, path: ObjectPath) -> None:
    depth = len(path)
    # A generator expression would be slower, and this runs for each of a million objects.
    if type(here) is not tuple or not all([isinstance(part, str) for part in here[depth:]]):  # noqa: C419
        msg = f"describe yields the path {here!r}, which is no tuple of strings"
        raise BrokenEntryError(msg)
    if here[:depth] != path:
        msg = (
            f"describe yields {show_path(here) or 'the root'}, which is outside of its part of "
            "the tree: it describes the entries at and below the path that it was given"
        )
        raise BrokenEntryError(msg)


def _check_meta(node: Node) -> None:
    """Check that `meta` comes back from JSON as it was put in."""
    why = "it is no dict"
    if type(node.meta) is dict:
        try:
            if json.loads(json.dumps(node.meta, allow_nan=False)) != node.meta:
                why = "it does not come back equal (a tuple as a list, a key as a string)"
            elif depth_of(node.meta) > MAX_METADATA_DEPTH:
                why = f"it is nested more than {MAX_METADATA_DEPTH} levels deep"
            else:
                return
        except (TypeError, ValueError, RecursionError) as error:
            why = str(error)
    msg = (
        f"the meta of the Node {show_path(node.path) or 'at the root'} cannot be stored as JSON: "
        f"{why}; take dicts with string keys, lists, strings, finite numbers, booleans and None"
    )
    raise BrokenEntryError(msg)

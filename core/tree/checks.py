"""Checks of providers' results and of the format's limits; errors name the provider.

Tested in `tests/integration/faults/test_broken_contracts.py`.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from penstock.core.abc import Node, Placement, StateObject
from penstock.core.errors import PenstockError, PluginError, UnsupportedStateError
from penstock.core.foreign import note_origin, said, shipped_by
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
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from penstock.core.abc import StateProvider
    from penstock.core.tree.containers import Found
    from penstock.core.types import ObjectPath, TensorSpec


T = TypeVar("T")


def plugin_error(
    provider: StateProvider, path: ObjectPath, what: str, error: BaseException
) -> PluginError:
    """Turn an error that the contract does not list into a PluginError that names the provider."""
    return PluginError(
        f"{show_path(path) or 'the root'}: {what} failed in provider {provider.name!r} "
        f"({shipped_by(type(provider))}) with {said(error)}"
    )


def asked(
    provider: StateProvider,
    path: ObjectPath,
    what: str,
    ask: Callable[..., T],
    *args: object,
    context: object,
) -> T:
    """Call a provider's method and return the result; `what` names the call in errors.

    Raises:
        PluginError: The method raised an error that the contract does not list.
    """
    try:
        return ask(*args, context=context)
    except (PenstockError, RecursionError):
        raise
    except Exception as error:
        raise plugin_error(provider, path, what, error) from error


def broken_contract(provider: StateProvider, path: ObjectPath, what: str) -> PluginError:
    """Return the error for a provider that broke its contract."""
    return PluginError(
        f"{show_path(path) or 'the root'}: provider {provider.name!r} "
        f"({shipped_by(type(provider))}) broke its contract: {what}"
    )


@contextmanager
def naming(item: Found, what: str) -> Iterator[None]:
    """Turn an error of a third party's provider into a PluginError that names it."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise plugin_error(item.provider, item.path, what, error) from error


def checked_entries(
    provider: StateProvider, entries: Iterable[object], path: ObjectPath, forms: AbstractSet[str], /
) -> Iterator[StateObject | Node]:
    """Yield the entries of one `describe` call, if core can store them.

    Args:
        provider: The provider that yields them.
        entries: The entries of a value at `path`, including those of its children.
        path: The path of the value.
        forms: All forms that some provider can rebuild.

    Raises:
        PluginError: An entry has a wrong type, cannot be stored or rebuilt, or repeats a path. Only
            the provider's author can fix that.
    """
    seen: set[ObjectPath] = set()
    for entry in entries:
        # No subclasses: the fast paths of saves compare with exactly these classes.
        if type(entry) is not StateObject and type(entry) is not Node:
            msg = f"describe yields {type(entry).__name__}, not a StateObject or Node"
            raise broken_contract(provider, path, msg)
        here = entry.path
        if here is not path:  # most leaves are at the path itself
            _check_place(provider, here, path)
        if here in seen:
            msg = f"describe yields the path {show_path(here) or 'of the root'} twice"
            raise broken_contract(provider, path, msg)
        seen.add(here)
        if entry.form not in forms:
            what = "Node" if isinstance(entry, Node) else "StateObject"
            msg = (
                f"describe yields the {what} {show_path(entry.path)} of the form {entry.form!r}, "
                "which no provider could build again: use one of the provider's own `forms`"
                f"{nearest(str(entry.form), forms)}"
            )
            raise broken_contract(provider, path, msg)
        if isinstance(entry, Node) and entry.meta != {}:
            _check_meta(provider, entry, path)
        yield entry


def check_path(path: ObjectPath) -> None:
    """Check the path of an entry against the limits of the format, before anything is stored.

    Raises:
        UnsupportedStateError: It exceeds a limit; the error names the path and a remedy.
    """
    if len(path) > MAX_SAVED_SEGMENTS:
        _refuse(path, f"is nested more than {MAX_SAVED_SEGMENTS} levels deep: flatten the state")
    if sum(map(len, path)) > MAX_PATH_CHARS:
        _refuse(path, f"has a path of more than {MAX_PATH_CHARS} characters: use shorter keys")


def check_spec(spec: TensorSpec, path: ObjectPath) -> None:
    """Check the spec of the object at `path` against the limits of the format.

    Raises:
        UnsupportedStateError: It exceeds a limit; the error names the path and a remedy.
    """
    if len(spec.shape) > MAX_DIMENSIONS:
        many = len(spec.shape)
        _refuse(
            path, f"has {many} dimensions, but at most {MAX_DIMENSIONS} can be stored: reshape it"
        )
    if not 1 <= spec.itemsize <= MAX_ITEMSIZE:
        _refuse(
            path,
            f"has elements of {spec.itemsize} bytes ({show_text(spec.dtype)}), but only 1 to "
            f"{MAX_ITEMSIZE} can be stored: save it as bytes, a string, or a list of them",
        )
    if spec.shape and max(spec.shape) > MAX_INT:
        _refuse(path, f"has a dimension of {max(spec.shape)}, but at most 2^62 - 1 can be stored")


def _refuse(path: ObjectPath, what: str) -> NoReturn:
    shown = show_path(path) or "the root"
    msg = f"{show_text(shown)} {what}"
    raise UnsupportedStateError(msg)


def _check_place(provider: StateProvider, here: object, path: ObjectPath) -> None:
    depth = len(path)
    # A generator expression would be slower, and this runs for each of a million objects.
    if type(here) is not tuple or not all([isinstance(part, str) for part in here[depth:]]):  # noqa: C419
        msg = f"describe yields the path {here!r}, which is not a tuple of strings"
        raise broken_contract(provider, path, msg)
    if here[:depth] != path:
        msg = (
            f"describe yields {show_path(here) or 'the root'}, which is outside its part of "
            "the tree: it must describe only entries at and below the given path"
        )
        raise broken_contract(provider, path, msg)


def _check_meta(provider: StateProvider, node: Node, path: ObjectPath) -> None:
    """Check that `meta` survives JSON unchanged."""
    why = "it is not a dict"
    if type(node.meta) is dict:
        if _is_plain(node.meta):
            return
        try:
            if json.loads(json.dumps(node.meta, allow_nan=False)) != node.meta:
                why = "JSON would change it (such as a tuple into a list, or a key into a string)"
            elif depth_of(node.meta) > MAX_METADATA_DEPTH:
                why = f"it is nested more than {MAX_METADATA_DEPTH} levels deep"
            else:
                return
        except (TypeError, ValueError, RecursionError) as error:
            why = str(error)
    msg = (
        f"the meta of the Node {show_path(node.path) or 'at the root'} cannot be stored as JSON: "
        f"{why}; use dicts with string keys, lists, strings, finite numbers, booleans and None"
    )
    raise broken_contract(provider, path, msg)


def _is_plain(meta: dict[Any, Any]) -> bool:
    """Return whether a dict clearly survives JSON; False if it needs the full check."""
    for key, value in meta.items():
        if type(key) is not str:
            return False
        for item in value if type(value) is list else (value,):
            if type(item) is int:
                if not -MAX_INT <= item <= MAX_INT:
                    return False
            elif item is not None and type(item) not in {str, bool}:
                return False
    return True


def checked_placement(
    placement: object, provider: StateProvider, path: ObjectPath, what: str
) -> Placement:
    """Return a provider's placement; errors of its `finish` will name the provider and the path.

    Raises:
        PluginError: The call that `what` names did not return a Placement.
    """
    if not isinstance(placement, Placement):
        msg = f"{what} returned {type(placement).__name__}, not a Placement"
        raise broken_contract(provider, path, msg)
    call = placement.finish
    if call is None:
        return placement

    def finish() -> object:
        # Not `with noting_origin(...)`: it would take longer than everything else for a tensor.
        try:
            return call()
        except BaseException as error:
            origin = f"by `finish` of provider {provider.name!r} ({shipped_by(type(provider))})"
            note_origin(error, f"{origin} at {show_path(path) or 'the root'}")
            raise

    placement.finish = finish
    return placement

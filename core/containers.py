"""Containers of the tree as nodes: what `load` needs to build a dict, list or tuple again."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.abc import Node
    from penstock.core.types import ObjectPath

_KEY_TYPES: dict[type, str] = {int: "int", bool: "bool", float: "float", type(None): "none"}


def key_segment(key: object, path: ObjectPath) -> str:
    """The path segment of a dict key: the key's plain text.

    Raises:
        UnsupportedStateError: A container's keys can only be str, int, bool, float and None.
    """
    if type(key) is str:
        return key
    if type(key) not in _KEY_TYPES:
        msg = (
            f"{show_path(path)} has the key {key!r} of type {type(key).__name__}: keys of a dict "
            "that holds tensors or other objects must be str, int, bool, float or None"
        )
        raise UnsupportedStateError(msg)
    return repr(key)


def key_types(keys: Sequence[object]) -> str | dict[str, str] | None:
    """What a dict's node has to say on its keys: one type for all, or the type of each segment."""
    kinds = {type(key) for key in keys}
    if not kinds or kinds == {str}:
        return None
    if len(kinds) == 1:
        return _KEY_TYPES[kinds.pop()]
    return {repr(key): _KEY_TYPES[type(key)] for key in keys if type(key) is not str}


def key_from_segment(segment: str, kinds: str | dict[str, str] | None, path: ObjectPath) -> object:
    """The inverse of `key_segment`, with what `key_types` said.

    Raises:
        FormatError: They do not fit.
    """
    kind = kinds.get(segment) if isinstance(kinds, dict) else kinds
    constants = {"True": True, "False": False, "None": None}
    try:
        match kind:
            case None:
                return segment
            case "int":
                return int(segment)
            case "float":
                return float(segment)
            case "bool" | "none":
                return constants[segment]
    except (ValueError, KeyError):
        pass
    msg = f"{show_path(path)} has no key {segment!r} of type {kind!r}"
    raise FormatError(msg, [show_path(path)])


_FACTORIES: dict[str, type] = {
    t.__name__: t for t in (list, dict, set, tuple, int, float, str, bool, bytes, complex)
}


def dict_meta(value: dict[Any, Any], path: ObjectPath) -> dict[str, Any]:
    """What the node of a container dict says besides its keys.

    Raises:
        UnsupportedStateError: It is of a class that cannot be built again.
    """
    kind = type(value)
    if kind is dict:
        return {}
    if kind is OrderedDict:
        return {"class": "OrderedDict"}
    if isinstance(value, defaultdict) and kind is defaultdict:
        factory = value.default_factory
        if factory is None:
            return {"class": "defaultdict", "factory": None}
        name = getattr(factory, "__name__", "")
        if _FACTORIES.get(name) is factory:
            return {"class": "defaultdict", "factory": name}
        msg = (
            f"{show_path(path)} is a defaultdict of {factory!r}: only of "
            f"{', '.join(_FACTORIES)} can one be stored"
        )
        raise UnsupportedStateError(msg)
    msg = (
        f"{show_path(path)} is a {kind.__module__}.{kind.__qualname__} that holds tensors or "
        "other objects: pass a plain dict of it"
    )
    raise UnsupportedStateError(msg)


def make_dict(meta: dict[str, Any], path: ObjectPath) -> dict[Any, Any]:
    """An empty dict as `dict_meta` described it.

    Raises:
        FormatError: The description is not one that `dict_meta` makes.
    """
    match meta.get("class"):
        case None:
            return {}
        case "OrderedDict":
            return OrderedDict()
        case "defaultdict":
            name = meta.get("factory")
            if name is None:
                return defaultdict(None)
            if isinstance(name, str) and name in _FACTORIES:
                return defaultdict(_FACTORIES[name])
    msg = f"{show_path(path)} is stored as a dict of unknown class {meta!r}"
    raise FormatError(msg, [show_path(path)])


def tuple_class(value: tuple[Any, ...], path: ObjectPath) -> str | None:
    """How a named tuple's class is stored: `module:qualified.name`; None for a plain tuple.

    Raises:
        UnsupportedStateError: It is some other subclass, or cannot be imported by that name.
    """
    kind = type(value)
    if kind is tuple:
        return None
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not hasattr(kind, "_fields") or _loaded_class(name) is not kind:
        msg = (
            f"{show_path(path)} is a {name}: only plain tuples and importable named tuples can "
            "hold tensors or other objects"
        )
        raise UnsupportedStateError(msg)
    return name


def make_tuple(items: list[Any], name: object, path: ObjectPath) -> tuple[Any, ...]:
    """The inverse of `tuple_class`. Never imports a module because a checkpoint names it.

    Raises:
        UnsupportedStateError: The class is not loaded, or is no named tuple.
        FormatError: It has other fields than were stored.
    """
    if name is None:
        return tuple(items)
    kind = _loaded_class(name) if isinstance(name, str) else None
    make = getattr(kind, "_make", None)
    if kind is None or not issubclass(kind, tuple) or make is None:
        msg = (
            f"{show_path(path)} is a named tuple {name}, which is not loaded here: import its "
            "module before loading"
        )
        raise UnsupportedStateError(msg)
    try:
        made: tuple[Any, ...] = make(items)
    except TypeError as error:
        msg = f"{show_path(path)} does not fit the named tuple {name}: {error}"
        raise FormatError(msg, [show_path(path)]) from error
    return made


def assemble(node: Node, items: dict[str, Any]) -> object:
    """The container that `node` describes, of the items by their segments.

    Raises:
        FormatError: They do not fit.
        UnsupportedStateError: Its class is not loaded.
    """
    path = node.path
    if node.form == "dict":
        kinds = node.meta.get("keys")
        result = make_dict(node.meta, path)
        for segment, value in items.items():
            result[key_from_segment(segment, kinds, path)] = value
        return result
    by_index = {key_from_segment(s, "int", path): value for s, value in items.items()}
    length = node.meta.get("length")
    if list(by_index) != list(range(len(by_index))) or len(by_index) != length:
        return by_index  # only some items are selected
    values = list(by_index.values())
    return values if node.form == "list" else make_tuple(values, node.meta.get("class"), path)


def _loaded_class(name: str) -> type | None:
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    found: object = None if module is None else vars(module)
    for part in qualname.split("."):
        members = found if isinstance(found, dict) else getattr(found, "__dict__", {})
        found = members.get(part)
    return found if isinstance(found, type) else None

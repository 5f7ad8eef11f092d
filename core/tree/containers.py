"""Containers of a state tree: finding them, turning them into nodes, and rebuilding them.

A dict, list or tuple with a tensor or another provider's object anywhere below it is a container.
Otherwise it is one value, which is stored and replaced whole.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.limits import MAX_KEY_DIGITS
from penstock.core.markers import Leaves, PerRank
from penstock.core.types import (
    FACTORIES,
    collide,
    loaded_class,
    show_key,
    show_path,
    show_text,
    show_value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.abc import Node, StateProvider
    from penstock.core.types import ObjectPath

VALUE_FORM = "json"
"""Form of the provider for all values that no other provider claims."""

CONTAINERS = frozenset({"dict", "list", "tuple"})
"""Forms of nodes that core builds itself; all other nodes belong to providers."""

NOTHING = frozenset({b"null", b"{}", b"[]", b'{"$":"tuple","v":[]}'})
"""The bytes, in `VALUE_FORM`, of the values that `is_nothing` accepts."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex})
_FIRST_LONG_KEY = 10**MAX_KEY_DIGITS
_KEY_TYPES: dict[type, str] = {int: "int", bool: "bool", float: "float", type(None): "none"}


def is_nothing(value: object) -> bool:
    """Return whether `value` counts as nothing: None, or an empty dict, list or tuple."""
    return value is None or (type(value) in {dict, list, tuple} and not value)


class Providers(Protocol):
    """Finds providers by type and by form."""

    def for_type(self, kind: type, /) -> StateProvider | None:
        """Return the provider that claims `kind` with the highest priority; None if there is none.

        Raises:
            PluginError: Two providers claim it with the same priority.
        """
        ...

    def for_form(self, form: str, /) -> StateProvider:
        """Return the provider that rebuilds `form`.

        Raises:
            PluginError: There is none, or more than one.
        """
        ...

    def all(self) -> Sequence[StateProvider]:
        """Return every provider."""
        ...


class Found(NamedTuple):
    """A provider's object in the tree (not a plain value)."""

    path: ObjectPath
    provider: StateProvider
    value: Any


class _Alike(NamedTuple):
    """The children of a container that all have one type, which a provider claims."""

    path: ObjectPath
    provider: StateProvider
    names: Sequence[object]
    children: Sequence[Any]


class Scan:
    """Walks a tree once: finds providers' objects, and distinguishes containers from values.

    Args:
        providers: The providers; a value that one of them claims is an object.
        thorough: Whether to find all objects; if not, the search in a container stops at its first
            object.

    Raises:
        UnsupportedStateError: A container contains itself.
    """

    def __init__(self, providers: Providers, *, thorough: bool = True) -> None:
        self._thorough = thorough
        self.value_provider = providers.for_form(VALUE_FORM)
        self._found: list[Found | _Alike] = []
        self._providers = providers
        self._by_type: dict[type, StateProvider | None] = {}
        self._holds: dict[int, bool] = {}
        self._alive: list[object] = []  # keeps the ids in `_holds` from being reused
        self._active: set[int] = set()

    @property
    def found(self) -> Iterator[Found]:
        """The providers' objects in the tree, in order."""
        for entry in self._found:
            if isinstance(entry, Found):
                yield entry
                continue
            for name, child in zip(entry.names, entry.children, strict=True):
                yield Found((*entry.path, _segment(name)), entry.provider, child)

    def provider_for(self, kind: type) -> StateProvider | None:
        """Return the provider of `kind`; None if only the value provider takes it."""
        if kind in self._by_type:
            return self._by_type[kind]
        provider = self._providers.for_type(kind)
        if provider is self.value_provider:
            provider = None
        self._by_type[kind] = provider
        return provider

    def is_container(self, value: object, path: ObjectPath) -> bool:
        """Return whether `value` is a dict, list or tuple with a provider's object below it."""
        kind = type(value)
        if kind in _PLAIN or not isinstance(value, dict | list | tuple):
            return False
        return self.provider_for(kind) is None and self._visit(value, path)

    def _visit(self, value: Any, path: ObjectPath) -> bool:
        is_found = self._find(value, path)
        if is_found is not None:
            return is_found
        key = id(value)
        known = self._holds.get(key)
        if known is not None:
            return known
        if key in self._active:
            msg = f"{show_path(path)} holds itself: a tree must not have cycles"
            raise UnsupportedStateError(msg)
        self._active.add(key)
        names, children = _children(value)
        holds = self._are_found(path, names, children)
        if not holds:
            for name, child in zip(names, children, strict=True):
                # Tested before the call: a list may hold a million numbers.
                if type(child) not in _PLAIN and self._visit(child, (*path, _segment(name))):
                    holds = True
                    if not self._thorough:
                        break
        self._active.discard(key)
        self._holds[key] = holds
        self._alive.append(value)
        return holds

    def _find(self, value: Any, path: ObjectPath) -> bool | None:
        """Return whether `value` is an object; None if it may be a container of objects."""
        kind = type(value)
        if kind in _PLAIN:
            return False
        provider = self.provider_for(kind)
        if provider is not None:
            self._found.append(Found(path, provider, value))
            return True
        if kind is PerRank:
            self._visit(value.value, path)
            return True
        if kind is Leaves:
            for keys, leaf in value.items.items():
                self._visit(leaf, (*path, *map(str, keys)))
            return True
        return None if isinstance(value, dict | list | tuple) else False

    def _are_found(
        self, path: ObjectPath, names: Sequence[object], children: Sequence[object]
    ) -> bool:
        """Record children that all have one claimed type; return False if they do not.

        Visiting each of fifty thousand tensors would be slow.
        """
        kinds = set(map(type, children))
        if len(kinds) != 1 or kinds <= _PLAIN:
            return False
        provider = self.provider_for(kinds.pop())
        if provider is None:
            return False
        self._found.append(_Alike(path, provider, names, children))
        return True


def _children(value: Any) -> tuple[Sequence[object], list[Any]]:
    if isinstance(value, dict):
        return list(value), list(value.values())
    return range(len(value)), list(value)


def _segment(name: object) -> str:
    return name if isinstance(name, str) else show_key(name)


def key_segment(key: object, path: ObjectPath) -> str:
    """Return the path segment of a dict key: the key's plain text.

    Raises:
        UnsupportedStateError: The key is not a str, int, bool, float or None, or has no usable
            text.
    """
    if type(key) is str:
        return key
    if type(key) not in _KEY_TYPES:
        msg = (
            f"{show_path(path)} has the key {show_value(key)} of type {type(key).__name__}: keys "
            "of a dict that holds tensors or other objects must be str, int, bool, float or None"
        )
        raise UnsupportedStateError(msg)
    if type(key) is float and not _comes_back(key):
        msg = (
            f"{show_path(path)} has a NaN of unusual bits as a key, which has no text: use "
            "another key"
        )
        raise UnsupportedStateError(msg)
    if type(key) is int and abs(key) >= _FIRST_LONG_KEY:
        msg = (
            f"{show_path(path)} has an integer of more than {MAX_KEY_DIGITS} digits as a key: keys "
            "of a dict that holds tensors or other objects cannot be longer; use another key"
        )
        raise UnsupportedStateError(msg)
    return repr(key)


def _comes_back(key: float) -> bool:
    return struct.pack("<d", float(repr(key))) == struct.pack("<d", key)


def key_types(keys: Sequence[object]) -> str | dict[str, str] | None:
    """Return the key types for a dict's node: one for all keys, or one by segment.

    None if all keys are strings.
    """
    kinds = {type(key) for key in keys}
    if not kinds or kinds == {str}:
        return None
    if len(kinds) == 1:
        return _KEY_TYPES[kinds.pop()]
    return {repr(key): _KEY_TYPES[type(key)] for key in keys if type(key) is not str}


def key_from_segment(segment: str, kinds: str | dict[str, str] | None, path: ObjectPath) -> object:
    """Return the key of a segment: the inverse of `key_segment`, given the `key_types`.

    Raises:
        FormatError: The segment does not fit its type.
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
    wrong = show_text(f"{segment!r} of type {kind!r}")
    msg = f"{show_path(path)} is stored with an impossible key: {wrong}"
    raise FormatError(msg, [show_path(path)])


def dict_meta(value: dict[Any, Any], path: ObjectPath) -> dict[str, Any]:
    """Return the class of a container dict as metadata for its node.

    Raises:
        UnsupportedStateError: The class cannot be rebuilt.
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
        if FACTORIES.get(name) is factory:
            return {"class": "defaultdict", "factory": name}
        msg = (
            f"{show_path(path)} is a defaultdict of {factory!r}: only defaultdicts of "
            f"{', '.join(FACTORIES)} can be stored"
        )
        raise UnsupportedStateError(msg)
    msg = (
        f"{show_path(path)} is a {kind.__module__}.{kind.__qualname__} that holds tensors or "
        "other objects: pass a plain dict"
    )
    raise UnsupportedStateError(msg)


def make_dict(meta: dict[str, Any], path: ObjectPath) -> dict[Any, Any]:
    """Return an empty dict of the class that `dict_meta` described.

    Raises:
        FormatError: `meta` is not in the format of `dict_meta`.
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
            if isinstance(name, str) and name in FACTORIES:
                return defaultdict(FACTORIES[name])
    msg = f"{show_path(path)} is stored as a dict of unknown class {show_text(repr(meta))}"
    raise FormatError(msg, [show_path(path)])


def tuple_class(value: tuple[Any, ...], path: ObjectPath) -> str | None:
    """Return the name under which a named tuple's class is stored, `module:qualified.name`.

    None for a plain tuple.

    Raises:
        UnsupportedStateError: It is another kind of tuple, or its class is not found by that name.
    """
    kind = type(value)
    if kind is tuple:
        return None
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not hasattr(kind, "_fields") or loaded_class(name) is not kind:
        msg = (
            f"{show_path(path)} is a {name}: only plain tuples and importable named tuples can "
            "hold tensors or other objects"
        )
        raise UnsupportedStateError(msg)
    return name


def make_tuple(items: list[Any], name: object, path: ObjectPath) -> tuple[Any, ...]:
    """Build a tuple of the class that `tuple_class` named. Does not import its module.

    Raises:
        UnsupportedStateError: The class is not loaded, or is not a named tuple.
        FormatError: The fields of the class differ from the stored ones.
    """
    if name is None:
        return tuple(items)
    kind = loaded_class(name) if isinstance(name, str) else None
    is_tuple = kind is not None and issubclass(kind, tuple)
    make = getattr(kind, "_make", None) if is_tuple else None
    if make is None:
        msg = (
            f"{show_path(path)} is a named tuple {show_text(str(name))}, which is not loaded "
            "here: import its module before loading"
        )
        raise UnsupportedStateError(msg)
    try:
        result: tuple[Any, ...] = make(items)
    except TypeError as error:
        msg = f"{show_path(path)} does not fit the named tuple {name}: {error}"
        raise FormatError(msg, [show_path(path)]) from error
    return result


def assemble(node: Node, items: dict[str, Any]) -> object:
    """Build the container that `node` describes from its items by segment.

    Raises:
        FormatError: The items do not fit the node.
        UnsupportedStateError: The class of the container is not loaded.
    """
    path = node.path
    kinds = node.meta.get("keys") if node.form == "dict" else "int"
    keys = [key_from_segment(segment, kinds, path) for segment in items]
    if collide(keys):
        msg = f"{show_path(path)} has keys whose hashes collide too often"
        raise FormatError(msg, [show_path(path)])
    by_key = zip(keys, items.values(), strict=True)
    if node.form == "dict":
        result = make_dict(node.meta, path)
        for key, value in by_key:
            result[key] = value
        return result
    # Sorted: ranks that each have some of the items may have stored them in any order.
    by_index: dict[Any, Any] = dict(sorted(by_key, key=itemgetter(0)))
    length = node.meta.get("length")
    if list(by_index) != list(range(len(by_index))) or len(by_index) != length:
        return by_index  # some items are not selected
    values = list(by_index.values())
    return values if node.form == "list" else make_tuple(values, node.meta.get("class"), path)

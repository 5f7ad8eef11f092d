"""The exact encoding of plain Python values as JSON; `decode` is the inverse.

JSON's own types represent themselves; all other values are `{"$": tag, ...}`. Decoding never
imports a module that a checkpoint names, so classes (Enum, named tuple, dataclass) must be loaded
already.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import datetime as dt
import enum
import inspect
import json
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from types import MemberDescriptorType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np

from penstock.core.errors import UnsupportedStateError
from penstock.core.types import FACTORIES as CONTAINER_FACTORIES
from penstock.core.types import collide, loaded_class, show_key, show_path, show_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.types import ObjectPath

MAX_DEPTH = 100
"""Deeper values are refused at the save: a reader would hit Python's recursion limit."""

_JSON_INT = 1 << 63  # larger ones are stored as hex: Python limits the digits of decimal ones
_CANONICAL_NAN = struct.pack("<d", math.nan)

TAG = "$"

FACTORIES: dict[str, type] = {
    **CONTAINER_FACTORIES,
    "frozenset": frozenset,
    "Counter": Counter,
}
"""The allowed factories of a defaultdict that is stored as one value.

Fewer are allowed in one that contains objects.
"""
PATHS: dict[str, type[pathlib.PurePath]] = {
    t.__name__: t
    for t in (
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    )
}
NAMESPACES: dict[str, type[argparse.Namespace | SimpleNamespace]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": SimpleNamespace,
}
NUMPY_KINDS = frozenset("biufcmMSU")


def class_name(kind: type) -> str | None:
    """Return `module:qualified.name` of a class if it leads back to the class; None otherwise."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if loaded_class(name) is kind else None


def field_names(kind: type) -> tuple[str, ...] | None:
    """Return the field names of a dataclass that holds only fields; None for any other class.

    Does not run the class's code, because a checkpoint may name any class.
    """
    fields = inspect.getattr_static(kind, "__dataclass_fields__", None)
    # A class with its own `__new__` has more content, as a subclass of dict does.
    made = inspect.getattr_static(kind, "__new__", None)
    if type(fields) is not dict or made is not object.__dict__["__new__"]:
        return None
    names = tuple(field.name for field in dataclasses.fields(kind))
    slots = {
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }
    return names if slots <= {*names} else None


def encode_value(value: object, path: ObjectPath) -> bytes:
    """Encode a value as bytes.

    Raises:
        UnsupportedStateError: A part of the value cannot be stored; the message has its path.
    """
    encoder = _Encoder(path)
    return json.dumps(encoder.encode(value), separators=(",", ":")).encode("ascii")


class _Encoder:
    """Encodes one value; keeps the path of the current part for error messages."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._within: list[str] = []
        self._active: set[int] = set()

    def encode(self, value: Any) -> Any:
        kind = type(value)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(self, value)
        if kind in _MEMBERS:
            return self._container(value, kind)
        return self._by_base(value, kind)

    def refuse(self, what: str) -> NoReturn:
        msg = f"{show_path(self._path)}{''.join(self._within)} {what}"
        raise UnsupportedStateError(msg)

    def pairs(self, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [[self.at(f"/key {show_key(key)}", key), self.at(_step(key), v)] for key, v in items]

    def items(self, values: Iterable[Any]) -> list[Any]:
        listed = [*values]
        if {*map(type, listed)} == {int} and max(map(abs, listed)) < _JSON_INT:
            return listed  # the states of generators have hundreds
        return [self.at(f"[{index}]", value) for index, value in enumerate(listed)]

    def at(self, step: str, value: Any) -> Any:
        self._within.append(step)
        encoded = self.encode(value)
        self._within.pop()
        return encoded

    def _container(self, value: Any, kind: type) -> Any:
        key = id(value)
        if key in self._active:
            self.refuse("holds itself: a value must not have cycles")
        if len(self._active) >= MAX_DEPTH:
            self.refuse(f"is nested more than {MAX_DEPTH} levels deep: save it in fewer levels")
        if kind in _HASHED and collide(value):  # a reader would hold the GIL for hours
            self.refuse(
                "has members or keys whose hashes collide too often to be built again: save a list "
                "or a tensor of them"
            )
        self._active.add(key)
        encoded = _MEMBERS[kind](self, value)
        self._active.discard(key)
        return encoded

    def factory(self, factory: object) -> str | None:
        if factory is None:
            return None
        name = getattr(factory, "__name__", "")
        if FACTORIES.get(name) is factory:
            return str(name)
        return self.refuse(
            f"is a defaultdict of {factory!r}: only those of {', '.join(FACTORIES)} can be stored"
        )

    def _by_base(self, value: Any, kind: type) -> Any:
        if isinstance(value, enum.Enum):
            return self._enum(value, kind)
        if isinstance(value, np.generic):
            return self._numpy(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            name = class_name(kind)
            if name is not None:
                members = self._container(tuple(value), tuple)
                return {TAG: "namedtuple", "class": name, "v": members["v"]}
        names = field_names(kind)
        if names is not None:
            return self._dataclass(value, kind, names)
        if kind.__module__ == "torch":
            return self._torch(value, kind)
        shown = f"{kind.__module__}.{kind.__qualname__}"
        return self.refuse(
            f"is a {shown}, which cannot be stored: save plain data of it, give its class "
            "state_dict and load_state_dict, or pass allow_pickle=True to save and to restore"
        )

    def _dataclass(self, value: Any, kind: type, names: tuple[str, ...]) -> Any:
        name = self._name(kind, "dataclass")
        items = {field: getattr(value, field) for field in names if hasattr(value, field)}
        unset, more = set(names) - items.keys(), getattr(value, "__dict__", {}).keys() - names
        if unset or more:
            shown = ", ".join(sorted(map(str, unset | more)))
            self.refuse(
                f"is of the dataclass {name}, and {shown} would not come back: a dataclass is "
                "stored only with all its fields set, and without other attributes. Give the class "
                "state_dict and load_state_dict, or pass allow_pickle=True to save and to restore"
            )
        return {TAG: "dataclass", "class": name, "v": self._container(items, dict)}

    def _name(self, kind: type, what: str) -> str:
        return class_name(kind) or self.refuse(
            f"is of the {what} {kind.__qualname__}, which cannot be imported by name: define it "
            "at the top level of a module"
        )

    def _enum(self, value: enum.Enum, kind: type) -> Any:
        name = self._name(kind, "Enum")
        if isinstance(value, enum.Flag):  # by value: a combination of flags may have no name
            return {TAG: "flag", "class": name, "v": self.encode(value.value)}
        return {TAG: "enum", "class": name, "v": value.name}

    def _numpy(self, value: np.generic) -> Any:
        dtype = value.dtype
        text = dtype.str
        if dtype.kind not in NUMPY_KINDS or np.dtype(text) != dtype:
            self.refuse(
                f"is a numpy scalar of dtype {dtype}, which cannot be stored: save plain data of it"
            )
        # An empty string has no bytes, but `tobytes` returns one character.
        return {TAG: "numpy", "dtype": text, "v": value.tobytes()[: dtype.itemsize].hex()}

    def _torch(self, value: Any, kind: type) -> Any:
        if kind.__name__ == "Size":
            return {TAG: "torch.Size", "v": list(value)}
        if kind.__name__ in ("dtype", "device"):
            return {TAG: f"torch.{kind.__name__}", "v": str(value).removeprefix("torch.")}
        return self.refuse(
            f"is a torch.{kind.__name__}, which cannot be stored as a value: tensors can be in "
            "dicts, lists, tuples and named tuples"
        )


def _is_text(text: str) -> bool:
    """Return whether `text` has no surrogates; JSON would join two adjacent lone ones."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _surrogates(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def _special(value: float) -> str:
    bits = struct.pack("<d", value)
    return bits.hex() if math.isnan(value) and bits != _CANONICAL_NAN else repr(value)


def _step(key: object) -> str:
    return "/" + show_segment(show_key(key))


def _encode_zone(encoder: _Encoder, zone: dt.tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        plain = dt.timezone(offset).tzname(None)
        return [_delta(offset), None if name == plain else encoder.encode(name)]
    if type(zone) is ZoneInfo and zone.key:
        return zone.key
    return encoder.refuse(f"has the time zone {zone!r}, which cannot be stored: use a ZoneInfo")


def _delta(delta: dt.timedelta) -> list[int]:
    return [delta.days, delta.seconds, delta.microseconds]


def _encode_time(encoder: _Encoder, value: dt.datetime | dt.time) -> Any:
    # ISO format has neither `fold` nor the name of a zone: both are stored beside it.
    return {
        TAG: type(value).__name__,
        "v": value.replace(tzinfo=None, fold=0).isoformat(),
        "tz": _encode_zone(encoder, value.tzinfo),
        "fold": value.fold,
    }


def _encode_complex(encoder: _Encoder, value: complex) -> Any:
    return {TAG: "complex", "v": [encoder.encode(value.real), encoder.encode(value.imag)]}


def _encode_path(encoder: _Encoder, value: pathlib.PurePath) -> Any:
    return {TAG: "path", "class": type(value).__name__, "v": encoder.encode(str(value))}


def _encode_str(_: _Encoder, value: str) -> Any:
    return value if _is_text(value) else {TAG: "str", "v": _surrogates(value)}


def _encode_int(_: _Encoder, value: int) -> Any:
    return value if -_JSON_INT < value < _JSON_INT else {TAG: "int", "v": hex(value)}


def _encode_float(_: _Encoder, value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "v": _special(value)}


def _encode_dict(encoder: _Encoder, value: dict[Any, Any]) -> Any:
    # A dict with the key `$` would be read as a tagged value; JSON keys are text.
    if TAG not in value and all(type(key) is str and _is_text(key) for key in value):
        return {key: encoder.at(_step(key), item) for key, item in value.items()}
    return {TAG: "dict", "v": encoder.pairs(value.items())}


def _encode_set(encoder: _Encoder, value: set[Any] | frozenset[Any]) -> Any:
    # Sorted by their text: the order of a set varies between processes, and equal values must
    # have equal bytes.
    members = sorted((encoder.at("{}", item) for item in value), key=json.dumps)
    return {TAG: type(value).__name__, "v": members}


def _encode_deque(encoder: _Encoder, value: deque[Any]) -> Any:
    return {TAG: "deque", "v": encoder.items(value), "maxlen": value.maxlen}


def _encode_defaultdict(encoder: _Encoder, value: defaultdict[Any, Any]) -> Any:
    return {
        TAG: "defaultdict",
        "factory": encoder.factory(value.default_factory),
        "v": encoder.pairs(value.items()),
    }


def _encode_pairs(encoder: _Encoder, value: dict[Any, Any]) -> Any:
    return {TAG: type(value).__name__, "v": encoder.pairs(value.items())}


def _encode_namespace(encoder: _Encoder, value: Any) -> Any:
    kind, members = type(value), vars(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not all(type(key) is str for key in members):
        encoder.refuse(
            f"is a {name} with names that are not text, which cannot be stored: save a dict"
        )
    return {TAG: "namespace", "class": name, "v": _encode_dict(encoder, members)}


_Encode: TypeAlias = "Callable[[_Encoder, Any], Any]"

_MEMBERS: dict[type, _Encode] = {
    list: lambda encoder, value: encoder.items(value),
    tuple: lambda encoder, value: {TAG: "tuple", "v": encoder.items(value)},
    dict: _encode_dict,
    set: _encode_set,
    frozenset: _encode_set,
    deque: _encode_deque,
    defaultdict: _encode_defaultdict,
    OrderedDict: _encode_pairs,
    Counter: _encode_pairs,
    **dict.fromkeys(NAMESPACES.values(), _encode_namespace),
}

_HASHED = frozenset({dict, set, frozenset, defaultdict, OrderedDict, Counter})

_SIMPLE: dict[type, _Encode] = {
    type(None): lambda _, v: v,
    bool: lambda _, v: v,
    str: _encode_str,
    int: _encode_int,
    float: _encode_float,
    bytes: lambda _, v: {TAG: "bytes", "v": base64.b64encode(v).decode("ascii")},
    bytearray: lambda _, v: {TAG: "bytearray", "v": base64.b64encode(v).decode("ascii")},
    complex: _encode_complex,
    dt.datetime: _encode_time,
    dt.time: _encode_time,
    dt.date: lambda _, v: {TAG: "date", "v": v.isoformat()},
    dt.timedelta: lambda _, v: {TAG: "timedelta", "v": _delta(v)},
    **dict.fromkeys(PATHS.values(), _encode_path),
}

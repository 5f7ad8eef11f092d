"""Decodes plain Python values from the JSON of `encode`; does not trust its input."""

from __future__ import annotations

import base64
import datetime as dt
import enum
import importlib.util
import inspect
import json
import pathlib
import re
import struct
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from functools import lru_cache
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np

from penstock.core.distributions import installed_only
from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import collide, loaded_class, show_path, show_text
from penstock.providers.values.encode import (
    FACTORIES,
    NAMESPACES,
    NUMPY_KINDS,
    PATHS,
    TAG,
    field_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.types import ObjectPath

_UCS4_BYTES = 4
_ZONE = re.compile(r"[\w+-]+(/[\w+-]+)*", re.ASCII)


def decode_value(data: bytes, path: ObjectPath) -> object:
    """Decode a value that `encode_value` encoded; `data` is not trusted.

    Raises:
        FormatError: `data` is not in the format of `encode_value`.
        UnsupportedStateError: A class that `data` names is not loaded.
    """
    try:
        return _decode(json.loads(data))
    except UnsupportedStateError as error:
        msg = f"{show_path(path)}: {error}"
        raise UnsupportedStateError(msg) from None
    except (
        RuntimeError,  # too deep, or torch does not know a device
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        OSError,  # a time zone that is a folder, or has too long a name
        SyntaxError,  # from numpy, about a dtype with commas
        struct.error,
        DeprecationWarning,  # from numpy, about a dtype's name, if warnings are errors
    ) as error:
        msg = f"{show_path(path)} holds a value that cannot be decoded: {show_text(repr(error))}"
        raise FormatError(msg, [show_path(path)]) from error


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return {key: _decode(item) for key, item in data.items()}
    tag = data[TAG]
    return _TAGS[tag](data["v"], data)


def _decode_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    decoded = [(_decode(key), _decode(value)) for key, value in pairs]
    _without_collisions([key for key, _ in decoded])
    return decoded


def _without_collisions(keys: list[Any]) -> list[Any]:
    """Return `keys`, or raise if their hash collisions could hold the GIL for hours."""
    if collide(keys):
        msg = "its members or keys have hashes that collide too often"
        raise ValueError(msg)
    return keys


def _decode_members(items: Any) -> dict[Any, None]:
    # Python makes a set from a dict in the order of the keys, which `collide` has checked. A set
    # that grows item by item is refilled in the order of its table.
    return dict.fromkeys(_without_collisions(_decode(items)))


def _decode_defaultdict(pairs: Any, data: dict[str, Any]) -> Any:
    name = data["factory"]
    return defaultdict(None if name is None else FACTORIES[name], _decode_pairs(pairs))


def _decode_deque(items: Any, data: dict[str, Any]) -> Any:
    limit = data["maxlen"]
    if limit is not None and len(items) > limit:
        raise ValueError(limit)
    return deque(_decode(items), limit)


def _decode_path(text: Any, data: dict[str, Any]) -> Any:
    kind = PATHS[data["class"]]
    if issubclass(kind, pathlib.Path) and not isinstance(pathlib.Path(), kind):
        # Python refuses to construct a concrete path of the other system.
        kind = kind.__bases__[1]
    return kind(_decode(text))


def _decode_numpy(text: Any, data: dict[str, Any]) -> Any:
    dtype = np.dtype(data["dtype"])
    if dtype.kind not in NUMPY_KINDS or dtype.hasobject:
        raise ValueError(str(dtype))
    raw = bytes.fromhex(text)
    if len(raw) != dtype.itemsize:
        raise ValueError(text)
    value = np.ndarray((), dtype, raw)[()] if raw else dtype.type()
    if dtype.kind in "SU" and value.dtype != dtype:
        return _padded(value, dtype)
    return value


def _padded(text: Any, dtype: np.dtype[Any]) -> Any:
    """Return the scalar with its trailing zeros, which numpy drops when it reads an element."""
    if dtype.kind == "S":
        return np.bytes_(text + b"\0" * (dtype.itemsize - len(text)))
    return np.str_(text + "\0" * (dtype.itemsize // _UCS4_BYTES - len(text)))


def _decode_enum(name: Any, data: dict[str, Any]) -> Any:
    return _find(data["class"], enum.Enum)[name]


def _decode_flag(value: Any, data: dict[str, Any]) -> Any:
    return _find(data["class"], enum.Flag)(_decode(value))


def _decode_namedtuple(items: Any, data: dict[str, Any]) -> Any:
    kind = _find(data["class"], tuple)
    if not hasattr(kind, "_fields"):
        raise ValueError(str(kind))
    return kind._make(_decode(items))


def _decode_dataclass(items: Any, data: dict[str, Any]) -> Any:
    """Build a dataclass from its fields without running the class's own code."""
    kind = _find(data["class"], object)
    names, values = field_names(kind), _decode(items)
    if names is None:
        raise ValueError(str(kind))
    if values.keys() != set(names):
        stored, here = (show_text(", ".join(some) or "none") for some in (values, names))
        msg = (
            f"the dataclass {show_text(data['class'])} was stored with the fields {stored}, but "
            f"now has {here}: load it with the old class, or exclude it"
        )
        raise UnsupportedStateError(msg)
    made = object.__new__(kind)
    for name, value in values.items():
        slot = inspect.getattr_static(kind, name, None)
        if isinstance(slot, MemberDescriptorType):
            slot.__set__(made, value)
        else:
            object.__getattribute__(made, "__dict__")[name] = value
    return made


def _decode_namespace(items: Any, data: dict[str, Any]) -> Any:
    made = NAMESPACES[data["class"]]()
    values = _decode(items)
    if not all(type(key) is str for key in values):
        raise TypeError(str(values))
    vars(made).update(values)
    return made


def _decode_torch(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def decode(value: Any, data: dict[str, Any]) -> Any:
        del data
        import torch  # noqa: PLC0415 - only values that came from torch need it

        if name == "Size":
            return torch.Size(value)
        if name == "device":
            return torch.device(value)
        dtype = vars(torch)[value]  # getattr would import the modules that torch loads lazily
        if not isinstance(dtype, torch.dtype):
            raise TypeError(value)
        return dtype

    return decode


def _find(name: str, base: type) -> Any:
    kind = loaded_class(name)
    if kind is None:
        msg = f"{show_text(name)} is not loaded: import its module before reading this value"
        raise UnsupportedStateError(msg)
    if not issubclass(kind, base):
        raise TypeError(name)
    return kind


def _decode_date_time(kind: Any) -> Callable[[Any, dict[str, Any]], Any]:
    def decode(text: Any, data: dict[str, Any]) -> Any:
        value = kind.fromisoformat(text)
        return value.replace(tzinfo=_decode_zone(data["tz"]), fold=data["fold"])

    return decode


def _float(text: str) -> float:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    (value,) = struct.unpack("<d", bytes.fromhex(text))
    return float(value)


def _decode_zone(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return _zone(zone)
    offset, name = zone
    delta = dt.timedelta(*offset)
    return dt.timezone(delta) if name is None else dt.timezone(delta, _decode(name))


@lru_cache(maxsize=1024)  # more than there are
def _zone(key: str) -> ZoneInfo:
    """Return `ZoneInfo(key)`; refuse a key for which that could run unexpected code.

    For a key that the system lacks, `ZoneInfo` imports the package `tzdata` from the first place
    that has it, and a subpackage that the key names. So the key must name a zone of the system or
    of an installed `tzdata`.

    Raises:
        ValueError: The key names neither.
    """
    with installed_only():
        package = importlib.util.find_spec("tzdata")
        places = package.submodule_search_locations if package else None
        folders = [*zoneinfo.TZPATH, *(f"{place}/zoneinfo" for place in places or ())]
        if not _ZONE.fullmatch(key) or not any(
            pathlib.Path(folder, key).is_file() for folder in folders
        ):
            msg = (
                f"this machine has no time zone {key!r}, and neither has the package tzdata: "
                "install or upgrade tzdata"
            )
            raise ValueError(msg)
        return ZoneInfo(key)


_TAGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "str": lambda v, _: bytes.fromhex(v).decode("utf-8", "surrogatepass"),
    "int": lambda v, _: int(v, 16),
    "float": lambda v, _: _float(v),
    "complex": lambda v, _: complex(*_decode(v)),
    "bytes": lambda v, _: base64.b64decode(v, validate=True),
    "bytearray": lambda v, _: bytearray(base64.b64decode(v, validate=True)),
    "tuple": lambda v, _: tuple(_decode(v)),
    "set": lambda v, _: set(_decode_members(v)),
    "frozenset": lambda v, _: frozenset(_decode_members(v)),
    "dict": lambda v, _: dict(_decode_pairs(v)),
    "OrderedDict": lambda v, _: OrderedDict(_decode_pairs(v)),
    "Counter": lambda v, _: Counter(dict(_decode_pairs(v))),
    "defaultdict": _decode_defaultdict,
    "deque": _decode_deque,
    "namedtuple": _decode_namedtuple,
    "dataclass": _decode_dataclass,
    "namespace": _decode_namespace,
    "enum": _decode_enum,
    "flag": _decode_flag,
    "numpy": _decode_numpy,
    "path": _decode_path,
    "date": lambda v, _: dt.date.fromisoformat(v),
    "datetime": _decode_date_time(dt.datetime),
    "time": _decode_date_time(dt.time),
    "timedelta": lambda v, _: dt.timedelta(*v),
    "torch.Size": _decode_torch("Size"),
    "torch.dtype": _decode_torch("dtype"),
    "torch.device": _decode_torch("device"),
}

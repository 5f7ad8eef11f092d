"""The context of a tensor of parts as JSON: the state of the tensor beside its parts.

A stored context is compared with that of a template. Rebuilding one uses plain values only, and
classes and functions that are loaded and known to torch as safe: a checkpoint must not run code.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import collide, show_path, show_text
from penstock.providers.values.decode import decode_value
from penstock.providers.values.encode import encode_value

if TYPE_CHECKING:
    from penstock.core.types import ObjectPath


def encode_context(value: object, path: ObjectPath) -> Any:
    """Encode a context as JSON that is equal for equal contexts.

    Raises:
        UnsupportedStateError: A part of the context is neither a plain value nor a named object.
    """
    kind = type(value)
    if kind in (list, tuple):
        items: Any = value
        return {"form": kind.__name__, "items": [encode_context(item, path) for item in items]}
    if kind is dict:
        pairs: Any = value
        return {
            "form": "dict",
            "items": [
                [encode_context(key, path), encode_context(item, path)]
                for key, item in pairs.items()
            ],
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: encode_context(getattr(value, name), path) for name in names}
        return {"form": "dataclass", "name": global_name(kind), "fields": fields}
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str) and "<" not in name:
        return {"form": "global", "name": global_name(value)}
    try:
        return {"form": "value", "value": json.loads(encode_value(value, path))}
    except UnsupportedStateError as error:
        msg = f"{error}. It belongs to the context that its __tensor_flatten__ gives."
        raise UnsupportedStateError(msg) from None


def decode_context(data: Any, path: ObjectPath) -> Any:
    """Decode a context that `encode_context` encoded.

    Raises:
        UnsupportedStateError: The context needs a class or function not known to torch as safe.
        FormatError: `data` is not what `encode_context` writes.
    """
    match data:
        case {"form": "list", "items": list(items)}:
            return [decode_context(item, path) for item in items]
        case {"form": "tuple", "items": list(items)}:
            return tuple(decode_context(item, path) for item in items)
        case {"form": "dict", "items": list(items)}:
            pairs = [(decode_context(k, path), decode_context(v, path)) for k, v in items]
            if collide([key for key, _ in pairs]):
                msg = f"{show_path(path)} has a context with keys whose hashes collide too often"
                raise FormatError(msg, [show_path(path)])
            return dict(pairs)
        case {"form": "dataclass", "name": str(name), "fields": dict(fields)}:
            made = {key: decode_context(item, path) for key, item in fields.items()}
            return safe_global(name, path)(**made)
        case {"form": "global", "name": str(name)}:
            return safe_global(name, path)
        case {"form": "value", "value": value}:
            return decode_value(json.dumps(value).encode(), path)
    shown = show_path(path)
    msg = f"{shown} is not stored as a tensor of parts is"
    raise FormatError(msg, [shown])


def global_name(value: object) -> str:
    """Return `module.qualified.name` of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]  # both have it


def safe_global(name: str, path: ObjectPath) -> Any:
    """Return the class or function of that name, if it is registered with torch as safe to call.

    Nothing is imported because a checkpoint names it.

    Raises:
        UnsupportedStateError: No safe class or function has that name.
    """
    for known in torch.serialization.get_safe_globals():
        found, known_as = known if isinstance(known, tuple) else (known, "")
        if name == known_as or name == global_name(found):
            return found
    msg = (
        f"{show_path(path)} consists of the parts of a {show_text(name)}, which cannot be put "
        "together here: nothing that is loaded and named to torch as safe has that name. Import "
        "its package (and call torch.serialization.add_safe_globals on it where the package "
        "does not); or restore into such a tensor; or exclude it, or read its parts one by one "
        "through open()"
    )
    raise UnsupportedStateError(msg)

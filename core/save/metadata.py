"""Checks that a commit record can hold the user's metadata."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.limits import MAX_METADATA_DEPTH, METADATA_LIMIT_BYTES, depth_of
from penstock.core.types import show_value


def check_metadata(metadata: object) -> dict[str, Any]:
    """Return the metadata as it will be read back: tuples as lists, scalars as plain numbers.

    Raises:
        ConfigError: The metadata is not JSON, has a key that is not text, is larger than 16 MiB,
            or is nested too deeply.
    """
    if not isinstance(metadata, Mapping):
        msg = f"metadata is a {type(metadata).__name__}: pass a dict"
        raise ConfigError(msg)
    if depth_of(dict(metadata)) > MAX_METADATA_DEPTH:
        msg = (
            f"metadata is nested more than {MAX_METADATA_DEPTH} levels deep, or holds itself: pass "
            "flat dicts, and store deeper ones in the state"
        )
        raise ConfigError(msg)
    try:
        text = json.dumps(dict(metadata), ensure_ascii=False, default=_plain_scalar)
        result = json.loads(text)
        # `json` turns other keys into text; it would silently lose one of `{1: "a", "1": "b"}`.
        if not _all_keys_are_text(dict(metadata)):
            raise TypeError  # noqa: TRY301 - the handler below finds the key for its message
    except (TypeError, ValueError, RecursionError) as error:
        flaw = _foreign(dict(metadata), "metadata") if isinstance(error, TypeError) else None
        if flaw is not None:
            raise ConfigError(flaw) from error
        msg = f"metadata cannot be stored as JSON: {error}; pass plain dicts, lists, text, numbers"
        raise ConfigError(msg) from error
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > METADATA_LIMIT_BYTES or type(result) is not dict:
        msg = (
            f"metadata is {size} bytes of JSON, but at most {METADATA_LIMIT_BYTES} can be stored: "
            "put large data into the state"
        )
        raise ConfigError(msg)
    return result


def _plain_scalar(value: object) -> object:
    """Return a numpy scalar, or a tensor or array without dimensions, as a plain value."""
    # Recognized by their methods, so that a commit record does not import torch.
    item = getattr(value, "item", None)
    if not callable(item) or getattr(value, "ndim", None) != 0:
        raise TypeError(type(value).__name__)
    try:
        plain: object = item()
    except Exception as error:  # a tensor on meta has no value
        raise TypeError(str(error)) from error
    # `item` of a numpy.longdouble returns another numpy.longdouble.
    return float(plain) if type(plain) is type(value) else plain  # type: ignore[arg-type]


def _all_keys_are_text(value: object) -> bool:
    todo = [value]
    while todo:
        here = todo.pop()
        if isinstance(here, dict):
            if not all(isinstance(key, str) for key in here):
                return False
            todo += here.values()
        elif isinstance(here, list | tuple):
            todo += here
    return True


def _foreign(value: object, place: str) -> str | None:
    """Describe the first key or value that cannot be stored, and what to pass instead."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return (
                    f"{place} has the key {show_value(key)}: keys of metadata are text; pass "
                    "str(key)"
                )
        items = [(f"{place}[{show_value(key)}]", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{number}]", child) for number, child in enumerate(value)]
    else:
        kind = type(value)
        subject = f"{place} is a {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " ")
        if callable(getattr(value, "tolist", None)) and getattr(value, "ndim", None):
            return f"{subject} of several elements: pass .tolist()"
        with contextlib.suppress(TypeError):
            if _foreign(_plain_scalar(value), place) is None:
                return None
        return f"{subject}: metadata is stored as JSON; pass plain dicts, lists, text, numbers"
    return next(filter(None, (_foreign(child, where) for where, child in items)), None)

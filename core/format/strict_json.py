"""Reads JSON that may be damaged or hostile, strictly. Sans-IO; every error is a `FormatError`.

Tested in `tests/core/format/test_records.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.errors import FormatError
from penstock.core.limits import MAX_INT
from penstock.core.types import show_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEX_DIGITS = frozenset("0123456789abcdef")

# Values that contain themselves are refused earlier; the check here would take a third of the time.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False)


def refuse(name: str, reason: str) -> NoReturn:
    """Raise a `FormatError` with the reason why record `name` is refused."""
    msg = f"{name}: {show_text(reason)}"  # the reason may quote megabytes
    raise FormatError(msg, [name])


def load_json(data: bytes | memoryview, name: str) -> Any:
    """Decode UTF-8 JSON.

    Raises:
        FormatError: `data` is not JSON, or is nested too deeply.
    """
    try:  # Python strings may hold lone surrogates, so stored JSON may too
        return json.loads(bytes(data).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        msg = f"{name}: not JSON: {error}"
        raise FormatError(msg, [name]) from error


def dump_json(value: object) -> bytes:
    """Return compact JSON in UTF-8.

    Text is not escaped, since two adjacent escaped surrogates would be read as one character.
    """
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def is_hex(text: object, digits: int) -> bool:
    """Return whether `text` is a string of exactly `digits` lower-case hex digits."""
    return type(text) is str and len(text) == digits and _HEX_DIGITS.issuperset(text)


def check_list(column: object, name: str, *, count: int | None = None) -> list[Any]:
    """Return `column` if it is a list, of `count` items if that is given."""
    if type(column) is not list or (count is not None and len(column) != count):
        refuse(name, "not a list, or has the wrong number of items")
    return column


def check_ints(
    column: object, name: str, *, count: int | None = None, low: int = 0, high: int = MAX_INT
) -> list[int]:
    """Return `column` if it is a list of integers within bounds, checked at C speed."""
    ints = check_list(column, name, count=count)
    if ints and (set(map(type, ints)) != {int} or min(ints) < low or max(ints) > high):
        refuse(name, f"not all values are integers from {low} to {high}")
    return ints


def check_texts(column: object, name: str, *, count: int | None = None) -> list[str]:
    """Return `column` if it is a list of strings, `count` of them if that is given."""
    texts = check_list(column, name, count=count)
    if texts and set(map(type, texts)) != {str}:
        refuse(name, "not all values are strings")
    return texts


class Fields:
    """A decoded JSON object whose fields are fetched with their types checked.

    Args:
        value: The decoded JSON.
        name: Name of the record, for error messages.
        keys: The keys that the object must have, and no others.
        optional: Keys that it may also have.
    """

    __slots__ = ("_name", "_value")

    def __init__(
        self, value: object, name: str, keys: Sequence[str], *, optional: Sequence[str] = ()
    ) -> None:
        if type(value) is not dict:
            refuse(name, "not a JSON object")
        if value.keys() - set(optional) != set(keys):
            odd = sorted((value.keys() - set(optional)) ^ set(keys))
            refuse(name, f"missing or unknown fields: {', '.join(map(repr, odd))}")
        self._name = name
        self._value: dict[str, Any] = value

    @classmethod
    def of_row(cls, row: object, name: str, keys: Sequence[str]) -> Fields:
        """Return the fields of a list that has one column for each key."""
        return cls(dict(zip(keys, check_list(row, name, count=len(keys)), strict=True)), name, keys)

    def __contains__(self, key: object) -> bool:
        return key in self._value

    def value(self, key: str) -> Any:
        """Return the field unchecked."""
        return self._value[key]

    def integer(self, key: str, *, low: int = 0, high: int = MAX_INT) -> int:
        """Return the field if it is an integer within bounds."""
        value = self._value[key]
        if type(value) is not int or not low <= value <= high:
            refuse(self._name, f"{key} is not an integer from {low} to {high}")
        return value

    def text(self, key: str, *, limit: int = 1 << 16) -> str:
        """Return the field if it is a string of at most `limit` characters."""
        value = self._value[key]
        if type(value) is not str or len(value) > limit:
            refuse(self._name, f"{key} is not a string of at most {limit} characters")
        return value

    def hexadecimal(self, key: str, digits: int) -> str:
        """Return the field if it is a string of exactly `digits` lower-case hex digits."""
        value = self._value[key]
        if not is_hex(value, digits):
            refuse(self._name, f"{key} is not {digits} hex digits")
        return str(value)

    def items(self, key: str, *, count: int | None = None) -> list[Any]:
        """Return the field if it is a list."""
        return check_list(self._value[key], f"{self._name}: {key}", count=count)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return the field if it is a JSON object."""
        value = self._value[key]
        if type(value) is not dict:
            refuse(self._name, f"{key} is not a JSON object")
        return value

"""Strict reading of JSON that nobody vouches for. Sans-IO; every complaint is a `FormatError`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_INT = (1 << 62) - 1
"""No count or offset is larger, so sums of two never surprise other readers."""

_HEX_DIGITS = frozenset("0123456789abcdef")


def refuse(name: str, reason: str) -> NoReturn:
    """Raise the `FormatError` that says what is wrong with record `name`."""
    msg = f"{name}: {reason}"
    raise FormatError(msg, [name])


def load_json(data: bytes | memoryview, name: str) -> Any:
    """Decode UTF-8 JSON.

    Raises:
        FormatError: It is none, or nested too deeply.
    """
    try:
        return json.loads(bytes(data).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        msg = f"{name}: not JSON: {error}"
        raise FormatError(msg, [name]) from error


def dump_json(value: object) -> bytes:
    """Compact JSON in UTF-8.

    Not escaped, since of an escaped lone surrogate before another nobody knows that they are two.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def is_hex(text: object, digits: int) -> bool:
    """Whether `text` is a string of exactly so many lower-case hex digits."""
    return type(text) is str and len(text) == digits and _HEX_DIGITS.issuperset(text)


def check_ints(
    column: object, name: str, *, count: int | None = None, low: int = 0, high: int = MAX_INT
) -> list[int]:
    """`column` as a list of integers within bounds, checked at C speed."""
    if type(column) is not list or (count is not None and len(column) != count):
        refuse(name, "not a list of the right length")
    if column and (set(map(type, column)) != {int} or min(column) < low or max(column) > high):
        refuse(name, f"not all are integers from {low} to {high}")
    return column


def check_texts(column: object, name: str, *, count: int | None = None) -> list[str]:
    """`column` as a list of strings."""
    if type(column) is not list or (count is not None and len(column) != count):
        refuse(name, "not a list of the right length")
    if column and set(map(type, column)) != {str}:
        refuse(name, "not all are strings")
    return column


def check_list(column: object, name: str, *, count: int | None = None) -> list[Any]:
    """`column` as a list of anything."""
    if type(column) is not list or (count is not None and len(column) != count):
        refuse(name, "not a list of the right length")
    return column


class Fields:
    """A decoded JSON object whose fields are fetched with their types checked.

    Args:
        value: What was decoded.
        name: The record, for complaints.
        keys: Exactly these keys have to be there.
    """

    __slots__ = ("_name", "_value")

    def __init__(self, value: object, name: str, keys: Sequence[str]) -> None:
        if type(value) is not dict:
            refuse(name, "not a JSON object")
        if value.keys() != set(keys):
            odd = sorted(value.keys() ^ set(keys))
            refuse(name, f"missing or unknown fields: {', '.join(map(repr, odd))}")
        self._name = name
        self._value: dict[str, Any] = value

    def value(self, key: str) -> Any:
        """The field as it is."""
        return self._value[key]

    def integer(self, key: str, *, low: int = 0, high: int = MAX_INT) -> int:
        """An integer within bounds."""
        value = self._value[key]
        if type(value) is not int or not low <= value <= high:
            refuse(self._name, f"{key} is not an integer from {low} to {high}")
        return value

    def text(self, key: str, *, limit: int = 1 << 16) -> str:
        """A string of at most `limit` characters."""
        value = self._value[key]
        if type(value) is not str or len(value) > limit:
            refuse(self._name, f"{key} is not a string of at most {limit} characters")
        return value

    def hexadecimal(self, key: str, digits: int) -> str:
        """A string of exactly so many lower-case hex digits."""
        value = self._value[key]
        if not is_hex(value, digits):
            refuse(self._name, f"{key} is not {digits} hex digits")
        return str(value)

    def items(self, key: str, *, count: int | None = None) -> list[Any]:
        """A list of anything."""
        return check_list(self._value[key], f"{self._name}: {key}", count=count)

    def mapping(self, key: str) -> dict[str, Any]:
        """A JSON object."""
        value = self._value[key]
        if type(value) is not dict:
            refuse(self._name, f"{key} is not a JSON object")
        return value

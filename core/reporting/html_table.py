"""Reports as small HTML tables, which notebooks show in the place of a repr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

from penstock.core.suggest import cut, listed
from penstock.core.units import counted, size_text


class HtmlTable:
    """Makes a dataclass of figures a table in a notebook: a row for each field that says something.

    Names and texts may be those that another user has stored, so all of them are escaped.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _rows(self)
        )
        return f"<table><caption>{escape(type(self).__name__)}</caption>{cells}</table>"


def _rows(figures: Any) -> list[tuple[str, str]]:
    """Return the fields of a dataclass that have a value, as text."""
    found = [
        (field.name, _text(field.name, getattr(figures, field.name))) for field in fields(figures)
    ]
    return [(name, text) for name, text in found if text]


def _text(name: str, value: Any) -> str:
    match value:
        case None | ():
            text = ""
        case bool():
            text = "yes" if value else "no"
        case int() if "bytes" in name:
            text = size_text(value)
        case float() if name == "seconds":
            text = f"{value:.3g} s"
        case tuple():
            # Of thousands of paths the first ones show whether these are the expected ones.
            text = f"{len(value)}: {listed([_entry(name, one) for one in value])}"
        case Mapping() if name == "values" and value:  # they may be of any size
            text = counted(len(value), "value")
        case Mapping():
            text = ", ".join(f"{key} {_entry(name, inner)}" for key, inner in value.items())
        case _ if is_dataclass(value):
            text = ", ".join(f"{inner} {text}" for inner, text in _rows(value))
        case _:
            text = cut(str(value))
    return text


def _entry(name: str, entry: Any) -> str:
    return " from ".join(entry) if isinstance(entry, tuple) else _text(name, entry)

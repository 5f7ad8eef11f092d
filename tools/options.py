"""Put the tables of options into the documentation: mkdocs calls this.

A comment on a page marks the place of a table. It names models, each with or without a label:

    <!-- options: penstock.core.config.model.Retention -->
    <!-- options: zstd=penstock.codecs.zstd.ZstdConfig lz4=penstock.codecs.lz4.Lz4Config -->
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from penstock.core.units import size_text

if TYPE_CHECKING:
    from pydantic import BaseModel

PLACE = re.compile(r"^<!-- options: (.*) -->$", re.MULTILINE)


def default_text(name: str, default: object) -> str:
    """Return the default of an option as text; empty if there is none."""
    if default is PydanticUndefined or default is None or default == ():
        return ""
    if name.endswith("_bytes") and type(default) is int:
        return size_text(default).replace(".0 ", " ") if default else "0"
    return f"{default:g}" if isinstance(default, float) else f"`{json.dumps(default)}`"


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return each option's description, from the docstrings of the model and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def table(models: str) -> str:
    """Return the table for the models that a comment names.

    An option that two models inherit has one row.

    Raises:
        KeyError: A docstring does not describe an option.
    """
    rows: dict[tuple[str, str], str] = {}
    for entry in models.split():
        label, _, path = entry.rpartition("=")
        module, _, name = path.rpartition(".")
        model: type[BaseModel] = getattr(importlib.import_module(module), name)
        texts = descriptions(model)
        for key, field in model.model_fields.items():
            shown = f"`{label}`: `{key}`" if label else f"`{key}`"
            row = f"| {shown} | {default_text(key, field.default)} | {texts[key]} |"
            rows.setdefault((key, texts[key]), row)
    return "\n".join(["| key | default | |", "|---|---|---|", *rows.values()])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace a page's comments by tables: mkdocs calls this."""
    return PLACE.sub(lambda place: table(place[1]), markdown)

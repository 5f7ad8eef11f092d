"""The `penstock plugins` and `penstock schema` commands.

Tested in `tests/core/cli/test_schema.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.core.cli.app import Json, command
from penstock.core.cli.output.render import (
    Column,
    print_json,
    print_line,
    print_table,
    state_cell,
    warn,
)
from penstock.core.config.model import json_schema
from penstock.core.errors import PluginError
from penstock.core.plugins.registry import default_registry

if TYPE_CHECKING:
    from penstock.core.plugins.registry import PluginInfo, Registry

_COLUMNS: tuple[Column[PluginInfo], ...] = (
    Column("KIND", lambda info: info.kind),
    Column("NAME", lambda info: info.name),
    Column("STATE", lambda info: state_cell(info.state)),
    Column("DISTRIBUTION", lambda info: info.distribution, keep=2),
    Column("VERSION", lambda info: info.version, keep=1),
    Column("TARGET", lambda info: info.target, flexible=True, keep=3),
)


@command("plugins")
def plugins(
    *,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import and try each; exits with 1 if one is broken."),
    ] = False,
    as_json: Json = False,
) -> bool:
    """List the installed providers, codecs, backends and replayers, and why any cannot be used."""
    found = default_registry().listing(load=check)
    if as_json:
        print_json({"plugins": [asdict(info) for info in found]})
        return all(info.error is None for info in found)
    print_table(_COLUMNS, found)
    # Several plugins may share one error, such as an import that fails: each is printed once.
    for error in dict.fromkeys(info.error for info in found if info.error):
        print_line("")
        for line in error.splitlines():
            print_line(line, style="red")
    return all(info.error is None for info in found)


@command("schema")
def schema(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="No effect: the output is always JSON.")
    ] = False,
) -> None:
    """Print the JSON Schema of configuration files, for editors and other tools.

    Includes the options of every installed backend and codec.

    Examples:
      penstock schema > penstock.schema.json
    """
    del as_json
    print_json(full_schema(default_registry()))


def full_schema(registry: Registry) -> dict[str, Any]:
    """Return the configuration's schema, with a table for each installed backend and codec.

    Leaves out broken plugins, and names each on standard error.
    """
    schema = json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    backends = _tables("backend", registry, definitions)
    codecs = _tables("codec", registry, definitions)
    definitions["BackendConfig"] = {"anyOf": backends}
    # A codec without options may be given by name alone.
    bare = {"type": "string", "enum": [table["$ref"].rpartition(".")[2] for table in codecs]}
    definitions["CodecConfig"] = {"anyOf": [bare, *codecs]}
    return schema


def _tables(
    kind: Literal["backend", "codec"], registry: Registry, definitions: dict[str, Any]
) -> list[dict[str, Any]]:
    """Add the options of each plugin to `definitions`, and return a reference to each."""
    found = []
    for name in registry.names(kind):
        try:
            cls = registry.backend_class(name) if kind == "backend" else registry.codec_class(name)
        except PluginError as error:
            warn(f"left out: {error}")
            continue
        key = f"{kind}.{name}"  # a backend and a codec may have the same name
        options = cls.Config.model_json_schema(ref_template=f"#/$defs/{key}.{{model}}")
        for inner, definition in options.pop("$defs", {}).items():
            definitions[f"{key}.{inner}"] = definition
        properties = {"type": {"const": name}, **options.get("properties", {})}
        required = ["type", *options.get("required", [])]
        definitions[key] = {**options, "properties": properties, "required": required}
        found.append({"$ref": f"#/$defs/{key}"})
    return found

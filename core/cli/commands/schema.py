"""The `penstock schema` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.core.cli.app import command
from penstock.core.cli.output.render import print_json, visible
from penstock.core.config.model import json_schema
from penstock.core.errors import PluginError
from penstock.core.plugins.registry import default_registry

if TYPE_CHECKING:
    from penstock.core.plugins.registry import Registry


@command(
    "schema",
    epilog="""\b
Example:
  penstock schema > penstock.schema.json
""",
)
def schema(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="What is printed is JSON in any case.")
    ] = False,
) -> None:
    """Print the JSON Schema of configuration files, for editors and other tools.

    It holds the options of every backend and codec that is installed here.
    """
    del as_json
    print_json(full_schema(default_registry()))


def full_schema(registry: Registry) -> dict[str, Any]:
    """Return the configuration's schema, with a table for each installed backend and codec.

    A broken plugin is left out, and a line on standard error names it.
    """
    schema = json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    backends = _tables("backend", registry, definitions)
    codecs = _tables("codec", registry, definitions)
    definitions["BackendConfig"] = {"anyOf": backends}
    # A codec without options may be given by its bare name.
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
            sys.stderr.write(f"penstock: left out: {visible(str(error))}\n")
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

"""`penstock schema`: the configuration's schema with the options of installed plugins."""

import json

from penstock.core.cli.commands.plugins import full_schema
from penstock.core.plugins.registry import default_registry


def references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_schema_holds_the_options_of_every_installed_backend_and_codec(call):
    done = call("schema")
    assert (done.code, done.err) == (0, "")
    schema = done.json
    assert done.out.isascii()
    assert schema == call("schema", "--json").json
    registry = default_registry()
    for kind, find in (("backend", registry.backend_class), ("codec", registry.codec_class)):
        for name in registry.names(kind):
            table = schema["$defs"][f"{kind}.{name}"]
            assert table["properties"]["type"] == {"const": name}
            assert set(table["properties"]) == {"type", *find(name).Config.model_fields}
            assert "type" in table["required"]
    assert schema["$defs"]["CodecConfig"]["anyOf"][0]["enum"] == registry.names("codec")
    assert set(schema["properties"]) >= {"backend", "rules", "retention", "staging_bytes"}


def test_every_reference_in_the_schema_resolves():
    schema = full_schema(default_registry())
    found = list(references(schema))
    assert "#/$defs/backend.posix" in found
    for reference in found:
        assert reference.removeprefix("#/$defs/") in schema["$defs"]
    assert json.loads(json.dumps(schema)) == schema

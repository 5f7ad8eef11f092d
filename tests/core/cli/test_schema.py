"""`penstock schema`: the configuration's schema with the options of what is installed."""

import json
from importlib.metadata import EntryPoint

import pytest
from tests.core.cli.command import caller

from penstock.core.cli.commands.plugins import full_schema
from penstock.core.plugins.registry import Registry, default_registry


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


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


def test_every_reference_in_the_schema_leads_somewhere():
    schema = full_schema(default_registry())
    found = list(references(schema))
    assert "#/$defs/backend.posix" in found
    for reference in found:
        assert reference.removeprefix("#/$defs/") in schema["$defs"]
    assert json.loads(json.dumps(schema)) == schema


def test_schema_takes_nested_models_and_leaves_out_what_is_broken(plugin_site, capsys):
    plugin_site.add(
        "acme",
        {"penstock.codecs": {"acme": "acme_codec:Acme"}},
        acme_codec="""
            from pydantic import BaseModel
            from penstock.codecs.lz4 import Lz4Codec
            from penstock.core.abc import PluginConfig

            class Tuning(BaseModel):
                effort: int = 3

            class Options(PluginConfig):
                tuning: Tuning = Tuning()

            class Acme(Lz4Codec):
                api_version = 1
                name = "acme"
                Config = Options
        """,
    )
    group = "penstock.codecs"
    registry = Registry(
        [
            EntryPoint("acme", "acme_codec:Acme", group),
            EntryPoint("broken", "acme_codec:Missing", group),
        ]
    )
    schema = full_schema(registry)
    assert schema["$defs"]["codec.acme.Tuning"]["properties"]["effort"]["type"] == "integer"
    assert "#/$defs/codec.acme.Tuning" in references(schema["$defs"]["codec.acme"])
    assert schema["$defs"]["CodecConfig"]["anyOf"][0]["enum"] == ["acme"]
    assert "codec.broken" not in schema["$defs"]
    assert "left out: codec 'broken'" in capsys.readouterr().err

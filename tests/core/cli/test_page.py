"""docs/cli.md: every command and option stands there, and the JSON keys are the real ones."""

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from tests.core.cli.command import caller

import penstock
from penstock.core.cli.app import app, load_command

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Mappings whose keys are names of parts or steps, or the user's.
FREE = {"codecs", "providers", "metadata", "lost"}


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    rules = [{"match": "w", "codecs": ["zstd"]}, {"match": "b", "codecs": "auto"}]
    with penstock.Checkpointer(f"posix://{root}", rules=rules) as ckpt:
        for step in (1, 2, 3):
            state = {"w": torch.ones(5000), "b": torch.ones(5)}
            ckpt.save(state, step=step, mode="blocking", metadata={"loss": 1.0})
    return root


def documented(command):
    (block,) = re.findall(r"```json\n(.*?)```", SECTIONS[command], re.DOTALL)
    return json.loads(block)


def keys(value, place=""):
    """Where keys stand: `.checkpoints.step`; those of all elements of a list together."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key for inner in value for key in keys(inner, place)}
    if not isinstance(value, dict) or place.rpartition(".")[2] in FREE:
        return {place}
    return {key for name, inner in value.items() for key in keys(inner, f"{place}.{name}")}


def commands():
    return {name: load_command(name) for name in typer.main.get_command(app).commands}


def test_page_has_every_command_and_every_option():
    assert SECTIONS.keys() == commands().keys()
    for name, command in commands().items():
        for parameter in command.params:
            options = {o for o in (*parameter.opts, *parameter.secondary_opts) if o[:2] == "--"}
            for option in options - {"--json", "--probe"}:
                assert f"`{option}" in PAGE or f" {option}" in SECTIONS[name], (name, option)


def test_ls_json_is_as_documented(call, run):
    (run / "commits" / "00000002-0.json").write_bytes(b"nonsense\n")
    assert keys(call("ls", run, "--json").json) == keys(documented("ls"))


def test_show_json_is_as_documented(call, run):
    assert keys(call("show", run, "--stats", "--json").json) == keys(documented("show"))


def test_verify_json_is_as_documented(call, run):
    (run / "commits" / "00000002-0.json").write_bytes(b"nonsense\n")
    found = call("verify", run, "--step", "2", "--json").json
    assert keys(found) == keys(documented("verify"))


@pytest.mark.parametrize(("command", "steps"), [("prune", []), ("delete", ["1"])])
def test_prune_and_delete_json_are_as_documented(call, run, command, steps):
    found = call(command, run, *steps, "--dry-run", "--json").json
    assert keys(found) == keys(documented(command))


def test_drain_json_is_as_documented(call, run, tmp_path):
    url = f"tiered://?fast=posix://{run}&durable=posix://{tmp_path}/durable"
    assert keys(call("drain", url, "--json").json) == keys(documented("drain"))


def test_doctor_json_is_as_documented(call, run):
    found = call("doctor", run, "--probe-size", "1MiB", "--json").json
    page = documented("doctor")
    assert found.keys() == page.keys()

    def shapes(checks):
        return {
            check["name"]: (list(check), sorted(check["values"]), type(check["found"]))
            for check in checks
        }

    assert shapes(found["checks"]) == shapes(page["checks"])


def test_plugins_json_is_as_documented(call):
    assert keys(call("plugins", "--json").json) == keys(documented("plugins"))


def test_schema_has_what_is_documented(call):
    schema, page = call("schema").json, documented("schema")
    assert schema["$schema"] == page["$schema"]
    for name, table in page["$defs"].items():
        assert table["required"] == schema["$defs"][name]["required"]
        for option, how in table["properties"].items():
            assert how.items() <= schema["$defs"][name]["properties"][option].items()

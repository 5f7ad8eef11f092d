"""docs/cli.md has the help of every command, and the JSON keys are the real ones."""

import json
import re
from collections import defaultdict
from pathlib import Path

import typer
from tests.golden.test_json_keys import GOLDEN, keys

from penstock.core.cli.app import app, load_command

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def documented(command):
    (block,) = re.findall(r"```json\n(.*?)```", SECTIONS[command], re.DOTALL)
    return json.loads(block)


def commands():
    return {name: load_command(name) for name in typer.main.get_command(app).commands}


def test_page_has_the_help_of_every_command():
    assert SECTIONS.keys() == commands().keys()
    for name, command in commands().items():
        assert SECTIONS[name].startswith(f"\n<!-- command: {name} -->\n")
        assert command.help
        assert [parameter.name for parameter in command.params if not parameter.help] == []


def test_page_has_the_keys_of_every_output():
    printed = defaultdict(set)
    for call, places in json.loads(GOLDEN.read_text()).items():
        printed[call.split()[0]] |= {(at, key) for at in places for key in places[at].split()}
    del printed["schema"]
    for command, found in printed.items():
        for _, key in found - {(at, "*") for at, _ in found}:
            assert f'"{key}"' in PAGE or f"`{key}`" in PAGE, (command, key)
        if "```json" in SECTIONS[command]:
            stated = keys(documented(command))
            assert {(at, key) for at in stated for key in stated[at]} <= found, command


def test_doctor_json_is_as_documented(call, tmp_path):
    found = call("doctor", tmp_path, "--probe-size", "1MiB", "--json").json
    page = documented("doctor")
    assert found.keys() == page.keys()

    def shapes(checks):
        return {
            check["name"]: (list(check), sorted(check["values"]), type(check["found"]))
            for check in checks
        }

    assert shapes(found["checks"]) == shapes(page["checks"])


def test_schema_has_what_is_documented(call):
    schema, page = call("schema").json, documented("schema")
    assert schema["$schema"] == page["$schema"]
    for name, table in page["$defs"].items():
        assert table["required"] == schema["$defs"][name]["required"]
        for option, how in table["properties"].items():
            assert how.items() <= schema["$defs"][name]["properties"][option].items()

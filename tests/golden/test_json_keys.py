"""The keys of every `--json` output, which programs read.

PENSTOCK_REWRITE_GOLDEN=1 rewrites them, after a key was added on purpose.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from tests.core.cli.bench_reports import figures, row, write_report
from tests.core.cli.command import caller

import penstock
from penstock.core.cli.app import app, load_command
from penstock.core.format.features import FORMAT_VERSION
from penstock.testing.golden import check_golden

HERE = Path(__file__).parent
GOLDEN = HERE / "json_keys.json"
# Mappings whose keys are steps, uids, paths, names of plugins, or the user's.
FREE = {"codecs", "failed", "lost", "metadata", "providers", "silent", "tied", "unrecorded"}
# In this order, since some change a run, and later ones show the change.
CALLS = """
delete CHAIN 1 --yes
ls CHAIN
ls DAMAGED
ls TIERS
ls HOSTS
show HOSTS
show CHAIN --stats
show LOSSY
show CHAIN --by codec
show CHOSEN
diff CHAIN
diff CHAIN --norms
report CHAIN PAGE
copy CHAIN COPY --step all
export CHAIN FILES --to safetensors
import FILES IMPORTED
drain TIERS
annotate CHAIN 4 loss=0.5
pin CHAIN 4 best
unpin CHAIN 4 best
verify DAMAGED --all
verify TIERS --all --repair
doctor CHAIN --probe-size 1MiB
bench CHAIN --size 1MiB --rounds 1 --seconds 1s
tune CHAIN --from BENCH
plugins
advise CHAIN --step-s 1 --blocked-s 0.1
schema
prune CHAIN --dry-run
compact CHAIN --dry-run
""".strip().splitlines()


def keys(value, place="", found=None):
    """The keys at each place, such as `.checkpoints[]`; those of a list's elements together."""
    found = {} if found is None else found
    if isinstance(value, list):
        for inner in value:
            keys(inner, f"{place}[]", found)
    elif isinstance(value, dict):
        free = place.rpartition(".")[2] in FREE
        found.setdefault(place, set()).update(["*"] if free else value)
        for name, inner in value.items():
            keys(inner, f"{place}.{'*' if free else name}", found)
    return found


def damage(run):
    """Make the newest record unreadable, and the blobs of the oldest one."""
    oldest, *_, newest = sorted((run / "commits").iterdir())
    uid = re.search(r'"uid": ?"(\w{32})"', oldest.read_text())[1]
    newest.write_bytes(b"nonsense\n")
    for blob in (run / "data" / uid / "blobs").iterdir():
        blob.write_bytes(bytes(blob.stat().st_size))


@pytest.fixture
def places(tmp_path):
    """The paths and URLs of the words in capitals."""
    stored = HERE / f"format-{FORMAT_VERSION}" / "0.1.0"
    for name, run in [("CHAIN", "chain"), ("DAMAGED", "chain"), ("LOSSY", "lossy")]:
        shutil.copytree(stored / run, tmp_path / name)
    shutil.copytree(stored / "tiers", tmp_path / "tiers")
    damage(tmp_path / "DAMAGED")
    damage(tmp_path / "tiers" / "durable")
    names = ("CHAIN", "CHOSEN", "DAMAGED", "LOSSY", "PAGE", "BENCH", "COPY", "FILES", "IMPORTED")
    with penstock.Checkpointer(
        tmp_path / "CHOSEN", rules=[{"match": "**", "codecs": "auto"}]
    ) as ckpt:
        ckpt.save({"b": torch.ones(5)}, 1, mode="blocking")
    better = row("engine", "workers", 1, *[figures(150)] * 2)
    write_report(tmp_path / "BENCH", f"file://{tmp_path}/CHAIN", better)
    hosts = f"hosts://{tmp_path}/hosts"
    with penstock.Checkpointer(hosts) as ckpt:
        ckpt.save({"b": torch.ones(5)}, 1, mode="blocking")
    tiers = f"tiered://?fast={tmp_path}/tiers/fast&durable={tmp_path}/tiers/durable"
    return {"TIERS": tiers, "HOSTS": hosts} | {name: tmp_path / name for name in names}


def test_keys_are_those_of_the_file(places, capsys, monkeypatch):
    plotly = SimpleNamespace(to_html=lambda *_, **__: "")
    monkeypatch.setitem(sys.modules, "plotly.io", plotly)
    call = caller(capsys, monkeypatch)
    found = {}
    for words in CALLS:
        done = call(*(places.get(word, word) for word in words.split()), "--json")
        assert done.out, f"{words}: {done.err}"
        document = done.json
        # A schema has only keys, of installed plugins: `test_schema.py` checks them.
        at = {"": document} if words == "schema" else keys(document)
        found[words] = {place: " ".join(sorted(names)) for place, names in at.items()}
    check_golden(GOLDEN, (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())


def test_every_command_with_json_is_in_the_file():
    commands = map(load_command, typer.main.get_command(app).commands)
    taking = {c.name for c in commands if any("--json" in p.opts for p in c.params)}
    assert {call.split()[0] for call in json.loads(GOLDEN.read_text())} == taking

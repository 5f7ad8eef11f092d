"""The example that reads checkpoints without Penstock reads the stored runs like Penstock.

It was written only from the page on the storage format, so this also tests the page.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import interpreters
from tests.golden.runs import RUNS
from tests.integration.support import bits

GOLDEN = Path(__file__).parent
READER = GOLDEN.parents[1] / "examples" / "read_a_checkpoint.py"
STORED = sorted(path for path in GOLDEN.glob("format-1/*/*") if path.is_dir())
PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias"]  # of the model of the run "one"


def read(root, *options):
    return interpreters.run(READER, root, *options)


def roots(run, folder):
    return [folder / "fast", folder / "durable"] if run.tiers else [folder]


def steps_in(root):
    return sorted({int(path.name.partition("-")[0]) for path in root.glob("commits/*.json")})


def flat(tree, paths, path=""):
    """Yields the objects at these paths of a state loaded by Penstock."""
    if path in paths:
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            # An optimizer's state has numbers in place of parameter names.
            name = PARAMETERS[key] if path == "optimizer/state" else key
            yield from flat(value, paths, f"{path}/{name}" if path else str(name))
    elif isinstance(tree, list):
        yield from flat(dict(enumerate(tree)), paths, path)


def holds(array, leaf):
    """Whether an array written by the example equals Penstock's."""
    if isinstance(leaf, torch.Tensor):
        return array.shape == tuple(leaf.shape) and array.tobytes() == bits(leaf)
    if isinstance(leaf, np.ndarray):
        return array.dtype == leaf.dtype and np.array_equal(array, leaf)
    text = array.tobytes().decode()
    return '"$"' in text or json.loads(text) == leaf


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_reads_what_penstock_loads(stored, tmp_path):
    run = RUNS[stored.name]
    only = ["--only", "m"] if run.lossy else []  # it cannot read the other object, of log8
    with run.opened(Path(shutil.copytree(stored, tmp_path / "run"))) as ckpt:
        for root in roots(run, stored):
            for step in steps_in(root):
                out = tmp_path / "out.npz"
                done = read(root, f"--step={step}", f"--out={out}", *only)
                assert done.returncode == 0, done.stderr
                with np.load(out, allow_pickle=False) as file:
                    written = dict(file)
                loaded = dict(flat(ckpt.load(step), written))
                assert loaded.keys() == written.keys()
                assert [path for path in loaded if not holds(written[path], loaded[path])] == []


def test_reads_the_newest_step():
    assert read(GOLDEN / "format-1/0.1.0/retention").stdout.startswith("step 9, generation 0,")


@pytest.mark.parametrize("kind", ["raw", "enc"])
def test_refuses_a_flipped_byte_of_a_blob(kind, tmp_path):
    root = Path(shutil.copytree(GOLDEN / "format-1/0.1.0/one", tmp_path / "run"))
    (blob,) = root.glob(f"data/*/blobs/*.{kind}")
    stored = bytearray(blob.read_bytes())
    stored[0] ^= 1
    blob.write_bytes(stored)
    done = read(root)
    assert done.returncode == 1
    assert done.stderr.startswith("refused: data/")
    assert f"{blob.name} is damaged" in done.stderr


def test_refuses_an_unknown_codec_by_name():
    done = read(GOLDEN / "format-1/0.1.0/lossy")
    assert done.returncode == 1
    assert "refused: this reader does not have the codec log8 1" in done.stderr


def test_refuses_an_unknown_feature_by_name(tmp_path):
    root = Path(shutil.copytree(GOLDEN / "format-1/0.1.0/one", tmp_path / "run"))
    (record,) = root.glob("commits/*.json")
    body = json.loads(record.read_bytes().partition(b"\n")[2]) | {"requires": ["tomorrow"]}
    new = json.dumps(body).encode()
    first = {"penstock": 1, "length": len(new), "sha256": hashlib.sha256(new).hexdigest()}
    record.write_bytes(json.dumps(first).encode() + b"\n" + new)
    done = read(root)
    assert done.returncode == 1
    assert "requires ['tomorrow']" in done.stderr

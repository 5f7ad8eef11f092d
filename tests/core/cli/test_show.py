"""`penstock show`: the tree, the figures; `penstock verify --all`; `penstock ls --metadata`."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch

import penstock

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(300, 50, generator=generator) * 3 + 1
    state = {
        "model": {
            "block": {"weight": weight, "bias": torch.ones(7, dtype=torch.bfloat16)},
            "tied": weight,
            "eight": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        },
        "odd": {
            "mixed": torch.tensor([1.0, NAN, INF, -INF, 3.0]),
            "nothing": torch.full((3,), NAN),
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "huge": torch.full((2,), 1e308, dtype=torch.float64),
            "complex": torch.ones(2, dtype=torch.complex64),
            "flags": torch.tensor([True, False, True, True]),
            "counts": torch.tensor([2**62, -3]),
            "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
            "dates": np.array(["2026-01-31"], dtype="datetime64[s]"),
        },
        "epoch": 7,
    }
    rules = [{"match": "model/block", "codecs": ["zstd"]}]
    with penstock.Checkpointer(f"posix://{root}", rules=rules) as ckpt:
        for step in (10, 20):
            metadata = {"loss": 1 / 3, "note": "a\nb", "deep": {"x": [1]}}
            ckpt.save(state, step=step, mode="blocking", metadata=metadata)
    return root


# -- the tree -----------------------------------------------------------------------------------


def test_show_tree_indents_objects_and_sums_subtrees(call, saved):
    done = call("show", saved, "--tree", "--include", "model")
    assert done.code == 0
    table = done.out.splitlines()[4:-2]
    assert [re.split(r" {2,}", line.strip())[:2] for line in table] == [
        ["model/", "4 objects"],
        ["block/", "2 objects"],
        ["weight", "float32"],
        ["bias", "bfloat16"],
        ["tied = model/block/weight", "float32"],
        ["eight", "float8_e4m3fn"],
    ]
    assert [len(line) - len(line.lstrip()) for line in table] == [0, 2, 4, 4, 2, 2]
    assert "  58.6 KiB  " in table[0]  # the tied tensor is stored once


# -- sums by codec, rule, role, dtype --------------------------------------------------------------


def groups(call, run, by):
    found = call("show", run, "--by", by, "--json").json
    assert (found["by"], "objects" in found) == (by, False)
    return {one["group"]: one for one in found["groups"]}


def test_sums_by_each_grouping_add_up_to_the_checkpoint(call, saved, tmp_path):
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'backend = "posix://{saved}"\n[[rules]]\n'
        'match = ["model/block", "x/**"]\ncodecs = "zstd"\n'
    )
    objects = call("show", saved, "--json").json["objects"]
    for by, names in (
        ("codec", {"zstd", "raw", "tied"}),
        ("role", {"other"}),
        ("dtype", {one["dtype"] if one["kind"] == "tensor" else one["form"] for one in objects}),
        ("rule", {"model/block, x/**", "no rule"}),
    ):
        found = groups(call, config if by == "rule" else saved, by)
        assert found.keys() == names
        for figure in ("bytes_raw", "bytes_stored"):
            wanted = sum(one[figure] for one in objects)
            assert sum(one[figure] for one in found.values()) == wanted
        assert sum(one["objects"] for one in found.values()) == len(objects)
    block = [one for one in objects if one["path"].startswith("model/block")]
    ours = found["model/block, x/**"]
    assert ours["objects"] == 2
    assert ours["bytes_stored"] == sum(one["bytes_stored"] for one in block)


# -- verify --all, ls --metadata ------------------------------------------------------------------


def test_verify_all_continues_past_a_damaged_checkpoint(call, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "run")
    assert call("verify", root, "--all").out.endswith("2 checkpoints verified, 0 damaged\n")
    (root / "commits" / "00000010-0.json").write_bytes(b"nonsense\n")
    done = call("verify", root, "--all", "--json")
    assert done.code == 1
    ten, twenty = done.json["reports"]
    assert (ten["step"], ten["ok"], twenty["ok"]) == (10, False, True)
    assert ten["damaged"][0]["what"] == "commits/00000010-0.json"
    done = call("verify", root, "--all", "--quick")
    assert done.code == 1
    assert done.out.endswith("2 checkpoints verified, 1 damaged\n")
    assert call("verify", root, "--step", "10").code == 1


def test_ls_metadata_prints_all_of_it(call, saved):
    out = call("ls", saved, "--metadata").out
    assert out.endswith(
        "\nstep 20\n  loss: 0.3333333333333333\n  note: a\\nb\n" + '  deep: {"x": [1]}\n'
    )
    assert json.loads(call("ls", saved, "--json").out)["checkpoints"][0]["metadata"]["note"]


def test_show_depth_folds_the_tree(call, saved):
    table = call("show", saved, "--depth", "1").out.splitlines()[4:-2]
    assert [line.split()[0] for line in table] == ["model/", "odd/", "epoch"]
    two = call("show", saved, "--depth", "2", "--include", "model").out.splitlines()[4:-2]
    assert [line.split()[0] for line in two] == ["model/", "block/", "tied", "eight"]


@pytest.mark.parametrize("options", [("--flat",), ("--json",)])
def test_depth_goes_only_with_the_tree(call, saved, options):
    done = call("show", saved, "--depth", "1", *options)
    assert done.code == 2
    assert "--depth" in done.err


@pytest.mark.parametrize("words", [["x"], ["rule"], ["codec", "--tree"], ["codec", "--stats"]])
def test_wrong_groupings_exit_with_2(call, saved, words):
    done = call("show", saved, "--by", *words)
    assert done.code == 2
    assert "--by" in done.err


def test_stats_are_those_of_the_tensors(call, saved):
    shown = call("show", saved, "--stats", "--json").json
    found = {o["path"]: o["stats"] for o in shown["objects"]}
    with penstock.Checkpointer(f"posix://{saved}") as ckpt:
        weight = ckpt.open(20)["model/block/weight"].double()
    got = found["model/block/weight"]
    assert (got["min"], got["max"]) == (weight.min().item(), weight.max().item())
    assert got["mean"] == pytest.approx(weight.mean().item(), rel=1e-12)
    assert got["std"] == pytest.approx(weight.std(correction=0).item(), rel=1e-12)
    assert (got["nan"], got["inf"]) == (0, 0)

    def flat(path):
        return tuple(found[path].values())

    assert flat("model/block/bias") == (1, 1, 1, 0, 0, 0)
    assert flat("model/eight") == (-2, 0.5, -0.75, 1.25, 0, 0)
    assert flat("odd/mixed") == (1, 3, 2, 1, 1, 2)
    assert flat("odd/nothing") == (None, None, None, None, 3, 0)
    assert flat("odd/empty") == (None, None, None, None, 0, 0)
    assert flat("odd/scalar") == (2.5, 2.5, 2.5, 0, 0, 0)
    assert flat("odd/huge") == (1e308, 1e308, None, None, 0, 0)
    assert flat("odd/flags") == (0, 1, 0.75, pytest.approx(math.sqrt(3) / 4), 0, 0)
    assert flat("odd/counts")[:2] == (-3, 2**62)
    assert flat("odd/array")[:3] == (0, 5, 2.5)
    assert {p for p, s in found.items() if s is None} == {
        "model/tied", "odd/complex", "odd/dates", "epoch",
    }  # fmt: skip


def test_stats_read_only_the_selection_and_report_damage(call, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "run")
    for blob in root.glob("data/*/blobs/*.raw"):
        blob.write_bytes(bytes(blob.stat().st_size))
    assert call("show", root, "--stats", "--include", "model/block").code == 0
    done = call("show", root, "--stats", "--include", "odd/mixed")
    assert (done.code, done.out) == (1, "")
    assert "odd/mixed" in done.err


def test_verify_of_a_run_without_checkpoints(call, tmp_path):
    done = call("verify", tmp_path)
    assert done.code == 1
    assert done.err.startswith("penstock: no checkpoint under ")
    assert call("verify", tmp_path, "--all").out == "0 checkpoints verified, 0 damaged\n"


def test_verify_all_and_step_exclude_each_other(call, saved):
    assert call("verify", saved, "--all", "--step", "10").code == 2

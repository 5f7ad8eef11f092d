"""What `show`, `verify`, `diff` and `copy` print on values rounded by a lossy codec."""

import pytest
import torch

import penstock
from penstock.codecs.zstd import ZstdCodec
from penstock.core.plugins.registry import Registry

RULES = [
    {"match": ["rounded/w", "rounded/tied"], "codecs": ["cast", "zstd"]},
    {"match": "rounded/n", "codecs": ["cast"]},
    {"match": "exact", "codecs": ["zstd"]},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 1 and 2: `rounded/w` and its tie were rounded; `cast` declined the integers."""
    root = tmp_path_factory.mktemp("saved") / "run"
    torch.manual_seed(2)
    weight = torch.randn(3000)
    with penstock.Checkpointer(f"posix://{root}", rules=RULES) as ckpt:
        for step in (1, 2):
            state = {
                "rounded": {"w": weight * step, "n": torch.arange(3000), "tied": None},
                "exact": torch.randn(3000),
                "raw": torch.ones(5),
                "epoch": step,
            }
            state["rounded"]["tied"] = state["rounded"]["w"]
            ckpt.save(state, step, mode="blocking")
    return root


@pytest.fixture
def run_of_an_absent_codec(tmp_path):
    class Own(ZstdCodec):
        api_version = 1
        name = "own"

    registry = Registry()
    registry.register(Own)
    rules = [{"match": "w", "codecs": ["own"]}]
    with penstock.Checkpointer(f"posix://{tmp_path}/r", registry=registry, rules=rules) as ckpt:
        ckpt.save({"w": torch.arange(9000.0), "b": torch.ones(9)}, 1, mode="blocking")
    return tmp_path / "r"


def test_show_marks_objects_with_rounded_values(call, run):
    found = call("show", run, "--json").json["objects"]
    lossless = {one["path"]: one["lossless"] for one in found}
    assert lossless == {
        "rounded/w": False,
        "rounded/tied": False,
        "rounded/n": True,
        "exact": True,
        "raw": True,
        "epoch": True,
    }
    lines = call("show", run, "--flat").out.splitlines()
    [row] = [line for line in lines if line.startswith("rounded/w ")]
    assert " cast(lossy)+zstd " in row
    assert "2 of these are rounded: lossy codecs (cast) have changed their values" in lines
    assert "lossy" not in call("show", run, "--include", "exact").out


def test_show_reports_no_details_of_a_codec_that_is_not_installed(call, run_of_an_absent_codec):
    found = call("show", run_of_an_absent_codec, "--json").json["objects"]
    assert {one["path"]: one["lossless"] for one in found} == {"w": None, "b": True}
    shown = call("show", run_of_an_absent_codec, "--flat").out
    assert " own(?) " in shown
    assert "own may be lossy: not installed here, so this is unknown" in shown


@pytest.mark.parametrize("how", ["--deep", "--quick"])
def test_verify_explains_whole_for_rounded_values(call, run, how):
    found = call("verify", run, how)
    assert found.code == 0
    text = " ".join(found.out.split())
    assert "step 2 is whole" in text
    assert "lossy codecs in step 2: cast; they rounded values during the save" in text
    assert call("verify", run, how, "--json").json["reports"][0]["lossy"] == ["cast"]


def test_verify_by_code_names_lossy_codecs(run, tmp_path):
    with penstock.Checkpointer(run) as ckpt:
        assert ckpt.verify(1).lossy == ("cast",)
    with penstock.Checkpointer(tmp_path / "exact") as ckpt:
        ckpt.save({"w": torch.ones(5)}, 1, mode="blocking")
        assert ckpt.verify(1).lossy == ()


def test_diff_reports_comparing_rounded_values(call, run):
    sentence = "values that cast (lossy) had rounded are compared rounded"
    assert call("diff", run).out.count(sentence) == 2
    found = call("diff", run, "--json").json
    assert (found["a"]["lossy"], found["b"]["lossy"]) == (["cast"], ["cast"])
    assert "(lossy)" not in call("diff", run, "--include", "exact").out
    exact = call("diff", run, "--include", "rounded/n", "--json").json
    assert (exact["a"]["lossy"], exact["same"]) == ([], True)


@pytest.mark.parametrize("how", [["--raw"], ["--codec", "zstd"], ["--include", "rounded"]])
def test_copy_reports_copying_rounded_values(call, run, tmp_path, how):
    sentence = "values that cast (lossy) had rounded are copied rounded"
    done = call("copy", run, tmp_path / "to", *how)
    assert sentence in " ".join(done.out.split())
    again = call("copy", run, tmp_path / "to", *how, "--overwrite", "--json").json
    assert again["copies"][0]["rounded_by"] == ["cast"]
    with penstock.Checkpointer(run) as source, penstock.Checkpointer(tmp_path / "to") as target:
        assert torch.equal(target.load(2)["rounded"]["w"], source.load(2)["rounded"]["w"])

"""`penstock export` and `penstock import`: what they print, and how they end."""

import json

import pytest
import torch
from safetensors.torch import load_file

import penstock


@pytest.fixture
def run(tmp_path):
    weight = torch.arange(6.0)
    state = {"model": {"wte": weight, "head": weight, "b": torch.ones(2)}, "epoch": 1}
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(state, 7, mode="blocking")
        ckpt.save({"model": {"wte": weight + 1}}, 9, mode="blocking")
    return tmp_path / "run"


def test_export_takes_all_options(call, run, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"torch_dtype": "float32", "n": 1}')
    done = call(
        "export", run, tmp_path / "o", "--to", "safetensors", "--step", "7", "--include", "model",
        "--exclude", "model/b", "--rename", "model/wte=model/embed", "--cast", "bfloat16",
        "--shard-bytes", "1KiB", "--config-from", source,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"step 7 is exported to {tmp_path}/o: 1 tensor, 12 B in 2 files",
        "head is tied to embed, and left out; --keep-tied writes it too",
    ]
    found = load_file(tmp_path / "o" / "model.safetensors")
    assert found.keys() == {"embed"}
    assert torch.equal(found["embed"], torch.arange(6).bfloat16())
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert config == {"torch_dtype": "bfloat16", "n": 1}  # `from_pretrained` would undo the cast


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_exports_can_be_imported(call, run, tmp_path, to):
    out, back = tmp_path / "o", tmp_path / "back"
    assert call("export", run, out, "--to", to, "--step", "7", "--include", "model").code == 0
    options = ["--format", to, "--step", "3", "--exclude", "**/b", "--rename", "model/wte=net/w"]
    done = call("import", out, back, *options)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{out} is step 3 of {back}: ")
    with penstock.Checkpointer(back) as ckpt:
        assert torch.equal(ckpt.load(3)["net"]["w"], torch.arange(6.0))
    assert call("import", out, back, *options).code == 1
    assert call("import", out, back, *options, "--overwrite", "--include", "model/wte").code == 0


def test_wrong_calls_exit_with_2(call, run):
    for words in [
        ["export", "RUN", "o"],
        ["export", "RUN", "o", "--to", "torch", "--rename", "a"],
        ["export", "RUN", "o", "--to", "torch", "--rename", "a=b", "--rename", "a=c"],
        ["export", "RUN", "o", "--to", "torch", "--shard-bytes", "many"],
        ["export", "RUN", "o", "--to", "torch", "--shard-bytes", "0"],
        ["export", "RUN", "o", "--to", "torch", "--step", "x"],
        ["import", "o", "RUN", "--step", "latest"],
        ["import", "o"],
    ]:
        assert call(*(run if word == "RUN" else word for word in words)).code == 2


def test_errors_say_what_to_do(call, run, tmp_path):
    file = tmp_path / "o.pt"
    assert call("export", run, file, "--to", "torch").code == 0
    assert call("ls", file).err == f"penstock: {file} is a file, not the folder of a run\n"
    done = call("import", file, run, "--step", "9")
    assert done.code == 1
    assert "step 9" in done.err
    assert "--overwrite" in done.err
    assert "overwrite=True" not in done.err


def test_export_uses_the_latest_step_and_refuses_an_existing_out(call, run, tmp_path):
    out = tmp_path / "o.safetensors"
    assert "step 9, the latest, is exported" in call("export", run, out, "--to", "safetensors").out
    again = call("export", run, out, "--to", "safetensors")
    assert again.code == 1
    assert again.err == (
        f"penstock: {out} exists: export to another place, or replace it with overwrite "
        "(--overwrite)\n"
    )
    done = call(
        "export", run, out, "--to", "safetensors", "--overwrite", "--step", "7", "--keep-tied"
    )
    assert done.code == 0
    assert load_file(out).keys() == {"wte", "head", "b"}


def test_export_does_not_create_a_missing_run(call, tmp_path):
    done = call("export", tmp_path / "none", tmp_path / "o", "--to", "torch")
    assert done.code == 1
    assert list(tmp_path.iterdir()) == []

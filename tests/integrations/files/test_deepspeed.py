"""Folders written by DeepSpeed, read without it; `deepspeed/make.py` made those here."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.integrations.files.conftest import assert_same
from tests.integrations.files.test_torch_files import Touch

import penstock
from penstock.integrations.files.torch_import import STUB

FOLDERS = Path(__file__).parent / "deepspeed"
STAGES = ["zero1", "zero2", "zero3"]


@pytest.fixture(params=STAGES)
def folder(request, tmp_path):
    return shutil.copytree(FOLDERS / request.param, tmp_path / request.param)


def file_of(folder, kind, rank=0):
    return sorted((folder / "t1").glob(f"*{kind}_states.pt"))[rank]


def change(path, edit):
    """Change a file of a rank; loads its DeepSpeed classes as DeepSpeed does."""
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


def test_ranks_are_merged_as_deepspeed_does(folder, tmp_path):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    penstock.import_checkpoint(folder, tmp_path / "run", step=2)
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load()
        tied = ckpt.open().specs()["model/head.weight"].same_as
        loaded = torch.nn.ModuleDict({
            "emb": torch.nn.Embedding(7, 5), "a": torch.nn.Linear(5, 9),
            "b": torch.nn.Linear(9, 5, bias=False), "frozen": torch.nn.Linear(5, 5),
            "head": torch.nn.Linear(5, 7, bias=False),
        })  # fmt: skip
        loaded["head"].weight = loaded["emb"].weight
        loaded.register_buffer("scale", torch.zeros(3))
        optimizer = torch.optim.AdamW(
            [{"params": [p for p in loaded.parameters() if p.dim() == d]} for d in (2, 1)]
        )
        del optimizer.param_groups[0]["params"][3], optimizer.param_groups[1]["params"][1]
        state = {"model": loaded, "optimizer": optimizer}
        ckpt.restore(state, cast=True)
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name].float(), tensor.float()), name
    assert found["model"]["scale"].tolist() == [2, 2, 2]
    assert found["model"]["frozen.weight"].any()
    assert tied == "model/emb.weight"
    for name, moments in expected["state"].items():
        entry = found["optimizer"]["state"][name]
        assert_same({key: entry[key] for key in moments}, moments)
        assert entry["step"] == 2
        parameter = loaded.get_parameter(name)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moments["exp_avg"])
    groups = found["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [g["params"] for g in groups] == [["emb.weight", "a.weight", "b.weight"], ["a.bias"]]
    assert (found["epoch"], found["global_steps"]) == (3, 2)
    assert "lr_scheduler" in found
    steps = [entry["step"] for entry in found["optimizer"]["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


def test_the_tag_folder_suffices_and_latest_stays_inside(folder, tmp_path, refused):
    assert penstock.import_checkpoint(folder / "t1", tmp_path / "run").objects > 10
    for tag in ("../t1", "", "t2", "/etc"):
        (folder / "latest").write_text(tag)
        with refused(penstock.FormatError, "which is not a folder beside it") as root:
            penstock.import_checkpoint(folder, root, step=2)


def test_a_missing_rank_is_a_clear_error(folder, refused):
    file_of(folder, "optim", 0).unlink()
    with refused(penstock.FormatError, "lacks a file of rank 0") as root:
        penstock.import_checkpoint(folder, root, step=2)
    for path in (folder / "t1").glob("*model_states.pt"):
        path.unlink()
    path = file_of(folder, "optim")
    path.rename(path.with_name(path.name.replace("_1_", "_0_")))
    with refused(penstock.FormatError, r"no file of the model|rank 1") as root:
        penstock.import_checkpoint(folder, root, step=2)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "experts"),
        ("zero", "universal"),
    ],
)
def test_other_partitionings_are_refused_by_name(folder, refused, name, match):
    shutil.copy(file_of(folder, "model"), folder / "t1" / name)
    with refused(penstock.UnsupportedStateError, match) as root:
        penstock.import_checkpoint(folder, root, step=2)


def test_stubs_of_the_adapter_are_refused_with_advice(folder, refused):
    for path in (folder / "t1").glob("*_states.pt"):
        path.write_bytes(STUB + b"...")
    for source in (folder, file_of(folder, "model")):
        with refused(penstock.FormatError, "is a stub: .* saved this checkpoint in a run") as root:
            penstock.import_checkpoint(source, root)


def test_a_folder_without_zero_is_refused_with_advice(folder, refused):
    for path in (folder / "t1").glob("*optim_states.pt"):
        path.unlink()
    with refused(penstock.UnsupportedStateError, "no files of ZeRO.*--rename") as root:
        penstock.import_checkpoint(folder, root, step=2)


def _with_degree(content):
    content["checkpoint_parallel_dimensions"]["tp_degree"] = 2


def _with_other_shape(content):
    content["param_shapes"][0]["a.weight"] = torch.Size([90, 50])


def _with_model(content):
    content["model"] = 3


def _with_strange_shapes(content):
    content["param_shapes"] = [3]


def _without_shapes(content):
    del content["param_shapes"]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (_with_degree, "tensor parallelism"),
        (_with_other_shape, "of 'a.weight'"),
        (_with_model, "client state named 'model'"),
        (_with_strange_shapes, "is not what DeepSpeed writes"),
        (_without_shapes, "as param_shapes"),
    ],
)
def test_mismatched_files_are_a_clear_error(folder, refused, edit, match):
    change(file_of(folder, "model"), edit)
    with refused(penstock.PenstockError, match) as root:
        penstock.import_checkpoint(folder, root, step=2)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_file_resaved_meanwhile_fails_the_import(folder, refused, kind):
    def touch(path):
        os.utime(file_of(folder, kind), ns=(0, 0))
        return path

    with refused(penstock.FormatError, "changed while") as root:
        penstock.import_checkpoint(folder, root, step=2, rename=touch)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_code_is_refused_by_name_and_does_not_run(folder, tmp_path, refused, kind):
    touched = tmp_path / "touched"
    path = file_of(folder, kind)
    torch.save({"evil": Touch(touched), "optimizer_state_dict": {}}, path)
    with refused(penstock.UnsupportedStateError, "posix.mkdir") as root:
        penstock.import_checkpoint(folder, root, step=2)
    assert not touched.exists()

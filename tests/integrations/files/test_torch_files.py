"""Files of `torch.save` out and in; they run no code."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from tests.integrations.files.conftest import assert_same, names_in

import penstock


class Touch:
    """A pickle that creates a folder when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_whole_tree_loads_with_weights_only(tmp_path, run, model):
    seen = []
    report = penstock.export_checkpoint(run, tmp_path / "o.pt", to="torch", on_progress=seen.append)
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    assert found.keys() == {"model", "optimizer", "epoch"}
    assert_same(found["model"], model)
    assert found["model"]["lm_head.weight"].data_ptr() == (
        found["model"]["layers.0.weight"].data_ptr()
    )
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["layers.0.weight"]}]
    assert report.files == ("o.pt",)
    assert seen[-1].phase == "done"
    assert names_in(tmp_path) == ["o.pt"]


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_file_can_be_mapped_and_is_a_sound_archive(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(3, 2_000_000),  # more than one piece
        "odd": torch.arange(7, dtype=torch.uint8),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "uint16": torch.arange(5).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"x": tensors, "y": {"large": tensors["large"]}}, 1, mode="blocking")
        seen = []
        penstock.export_checkpoint(ckpt, tmp_path / "o.pt", to="torch", on_progress=seen.append)
    assert seen[-2].bytes_done == seen[-1].bytes_total == sum(t.nbytes for t in tensors.values())
    with zipfile.ZipFile(tmp_path / "o.pt") as archive:
        assert archive.testzip() is None  # the checksums, which torch does not compare
    mapped = torch.load(tmp_path / "o.pt", mmap=True, weights_only=True)
    for name, tensor in tensors.items():
        found = mapped["x"][name]
        assert found.data_ptr() % 64 == 0, name
        assert torch.equal(bits(found), bits(tensor)), name
        assert found.dtype == tensor.dtype
    assert mapped["y"]["large"].data_ptr() == mapped["x"]["large"].data_ptr()


def test_one_state_dict_is_not_wrapped_and_loads_below_model(tmp_path, run, model):
    penstock.export_checkpoint(
        run, tmp_path / "o.pt", to="torch", include="model", rename={"model/scale": "model/s"}
    )
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    assert torch.equal(found.pop("s"), model["scale"])
    assert_same(found, {n: t for n, t in model.items() if n != "scale"})
    penstock.import_checkpoint(tmp_path / "o.pt", tmp_path / "back")
    with penstock.Checkpointer(tmp_path / "back") as ckpt:
        assert torch.equal(ckpt.load()["model"]["s"], model["scale"])


def test_cast_keeps_ties_and_counts_of_steps(tmp_path, run, model):
    penstock.export_checkpoint(run, tmp_path / "o.pt", to="torch", cast="bfloat16")
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    assert found["optimizer"]["state"]["layers.0.weight"]["step"].item() == 1001
    assert found["optimizer"]["state"]["layers.0.weight"]["m"].dtype == torch.bfloat16
    assert found["model"]["layers.0.weight"] is not None
    assert found["model"]["lm_head.weight"].data_ptr() == (
        found["model"]["layers.0.weight"].data_ptr()
    )
    assert torch.equal(found["model"]["turned"], model["turned"].bfloat16())


def test_values_that_weights_only_refuses_are_listed_and_nothing_is_written(tmp_path):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(1), "array": np.arange(3)}, 1, mode="blocking")
        with pytest.raises(penstock.UnsupportedStateError, match=r"numpy.*_reconstruct"):
            penstock.export_checkpoint(ckpt, tmp_path / "o.pt", to="torch")
        assert names_in(tmp_path) == ["run"]
        penstock.export_checkpoint(ckpt, tmp_path / "o.pt", to="torch", exclude="array")
        with pytest.raises(penstock.ConfigError, match="exists"):
            penstock.export_checkpoint(ckpt, tmp_path / "o.pt", to="torch", exclude="array")
        penstock.export_checkpoint(
            ckpt, tmp_path / "o.pt", to="torch", exclude="array", overwrite=True
        )
    assert torch.load(tmp_path / "o.pt", weights_only=True)["w"] == 1


def test_tree_with_ties_and_values_becomes_a_checkpoint(tmp_path, model):
    tree = {"state_dict": OrderedDict(model), "epoch": 3, "lr": [0.1, {"x": torch.ones(2)}]}
    torch.save(tree, tmp_path / "x.ckpt")
    penstock.import_checkpoint(
        tmp_path / "x.ckpt", tmp_path / "run", step=9, rename={"state_dict": "model"}
    )
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load(9)
        same_as = {"/".join(o.path): o.same_as for o in ckpt.open().objects()}
    assert_same(found["model"], model)
    assert (found["epoch"], found["lr"][0], found["lr"][1]["x"].tolist()) == (3, 0.1, [1, 1])
    assert same_as["model/lm_head.weight"] == ("model", "layers.0.weight")


def test_a_file_resaved_meanwhile_fails_the_import(tmp_path, refused):
    torch.save({"state_dict": {"w": torch.ones(5)}}, tmp_path / "x.ckpt")

    def touch(path):
        os.utime(tmp_path / "x.ckpt", ns=(0, 0))
        return path

    with refused(penstock.FormatError, "changed while") as root:
        penstock.import_checkpoint(tmp_path / "x.ckpt", root, step=2, rename=touch)


def test_views_of_one_storage_round_trip_with_any_strides(tmp_path):
    whole = torch.randn(6, 8, 10)
    views = {
        "part": whole[1:3], "turned": whole.permute(2, 0, 1), "step": whole[0, 0, ::3],
        "wide": whole[0].t()[None], "same": torch.ones(1).expand(4, 3), "number": whole[0, 0, 0],
        "bits": torch.randn(3, 4, dtype=torch.complex64).conj(), "none": whole[:0],
    }  # fmt: skip
    torch.save(views, tmp_path / "x.pt")
    penstock.import_checkpoint(tmp_path / "x.pt", tmp_path / "run")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        assert_same(ckpt.load()["model"], views)


def test_old_folders_of_hugging_face_are_read_with_and_without_index(tmp_path, model, refused):
    folder = tmp_path / "hf"
    folder.mkdir()
    torch.save(model, folder / "pytorch_model.bin")
    penstock.import_checkpoint(folder, tmp_path / "single")
    (folder / "pytorch_model.bin").unlink()
    names, weight_map = [*model], {}
    for number, part in enumerate((names[:4], names[4:])):
        file = f"pytorch_model-0000{number + 1}-of-00002.bin"
        torch.save({name: model[name].clone() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    penstock.import_checkpoint(folder, tmp_path / "shards")
    for run in ("single", "shards"):
        with penstock.Checkpointer(tmp_path / run) as ckpt:
            assert_same(ckpt.load()["model"], model)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../x.bin")}))
    with refused(penstock.FormatError, "not name a file") as root:
        penstock.import_checkpoint(folder, root, step=2)
    torch.save({"w": torch.ones(1), "epoch": 3}, folder / "x.bin")
    index.write_text(json.dumps({"weight_map": {"w": "x.bin"}}))
    with refused(penstock.FormatError, "holds epoch, not tensors only") as root:
        penstock.import_checkpoint(folder, root, step=2)


def test_numbered_state_of_an_optimizer_keeps_its_numbers(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "epoch": 1}, tmp_path / "x.pt")
    penstock.import_checkpoint(tmp_path / "x.pt", tmp_path / "run")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load()["optimizer"]
    assert found["state"].keys() == {0, 1}
    again = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    again.load_state_dict(found)
    assert torch.equal(
        again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def trained(groups=lambda model: model.parameters()):
    """A model with a buffer and tied weights, and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    )
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(groups(model))
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("source", ["state_dict", "file", "run", "list"])
def test_numbers_of_an_optimizer_get_the_names_of_a_model(tmp_path, source):
    model, optimizer = trained()
    tree = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(tree, tmp_path / "x.ckpt")
    names = [name for name, _ in model.named_parameters()]
    if source == "file":
        torch.save(tree.pop("state_dict"), tmp_path / "file")
    if source == "run":
        with penstock.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save({"model": model}, 1, mode="blocking")
    (tmp_path / "list.json").write_text(json.dumps(names))
    place = {"state_dict": source, "list": tmp_path / "list.json"}.get(source, tmp_path / source)
    penstock.import_checkpoint(tmp_path / "x.ckpt", tmp_path / "back", names_from=place)
    with penstock.Checkpointer(tmp_path / "back") as ckpt:
        (found,) = ckpt.load()["optimizer_states"]
    assert found["param_groups"][0]["params"] == [*found["state"]] == names
    for name, parameter in model.named_parameters():
        assert torch.equal(found["state"][name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_ambiguous_numbers_of_parameters_are_refused(tmp_path, refused):
    def groups(model):
        return [{"params": model[0].parameters()}, {"params": model[3].parameters()}]

    cases = {
        "has 2 groups": trained(groups),
        "do not fit": trained(lambda model: [*model.parameters()][::-1]),
        # The second could be any vector of four.
        "fit in several ways": trained(lambda model: [model[0].weight, model[0].bias]),
    }
    for match, (model, optimizer) in cases.items():
        tree = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(tree, tmp_path / "x.pt")
        with refused(penstock.PenstockError, match) as root:
            penstock.import_checkpoint(tmp_path / "x.pt", root, step=2, names_from="state_dict")
    (tmp_path / "n.json").write_text('["a"]')
    for source, match in (
        ("n.json", "1 names, but the optimizer has 2"), ("nothing", "is not the path of a model")
    ):  # fmt: skip
        with refused(penstock.PenstockError, match) as root:
            penstock.import_checkpoint(
                tmp_path / "x.pt", root, step=2, names_from=tmp_path / source
            )


def test_code_in_a_file_is_refused_by_name_and_does_not_run(tmp_path, refused):
    touched = tmp_path / "touched"
    torch.save({"w": torch.ones(2), "evil": Touch(touched)}, tmp_path / "x.pt")
    with refused(penstock.UnsupportedStateError, "posix.mkdir") as root:
        penstock.import_checkpoint(tmp_path / "x.pt", root, step=2)
    assert not touched.exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert touched.exists()  # it would have


def test_legacy_files_are_refused_with_advice_and_do_not_run(tmp_path, refused):
    touched = tmp_path / "touched"
    for number, content in enumerate(({"w": torch.ones(2)}, Touch(touched))):
        path = tmp_path / f"{number}.pt"
        torch.save(content, path, _use_new_zipfile_serialization=False)
        with refused(penstock.FormatError, r"Write it again: `torch.save") as root:
            penstock.import_checkpoint(path, root, step=2)
    assert not touched.exists()
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"a": 1}))
    with refused(penstock.FormatError, "zip format") as root:
        penstock.import_checkpoint(tmp_path / "plain.pkl", root, step=2)


def test_all_but_dicts_of_names_are_refused(tmp_path, refused):
    for content in [torch.ones(2), [torch.ones(2)], {}, {1: torch.ones(1)}]:
        torch.save(content, tmp_path / "x.pt")
        with refused(penstock.FormatError, "not a dict with names") as root:
            penstock.import_checkpoint(tmp_path / "x.pt", root, step=2)


def test_a_recursive_tree_is_refused(tmp_path, refused):
    tree = {"w": torch.ones(1)}
    tree["inner"] = tree
    torch.save(tree, tmp_path / "x.pt")
    with refused(penstock.UnsupportedStateError, "nested too deeply") as root:
        penstock.import_checkpoint(tmp_path / "x.pt", root, step=2)


def test_damaged_files_are_refused(tmp_path, refused):
    torch.save({"w": torch.ones(50_000)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for broken in (data[:-200], data[:5000], b"PK" + bytes(500)):
        (tmp_path / "x.pt").write_bytes(broken)
        with refused(penstock.FormatError, "is damaged, or was not written") as root:
            penstock.import_checkpoint(tmp_path / "x.pt", root, step=2)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}q\x00.")
    with refused(penstock.FormatError, "x.pt") as root:
        penstock.import_checkpoint(tmp_path / "x.pt", root, step=2)

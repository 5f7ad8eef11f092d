"""Safetensors out and in: real files of Penstock and of the library."""

import json
import os
import struct
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.integrations.files.conftest import assert_same, names_in

import penstock
from penstock.integrations.files.safetensors import NAMES

INDEX = "model.safetensors.index.json"


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- out ------------------------------------------------------------------------------------------


def test_folder_has_the_model_in_library_format(tmp_path, run, model):
    seen = []
    report = penstock.export_checkpoint(
        run, tmp_path / "out", to="safetensors", on_progress=seen.append
    )
    assert names_in(tmp_path) == ["out"]
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(
        {name: found[name] for name in model if name in found}, without(model, "lm_head.weight")
    )
    assert found.keys() == model.keys() - {"lm_head.weight"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert report.tied == {"lm_head.weight": "layers.0.weight"}
    assert (report.step, report.tensors, report.files) == (5, len(found), ("model.safetensors",))
    assert report.bytes_written == sum(t.nbytes for t in found.values())
    assert (seen[-1].phase, seen[-1].bytes_done) == ("done", report.bytes_written)


def test_shards_have_the_names_and_the_index_of_hugging_face(tmp_path, run, model):
    out = tmp_path / "out"
    report = penstock.export_checkpoint(run, out, to="safetensors", shard_bytes=25_000)
    index = json.loads((out / INDEX).read_text())
    names = sorted({*index["weight_map"].values()})
    count = len(names)
    assert count > 2
    assert names == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert names_in(out) == sorted([*names, INDEX]) == sorted(report.files)
    assert index["metadata"]["total_size"] == report.bytes_written
    for name in names:
        found = load_file(out / name)
        assert {n for n, file in index["weight_map"].items() if file == name} == found.keys()
        assert sum(t.nbytes for t in found.values()) <= 25_000
        assert all(torch.equal(tensor, model[n]) for n, tensor in found.items())


def test_a_tensor_above_the_limit_gets_its_own_file(tmp_path, run):
    penstock.export_checkpoint(run, tmp_path / "o", to="safetensors", shard_bytes=1)
    index = json.loads((tmp_path / "o" / INDEX).read_text())
    assert len({*index["weight_map"].values()}) >= len(index["weight_map"]) - 1  # one is empty


def test_every_tensor_is_aligned_for_a_mapped_file(tmp_path):
    state = {"bytes": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.float64)}
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": state}, 1, mode="blocking")
    penstock.export_checkpoint(tmp_path / "run", tmp_path / "o.safetensors", to="safetensors")
    data = (tmp_path / "o.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["wide"]["data_offsets"][0] % 8 == 0


def test_keep_tied_writes_each_name(tmp_path, run, model):
    out = tmp_path / "a" / "one.safetensors"
    report = penstock.export_checkpoint(run, out, to="safetensors", keep_tied=True)
    assert report.tied == {}
    assert load_file(out).keys() == model.keys()
    assert torch.equal(load_file(out)["lm_head.weight"], model["lm_head.weight"])


def test_a_tied_name_is_written_if_its_owner_is_not_selected(tmp_path, run, model):
    out = tmp_path / "one.safetensors"
    penstock.export_checkpoint(run, out, to="safetensors", include="model/lm_head.*")
    assert_same(load_file(out), {"lm_head.weight": model["lm_head.weight"]})


def test_cast_converts_floats_only(tmp_path, run, model):
    out = tmp_path / "one.safetensors"
    penstock.export_checkpoint(run, out, to="safetensors", cast="bfloat16")
    found = load_file(out)
    for name in found:
        is_cast = model[name].is_floating_point() and model[name].dim()
        assert torch.equal(found[name], model[name].bfloat16() if is_cast else model[name]), name
        assert found[name].dtype == (torch.bfloat16 if is_cast else model[name].dtype)


def test_a_cast_that_overflows_is_refused(tmp_path):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": {"w": torch.tensor([1.0, 1e6])}}, 1, mode="blocking")
        with pytest.raises(penstock.UnsupportedStateError, match=r"model/w .* too large"):
            penstock.export_checkpoint(ckpt, tmp_path / "o", to="safetensors", cast="float16")
    assert names_in(tmp_path) == ["run"]


def test_rename_and_several_tops_build_names(tmp_path, run):
    out = tmp_path / "o.safetensors"
    penstock.export_checkpoint(
        run, out, to="safetensors", include="model/layers.*",
        rename={"model/layers.": "model/blocks."},
    )  # fmt: skip
    assert load_file(out).keys() == {f"blocks.{n}.weight" for n in range(6)}
    both = ["model/scale", "optimizer/state/**"]
    penstock.export_checkpoint(run, out, to="safetensors", include=both, overwrite=True)
    assert load_file(out).keys() == {
        "model.scale", "optimizer.state.layers.0.weight.step", "optimizer.state.layers.0.weight.m",
    }  # fmt: skip


def test_two_tensors_of_one_name_are_refused(tmp_path):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        state = {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}
        ckpt.save(state, 1, mode="blocking")
        with pytest.raises(penstock.SelectionError, match=r"'a.b' in the file"):
            penstock.export_checkpoint(ckpt, tmp_path / "o", to="safetensors")


def test_values_are_refused_by_name(tmp_path, run):
    with pytest.raises(penstock.UnsupportedStateError, match="epoch"):
        penstock.export_checkpoint(
            run, tmp_path / "o", to="safetensors", include=["model", "epoch"]
        )
    assert names_in(tmp_path) == []


def test_dtypes_outside_the_format_are_refused(tmp_path):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": {"z": torch.ones(2, dtype=torch.complex128)}}, 1, mode="blocking")
        with pytest.raises(penstock.UnsupportedStateError, match="model/z is of dtype complex128"):
            penstock.export_checkpoint(ckpt, tmp_path / "o", to="safetensors")


def test_config_and_tokenizer_are_copied_and_weights_and_code_are_not(tmp_path, run):
    source = tmp_path / "source"
    source.mkdir()
    copied = ["config.json", "tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja"]
    for name in [*copied, "model.safetensors", INDEX, "modeling.py", "pytorch_model.bin"]:
        (source / name).write_text(name)
    (source / "folder.json").mkdir()
    report = penstock.export_checkpoint(run, tmp_path / "o", to="safetensors", config_from=source)
    assert {*report.files} == {*names_in(tmp_path / "o")} == {*copied, "model.safetensors"}
    assert all((tmp_path / "o" / name).read_text() == name for name in copied)


def test_wrong_options_are_refused_before_anything_is_written(tmp_path, run):
    for options, match in [
        ({"to": "gguf"}, "not an export format"),
        ({"cast": "int8"}, "not a dtype to convert to"),
        ({"shard_bytes": 0}, "at least 1"),
        ({"config_from": "nowhere"}, "no config.json"),
        ({"config_from": ".", "to": "torch"}, "folder of safetensors"),
        ({"out": "s3://bucket/x"}, "is a URL"),
    ]:
        given = {"to": "safetensors", "out": tmp_path / "o", **options}
        with pytest.raises(penstock.ConfigError, match=match):
            penstock.export_checkpoint(run, **given)
        assert names_in(tmp_path) == []


def test_an_existing_out_is_refused_and_kept(tmp_path, run):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").write_text("mine")
    for overwrite, match in ((False, "exists"), (True, "not an earlier export .it has mine")):
        with pytest.raises(penstock.ConfigError, match=match):
            penstock.export_checkpoint(run, tmp_path / "o", to="safetensors", overwrite=overwrite)
    assert contents(tmp_path / "o") == {"mine": b"mine"}
    assert names_in(tmp_path) == ["o"]


@pytest.mark.parametrize(
    "names",
    [
        ["config.json"],
        [],
        ["model.safetensors", "notes.md"],
        ["model.safetensors", "other.safetensors"],
        ["config.json", "model.safetensors", "tokenizer.json"],  # a downloaded model
        ["model.safetensors", "notes.txt"],
    ],
)
def test_overwrite_accepts_only_earlier_exports(tmp_path, run, names):
    (tmp_path / "o").mkdir()
    for name in names:
        (tmp_path / "o" / name).write_text("mine")
    with pytest.raises(penstock.ConfigError, match="not an earlier export"):
        penstock.export_checkpoint(run, tmp_path / "o", to="safetensors", overwrite=True)
    assert names_in(tmp_path / "o") == sorted(names)


def test_overwrite_replaces_an_earlier_export_as_a_whole(tmp_path, run):
    out = tmp_path / "o"
    penstock.export_checkpoint(run, out, to="safetensors", shard_bytes=25_000)
    penstock.export_checkpoint(run, out, to="safetensors", overwrite=True)
    assert names_in(out) == ["model.safetensors"]
    assert names_in(tmp_path) == ["o"]


def test_a_link_at_out_is_not_followed(tmp_path, run):
    (tmp_path / "real.safetensors").write_text("mine")
    (tmp_path / "o.safetensors").symlink_to("real.safetensors")
    with pytest.raises(penstock.ConfigError, match="is not a file"):
        penstock.export_checkpoint(
            run, tmp_path / "o.safetensors", to="safetensors", overwrite=True
        )
    assert (tmp_path / "real.safetensors").read_text() == "mine"


def test_damage_ends_the_export_without_output(tmp_path, model):
    with penstock.Checkpointer(f"posix://{tmp_path}/run") as ckpt:
        ckpt.save({"model": model}, 1, mode="blocking")
        (blob,) = (tmp_path / "run").glob("data/*/blobs/*.raw")
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
        with pytest.raises(penstock.DamagedError):
            penstock.export_checkpoint(ckpt, tmp_path / "o", to="safetensors")
    assert names_in(tmp_path) == ["run"]


def test_a_full_or_forbidden_place_is_a_storage_error(tmp_path, run):
    (tmp_path / "file").write_text("")
    with pytest.raises(penstock.StorageError, match=r"the export to .* failed"):
        penstock.export_checkpoint(run, tmp_path / "file" / "o", to="safetensors")


def test_an_on_progress_error_is_harmless(tmp_path, run, caplog):
    def fail(progress):
        raise OSError("closed")

    penstock.export_checkpoint(run, tmp_path / "o", to="safetensors", on_progress=fail)
    assert "on_progress failed" in caplog.text


def test_a_missing_run_is_not_created(tmp_path):
    with pytest.raises(penstock.CheckpointNotFoundError):
        penstock.export_checkpoint(tmp_path / "none", tmp_path / "o", to="safetensors")
    assert names_in(tmp_path) == []


# -- in -------------------------------------------------------------------------------------------


def test_library_file_becomes_a_checkpoint(tmp_path, model):
    plain = {n: t.contiguous() for n, t in without(model, "lm_head.weight").items()}
    save_file(plain, tmp_path / "x.safetensors", metadata={"format": "pt", "by": "us"})
    report = penstock.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "run", step=3)
    assert (report.step, report.objects) == (3, len(plain))
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load()["model"]
        assert_same({name: found[name] for name in plain}, plain)
        assert ckpt.info().metadata == {
            "imported_from": "x.safetensors", "imported_format": "safetensors",
        }  # fmt: skip


@pytest.mark.parametrize("length", [128, int.from_bytes(b"PK", "little")])
@pytest.mark.parametrize("name", ["x.safetensors", "x"])
def test_file_with_a_header_length_like_another_magic_is_read(tmp_path, name, length):
    text = json.dumps({"w": f32(0, 8)}).encode().ljust(length)
    (tmp_path / name).write_bytes(header(None, text=text))
    assert penstock.import_checkpoint(tmp_path / name, tmp_path / "run").objects == 1


def test_every_dtype_round_trips_as_the_library_has_it(tmp_path):
    bits = torch.arange(2, dtype=torch.uint8).repeat(8)
    wanted = {dtype: bits.clone().view(getattr(torch, dtype)) for dtype in NAMES}
    save_file(wanted, tmp_path / "x.safetensors")
    penstock.import_checkpoint(tmp_path / "x.safetensors", tmp_path / "run")
    penstock.export_checkpoint(tmp_path / "run", tmp_path / "o.safetensors", to="safetensors")
    found = load_file(tmp_path / "o.safetensors")
    for dtype, tensor in wanted.items():
        assert found[dtype].dtype == tensor.dtype
        assert torch.equal(found[dtype].view(torch.uint8), bits)


def test_shards_round_trip_and_restore_into_a_module(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": module}, 1, mode="blocking")
        penstock.export_checkpoint(ckpt, tmp_path / "o", to="safetensors", shard_bytes=2000)
    assert (tmp_path / "o" / INDEX).exists()
    penstock.import_checkpoint(tmp_path / "o", tmp_path / "back")
    other = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    with penstock.Checkpointer(tmp_path / "back") as ckpt:
        ckpt.restore({"model": other})
    assert_same(other.state_dict(), module.state_dict())


LORA = {"base_model.model.q.lora_A.weight": torch.ones(2, 3)}


def adapter_of_peft(folder):
    folder.mkdir()
    save_file(LORA, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    return folder


def test_adapter_has_and_needs_its_configuration(tmp_path, refused):
    source = adapter_of_peft(tmp_path / "adapter")
    penstock.import_checkpoint(source, tmp_path / "run")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load()
        assert found["adapter_config"] == {"peft_type": "LORA", "r": 2}
        assert_same(found["model"], LORA)
        live = {"base_model.model.q.lora_A.default.weight": torch.ones(2, 3)}
        ckpt.save({"model": live}, 1, mode="blocking")
        penstock.export_checkpoint(
            ckpt, tmp_path / "o", to="safetensors", config_from=source, shard_bytes=1
        )
    assert names_in(tmp_path / "o") == ["adapter_config.json", "adapter_model.safetensors"]
    assert_same(load_file(tmp_path / "o" / "adapter_model.safetensors"), LORA)
    (source / "adapter_config.json").unlink()
    with refused(penstock.FormatError, "no adapter_config.json") as root:
        penstock.import_checkpoint(source, root, step=2)


def test_include_exclude_and_rename_are_those_of_restore(tmp_path, run):
    penstock.export_checkpoint(run, tmp_path / "o", to="safetensors")
    penstock.import_checkpoint(
        tmp_path / "o", tmp_path / "back", include="model/layers.*", exclude="**/layers.5.*",
        rename={"model/layers.": "net/h."},
    )  # fmt: skip
    with penstock.Checkpointer(tmp_path / "back") as ckpt:
        assert ckpt.open().keys() == [f"net/h.{n}.weight" for n in range(5)]


def test_patterns_and_places_that_are_wrong_are_refused(tmp_path, run, refused):
    penstock.export_checkpoint(run, tmp_path / "o", to="safetensors")
    for options, match in (
        ({"include": "modl"}, "matches nothing; nearest"),
        ({"exclude": "**"}, "nothing is selected"),
        ({"rename": {"model/layers.0.weight": "model/layers.1.weight"}}, "maps both"),
        ({"rename": {"model/mask": "model/scale/x"}}, "below another object"),
        ({"rename": lambda path: ""}, "to ''"),
    ):
        with refused(penstock.SelectionError, match) as root:
            penstock.import_checkpoint(tmp_path / "o", root, step=2, **options)


def test_an_existing_step_is_refused(tmp_path, run, refused):
    penstock.export_checkpoint(run, tmp_path / "o", to="safetensors")
    with refused(penstock.StepExistsError, "1") as root:
        penstock.import_checkpoint(tmp_path / "o", root, step=1)


def test_a_configuration_file_sets_storage(tmp_path, run):
    penstock.export_checkpoint(run, tmp_path / "o", to="safetensors")
    (tmp_path / "penstock.toml").write_text(
        f'backend = "{tmp_path}/back"\nrules = [{{ match = "**", codecs = ["zstd"] }}]\n'
    )
    penstock.import_checkpoint(tmp_path / "o", tmp_path / "penstock.toml")
    with penstock.Checkpointer(tmp_path / "back") as ckpt:
        assert "zstd" in ckpt.info().codecs


def header(tensors, *, data=8, length=None, text=None):
    raw = json.dumps(tensors).encode() if text is None else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def f32(start, stop, shape=None):
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


BAD = {
    "empty": (b"", "cut short in its header"),
    "short": (b"\x10", "cut short in its header"),
    "no tensors": (header({}, data=0), "has no tensors"),
    "header cut short": (header({"a": f32(0, 8)}, length=10_000), "cut short in its header"),
    "huge header": (header({"a": f32(0, 8)}, length=1 << 62), "cut short in its header"),
    "no json": (header(None, text=b"{nonsense"), "is not JSON"),
    "deep json": (header(None, text=b"[" * 100_000), "is not JSON"),
    "no utf-8": (header(None, text=b'{"\xff": 1}'), "is not JSON"),
    "no object": (header([1]), "JSON that is not an object"),
    "data cut short": (header({"a": f32(0, 8)}, data=7), "its header says"),
    "bytes left over": (header({"a": f32(0, 8)}, data=9), "its header says"),
    "gap": (header({"a": f32(0, 4), "b": f32(8, 12)}, data=12), "'b' follows a gap"),
    "gap at the start": (header({"a": f32(4, 8)}), "'a' follows a gap"),
    "overlap": (header({"a": f32(0, 8), "b": f32(4, 8)}), "'b' overlaps"),
    "size": (header({"a": f32(0, 8, shape=[3])}), "wrong header: 'a'"),
    "negative": (header({"a": f32(-8, 0)}), "wrong header: 'a'"),
    "negative shape": (header({"a": f32(0, 8, shape=[-1, -2])}), "wrong header: 'a'"),
    "bool": (header({"a": f32(0, 4, shape=[True])}, data=4), "wrong header: 'a'"),
    "float": (header({"a": f32(0, 8, shape=[2.0])}), "wrong header: 'a'"),
    "dtype": (header({"a": {**f32(0, 8), "dtype": "F4"}}), "dtype 'F4', which Penstock"),
    "no fields": (header({"a": 3}), "wrong header: 'a'"),
    "twice": (
        header(None, text=b'{"a": %b, "a": %b}' % ((json.dumps(f32(0, 8)).encode(),) * 2)),
        "'a' twice",
    ),
}  # fmt: skip


def test_wrong_file_is_a_clear_error(tmp_path, refused):
    for data, match in BAD.values():
        (tmp_path / "x.safetensors").write_bytes(data)
        with refused(penstock.FormatError, match) as root:
            penstock.import_checkpoint(tmp_path / "x.safetensors", root, step=2)


def sharded(folder, weight_map, files):
    folder.mkdir()
    for name, tensors in files.items():
        save_file({n: torch.ones(2) for n in tensors}, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


A, B = "a.safetensors", "b.safetensors"
BAD_INDEXES = {
    "leaves the folder": ({"x": f"../f/{A}"}, {A: "x"}, "not name a file"),
    "absolute": ({"x": "/etc/passwd"}, {A: "x"}, "not name a file"),
    "dots": ({"x": ".."}, {A: "x"}, "not name a file"),
    "folder": ({"x": f"sub/{A}"}, {A: "x"}, "not name a file"),
    "no name": ({"x": ""}, {A: "x"}, "not name a file"),
    "number": ({"x": 3}, {A: "x"}, "not name a file"),
    "nothing": ({}, {A: "x"}, "no weight_map"),
    "missing shard": ({"x": A, "y": B}, {A: "x"}, f"names {B}, which is not there"),
    "twice": ({"x": A, "y": B}, {A: "x", B: "xy"}, f"'x' twice, in {A} and in {B}"),
    "other file": ({"x": B, "y": A}, {A: "x", B: "y"}, "but the index says"),
    "not in the index": ({"x": A}, {A: "xy"}, "'y' in .* but the index says nowhere"),
    "not in a file": ({"x": A, "y": A}, {A: "x"}, "'y' in no file"),
}


def test_wrong_index_is_a_clear_error(tmp_path, refused):
    for name, (weight_map, files, match) in BAD_INDEXES.items():
        (tmp_path / name).mkdir()
        folder = sharded(tmp_path / name / "f", weight_map, files)
        with refused(penstock.FormatError, match) as root:
            penstock.import_checkpoint(folder, root, step=2)


def test_several_files_without_an_index_are_refused(tmp_path, refused):
    folder = sharded(tmp_path / "f", {"x": A}, {A: "x", B: "y"})
    (folder / INDEX).unlink()
    with refused(penstock.FormatError, "2 files, and no") as root:
        penstock.import_checkpoint(folder, root, step=2)


def test_a_pipe_in_a_folder_does_not_block(tmp_path, refused):
    os.mkfifo(tmp_path / "model.safetensors")
    with refused(penstock.FormatError, r"no \*\.safetensors") as root:
        penstock.import_checkpoint(tmp_path, root, step=2, format="safetensors")


def test_links_into_a_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert penstock.import_checkpoint(tmp_path / "snapshot", tmp_path / "run").objects == 1


def test_a_file_changed_meanwhile_fails_the_import(tmp_path, refused):
    path = tmp_path / "x.safetensors"
    save_file({f"t{n}": torch.ones(6_000_000) for n in range(4)}, path)
    changed = threading.Event()

    def change(progress):
        if not changed.is_set():
            os.utime(path, ns=(0, 0))
            changed.set()

    with refused(penstock.FormatError, "changed while") as root, open_small(root) as ckpt:
        original = path.stat()
        os.utime(path, ns=(original.st_atime_ns, original.st_mtime_ns))
        penstock.import_checkpoint(path, ckpt, step=2, on_progress=change)


def open_small(root):
    return penstock.Checkpointer(root, staging_bytes="32 MiB")


def test_missing_files_and_unknown_formats_are_refused(tmp_path, refused):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello, world")
    for name, match in (
        ("nothing", "does not exist"),
        ("folder", "not recognized"),
        ("text", "not recognized"),
    ):
        with refused(penstock.ConfigError, match) as root:
            penstock.import_checkpoint(tmp_path / name, root, step=2)
    with refused(penstock.ConfigError, "not an import format") as root:
        penstock.import_checkpoint(tmp_path / "text", root, step=2, format="gguf")
    with refused(penstock.StorageError, "cannot be read") as root:
        penstock.import_checkpoint(tmp_path / "nothing", root, step=2, format="safetensors")
    with refused(penstock.FormatError, "not a folder of DCP") as root:
        penstock.import_checkpoint(tmp_path / "folder", root, step=2, format="dcp")

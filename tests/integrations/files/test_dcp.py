"""Folders of `torch.distributed.checkpoint` out and in; their pickles run no code."""

import collections
import contextlib
import io
import pickle
import pickletools
import resource
import shutil
import sys
import types
import warnings
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests import interpreters
from tests.integrations.files.conftest import assert_same, names_in
from tests.integrations.files.test_torch_files import Touch
from torch.distributed.checkpoint import _extension
from torch.distributed.checkpoint import metadata as of_dcp
from torch.utils._pytree import tree_flatten

import penstock
from penstock.integrations.files.dcp_import import ChunkReader
from penstock.integrations.files.dcp_metadata import StoredBlob, StoredChunk, StoredTensor
from penstock.integrations.files.source import SourceFile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save(state, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, **options)
        dcp.save(state, storage_writer=writer, no_dist=True)
    return folder


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def write_metadata(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def state_of(model):
    return {
        "model": model,
        "opt": {
            "state": {"a.b": {"step": torch.tensor(3.0), "m": torch.randn(5, 6).bfloat16()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.b"]}],
        },
        "list": [torch.ones(2), [torch.zeros(1), torch.full((1,), 2.0)]],
        "epoch": 4,
        "none": None,
    }


# -- out ------------------------------------------------------------------------------------------


def test_folder_is_what_dcp_loads(tmp_path, run, model):
    report = penstock.export_checkpoint(run, tmp_path / "o", to="dcp")
    assert names_in(tmp_path) == ["o"]
    assert names_in(tmp_path / "o") == sorted(report.files)
    target = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in model.items()},
        "optimizer": {"state": {"layers.0.weight": {"m": torch.zeros(3, 4)}}},
        "epoch": 0,
    }
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "o"), no_dist=True)
    assert_same(target["model"], model)
    assert target["epoch"] == 4
    assert target["optimizer"]["state"]["layers.0.weight"]["m"].any()


def test_large_tensors_are_written_as_chunks(tmp_path):
    tensors = {
        "rows": torch.arange(10_000_000, dtype=torch.float32).reshape(1000, 10_000),
        "wide": torch.arange(60_000_000, dtype=torch.uint8).reshape(2, 1, 30_000_000),
    }
    seen = []
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(tensors, 1, mode="blocking")
        penstock.export_checkpoint(ckpt, tmp_path / "o", to="dcp", on_progress=seen.append)
    for name, chunks in (("rows", 3), ("wide", 4)):
        found = metadata_of(tmp_path / "o").state_dict_metadata[name].chunks
        assert len(found) == chunks
        assert all(prod(c.sizes) * tensors[name].itemsize <= 16 << 20 for c in found)
    assert seen[-2].bytes_done == seen[-1].bytes_total == 100_000_000
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "o"), no_dist=True)
    assert_same(target, tensors)


Pair = collections.namedtuple("Pair", "left right")


def test_tensors_in_tuples_are_written(tmp_path):
    wanted = torch.arange(3.0)
    state = {
        "tuple": (wanted, 1), "list": [2, (wanted, [wanted])], "inner": ({"a": wanted},),
        "pair": Pair(wanted, wanted), "none": (wanted[:0],),
    }  # fmt: skip
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(state, 1, mode="blocking")
        penstock.export_checkpoint(ckpt, tmp_path / "o", to="dcp")
    target = dict.fromkeys(state)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "o"), no_dist=True)
    found, kept = tree_flatten(target), tree_flatten(state)
    assert found[1] == kept[1]
    for one, other in zip(found[0], kept[0], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_damage_fails_the_export(tmp_path):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.arange(300_000)}, 1, mode="blocking")
        (blob,) = (tmp_path / "run").rglob("*.raw")
        with blob.open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"damage")
        with pytest.raises(penstock.DamagedError, match="w"):
            penstock.export_checkpoint(ckpt, tmp_path / "o", to="dcp")
    assert names_in(tmp_path) == ["run"]


def test_overwrite_replaces_an_earlier_folder(tmp_path, run):
    penstock.export_checkpoint(run, tmp_path / "o", to="dcp")
    with pytest.raises(penstock.ConfigError, match="exists"):
        penstock.export_checkpoint(run, tmp_path / "o", to="dcp")
    penstock.export_checkpoint(run, tmp_path / "o", to="dcp", include="model", overwrite=True)
    names = metadata_of(tmp_path / "o").state_dict_metadata
    assert all(name.startswith("model.") for name in names)
    assert names_in(tmp_path) == ["o"]


# -- in -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_everything_loads_bit_by_bit(tmp_path, model, threads):
    state = state_of(model)
    save(state, tmp_path / "d", thread_count=threads)
    report = penstock.import_checkpoint(tmp_path / "d", tmp_path / "run", step=900)
    assert report.step == 900
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load()
    assert found.keys() == state.keys()
    assert_same({name: found["model"][name] for name in model}, model)
    inner = found["opt"]["state"]["a.b"]
    assert torch.equal(inner["m"], state["opt"]["state"]["a.b"]["m"])
    assert inner["step"] == 3
    assert found["opt"]["param_groups"] == state["opt"]["param_groups"]
    assert [found["list"][0].tolist(), found["list"][1][1].tolist()] == [[1, 1], [2]]
    assert (found["epoch"], found["none"]) == (4, None)


RANKS = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
cuts = {
    "rows": [Shard(0), Replicate()], "columns": [Shard(1), Replicate()],
    "grid": [Shard(0), Shard(1)], "both": [Replicate(), Replicate()], "deep": [Shard(2), Shard(0)],
}
mesh = init_device_mesh("cpu", (2, 2))
torch.manual_seed(0)
state = {}
for name, placements in cuts.items():
    shape = (7, 5, 9) if name == "deep" else (2050, 1001)
    whole = torch.randn(shape)
    state[name] = distribute_tensor(whole.clone(), mesh, placements)
    if dist.get_rank() == 0:
        torch.save(whole, f"{sys.argv[1]}-{name}.pt")
dcp.save({"model": state, "step": 5}, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.multirank
def test_tensors_cut_by_four_ranks_load_whole(tmp_path):
    interpreters.run_as_torchrun(4, "-c", RANKS, str(tmp_path / "d"))
    assert len(list((tmp_path / "d").glob("*.distcp"))) > 1
    penstock.import_checkpoint(tmp_path / "d", tmp_path / "run")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        found = ckpt.load()
    assert found["step"] == 5
    for name in ("rows", "columns", "grid", "both", "deep"):
        assert torch.equal(found["model"][name], torch.load(f"{tmp_path}/d-{name}.pt")), name


def test_each_chunk_is_read_once_and_kept_only_while_needed(tmp_path):
    pieces = [torch.arange(n * 12.0, n * 12 + 12).reshape(4, 3) for n in range(3)]
    for n, piece in enumerate(pieces):
        torch.save(piece, tmp_path / f"{n}.pt")
    files = [tmp_path / f"{n}.pt" for n in range(3)]
    blobs = [StoredBlob(SourceFile.of(file), 0, file.stat().st_size) for file in files]
    chunks = tuple(StoredChunk((4 * n, 0), (4, 3), blob) for n, blob in enumerate(blobs))
    reader = ChunkReader(StoredTensor("w", "float32", (12, 3), chunks))
    whole = torch.cat(pieces).numpy().tobytes()
    found = bytearray(len(whole))
    opened = []
    with opening(opened.append):
        for start in range(0, len(whole), 20):  # ranges end within rows, and within chunks
            reader.read(start, memoryview(found)[start : start + 20])
            assert len(reader.held) <= 1
    assert found == whole
    assert [path for path in opened if path.endswith(".pt")] == [str(b.source.path) for b in blobs]
    assert not reader.held


@contextlib.contextmanager
def opening(call):
    """Call `call` with each opened file; an audit hook stays, so a flag ends it."""
    active = [True]

    def audit(event, arguments):
        if active and event == "open":
            call(str(arguments[0]))

    sys.addaudithook(audit)
    yield
    active.clear()


def test_a_folder_resaved_meanwhile_fails_the_import(tmp_path, refused):
    state = {f"t{n}": torch.full((1000,), float(n)) for n in range(6)}
    folder = save(state, tmp_path / "d")
    later = save({name: tensor + 10 for name, tensor in state.items()}, tmp_path / "later")
    reads = []

    def save_again(path):
        if path == str(folder / "__0_0.distcp"):
            reads.append(path)
            if len(reads) == 3:
                (later / "__0_0.distcp").replace(path)

    with opening(save_again), refused(penstock.FormatError, "changed while") as root:
        penstock.import_checkpoint(folder, root, step=2)


def test_unselected_data_is_not_read(tmp_path, model):
    state = {"model": model, "evil": Touch(tmp_path / "touched")}
    save(state, tmp_path / "d")
    penstock.import_checkpoint(tmp_path / "d", tmp_path / "run", include="model")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.load().keys() == {"model"}
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("where", ["value", "metadata", "metadata key", "planner"])
def test_code_is_refused_by_name_and_does_not_run(tmp_path, refused, where):
    touched = tmp_path / "touched"
    evil = Touch(touched)
    folder = save({"w": torch.ones(2), "v": evil if where == "value" else 1}, tmp_path / "d")
    metadata = metadata_of(folder)
    if where == "metadata":
        metadata.storage_meta = evil
    elif where == "metadata key":
        metadata.storage_data = {(evil, 1): 2}
    elif where == "planner":
        metadata.planner_data = evil
    if where != "value":
        write_metadata(folder, metadata)
    with refused(penstock.UnsupportedStateError, "posix.mkdir") as root:
        penstock.import_checkpoint(folder, root, step=2)
    assert not touched.exists()
    if where != "value":
        pickle.loads((folder / ".metadata").read_bytes())
        assert touched.exists()  # it would have


def test_only_classes_of_dcp_are_allowed(tmp_path, refused):
    for names in [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "classes"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "__builtins__"),
        ("pathlib", "PosixPath.touch"),
        ("penstock.integrations.files.dcp_metadata", "_Inert"),
    ]:
        module, name = names
        program = pickle.PROTO + b"\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)])
        program += module.encode() + pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode()
        program += pickle.STACK_GLOBAL + pickle.STOP
        pickletools.dis(program, io.StringIO())
        folder = save({"w": torch.ones(2)}, tmp_path / "d")
        (folder / ".metadata").write_bytes(program)
        with refused(penstock.UnsupportedStateError, f"names {module}.{name}, which") as root:
            penstock.import_checkpoint(folder, root, step=2)


def test_a_pickle_cannot_change_the_stand_in_classes(tmp_path, refused):
    """The state of an object may be applied to a class, and would set its attributes."""
    of_metadata = "torch.distributed.checkpoint.metadata"
    good = save({"w": torch.ones(2)}, tmp_path / "good")
    folder = save({"w": torch.ones(2)}, tmp_path / "d")
    for module, name in (("torch", "Size"), (of_metadata, "Metadata"), ("torch", "float32")):
        program = pickle.PROTO + b"\x04c" + f"{module}\n{name}\n".encode()
        state = (None, {"__iter__": 1, "__setstate__": 2, "state": 3})
        program += pickle.dumps(state, 4)[2:-1] + pickle.BUILD + pickle.STOP
        (folder / ".metadata").write_bytes(program)
        with refused(penstock.FormatError, "is not the metadata") as root:
            penstock.import_checkpoint(folder, root, step=2)
        penstock.import_checkpoint(good, f"memory://{tmp_path}/{name}")


five_fields = of_dcp.TensorProperties.__getstate__


@pytest.mark.parametrize("fields", [4, 5, 6, 7])
def test_properties_of_torch_2_6_to_2_15_are_read(tmp_path, refused, monkeypatch, fields):
    folder = save({"w": torch.arange(5)}, tmp_path / "d")
    metadata = metadata_of(folder)
    monkeypatch.setattr(
        of_dcp.TensorProperties, "__getstate__", lambda p: (*five_fields(p), None, None)[:fields]
    )
    write_metadata(folder, metadata)
    monkeypatch.undo()
    if fields in {5, 6}:
        penstock.import_checkpoint(folder, tmp_path / "run")
        with penstock.Checkpointer(tmp_path / "run") as ckpt:
            assert torch.equal(ckpt.load()["w"], torch.arange(5))
        return
    with refused(penstock.FormatError, "where a _DtypeName belongs") as root:
        penstock.import_checkpoint(folder, root, step=2)


class Reverse(_extension.StreamTransformExtension):
    """A real transformation, like one that compresses."""

    @staticmethod
    def registry_name():
        return "stream.test"

    @staticmethod
    def from_descriptor(version):
        return Reverse()

    def get_descriptor(self):
        return "stream.test/1"

    def transform_to(self, output):
        return output

    def transform_from(self, source):
        return source


def test_transformed_files_are_refused_by_name(tmp_path, refused):
    folder = save({"w": torch.ones(2)}, tmp_path / "d", _extensions=[Reverse()])
    with refused(
        penstock.UnsupportedStateError, r"'w' was saved with the transforms \['stream.test/1'\]"
    ) as r:
        penstock.import_checkpoint(folder, r, step=2)


def break_cover(metadata):
    metadata.state_dict_metadata["w"].chunks.clear()


def break_overlap(metadata):
    tensor = metadata.state_dict_metadata["w"]
    chunk = of_dcp.ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))
    tensor.chunks.append(chunk)
    (key,) = (key for key in metadata.storage_data if key.fqn == "w")
    metadata.storage_data[of_dcp.MetadataIndex("w", chunk.offsets)] = metadata.storage_data[key]


def break_bounds(metadata):
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([7])


def break_dimensions(metadata):
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3, 2])


def break_size(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([8])
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([8])


def break_dtype(metadata):
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def info_of(metadata, **fields):
    for key, info in metadata.storage_data.items():
        if key.fqn == "w":
            for name, value in fields.items():
                setattr(info, name, value)


def break_place(metadata):
    metadata.storage_data.clear()


def break_path(metadata):
    metadata.planner_data["w"] = ()


def break_nesting(metadata):
    metadata.planner_data["v"] = ("w", "below")


def break_list(metadata):
    metadata.planner_data["w"] = ("list", 10**12)


BREAKS = {
    "no chunk": (break_cover, "no chunk for a part of 'w'"),
    "overlap": (break_overlap, "overlapping chunks of 'w'"),
    "bounds": (break_bounds, "extends beyond the tensor"),
    "dimensions": (break_dimensions, "extends beyond the tensor"),
    "size": (break_size, "does not hold 'w' as the metadata describes"),
    "dtype": (break_dtype, "does not hold 'w' as the metadata describes"),
    "place": (break_place, "where 'w' at"),
    "no path": (break_path, "no path for 'w'"),
    "nesting": (break_nesting, "conflicts with that of another object"),
    "list": (break_list, "has gaps: its indices are"),
    "leaves": (lambda m: info_of(m, relative_path="../w"), "not in the folder"),
    "absolute": (lambda m: info_of(m, relative_path="/etc/passwd"), "not in the folder"),
    "no name": (lambda m: info_of(m, relative_path=""), "not in the folder"),
    "offset": (lambda m: info_of(m, offset=-1), "where non-negative integers belong"),
    "far": (lambda m: info_of(m, offset=1 << 40), "'w' in .* is damaged"),
    "long": (lambda m: info_of(m, length=3), "'w' in .* is damaged"),
    "no dict": (lambda m: setattr(m, "storage_data", [1]), "a list where a dict belongs"),
    "names": (lambda m: setattr(m, "state_dict_metadata", {1: 2}), "where a str belongs"),
    "kind": (lambda m: m.state_dict_metadata.update(w=m), "does not say where 'w' is"),
}


def test_wrong_metadata_is_a_clear_error(tmp_path, refused):
    folder = save({"w": torch.arange(3), "v": 1}, tmp_path / "d")
    right = (folder / ".metadata").read_bytes()
    for change, match in BREAKS.values():
        metadata = pickle.loads(right)
        change(metadata)
        write_metadata(folder, metadata)
        with refused(penstock.FormatError, match) as root:
            penstock.import_checkpoint(folder, root, step=2)


def test_a_torn_metadata_or_file_is_a_clear_error(tmp_path, refused):
    folder = save({"w": torch.arange(3000), "v": 1}, tmp_path / "d")
    data = (folder / ".metadata").read_bytes()
    for torn in (b"", data[:40], data[:-30], b"nonsense", pickle.dumps(3)):
        (folder / ".metadata").write_bytes(torn)
        with refused(penstock.FormatError, "metadata") as root:
            penstock.import_checkpoint(folder, root, step=2)
    (folder / ".metadata").write_bytes(data)
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000])
    with refused(penstock.FormatError, "is damaged") as root:
        penstock.import_checkpoint(folder, root, step=2)
    file.unlink()
    with refused(penstock.StorageError, "cannot be read") as root:
        penstock.import_checkpoint(folder, root, step=2)


def test_a_key_of_a_crafted_pickle_does_not_end_the_process(tmp_path, refused):
    nested = b")" + b"\x85" * 250_000  # a tuple in a tuple, and so on
    (tmp_path / "d").mkdir()
    for crafted in (b"}%bNs.", b"(%bNd.", b"\x8f(%b\x90.", b"(%b\x91."):
        (tmp_path / "d" / ".metadata").write_bytes(b"\x80\x04" + crafted % nested)
        with refused(penstock.FormatError, "is not the metadata") as root:
            penstock.import_checkpoint(tmp_path / "d", root, step=2)


def test_a_memo_of_a_crafted_pickle_takes_no_memory(tmp_path, refused):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(b"\x80\x02}r\xff\xff\xff\xff.")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), hard))
    try:
        with refused(penstock.FormatError, "a dict where a _Inert belongs") as root:
            penstock.import_checkpoint(tmp_path / "d", root, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_metadata_of_each_rank_is_refused_with_advice(tmp_path, refused):
    folder = save({"w": torch.ones(2)}, tmp_path / "d")
    (folder / ".metadata").rename(folder / "__0.metadata")
    with refused(penstock.UnsupportedStateError, "use_collectives=False") as root:
        penstock.import_checkpoint(folder, root, step=2)


def test_megatron_metadata_is_read_without_megatron(tmp_path, monkeypatch):
    folder = save({"w": torch.arange(4)}, tmp_path / "d")
    metadata = metadata_of(folder)
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = types.ModuleType(name)
    module.MCoreMetadata = type("MCoreMetadata", (of_dcp.Metadata,), {"__module__": name})
    for parent in (
        "megatron",
        "megatron.core",
        "megatron.core.dist_checkpointing",
        name,
        name[:-6],
    ):
        monkeypatch.setitem(sys.modules, parent, module)
    write_metadata(folder, module.MCoreMetadata(**vars(metadata)))
    monkeypatch.undo()
    penstock.import_checkpoint(folder, tmp_path / "run")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        assert torch.equal(ckpt.load()["w"], torch.arange(4))


def test_export_and_import_are_inverse(tmp_path, run):
    penstock.export_checkpoint(run, tmp_path / "d", to="dcp")
    penstock.import_checkpoint(tmp_path / "d", tmp_path / "back")
    shutil.rmtree(tmp_path / "d")
    with penstock.Checkpointer(run) as ckpt, penstock.Checkpointer(tmp_path / "back") as back:
        first, second = ckpt.load(), back.load()
    assert_same({n: second["model"][n] for n in first["model"]}, first["model"])
    assert first["optimizer"]["param_groups"] == second["optimizer"]["param_groups"]

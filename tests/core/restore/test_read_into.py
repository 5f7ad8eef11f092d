"""`Checkpoint.read_into`, which needs no torch, and `Checkpoint.load`."""

import shutil

import numpy as np
import pytest
import torch

import penstock

LARGE = torch.arange(6_000_000, dtype=torch.float32).reshape(1000, -1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    state = {
        "raw": LARGE,
        "zstd": LARGE,
        "column": LARGE.t(),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "array": np.arange(4),
        "tied": [torch.ones(3)] * 2,
        "empty": torch.empty(0),
        "epoch": 3,
    }
    with penstock.Checkpointer(root, rules=[{"match": "zstd", "codecs": ["zstd"]}]) as ckpt:
        ckpt.save(state, 1, mode="blocking")
    return root


def expected(view, path):
    value = view[path]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_whole_and_partial_reads_match_the_tensor(run):
    for path in ["raw", "zstd", "column", "half", "array", "tied/1", "empty"]:
        with penstock.Checkpointer(run) as ckpt:
            view = ckpt.open()
            whole = expected(view, path)
            out = bytearray(len(whole))
            view.read_into(path, out)
            assert out == whole
            start, stop = len(whole) // 16 * 8, len(whole) // 16 * 15 // 8 * 8
            piece = bytearray(stop - start)
            view.read_into(path, piece, start=start)
            assert piece == whole[start:stop]


def test_partial_elements_are_refused(tmp_path):
    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"t": torch.ones(2)}, 1, mode="blocking")
        for start, length in [(1, 4), (0, 3), (-4, 4), (8, 4), (4, 8), (0, 16)]:
            with pytest.raises(penstock.SelectionError, match="not whole elements"):
                ckpt.open().read_into("t", bytearray(length), start=start)


def test_a_plain_value_is_not_read_into_memory(run):
    refused = pytest.raises(penstock.SelectionError, match="epoch is a plain value")
    with penstock.Checkpointer(run) as ckpt, refused:
        ckpt.open().read_into("epoch", bytearray(1))


def test_streamed_tree_reads_only_when_it_is_saved_elsewhere(run, tmp_path):
    with penstock.Checkpointer(run) as ckpt:
        view = ckpt.open()
        tree = view.load(streamed=True)
        assert tree["tied"][0] is tree["tied"][1]
        assert (tree["raw"].dtype, tree["raw"].shape) == ("float32", LARGE.shape)
        assert isinstance(tree["array"], np.ndarray)
        assert tree["epoch"] == 3
        with penstock.Checkpointer(tmp_path / "copy") as other:
            other.save(tree, 7, mode="blocking")
            copy = other.open()
            assert copy.specs().keys() == view.specs().keys()
            for path in view.specs():
                assert repr(copy[path]) == repr(view[path])
            assert torch.equal(copy["column"], LARGE.t())
            assert copy.specs()["tied/1"].same_as == "tied/0"
        with pytest.raises(penstock.ConfigError, match="nothing to put on 'cpu'"):
            view.load(streamed=True, device="cpu")


def test_streamed_bytes_are_verified_on_read(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        tree = ckpt.open().load(streamed=True)
        for blob in (tmp_path / "run").rglob("*.raw"):
            blob.write_bytes(bytes(blob.stat().st_size))
        with pytest.raises(penstock.DamagedError, match="raw"):
            tree["raw"].read(0, memoryview(bytearray(400)))

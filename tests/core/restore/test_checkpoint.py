"""The read-only view of one checkpoint."""

import numpy as np
import pytest
import torch

from penstock import (
    Checkpoint,
    CheckpointNotFoundError,
    PluginError,
    Region,
    SelectionError,
    UnsupportedStateError,
)
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.checkpointer import Checkpointer
from penstock.core.plugins.registry import Registry, default_registry
from penstock.testing.faults import FaultyBackend

STATE = {
    "net": {"w": torch.arange(6000.0).view(60, 100), "b": torch.tensor(3)},
    "tied": None,
    "list": [torch.ones(2), {"x": torch.zeros(1), "y": 5}, (torch.full((2,), 2.0), "fixed")],
    "by number": {1: torch.ones(1), 2: {3: torch.tensor([3, 4])}},
    "array": np.arange(24, dtype="i2").reshape(4, 6),
    "a/b": torch.tensor([1.5]),
    "epoch": 7,
    "empty": torch.zeros(0, 3),
}
STATE["tied"] = STATE["net"]["w"]


@pytest.fixture(scope="module")
def store():
    store = MemoryBackend(MemoryConfig())
    with Checkpointer(
        store, chunk_bytes=8192, block_bytes=4096, rules=[{"match": "list/**", "codecs": ["zstd"]}]
    ) as ckpt:
        ckpt.save(STATE, 5, mode="blocking", metadata={"loss": 2.5, "tags": ["x"]})
        ckpt.save({"x": 1}, 8, mode="blocking")
    return store


@pytest.fixture
def checkpoint(store):
    return Checkpoint.open(store, 5)


def test_a_reader_needs_no_checkpointer(store, checkpoint):
    assert checkpoint.step == 5
    assert checkpoint["epoch"] == 7
    with pytest.raises(CheckpointNotFoundError, match="5, 8"):
        Checkpoint.open(store, 6)


def test_opening_reads_the_commit_record_only(store):
    faulty = FaultyBackend(store)
    checkpoint = Checkpoint.open(faulty, 5)
    assert {name for call, names in faulty.calls if call == "read" for name in names} == {
        "commits/00000005-0.json"
    }
    assert checkpoint.info.step == 5


def test_info_matches_the_record(checkpoint):
    info = checkpoint.info
    assert (info.step, info.generation, info.world_size) == (5, 0, 1)
    assert info.metadata == {"loss": 2.5, "tags": ["x"]}
    assert info.objects == len(checkpoint) == len(checkpoint.keys())
    assert info.codecs == {"zstd": 1}
    assert set(info.providers) == {"tensor", "ndarray", "value"}
    assert info.bytes_raw < info.bytes_stored
    assert len(info.uid) == 32
    assert info.references == ()


def test_one_object_is_read_by_its_path(checkpoint):
    for path, expected in [
        ("net/w", STATE["net"]["w"]),
        ("net/b", STATE["net"]["b"]),
        ("a%2Fb", STATE["a/b"]),
        ("list/1/y", 5),
        ("by number/2/3", torch.tensor([3, 4])),
        ("tied", STATE["net"]["w"]),
        ("empty", torch.zeros(0, 3)),
    ]:
        found = checkpoint[path]
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        else:
            assert found == expected


def test_a_subtree_is_read_by_the_path_of_its_container(checkpoint):
    found = checkpoint["list"]
    assert [type(item) for item in found] == [torch.Tensor, dict, tuple]
    assert found[1]["y"] == 5
    assert found[2][1] == "fixed"
    assert list(checkpoint["by number"]) == [1, 2]
    assert torch.equal(checkpoint["by number/2"][3], torch.tensor([3, 4]))
    assert isinstance(checkpoint["net"], dict)
    assert torch.equal(checkpoint["list/2"][0], torch.full((2,), 2.0))


@pytest.mark.parametrize("path", ["nothing", "net/w/deeper", "list/9", "ne", "net/"])
def test_a_path_without_objects_is_an_error(path, checkpoint):
    with pytest.raises((KeyError, SelectionError)):
        checkpoint[path]
    with pytest.raises((KeyError, SelectionError)):
        checkpoint.read(path, (slice(0, 1),))


SLICES = [
    (slice(0, 5),), (slice(3, 4), slice(10, 90)), (slice(None), slice(99, 100)), (slice(-3, None),),
    (slice(50, 10),), (), slice(2, 4), [slice(2, 4)], (slice(0, 1000),),
]  # fmt: skip


def test_slices_mean_what_they_mean_to_torch(checkpoint):
    for slices in SLICES:
        for path in ["net/w", "tied"]:
            key = tuple(slices) if isinstance(slices, list) else slices
            expected = STATE["net"]["w"][key] if key != () else STATE["net"]["w"]
            found = checkpoint.read(path, slices)
            assert found.shape == expected.shape
            assert torch.equal(found, expected)
            assert found.is_contiguous()


def test_membership_is_of_objects(checkpoint):
    assert "net/w" in checkpoint
    assert "a%2Fb" in checkpoint
    for other in ("net", "a/b", 5, "net/", "%"):
        assert other not in checkpoint


@pytest.mark.parametrize("region", [slice(1, 3), (), Region((0,), (1,))], ids=str)
def test_a_plain_value_has_no_regions(region, checkpoint):
    with pytest.raises(SelectionError, match="epoch is a plain value, which has no regions"):
        checkpoint.read("epoch", region)


@pytest.mark.parametrize(
    "region", [(slice(0, 1),) * 3, slice(0, 10, 2), Region((59, 0), (2, 100)), 5], ids=str
)
def test_invalid_regions_of_a_tensor_are_refused(region, checkpoint):
    with pytest.raises(SelectionError, match="net/w"):
        checkpoint.read("net/w", region)


def test_a_path_is_one_string(checkpoint):
    with pytest.raises(SelectionError, match="'net/w', not"):
        checkpoint[("net", "w")]


def test_still_there_detects_a_replaced_checkpoint():
    store = MemoryBackend(MemoryConfig())
    with Checkpointer(store) as ckpt:
        ckpt.save({"x": 1}, 1, mode="blocking")
        checkpoint = ckpt.open()
        assert checkpoint.still_there()
        ckpt.save({"x": 2}, 1, mode="blocking", overwrite=True)
        assert not checkpoint.still_there()
        assert ckpt.open().still_there()
        ckpt.delete(1)
        assert not checkpoint.still_there()


def test_verify_counts_what_it_checked(checkpoint):
    seen = []
    report = checkpoint.verify(on_progress=seen.append)
    assert report.ok
    assert report.damaged == ()
    assert report.deep
    assert report.objects == len(checkpoint)
    assert report.frames > 5
    assert report.bytes_read > checkpoint.info.bytes_raw
    assert [p.phase for p in (seen[0], seen[-1])] == ["manifest", "done"]
    assert 0 < seen[-1].bytes_done == seen[-1].bytes_total <= checkpoint.info.bytes_stored
    shallow = checkpoint.verify(deep=False)
    assert shallow.ok
    assert shallow.frames == 0


def test_a_missing_codec_is_named_and_raw_objects_stay_readable(store):
    entries = [
        entry for entries in default_registry()._entries("provider").values() for entry in entries
    ]
    checkpoint = Checkpoint.open(store, 5, registry=Registry(entries))
    assert torch.equal(checkpoint["net/w"], STATE["net"]["w"])
    with pytest.raises(PluginError, match="zstd"):
        _ = checkpoint["list/0"]
    report = checkpoint.verify()
    assert report.ok  # as far as the stored bytes show it
    assert "zstd" in report.not_decoded[0]


class Odd:
    """Only a pickle can hold it."""

    def __init__(self):
        self.number = 4


def test_a_pickle_is_read_only_if_allowed():
    store = MemoryBackend(MemoryConfig())
    with Checkpointer(store, allow_pickle=True) as ckpt:
        ckpt.save({"odd": {"inside": Odd()}, "plain": 1}, 1, mode="blocking")
        assert ckpt.load()["odd"]["inside"].number == 4
    checkpoint = Checkpoint.open(store, 1)
    assert checkpoint["plain"] == 1
    with pytest.raises(UnsupportedStateError, match=r"odd.*allow_pickle=True"):
        checkpoint["odd"]
    assert Checkpoint.open(store, 1, allow_pickle=True)["odd"]["inside"].number == 4
    assert checkpoint.verify().ok

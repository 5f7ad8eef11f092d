"""The specs of a checkpoint's objects, which need no data."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from tests.integration.ranks.saving import Job

from penstock import Checkpointer, ObjectSpec, Region, Shard
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.restore.checkpoint import Checkpoint
from penstock.testing.faults import FaultyBackend

WEIGHT = torch.nn.Parameter(torch.arange(6000.0).view(60, 100))
STATE = {
    "net": {"w": WEIGHT, "b": torch.ones(3, dtype=torch.bfloat16)},
    "tied": WEIGHT,
    "zeros": torch.zeros(40, 100),
    "a/b": 7,
}


@pytest.fixture(scope="module")
def store():
    store = MemoryBackend(MemoryConfig())
    with Checkpointer(store, rules=[{"match": "zeros", "codecs": ["zstd"]}]) as ckpt:
        ckpt.save(STATE, 1, mode="blocking")
    return store


def test_each_object_has_a_spec_under_its_shown_path_in_tree_order(store):
    checkpoint = Checkpoint.open(store, 1)
    specs = checkpoint.specs()
    assert list(specs) == checkpoint.keys() == ["net/w", "net/b", "tied", "zeros", "a%2Fb"]
    assert len(specs) == 5
    assert "net" not in specs
    assert ("net", "w") not in specs
    assert "a/%zz//b" not in specs
    assert specs.get("none") is None
    with pytest.raises(KeyError, match="nowhere"):
        specs["nowhere"]


def test_a_spec_says_what_an_object_is_and_how_it_is_stored(store):
    specs = Checkpoint.open(store, 1).specs()
    weight = specs["net/w"]
    assert (weight.path, weight.kind, weight.form) == (("net", "w"), "tensor", "tensor")
    assert (weight.role, weight.dtype, weight.shape) == ("parameter", "float32", (60, 100))
    assert (weight.bytes_raw, weight.bytes_stored, weight.bytes_borrowed) == (24000, 24000, 0)
    assert weight.shards == (Region((0, 0), (60, 100)),)
    assert (weight.codecs, weight.same_as, weight.derived) == ((), None, None)
    assert specs["net/b"].dtype == "bfloat16"
    assert specs["zeros"].codecs == ("zstd",)
    assert specs["zeros"].bytes_stored < 400 < specs["zeros"].bytes_raw == 16000
    assert (specs["a%2Fb"].path, specs["a%2Fb"].kind) == (("a/b",), "value")


def test_a_tied_object_names_the_one_that_has_its_bytes(store):
    tied = Checkpoint.open(store, 1).specs()["tied"]
    assert (tied.same_as, tied.shape, tied.bytes_raw) == ("net/w", (60, 100), 0)
    assert (tied.shards, tied.bytes_stored) == ((), 0)


def test_borrowed_bytes_are_counted_separately(tmp_path):
    with Checkpointer(tmp_path, share=True) as ckpt:
        ckpt.save({"w": torch.ones(40000)}, 1, mode="blocking")
        ckpt.save({"w": torch.ones(40000)}, 2, mode="blocking")
        spec = ckpt.open(2).specs()["w"]
    assert (spec.bytes_stored, spec.bytes_borrowed) == (0, 160000)


def test_shards_of_all_ranks_are_listed_once():
    store = MemoryBackend(MemoryConfig())
    state = {"w": torch.arange(40.0).view(8, 5), "same": torch.ones(3)}

    def of(rank):
        return {**state, "w": Shard(state["w"][4 * rank : 4 * rank + 4], (8, 5), (4 * rank, 0))}

    assert not any(isinstance(r, BaseException) for r in Job(2, store).save(of))
    specs = Checkpoint.open(store, 1).specs()
    assert set(specs["w"].shards) == {Region((0, 0), (4, 5)), Region((4, 0), (4, 5))}
    assert (specs["w"].shape, specs["w"].bytes_stored) == ((8, 5), 160)
    assert specs["same"].shards == (Region((0,), (3,)),)


def test_specs_read_no_blob_and_one_look_up_reads_one_section(store):
    faulty = FaultyBackend(store)
    specs = Checkpoint.open(faulty, 1).specs()
    assert (specs["zeros"].shape, specs["zeros"].codecs) == ((40, 100), ("zstd",))
    assert all(isinstance(spec.shards, tuple) for spec in specs.values())
    read = [name for call, names in faulty.calls if call == "read" for name in names]
    assert read
    assert not any("/blobs/" in name for name in read)


def test_a_spec_is_frozen_and_compares_by_what_it_says(store):
    one, other = (Checkpoint.open(store, 1).specs() for _ in range(2))
    assert isinstance(one["net/w"], ObjectSpec)
    assert one["net/w"] == other["net/w"] != other["zeros"]
    with pytest.raises(FrozenInstanceError):
        one["net/w"].dtype = "int8"

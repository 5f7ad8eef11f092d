"""The specs of a checkpoint's objects, which need no data."""

import pytest
import torch

from penstock import Checkpointer, Region
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


def test_a_spec_describes_an_object_and_its_storage(store):
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


def test_specs_read_no_blob_and_one_look_up_reads_one_section(store):
    faulty = FaultyBackend(store)
    specs = Checkpoint.open(faulty, 1).specs()
    assert (specs["zeros"].shape, specs["zeros"].codecs) == ((40, 100), ("zstd",))
    assert all(isinstance(spec.shards, tuple) for spec in specs.values())
    read = [name for call, names in faulty.calls if call == "read" for name in names]
    assert read
    assert not any("/blobs/" in name for name in read)

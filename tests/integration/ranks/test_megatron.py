"""Megatron's `ShardedTensor`, by a class with its fields: megatron.core is not installed here."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import examples
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory

from penstock import UnsupportedStateError


@dataclass
class ShardedTensor:
    """The fields of megatron/core/dist_checkpointing/mapping.py."""

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple
    global_shape: tuple
    global_offset: tuple
    axis_fragmentations: tuple | None
    replica_id: int | tuple = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


def made(key, data, shape, offset, **options):
    local = options.pop("local_shape", tuple(data.shape))
    return ShardedTensor(key, data, data.dtype, local, shape, offset, None, **options)


def succeed(reports):
    for report in reports:
        if isinstance(report, Exception):
            raise report
    return reports


def restored(count, store, state_of):
    def work(ckpt, rank):
        state = state_of(rank)
        ckpt.restore(state)
        return state

    return succeed(Job(count, store).run(work))


@settings(deadline=None, max_examples=examples(8))
@given(st.data())
def test_any_cut_is_saved_and_comes_back_in_any_other(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    whole = torch.randn(shape)

    def cut(label):
        """Return rows for each of 3 ranks, and of the rows a flat range for each of two."""
        rows = data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=2), label=label)
        found = []
        for a, b in itertools.pairwise([0, *sorted(rows), shape[0]]):
            flat = whole[a:b].reshape(-1)
            at = data.draw(st.integers(0, flat.numel()), label="flat")
            found.append((a, b, [(0, at), (at, flat.numel())]))
        return found

    def state_of(cuts, *, blank):
        def state(rank):
            a, b, ranges = cuts[rank // 2]
            start, stop = ranges[rank % 2]
            flat = whole[a:b].reshape(-1)[start:stop].clone()
            data = torch.zeros_like(flat) if blank else flat
            offset = (a, *(0 for _ in shape[1:]))
            options = {"local_shape": (b - a, *shape[1:]), "flattened_range": slice(start, stop)}
            return {"model": {"w": made("w", data, shape, offset, **options)}}

        return state

    store = memory()
    succeed(Job(6, store).save(state_of(cut("stored"), blank=False)))
    assert torch.equal(checkpointer(store).load()["model"]["w"], whole)
    cuts = cut("restored")
    found = restored(6, store, state_of(cuts, blank=True))
    for rank, state in enumerate(found):
        expected = state_of(cuts, blank=False)(rank)["model"]["w"].data
        assert torch.equal(state["model"]["w"].data, expected)


def test_only_the_main_replica_is_stored_and_all_are_restored():
    whole = torch.arange(12.0).reshape(4, 3)

    def state(rank, blank=False):  # tensor parallel 2, data parallel 2
        tp, dp = rank % 2, rank // 2
        piece = whole[2 * tp : 2 * tp + 2].clone() + (100 if dp or blank else 0)
        return {"w": made("w", piece, (4, 3), (2 * tp, 0), replica_id=(0, 0, dp))}

    store = memory()
    reports = succeed(Job(4, store).save(state))
    assert sum(report.bytes_raw for report in reports) == whole.nbytes
    assert torch.equal(checkpointer(store).load()["w"], whole)
    for rank, found in enumerate(restored(4, store, lambda rank: state(rank, blank=True))):
        tp = rank % 2
        assert torch.equal(found["w"].data, whole[2 * tp : 2 * tp + 2])


def layers(rank, count, *, blank=False):
    """Six layers on pipelines of `count` stages, by the key and the number of the layer."""
    found = {}
    for layer in range(rank * 6 // count, (rank + 1) * 6 // count):
        data = torch.full((2, 3), -1.0 if blank else float(layer))
        found[f"layers.weight.{layer}"] = made(
            "layers.weight", data, (6, 2, 3), (layer, 0, 0), prepend_axis_num=1
        )
    return {"model": found}


def test_layers_of_a_pipeline_are_objects_of_their_own():
    store = memory()
    succeed(Job(2, store).save(lambda rank: layers(rank, 2)))
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        assert set(ckpt.open(1).keys()) == {f"model/layers.weight.{n}/{n}" for n in range(6)}
    for count in (1, 3):
        for state in restored(count, store, lambda rank, n=count: layers(rank, n, blank=True)):
            for name, tensor in state["model"].items():
                assert tensor.data.eq(float(name.rpartition(".")[2])).all()


def test_two_layers_under_one_name_are_not_taken_for_one():
    """As Megatron names them before they are keyed: each stage counts its own from 0."""

    def state(rank):
        data = torch.full((2,), float(rank))
        return {"layers.0": made("layers", data, (2, 2), (rank, 0), prepend_axis_num=1)}

    store = memory()
    succeed(Job(2, store).save(state))
    tree = checkpointer(store).load()["layers.0"]
    assert {name: tensor.tolist() for name, tensor in tree.items()} == {
        "0": [0.0, 0.0],
        "1": [1.0, 1.0],
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": None}, "init_data"),
        ({"global_offset": (3, 0)}, "do not fit together"),
        ({"local_shape": (3, 3)}, "do not fit together"),
        ({"flattened_range": slice(0, 5)}, "do not fit together"),
        ({"flattened_range": slice(2, 9)}, "do not fit together"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, said):
    tensor = replace(made("w", torch.zeros(2, 3), (4, 3), (2, 0)), **change)
    with checkpointer(memory()) as ckpt, pytest.raises(UnsupportedStateError, match=said):
        ckpt.save({"w": tensor}, 1)

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
def test_any_cut_is_saved_and_restored_in_any_other(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    whole = torch.randn(shape)

    def cut(label):
        """Return rows for each of 3 ranks, and for two each a flat range of the rows."""
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


def test_two_layers_of_one_name_are_distinguished():
    """Named as by Megatron before keying: each stage counts its own from 0."""

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


def grid(rank, layout, *, blank=False):
    """A tensor cut by tensor and pipeline parallelism, whole and as unequal ranges."""
    tp, pp = layout
    dp, whole = 8 // (tp * pp), torch.arange(8.0 * 5 * 40).reshape(8, 5, 40)
    at = rank % tp, rank // tp % dp, rank // (tp * dp)
    offset = (at[0] * 8 // tp, 0, at[2] * 40 // pp)
    part = whole.chunk(tp, 0)[at[0]].chunk(pp, 2)[at[2]].contiguous()
    share, last = part.numel() // dp, at[1] == dp - 1
    held = slice(share * at[1] + at[1], part.numel() if last else share * (at[1] + 1) + at[1] + 1)
    flat = part.flatten()[held].clone()
    if blank:
        part, flat = torch.zeros_like(part), torch.zeros_like(flat)
    local = {"local_shape": tuple(part.shape), "flattened_range": held}
    return {
        "whole": made("whole", part, whole.shape, offset, replica_id=at[1]),
        "flat": made("flat", flat, whole.shape, offset, **local),
    }


LAYOUTS = [((2, 4), (4, 2)), ((8, 1), (1, 2))]


@pytest.mark.parametrize(("there", "here"), LAYOUTS)
def test_ranges_of_a_grid_restore_in_another_grid_and_ranges(there, here):
    """Of eight ranks, by the sizes of tensor and pipeline parallelism."""
    store = memory()
    succeed(Job(8, store).save(lambda rank: grid(rank, there)))
    whole = torch.arange(8.0 * 5 * 40).reshape(8, 5, 40)
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        assert all(torch.equal(tensor, whole) for tensor in ckpt.load().values())
    for rank, state in enumerate(restored(8, store, lambda rank: grid(rank, here, blank=True))):
        for name, tensor in grid(rank, here).items():
            assert torch.equal(state[name].data, tensor.data), name


def optimizer(rank, layout, *, blank=False):
    """Masters and moments of two weights and a bias, in ranges over the data-parallel ranks.

    The bias is trained, and the second weight is frozen: it has no state. Steps and options are
    plain values of two groups.
    """
    tp, dp = layout
    at, place = rank % tp, rank // tp
    found = {}
    for n, (name, shape) in enumerate({"up": (12, 5), "bias": (12,)}.items()):
        rows = 12 // tp
        for m, key in enumerate(("fp32_param", "exp_avg", "exp_avg_sq")):
            whole = (
                torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * n + 1e3 * m
            )
            part = whole[at * rows : (at + 1) * rows]
            # Buffers are padded to a multiple of the ranks, so the last ranges are short or empty.
            share = -(-part.numel() // dp) + 7
            held = slice(*(min(part.numel(), share * k) for k in (place, place + 1)))
            flat = part.flatten()[held].clone()
            label = f"optimizer.state.{key}.{name}"
            found[label] = made(
                label,
                torch.full_like(flat, -1) if blank else flat,
                shape,
                (at * rows, *(0 for _ in shape[1:])),
                local_shape=tuple(part.shape),
                flattened_range=held,
            )
    model = {
        "frozen": made("frozen", torch.full((3,), -1.0 if blank else 5.0), (3,), (0,)),
    }
    model["frozen"].replica_id = rank
    groups = [{"lr": 0.5, "step": 0 if blank else 1234}, {"lr": 0.25, "wd_mult": 0.0}]
    return {"model": model, "optimizer": {"state": found, "param_groups": groups}}


@pytest.mark.parametrize(("there", "here"), [((2, 4), (2, 1)), ((1, 1), (3, 2))])
def test_ranges_of_a_distributed_optimizer_restore_on_any_ranks(there, here):
    store = memory()
    succeed(Job(there[0] * there[1], store).save(lambda rank: optimizer(rank, there)))
    count = here[0] * here[1]
    found = restored(count, store, lambda rank: optimizer(rank, here, blank=True))
    for rank, state in enumerate(found):
        expected = optimizer(rank, here)
        assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
        assert state["model"]["frozen"].data.tolist() == [5.0] * 3
        for name, tensor in expected["optimizer"]["state"].items():
            assert torch.equal(state["optimizer"]["state"][name].data, tensor.data), name


def test_a_tensor_under_another_key_is_refused():
    """As numbered by two stages, whose ranges would be taken for those of one parameter."""
    cuts = [(0, 2), (2, 4)], [(0, 1), (1, 4)]

    def state(rank):
        stage = rank // 2
        held = slice(*cuts[stage][rank % 2])
        data = torch.full((held.stop - held.start,), float(stage))
        options = {"local_shape": (4,), "flattened_range": held}
        return {"state": {"0": made(f"exp_avg.layer{stage}", data, (4,), (0,), **options)}}

    store = memory()
    for error in Job(4, store).save(state):
        assert isinstance(error, UnsupportedStateError)
        assert "state/0 is a ShardedTensor of Megatron and has the key 'exp_avg.l" in str(error)
    with checkpointer(store) as ckpt:
        ckpt.save({"state": {"0": torch.zeros(4)}}, 1, mode="blocking")
        with pytest.raises(UnsupportedStateError, match="put it under its key"):
            ckpt.restore(state(0))


def test_tied_tensors_are_tied_by_all_replicas():
    def state(rank, blank=False):
        data = torch.full((3, 2), -1.0 if blank else 4.0)
        one = made("embedding", data, (3, 2), (0, 0), replica_id=rank)
        return {"embedding": one, "output": {"embedding": replace(one)}}

    store = memory()
    reports = succeed(Job(2, store).save(state))
    assert sum(report.bytes_raw for report in reports) == 24
    for found in restored(2, store, lambda rank: state(rank, blank=True)):
        assert found["output"]["embedding"].data.eq(4).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "init_data"),
        ({"global_offset": (3, 0)}, "does not fit local_shape"),
        ({"local_shape": (3, 3)}, "does not fit local_shape"),
        ({"flattened_range": slice(0, 5)}, "does not fit local_shape"),
        ({"flattened_range": slice(2, 9)}, "does not fit local_shape"),
    ],
)
def test_inconsistent_arguments_are_refused(change, message):
    tensor = replace(made("w", torch.zeros(2, 3), (4, 3), (2, 0)), **change)
    with checkpointer(memory()) as ckpt, pytest.raises(UnsupportedStateError, match=message):
        ckpt.save({"w": tensor}, 1)

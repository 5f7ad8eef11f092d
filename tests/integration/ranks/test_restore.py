"""Checkpoints of any rank count, restored on any other, bit by bit."""

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.plan.test_chunk_uses import splits, wanted
from tests.core.stored_ranks import STEP, cut, reshard, store_ranks
from tests.effort import examples
from tests.integration.ranks.topologies import (
    PLACES,
    Net,
    adam,
    expected_of,
    held_of,
    train,
    values_of,
)
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD

import penstock
from penstock import PenstockError, RestoreMismatchError, UnsupportedStateError
from penstock.core.abc import StateObject
from penstock.core.plan.regions import flaw_of_cover
from penstock.core.plugins.registry import default_registry
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.restore.fallback import Overwritten
from penstock.core.restore.restore import restore_into
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.select import Rename, Selection
from penstock.core.types import Region, regions_of_range
from penstock.providers.tensor.sharding import local_shard


def restore(store, state, **options):
    """Restore the checkpoint into this rank's state, like each rank of a job."""
    opened = Checkpoint.open(store, STEP).opened
    providers = opened.registry.providers
    return restore_into(
        opened,
        state,
        selection=Selection(options.get("include"), options.get("exclude")),
        rename=Rename(None),
        strict=options.get("strict", True),
        cast=options.get("cast", False),
        overwritten=Overwritten(state, providers, allow_pickle=False),
    )


def described(state):
    """The objects of a state."""
    found = describe_tree(state, providers=default_registry().providers, allow_pickle=False)
    return [entry for entry in found.entries if isinstance(entry, StateObject)]


def rows(count):
    """Rows, as even as possible: some ranks may hold none."""

    def cuts(_path, shape):
        if not shape:
            return [[] for _ in range(count)]
        share = -(-shape[0] // count)
        starts = [min(rank * share, shape[0]) for rank in range(count + 1)]
        return [
            [Region((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:]))] if a < b else []
            for a, b in itertools.pairwise(starts)
        ]

    return cuts


def columns(count):
    """The last dimension is cut, the others are whole."""

    def cuts(path, shape):
        turned = rows(count)(path, shape[::-1])
        return [[Region(r.offsets[::-1], r.sizes[::-1]) for r in regions] for regions in turned]

    return cuts


def grid(_path, shape):
    """Two ranks cut rows, and two columns; both of these hold objects without columns."""
    if len(shape) < 2:
        return [regions for regions in rows(2)(_path, shape) for _ in range(2)]
    across = columns(2)(_path, shape)
    return [
        [
            Region((a.offsets[0], *b.offsets[1:]), (a.sizes[0], *b.sizes[1:]))
            for a in by_row
            for b in by_column
        ]
        for by_row in rows(2)(_path, shape)
        for by_column in across
    ]


def flat(count):
    """Ranges of elements, ignoring rows, as ZeRO and FSDP1 cut."""

    def cuts(_path, shape):
        size = torch.Size(shape).numel()
        share = -(-size // count)
        bounds = [min(rank * share, size) for rank in range(count + 1)]
        return [regions_of_range(shape, a, b) for a, b in itertools.pairwise(bounds)]

    return cuts


STORED = {
    "one process": None,
    "rows 4": rows(4),
    "rows 3": rows(3),
    "columns 3": columns(3),
    "grid 2 x 2": grid,
    "flat ranges 5": flat(5),
}


@pytest.fixture(scope="module")
def trained():
    """The values after two steps, the next losses, and the checkpoints."""
    net = Net()
    state = {"model": net, "optimizer": adam(net), "epoch": 7}
    train(net, state["optimizer"], 2)
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save(state, STEP, mode="blocking")
    values = values_of(state)
    losses = train(net, state["optimizer"], 2, start=2)
    stores = {
        name: store if cuts is None else reshard(store, cuts) for name, cuts in STORED.items()
    }
    return values, losses, stores


def fresh(place, *, stepped=False):
    """The state of a rank with other values; no optimizer state before a step."""
    net = place(Net(seed=1))
    optimizer = adam(net)
    if stepped:  # without a forward: torch has none where tensor parallelism cuts unevenly
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": 0}


def equal(found, expected):
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert found[path].dtype == tensor.dtype, path
        assert torch.equal(found[path], tensor), path


@pytest.mark.parametrize(
    "where",
    ["FSDP2 2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("DDP 2", "HSDP 2 x 2"))],
)
def test_training_resumes_with_equal_losses(trained, where):
    _, losses, stores = trained
    count, place = PLACES[where]

    def work(_rank):
        state = fresh(place)
        restore(stores["columns 3"], state)
        return train(state["model"], state["optimizer"], 2, start=2)

    for found in run_ranks(count, work):
        assert found == losses


def test_restore_of_one_rank_waits_for_no_other(trained):
    """Also between a forward that has gathered the parameters and its backward."""
    values, _, stores = trained
    place = PLACES["FSDP2 2"][1]
    ready = threading.Barrier(2)

    def work(rank):
        expected = expected_of(values, place)
        # The optimizer first, which needs the names of still gathered parameters.
        state = dict(sorted(fresh(place).items(), reverse=True))
        weight = state["model"].up.weight
        versions = weight._version, weight._local_tensor._version
        for part in state["model"].modules():
            if isinstance(part, FSDPModule):
                part.set_reshard_after_forward(False)
        state["model"](torch.arange(5))
        assert not isinstance(next(state["model"].parameters()), DTensor)
        if rank == 0:
            restore(stores["rows 3"], state)
            equal(held_of(state), expected)
            assert state["model"].up.weight is weight
            # Written once, and not copied onto itself by `load_state_dict` thereafter.
            assert (weight._version, weight._local_tensor._version) == tuple(
                v + 2 for v in versions
            )
        ready.wait()  # a collective above would never have ended

    run_ranks(2, work)


def test_optimizer_names_and_order_match_the_bare_module(trained):
    values, _, stores = trained
    place = PLACES["FSDP2 x TP 3 x 2"][1]

    def work(_rank):
        expected = expected_of(values, place)
        state = fresh(place)
        restore(stores["grid 2 x 2"], state, include="optimizer")
        found = held_of(state)
        of_optimizer = {path for path in expected if path[0] == "optimizer"}
        equal({p: found[p] for p in of_optimizer}, {p: expected[p] for p in of_optimizer})

    run_ranks(6, work)


# -- single tensors --------------------------------------------------------------------------------


SHAPE = (5, 7, 3)


@st.composite
def placements(draw, mesh):
    one = [Replicate(), *map(Shard, range(3)), *(_StridedShard(d, split_factor=2) for d in (0, 1))]
    return [draw(st.sampled_from(one)) for _ in mesh]


def is_certain(tensor):
    """Whether this rank knows its elements; `test_sharding` has the cases where it does not."""
    try:
        local_shard(tensor, ("w",))
    except UnsupportedStateError:
        return False
    return True


@settings(deadline=None, max_examples=examples(35))
@given(splits(Region.whole(SHAPE)), st.sampled_from([(2,), (3,), (2, 2), (3, 2)]), st.data())
def test_any_rectangles_restore_in_any_placement(rectangles, mesh, data):
    count, chosen = math.prod(mesh), [data.draw(placements(mesh)) for _ in range(3)]
    array = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    ranks = [[] for _ in range(3)]
    for rectangle in rectangles:
        ranks[data.draw(st.integers(0, 2))].append(rectangle)
    store = memory()
    store_ranks(store, [[(("w",), array, held)] for held in ranks])

    def work(_rank):
        devices = init_device_mesh("cpu", mesh)
        for one in chosen:
            whole = torch.from_numpy(array)
            expected = distribute_tensor(whole, devices, one, src_data_rank=None)
            found = distribute_tensor(torch.zeros(SHAPE), devices, one, src_data_rank=None)
            version = found._version, found._local_tensor._version
            if not is_certain(found):
                with pytest.raises(UnsupportedStateError, match="depends on the order in which"):
                    restore(store, {"w": found})
                continue
            restore(store, {"w": found})
            assert torch.equal(found._local_tensor, expected._local_tensor)
            assert version < (found._version, found._local_tensor._version)

    run_ranks(count, work)


def test_state_shaped_unlike_its_sharded_parameter_needs_a_step_first():
    weight = nn.Parameter(torch.ones(8, 6))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight]["rows"] = torch.ones(8)
    store = memory()
    names = {"weight": weight}
    with checkpointer(store) as ckpt:
        ckpt.save({"names": names, "optimizer": optimizer}, STEP, mode="blocking")

    def work(rank):
        devices = init_device_mesh("cpu", (2,))
        placed = distribute_tensor(torch.zeros(8, 6), devices, [Shard(0)], src_data_rank=None)
        parameter = nn.Parameter(placed)
        with pytest.raises(RestoreMismatchError, match="run one step of the optimizer"):
            restore(store, {"names": {"weight": parameter}, "optimizer": SGD([parameter])})

    run_ranks(2, work)


# -- manually cut shards ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(25))
@given(splits(Region.whole(SHAPE)), wanted(SHAPE), st.booleans(), st.data())
def test_any_rectangles_restore_in_any_manual_shard(cut, held, of_numpy, data):
    array = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    ranks = [[] for _ in range(3)]
    for rectangle in cut:
        ranks[data.draw(st.integers(0, 2))].append(rectangle)
    store = memory()
    store_ranks(store, [[(("w",), array, regions)] for regions in ranks])
    tensor = np.zeros(held.sizes, np.float32) if of_numpy else torch.zeros(held.sizes)
    shard = penstock.Shard(tensor, SHAPE, held.offsets, replica=(1, 2))
    state = {"w": shard}
    restore(store, state)
    assert state["w"] is shard
    span = tuple(slice(o, o + n) for o, n in zip(held.offsets, held.sizes, strict=True))
    assert np.asarray(tensor).tobytes() == array[span].tobytes()


@settings(deadline=None, max_examples=examples(25))
@given(st.data())
def test_any_flat_ranges_restore_in_any_other_ranges(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4), label="shape"))
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def ranges(label):
        cuts = data.draw(st.lists(st.integers(0, array.size), max_size=4), label=label)
        return list(itertools.pairwise([0, *sorted(cuts), array.size]))

    stored = []
    for a, b in ranges("stored"):
        piece = array.reshape(-1)[a:b]
        shard = penstock.Shard(torch.from_numpy(piece.copy()), shape, flat_range=(a, b))
        (entry,) = described({"w": shard})
        assert entry.spec.shape == shape
        assert b"".join(cut(array, region).tobytes() for region in entry.regions) == piece.tobytes()
        stored.append([(("w",), array, entry.regions)])
    assert flaw_of_cover(shape, [one for held in stored for one in held[0][2]]) is None
    store = memory()
    store_ranks(store, stored)
    for a, b in ranges("restored"):
        flat = torch.zeros(b - a)
        restore(store, {"w": penstock.Shard(flat, shape, flat_range=(a, b))})
        assert flat.numpy().tobytes() == array.reshape(-1)[a:b].tobytes()


def test_one_process_saves_a_shard_of_the_whole_tensor():
    store = memory()
    shard = penstock.Shard(torch.arange(12.0).reshape(4, 3), (4, 3), (0, 0))
    with checkpointer(store) as ckpt:
        ckpt.save({"w": shard}, STEP, mode="blocking")
        assert torch.equal(ckpt.load()["w"], shard.tensor)


def test_one_process_cannot_save_half_a_tensor():
    half = penstock.Shard(torch.zeros(2, 3), (4, 3), (0, 0))
    with checkpointer(memory()) as ckpt:
        with pytest.raises(PenstockError, match="w"):
            ckpt.save({"w": half}, STEP, mode="blocking")
        assert ckpt.steps() == []


def stored_matrix(ranks=2, dtype=np.float32):
    array = np.arange(48, dtype=dtype).reshape(8, 6)
    store = memory()
    cut = rows(ranks)(("w",), array.shape)
    store_ranks(store, [[(("w",), array, held)] for held in cut])
    return store, torch.from_numpy(array)


def test_shard_of_another_whole_fails_with_both_shapes():
    store, _ = stored_matrix()
    shard = penstock.Shard(torch.zeros(2, 6), (9, 6), (0, 0))
    with pytest.raises(RestoreMismatchError, match=r"w: shape \[8, 6\] is stored, .*\[9, 6\]"):
        restore(store, {"w": shard})


def test_shard_takes_other_floats_with_cast():
    store, whole = stored_matrix(dtype=np.float64)
    shard = penstock.Shard(torch.zeros(2, 2), (8, 6), (3, 1))
    with pytest.raises(RestoreMismatchError, match="float64"):
        restore(store, {"w": shard})
    restore(store, {"w": shard}, cast=True)
    assert torch.equal(shard.tensor, whole[3:5, 1:3].float())


def test_shard_of_a_read_only_array_is_refused():
    store, _ = stored_matrix()
    array = np.zeros((2, 6), np.float32)
    array.flags.writeable = False
    with pytest.raises(UnsupportedStateError, match="read-only"):
        restore(store, {"w": penstock.Shard(array, (8, 6), (0, 0))})


def test_rank_outside_of_the_mesh_restores_nothing():
    store, whole = stored_matrix()

    def work(rank):
        devices = DeviceMesh("cpu", [1, 2])
        tensor = distribute_tensor(torch.zeros(8, 6), devices, [Shard(0)], src_data_rank=None)
        report = restore(store, {"w": tensor})
        assert report.restored == ("w",)
        return tensor._local_tensor.tolist(), report.bytes_read

    outside, *inside = run_ranks(3, work)
    assert outside == ([], 0)
    assert [held for held, _ in inside] == [whole[:4].tolist(), whole[4:].tolist()]

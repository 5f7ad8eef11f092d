"""`DTensor`s saved in any placement restore in each other one, on any mesh."""

import itertools
import math

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import penstock
from penstock import RankError, SaveError, UnsupportedStateError
from penstock.providers.tensor.sharding import local_shard

ONE = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
UNEVEN, EVEN, FEW, EMPTY = (7, 5), (8, 4), (1, 3), (0, 4)
SAVED = [(4,), (2, 2)]
"""The meshes of four ranks that save."""


def whole(shape):
    return 1 + torch.arange(float(math.prod(shape))).reshape(shape)


def placed(tensor, devices, placements):
    """The tensor on this mesh; None if a rank's elements are uncertain."""
    made = distribute_tensor(tensor, devices, placements, src_data_rank=None)
    try:
        local_shard(made, ("w",))
    except UnsupportedStateError:
        return None
    return made


def all_placements(mesh):
    return itertools.product(ONE, repeat=len(mesh))


@pytest.fixture(scope="module")
def stored():
    """A checkpoint with a tensor for each mesh, placement and shape; and the shapes by path."""
    store = memory()
    job = Job(4, store)

    def work(rank):
        state = {}
        for mesh in SAVED:
            devices = init_device_mesh("cpu", mesh)
            for placements in all_placements(mesh):
                for shape in (UNEVEN, EVEN) if len(mesh) > 1 else (UNEVEN, FEW, EMPTY):
                    tensor = placed(whole(shape), devices, placements)
                    if tensor is not None:
                        state[f"{placements} of {shape}"] = tensor
        few = DeviceMesh("cpu", [1, 3])
        state["two ranks"] = distribute_tensor(whole(UNEVEN), few, [Shard(0)], src_data_rank=None)
        with job.checkpointer(rank) as ckpt:
            ckpt.save(state, STEP, mode="blocking").result(300)
        return {path: tuple(tensor.shape) for path, tensor in state.items()}

    return store, run_ranks(4, work)[0]


@pytest.mark.parametrize(
    "mesh", [(3,), *(pytest.param(m, marks=pytest.mark.slow) for m in [(4,), (2, 2), (3, 2)])]
)
def test_every_placement_restores_every_other(stored, mesh):
    store, shapes = stored
    count = math.prod(mesh)
    job = Job(count, store)

    def work(rank):
        devices, restored = init_device_mesh("cpu", mesh), 0
        with job.checkpointer(rank) as ckpt:
            for placements in all_placements(mesh):
                state = {
                    path: tensor
                    for path, shape in shapes.items()
                    if (tensor := placed(torch.zeros(shape), devices, placements)) is not None
                }
                ckpt.restore(state, include=list(state))
                for path, tensor in state.items():
                    expected = placed(whole(shapes[path]), devices, placements)
                    assert torch.equal(tensor._local_tensor, expected._local_tensor), path
                restored += len(state)
        return restored

    found = set(run_ranks(count, work))
    assert len(found) == 1
    assert found.pop() >= len(ONE) * len(shapes)


def test_a_tensor_of_uneven_pieces_is_saved_if_they_are_torchs_own():
    """Four, four, four and two rows of 14 form one; other pieces form no tensor."""
    store = memory()
    good, bad = Job(4, store), Job(4, store)

    def made(devices, rank, rows, **options):
        start = sum(rows[:rank])
        local = whole((14, 1))[start : start + rows[rank]]
        return DTensor.from_local(local, devices, [Shard(0)], run_check=False, **options)

    def work(rank):
        devices = init_device_mesh("cpu", (4,))
        tensor = made(devices, rank, [4, 4, 4, 2], shape=(14, 1), stride=(1, 1))
        with good.checkpointer(rank) as ckpt:
            ckpt.save({"w": tensor}, 1, mode="blocking").result(300)
        refused = (UnsupportedStateError, SaveError, RankError)
        with bad.checkpointer(rank) as ckpt:
            for step, options in enumerate(({}, {"shape": (14, 1), "stride": (1, 1)})):
                tensor = made(devices, rank, [4, 3, 4, 3], **options)
                with pytest.raises(refused, match=r"one object on all ranks|its share has shape"):
                    ckpt.save({"w": tensor}, 2 + step, mode="blocking").result(300)

    run_ranks(4, work)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]
        assert torch.equal(ckpt.load()["w"], whole((14, 1)))


def test_a_local_tensor_of_pieces_is_refused_with_a_remedy():
    """For these, torch's mesh and placement do not determine a rank's elements."""
    store = memory()
    job = Job(2, store)

    def work(rank):
        start, stop = ((0, 3), (3, 5))[rank]
        rows = whole((5, 1))[start:stop]
        pieces = LocalShardsWrapper(local_shards=[rows], local_offsets=[(start, 0)])
        options = {"shape": torch.Size((5, 1)), "stride": (1, 1), "run_check": False}
        devices = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(pieces, devices, [Shard(0)], **options)
        with job.checkpointer(rank) as ckpt:
            refused = pytest.raises(UnsupportedStateError, match=r"w is a Local.*penstock\.Shard\(")
            with refused:
                ckpt.save({"w": tensor}, 1)
            advised = penstock.Shard(rows, (5, 1), (start, 0))
            ckpt.save({"w": advised}, 2, mode="blocking").result(300)

    run_ranks(2, work)
    with checkpointer(store) as ckpt:
        assert torch.equal(ckpt.load()["w"], whole((5, 1)))


def test_a_composite_local_tensor_is_refused():
    """Like 8-bit optimizer state, whose scales belong to blocks of a rank's rows."""
    store = memory()
    jobs = [Job(2, store) for _ in range(2)]

    def work(rank):
        local = TwoTensor(torch.ones(2, 3), torch.ones(2, 3))
        devices = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(local, devices, [Shard(0)], run_check=False)
        refused = pytest.raises((UnsupportedStateError, RankError), match="is a TwoTensor")
        with jobs[0].checkpointer(rank) as ckpt:
            with refused:
                ckpt.save({"w": tensor}, 1).result(300)
            ckpt.save({"w": torch.zeros(4, 3)}, 2, mode="blocking").result(300)
        with jobs[1].checkpointer(rank) as ckpt, refused:
            ckpt.restore({"w": tensor})

    run_ranks(2, work)

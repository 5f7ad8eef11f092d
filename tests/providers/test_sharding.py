"""The real places of distributed tensors' elements, and those by `local_shard`.

Each element of a whole tensor is its own number, so a local tensor shows what it holds.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from tests.providers.threads_as_ranks import run_ranks
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _dtensor_spec,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from penstock.core.errors import UnsupportedStateError
from penstock.core.plan.regions import flaw_of_cover
from penstock.providers.tensor import sharding
from penstock.providers.tensor.sharding import last_cut_of, local_shard, note_fully_shard

SHAPES = [(n,) for n in range(14)] + [(5, 3), (7, 2), (8, 6), (3, 0), (4, 3, 5), (3, 7, 2)]
PATH = ("model", "weight")


def whole(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def numbers_of(shard):
    """The numbers of the elements that a shard claims to hold, in its order."""
    tensor = whole(shard.global_shape)
    found = []
    for region in shard.regions:
        cut = zip(region.offsets, region.sizes, strict=True)
        found += tensor[tuple(slice(start, start + size) for start, size in cut)].flatten().tolist()
    return found


def held(tensor, **options):
    """A rank's real elements, and those by `local_shard`, or its refusal."""
    try:
        shard = local_shard(tensor, PATH, **options)
    except UnsupportedStateError as error:
        shard = error
    return tensor._local_tensor.detach().flatten().tolist(), shard


def check_ranks(shape, ranks):
    """Compare truth and claim of all ranks: `(numbers, shard)` of each, in the order of ranks."""
    holders = Counter()
    groups = {}
    for rank, (numbers, shard) in enumerate(ranks):
        assert shard.global_shape == shape
        assert numbers_of(shard) == numbers, (shape, rank, shard)
        holders.update(numbers)
        if shard.replica is None:
            assert not numbers
            continue
        assert shard.replica.ranks[shard.replica.index] == rank
        assert shard.replica.count == len(shard.replica.ranks)
        groups.setdefault(shard.replica.ranks, []).append(numbers)
    for members, contents in groups.items():
        assert len(contents) == len(members)
        assert all(numbers == contents[0] for numbers in contents)
        assert all(holders[n] == len(members) for n in contents[0])
    assert len(holders) == math.prod(shape)
    regions = [region for _, shard in ranks for region in shard.regions]
    assert flaw_of_cover(shape, regions) is None


def placements_of(mesh_dimensions, dimensions, *, strided):
    one = [Replicate(), *map(Shard, range(dimensions))]
    for factor in strided:
        one += [_StridedShard(d, split_factor=factor) for d in range(dimensions)]
    return itertools.product(one, repeat=mesh_dimensions)


@pytest.mark.parametrize(
    "mesh",
    [(3,), (2, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(2,), (3, 2), (2, 2, 2)])],
    ids=str,
)
def test_regions_match_distribute_tensor(mesh):
    """Also for strided cuts: refused only if another order would give other elements."""
    strided, shapes = ((2, 3), SHAPES) if len(mesh) < 3 else ((2,), SHAPES[::2])
    cases = [
        (shape, placements)
        for shape in shapes
        for placements in placements_of(len(mesh), len(shape), strided=strided)
    ]

    def work(rank):
        devices = init_device_mesh("cpu", mesh)
        return [
            held(distribute_tensor(whole(shape), devices, placements, src_data_rank=None))
            for shape, placements in cases
        ]

    refused = 0
    for (shape, placements), *ranks in zip(cases, *run_ranks(math.prod(mesh), work), strict=True):
        if isinstance(ranks[0][1], UnsupportedStateError):
            assert all(isinstance(shard, UnsupportedStateError) for _, shard in ranks)
            assert "depends on the order in which" in str(ranks[0][1])
            assert may_be_of_two_orders(shape, placements, mesh)
            refused += 1
        else:
            check_ranks(shape, ranks)
    assert bool(refused) == (len(mesh) > 1)


def may_be_of_two_orders(shape, placements, mesh):
    """Whether a strided cut precedes another of the dimension, and not all are even."""
    cuts = [
        (placement.dim, isinstance(placement, _StridedShard), ranks)
        for placement, ranks in zip(placements, mesh, strict=True)
        if not isinstance(placement, Replicate)
    ]
    for n, (dimension, strided, _) in enumerate(cuts):
        same = [other for other in cuts if other[0] == dimension]
        even = shape[dimension] % math.prod(ranks for *_, ranks in same) == 0
        if strided and any(other[0] == dimension for other in cuts[n + 1 :]):
            return not even or sum(one[1] for one in same) > 1
    return False


def test_fused_projection_is_several_rectangles():
    def work(rank):
        devices = init_device_mesh("cpu", (2,))
        placement = _StridedShard(0, split_factor=3)
        return held(distribute_tensor(whole((12, 2)), devices, [placement], src_data_rank=None))

    ranks = run_ranks(2, work)
    check_ranks((12, 2), ranks)
    assert [region.offsets for region in ranks[0][1].regions] == [(0, 0), (4, 0), (8, 0)]
    assert [region.sizes for region in ranks[0][1].regions] == [(2, 2)] * 3


def test_rank_outside_of_the_mesh_holds_nothing():
    def work(rank):
        devices = init_device_mesh("cpu", (2, 3), mesh_dim_names=("pp", "dp"))["dp"]
        both = [held(distribute_tensor(whole((7, 2)), devices, [Shard(0)]))]
        few = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 4])
        return [*both, held(distribute_tensor(whole((5,)), few, [Shard(0)]))]

    rows, few = zip(*run_ranks(6, work), strict=True)
    for stage in (0, 1):  # each stage has its own tensor
        shards = [shard for _, shard in rows[3 * stage : 3 * stage + 3]]
        assert [shard.replica.ranks for shard in shards] == [(3 * stage + n,) for n in range(3)]
        assert [region.sizes[0] for shard in shards for region in shard.regions] == [3, 3, 1]
    check_ranks((5,), few)
    assert [shard.replica is None for _, shard in few] == [True, False, True, True, False, True]


class Weight(nn.Module):
    """Has one parameter, perhaps distributed already."""

    def __init__(self, shape, devices=None, placements=()):
        super().__init__()
        weight = whole(shape)
        if devices is not None:
            weight = distribute_tensor(weight, devices, placements, src_data_rank=None)
        self.weight = nn.Parameter(weight)


def held_by_modules(module):
    """`held` of the one parameter, known to be cut by `fully_shard`; its gradient; a copy."""
    note_fully_shard(module)
    parameter = module.weight
    last_cut = last_cut_of(parameter)
    assert last_cut is not None
    same = held(torch.zeros_like(parameter), last_cut=last_cut)[1]
    known = held(parameter, last_cut=last_cut)
    assert getattr(same, "regions", str(same)) == getattr(known[1], "regions", str(known[1]))
    return known, held(parameter)


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(m, marks=pytest.mark.slow) for m in [(2,), (3,)]), (2, 3)], ids=str
)
def test_regions_match_fully_shard(mesh):
    shapes = [(n, m) for n in (1, 2, 3, 5, 6, 7, 13) for m in (1, 3)] + [(4,), (3, 2, 5)]

    def work(rank):
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "dp")[-len(mesh) :])
        return [held_by_modules(fully_shard(Weight(shape), mesh=devices)) for shape in shapes]

    for shape, *ranks in zip(shapes, *run_ranks(math.prod(mesh), work), strict=True):
        check_ranks(shape, [known for known, _ in ranks])
        check_ranks(shape, [unknown for _, unknown in ranks])  # there is only one order


@pytest.mark.parametrize(
    "mesh",
    [(3, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(2, 2), (2, 3), (2, 2, 2)])],
    ids=str,
)
def test_regions_match_fully_shard_after_tensor_parallelism(mesh):
    """A copy of a parameter with uncertain rows is refused on all ranks."""
    names = ("replicate", "dp", "tp")[-len(mesh) :]
    cases = [((n, 3), Shard(0)) for n in range(1, 14)] + [((n, 3), Shard(1)) for n in (4, 7)]
    cases += [((n, 2), _StridedShard(0, split_factor=3)) for n in (12, 13)]

    def work(rank):
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        found = []
        for shape, placement in cases:
            module = Weight(shape, devices["tp"], [placement])
            found.append(held_by_modules(fully_shard(module, mesh=devices[names[:-1]])))
        return found

    refused = []
    for (shape, placement), *ranks in zip(cases, *run_ranks(math.prod(mesh), work), strict=True):
        check_ranks(shape, [known for known, _ in ranks])
        copies = [unknown for _, unknown in ranks]
        if isinstance(copies[0][1], UnsupportedStateError):
            assert all(isinstance(shard, UnsupportedStateError) for _, shard in copies)
            refused.append((shape[0], placement))
        else:
            check_ranks(shape, copies)
    assert all(n % math.prod(mesh[-2:]) or isinstance(one, _StridedShard) for n, one in refused)
    # With 7 rows on 3 x 2 ranks torch's offsets are wrong; they never are for dp = 2.
    assert ((7, Shard(0)) in refused) == (mesh == (3, 2))


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ((3, 2, 2), [1, 7, 11, 13, 24]),
        *(pytest.param(m, range(1, 27), marks=pytest.mark.slow) for m in [(3, 2, 2), (2, 3, 2)]),
    ],
    ids=str,
)
def test_fully_shard_cuts_after_two_dimensions_of_other_parallelism(mesh, rows):
    """Those two from left to right: rightmost first would give other rows."""
    shapes = [(n, 2) for n in rows]

    def work(rank):
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "ep", "tp"))
        found = []
        for shape in shapes:
            module = Weight(shape, devices["ep", "tp"], [Shard(0)] * 2)
            found.append(held_by_modules(fully_shard(module, mesh=devices["dp"])))
        return found

    for shape, *ranks in zip(shapes, *run_ranks(math.prod(mesh), work), strict=True):
        check_ranks(shape, [known for known, _ in ranks])


@pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"),
    reason="needs torch.distributed.fsdp.DataParallelMeshDims",
)
@pytest.mark.parametrize(
    "rows", [[7], pytest.param([1, 5, 7, 11, 12], marks=pytest.mark.slow)], ids=str
)
def test_fully_shard_on_a_mesh_with_its_dimensions_anywhere(rows):
    placements = [
        [Shard(0), Replicate(), Shard(0)],
        [Replicate(), Replicate(), Shard(0)],
        [Shard(1), Replicate(), Replicate()],
        [_StridedShard(0, split_factor=3), Replicate(), Replicate()],
    ]
    shapes = [(n, 3) for n in rows]

    def work(rank):
        devices = init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("ep", "dp", "tp"))
        found = []
        for shape, one in itertools.product(shapes, placements):
            module = Weight(shape, devices, one)
            fully_shard(module, mesh=devices, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
            found.append(held_by_modules(module))
        return found

    cases = [shape for shape, _ in itertools.product(shapes, placements)]
    for shape, *ranks in zip(cases, *run_ranks(12, work), strict=True):
        check_ranks(shape, [known for known, _ in ranks])


def test_seven_rows_on_three_by_two_ranks_are_complete():
    """Offsets of torch give the last row to no rank."""

    def work(rank):
        devices = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        with torch.no_grad():
            model[0].weight.copy_(whole((7, 5)))
            model[1].weight.copy_(whole((5, 7)))
        parallelize_module(model, devices["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=devices["dp"])
        note_fully_shard(model)
        weights = model[0].weight, model[1].weight
        return tuple(held(weight, last_cut=last_cut_of(weight)) for weight in weights)

    first, second = zip(*run_ranks(6, work), strict=True)
    check_ranks((7, 5), first)
    check_ranks((5, 7), second)
    rows = [[(r.offsets[0], r.sizes[0]) for r in shard.regions] for _, shard in first]
    assert rows == [[(0, 2)], [(4, 1)], [(2, 2)], [(5, 1)], [], [(6, 1)]]


def refusal(placements, *, mesh=(2,), local=None, shape=(4, 2), order=None):
    """What rank 0 learns of a manually assembled tensor."""

    def work(rank):
        devices = init_device_mesh("cpu", mesh)
        meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
        options = {} if order is None else {"shard_order": order}
        spec = DTensorSpec(devices, tuple(placements), tensor_meta=meta, **options)
        mine = torch.zeros(shape if local is None else local)
        tensor = DTensor(mine, spec, requires_grad=False)
        with pytest.raises(UnsupportedStateError) as caught:
            local_shard(tensor, PATH)
        return str(caught.value)

    return run_ranks(math.prod(mesh), work)[0]


def test_pending_sums_are_refused():
    message = refusal([Partial()])
    assert "model/weight" in message
    assert ".redistribute" in message


def test_local_tensor_unlike_its_share_is_refused():
    message = refusal([Shard(0)], local=(3, 2))
    assert "shape [3, 2], but its share has shape [2, 2]" in message
    assert "dimension 0 to a multiple of 2" in message


def test_ambiguous_order_of_cuts_is_refused():
    message = refusal(
        [_StridedShard(0, split_factor=2), Shard(0)], mesh=(3, 2), local=(2, 2), shape=(7, 2)
    )
    assert "dimension 0 of size 7" in message
    assert "multiple of 6 (3 x 2)" in message


@pytest.mark.skipif(
    not hasattr(_dtensor_spec, "ShardOrderEntry"), reason="needs a torch whose DTensor has an order"
)
def test_dimensions_cut_in_a_custom_order_are_refused():
    order = (_dtensor_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    message = refusal([Shard(0), Shard(0)], mesh=(2, 2), local=(1, 2), order=order)
    assert "not cut in the default order" in message


def test_unknown_placements_are_refused():
    class Interleaved(Shard):
        pass

    assert "does not know which elements a " in refusal([Interleaved(0)], local=(2, 2))


def test_more_rectangles_than_can_be_stored_are_refused():
    rows = sharding.MAX_REGIONS // 2
    message = refusal([_StridedShard(1, split_factor=3)], local=(rows, 3), shape=(rows, 6))
    assert f"more than {sharding.MAX_REGIONS} rectangles" in message

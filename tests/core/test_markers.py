import numpy as np
import pytest
import torch
from tests.providers.threads_as_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Shard, Shards
from penstock.core.types import Region, Replica


def test_shard_is_one_rectangle():
    shard = Shard(np.zeros((2, 3)), [4, 3], np.array([2, 0]), replica=(1, 2))
    assert shard.regions == (Region((2, 0), (2, 3)),)
    assert shard.place == Replica(1, 2)
    assert shard.global_shape == (4, 3)
    assert Shard(torch.zeros(()), (), ()).regions == (Region((), ()),)


def test_empty_shard_has_no_rectangle():
    assert Shard(torch.zeros(0, 3), (4, 3), (4, 0)).regions == ()


def test_tensor_without_elements_is_whole_everywhere():
    for where in ({"offsets": (0, 0)}, {"flat_range": (0, 0)}):
        assert Shard(torch.zeros(0, 3), (0, 3), **where).regions == (Region((0, 0), (0, 3)),)


def test_inconsistent_arguments_are_refused():
    for arguments, message in [
        (((4, 3), (3, 0)), "elements 3:5 of dimension 0, whose size is 4"),
        (((4, 3), (-1, 0)), "elements -1:1 of dimension 0"),
        (((4, 3), (2,)), "2 dimensions, 1 offsets"),
        (((4,), (2,)), "2 dimensions, 1 offsets and a global shape of 1"),
        (((4, 3.0), (2, 0)), "global_shape=(4, 3.0)"),
        (((4, 3), 2), "offsets=2"),
        (((4, 3), None), "offsets=None and flat_range=None"),
        (((4, 3), (2, 0), (2, 2)), "replica=(2, 2)"),
        (((4, 3), (2, 0), (-1, 2)), "replica=(-1, 2)"),
        (((4, 3), (2, 0), (0, 1, 2)), "replica=(0, 1, 2)"),
        (((4, 3), (2, 0), 2), "replica=2"),
    ]:
        with pytest.raises(UnsupportedStateError) as caught:
            Shard(torch.zeros(2, 3), *arguments)
        assert message in str(caught.value)


def test_flat_range_becomes_several_rectangles():
    shard = Shard(np.zeros(6), (3, 4), flat_range=np.array([3, 9]), replica=(0, 2))
    assert shard.regions == (Region((0, 3), (1, 1)), Region((1, 0), (1, 4)), Region((2, 0), (1, 1)))
    assert shard.place == Replica(0, 2)
    assert shard.flat_range == (3, 9)
    assert Shard(torch.zeros(2, 2), (3, 4), flat_range=(4, 8)).regions == (Region((1, 0), (1, 4)),)
    assert Shard(torch.zeros(()), (), flat_range=(0, 1)).regions == (Region((), ()),)
    assert Shard(torch.zeros(0), (3, 4), flat_range=(12, 12)).regions == ()


def test_invalid_flat_range_is_refused():
    for shape, options, message in [
        ((3, 4), {"offsets": (0, 0), "flat_range": (0, 6)}, "it takes one of them"),
        ((3, 4), {"flat_range": (7, 13)}, "which has 12"),
        ((3, 4), {"flat_range": (-1, 5)}, "flat_range=(-1, 5)"),
        ((3, 4), {"flat_range": (9, 3)}, "give (start, stop)"),
        ((-3, -4), {"flat_range": (0, 6)}, "global shape [-3, -4]"),
        ((3, 4), {"flat_range": (0, 6, 1)}, "give (start, stop)"),
        ((3, 4), {"flat_range": 6}, "flat_range=6"),
        ((3, 4), {"flat_range": (0, 5)}, "without padding"),
    ]:
        with pytest.raises(UnsupportedStateError) as caught:
            Shard(torch.zeros(6), shape, **options)
        assert message in str(caught.value)


def test_non_tensors_are_refused():
    with pytest.raises(UnsupportedStateError, match="is given a list"):
        Shard([1, 2], (4,), (0,))


def test_distributed_tensor_is_no_manual_shard():
    def work(rank):
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(UnsupportedStateError, match="put the DTensor itself"):
            Shard(distribute_tensor(torch.zeros(2), mesh), (2,), (0,))

    run_ranks(1, work)


def piece(start, stop, **options):
    return Shard(torch.zeros(stop - start, 3), (8, 3), (start, 0), **options)


def test_shards_take_any_sequence_of_pieces_of_one_tensor():
    pieces = [piece(4, 6), Shard(torch.zeros(5), (8, 3), flat_range=(0, 5)), piece(8, 8)]
    assert Shards(iter(pieces)).pieces == tuple(pieces)
    nothing = Shard(torch.zeros(0, 3), (0, 3), (0, 0))
    assert len(Shards([nothing, nothing]).pieces) == 2


def test_incompatible_pieces_are_refused():
    for pieces, message in [
        ([], "holds nothing: give it a list of penstock.Shard"),
        ([torch.zeros(3)], "holds ['Tensor']"),
        ([piece(0, 2), piece(1, 4)], "from [0, 0] of shape [2, 3] and from [1, 0] of shape [3, 3]"),
        (
            [piece(0, 2), Shard(torch.zeros(2), (8, 3), flat_range=(5, 7))],
            "two pieces with the same elements",
        ),
        ([Shard(torch.zeros(()), (), ())] * 2, "two pieces with the same elements"),
        ([piece(0, 2), Shard(torch.zeros(2), (9,), (0,))], "global shape (8, 3) and (9,)"),
        ([piece(0, 2), piece(2, 4, replica=(0, 2))], "replica (0, 1) and (0, 2)"),
        (
            [piece(0, 2), Shard(torch.zeros(2, 3).double(), (8, 3), (2, 0))],
            "dtype torch.float32 and torch.float64",
        ),
        (
            [piece(0, 2), Shard(np.zeros((2, 3), "f4"), (8, 3), (2, 0))],
            "and float32: all pieces must",
        ),
        (
            [piece(0, 2), Shard(torch.zeros(2, 3, device="meta"), (8, 3), (2, 0))],
            "device cpu and meta",
        ),
    ]:
        with pytest.raises(UnsupportedStateError) as caught:
            Shards(pieces)
        assert message in str(caught.value)


def test_overlaps_are_found_among_pieces_in_any_order():
    cells = [(row, column) for row in range(4) for column in range(3)]
    made = {at: Shard(torch.zeros(2, 1), (9, 3), (2 * at[0], at[1])) for at in cells}
    Shards(list(made.values())[::-1])
    for at in cells:
        twice = Shard(torch.zeros(1, 1), (9, 3), (2 * at[0] + 1, at[1]))
        for pieces in ([*made.values(), twice], [twice, *made.values()]):
            with pytest.raises(UnsupportedStateError, match="two pieces with the same elements"):
                Shards(pieces)

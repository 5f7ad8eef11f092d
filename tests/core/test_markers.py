import numpy as np
import pytest
import torch
from tests.providers.threads_as_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Shard
from penstock.core.types import Region, Replica


def test_shard_is_one_rectangle():
    shard = Shard(np.zeros((2, 3)), [4, 3], np.array([2, 0]), replica=(1, 2))
    assert shard.regions == (Region((2, 0), (2, 3)),)
    assert shard.place == Replica(1, 2)
    assert shard.global_shape == (4, 3)
    assert Shard(torch.zeros(()), (), ()).regions == (Region((), ()),)


def test_empty_shard_has_no_rectangle():
    assert Shard(torch.zeros(0, 3), (4, 3), (4, 0)).regions == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((4, 3), (3, 0)), "elements 3:5 of dimension 0, which has 4"),
        (((4, 3), (-1, 0)), "elements -1:1 of dimension 0"),
        (((4, 3), (2,)), "2 dimensions, 1 offsets"),
        (((4,), (2,)), "2 dimensions, 1 offsets and a global shape of 1"),
        (((4, 3.0), (2, 0)), "global_shape=(4, 3.0)"),
        (((4, 3), None), "offsets=None"),
        (((4, 3), (2, 0), (2, 2)), "replica=(2, 2)"),
        (((4, 3), (2, 0), (-1, 2)), "replica=(-1, 2)"),
        (((4, 3), (2, 0), (0, 1, 2)), "replica=(0, 1, 2)"),
        (((4, 3), (2, 0), 2), "replica=2"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused(arguments, said):
    with pytest.raises(UnsupportedStateError) as caught:
        Shard(torch.zeros(2, 3), *arguments)
    assert said in str(caught.value)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(UnsupportedStateError, match="is given a list"):
        Shard([1, 2], (4,), (0,))


def test_distributed_tensor_is_no_shard_by_hand():
    def work(rank):
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(UnsupportedStateError, match="put the DTensor itself"):
            Shard(distribute_tensor(torch.zeros(2), mesh), (2,), (0,))

    run_ranks(1, work)

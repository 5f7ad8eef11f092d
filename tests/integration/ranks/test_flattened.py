"""FSDP1 with `use_orig_params=True`: parameters and optimizer state are flat ranges."""

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import Net, adam, train, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from penstock import Grads, RankError, UnsupportedStateError

pytestmark = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


STRATEGIES = {
    "FULL_SHARD 2": (2, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    "FULL_SHARD 3": (3, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    "SHARD_GRAD_OP 4": (4, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "NO_SHARD 2": (2, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "HYBRID_SHARD 2 x 2": (4, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
}


def fresh(where, seed=1, **options):
    net = Net(seed)
    if where is not None:
        _, chosen = STRATEGIES[where]
        chosen = chosen | options
        if "HYBRID" in where:
            chosen["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        chosen = {"use_orig_params": True, "device_id": torch.device("cpu")} | chosen
        for name in ("up", "down"):
            setattr(net, name, FullyShardedDataParallel(getattr(net, name), **chosen))
        net = FullyShardedDataParallel(net, **chosen)
    return {"model": net, "optimizer": adam(net), "epoch": 0}


@pytest.fixture(scope="module")
def plain():
    state = fresh(None, seed=0) | {"epoch": 7}
    train(state["model"], state["optimizer"], 2)
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save(state, STEP, mode="blocking")
    return values_of(state), train(state["model"], state["optimizer"], 2, start=2), store


@pytest.mark.parametrize("where", [where for where in STRATEGIES if where != "FULL_SHARD 2"])
def test_one_process_restores_a_save_of_ranks(where, plain):
    values, losses, stored = plain
    count, _ = STRATEGIES[where]
    store = memory()
    job, reader = Job(count, store), Job(count, stored)

    def work(rank):
        state = fresh(where)
        with reader.checkpointer(rank) as ckpt:
            report = ckpt.restore(state)
        assert (report.missing, report.unexpected, report.matched_by) == ((), (), "name")
        with job.checkpointer(rank) as ckpt:
            report = ckpt.save(state | {"epoch": 7}, STEP, mode="blocking").result(300)
        return report, train(state["model"], state["optimizer"], 2, start=2)

    for _, found in run_ranks(count, work):
        assert found == pytest.approx(losses, rel=1e-6)
    state = fresh(None)
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        ckpt.restore(state)
    found = values_of(state)
    assert found.keys() == values.keys()
    for path, tensor in values.items():
        assert torch.equal(found[path], tensor), path


@pytest.mark.parametrize("where", ["FULL_SHARD 2", "SHARD_GRAD_OP 4"])
def test_data_gathered_before_a_restore_is_discarded(where, plain):
    _, losses, stored = plain
    count, _ = STRATEGIES[where]
    reader = Job(count, stored)

    def work(rank):
        state = fresh(where)
        state["model"](torch.arange(5))  # leaves gathered parameters
        with reader.checkpointer(rank) as ckpt:
            ckpt.restore(state)
        return train(state["model"], state["optimizer"], 2, start=2)

    for found in run_ranks(count, work):
        assert found == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("state_of", "message"),
    [
        (lambda s: {"optimizer": s["optimizer"]}, "FullyShardedDataParallel module itself"),
        (lambda s: {"model": s["model"].module}, "FullyShardedDataParallel module itself"),
        (lambda s: {"model": s["model"].module.up.module}, "FullyShardedDataParallel module itse"),
        (lambda s: {"grads": Grads(s["model"])}, "cannot be stored"),
    ],
    ids=["optimizer alone", "bare module", "bare part", "gradients"],
)
def test_shards_without_element_positions_are_refused(state_of, message):
    def work(rank):
        state = state_of(fresh("FULL_SHARD 2"))
        refused = pytest.raises(UnsupportedStateError, match=message)
        with Job(1, memory()).checkpointer(0) as ckpt, refused:
            ckpt.save(state, STEP)

    run_ranks(2, work)


def test_ranges_of_tensor_parallel_parameters_are_refused():
    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = torch.nn.Sequential(torch.nn.Linear(4, 8))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(net, device_mesh=mesh["dp"], **options)
        refused = pytest.raises(UnsupportedStateError, match="FSDP1 over DTensors")
        with Job(1, memory()).checkpointer(0) as ckpt, refused:
            ckpt.save({"model": model}, STEP)

    run_ranks(4, work)


class Counted(torch.nn.Module):
    """Has extra state, a buffer, and, on demand, its own loading code."""

    def __init__(self, *, hook=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5, 3))
        self.register_buffer("seen", torch.zeros(2))
        self.count = 0
        if hook:
            self.register_load_state_dict_post_hook(lambda *_: None)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]

    def forward(self, x):
        return x @ self.weight


def test_extra_state_and_buffers_restore_and_load_hooks_are_refused():
    store = memory()
    job = Job(2, store)

    def sharded(module):
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(torch.nn.Sequential(module), **options)

    def work(rank):
        saved, found = Counted(), Counted()
        saved.count, saved.seen = 5, torch.ones(2)
        model = sharded(saved)
        with torch.no_grad():
            saved.weight.add_(torch.arange(float(saved.weight.numel())) + 100 * rank)
        with job.checkpointer(rank) as ckpt:
            ckpt.save({"model": model}, STEP, mode="blocking").result(300)
            other = sharded(found)
            ckpt.restore({"model": other})
            assert torch.equal(found.weight, saved.weight)
            assert (found.count, found.seen.tolist()) == (5, [1.0, 1.0])
            # The rank that first learns of the other's refusal does not reach its own.
            refused = pytest.raises((UnsupportedStateError, RankError), match="their own code")
            with refused:
                ckpt.restore({"model": sharded(Counted(hook=True))})

    run_ranks(2, work)

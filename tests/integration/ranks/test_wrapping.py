"""Modules and optimizers wrapped as in jobs: ranks save and restore them like bare ones."""

from collections import namedtuple

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import (
    PLACES,
    TP_PLAN,
    Net,
    adam,
    alone,
    fsdp2,
    local,
    trained,
    values_of,
)
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from penstock import Grads, RankError, RestoreMismatchError, SaveError, UnsupportedStateError


class Tied(Net):
    """Two names for one weight of six elements; the last of four ranks has none."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.last = nn.LayerNorm(6)
        self.last.weight = self.norm.weight


class Frozen(Net):
    """Two untrained parameters without state in an optimizer of all."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.embed.weight.requires_grad_(False)
        self.up.bias.requires_grad_(False)


class Stacked(Net):
    """With four experts in one tensor."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.experts = nn.Module()
        made = torch.Generator().manual_seed(seed)
        self.experts.weight = nn.Parameter(torch.randn(4, 6, 5, generator=made))


def expert_parallel(net):
    """Experts over the ranks of one dimension, their parameters over those of the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    weight = distribute_tensor(net.experts.weight.data, mesh["ep"], [Shard(0)], src_data_rank=None)
    net.experts.weight = nn.Parameter(weight)
    fully_shard(net.experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    return fully_shard(net, mesh=init_device_mesh("cpu", (4,)))


def sequence_parallel(net):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = RowwiseParallel(input_layouts=Replicate())
    plan = {"embed": whole, "norm": SequenceParallel(), "head": ColwiseParallel()}
    parallelize_module(net, mesh["tp"], {**TP_PLAN, **plan})
    return fully_shard(net, mesh=mesh["dp"])


def compiled(net):
    """A net whose parts are recomputed in the backward pass."""
    net.up, net.down = checkpoint_wrapper(net.up), checkpoint_wrapper(net.down)
    for part in (net.up, net.down):
        fully_shard(part)
    return torch.compile(fully_shard(net), backend="eager")


def data_parallel(net):
    return torch.compile(nn.parallel.DistributedDataParallel(net), backend="eager")


def ignoring(net):
    return fully_shard(net, ignored_params={net.head.weight, net.norm.bias})


def by_columns(net):
    even = lambda p: p.ndim > 1 and p.shape[1] % 2 == 0  # noqa: E731 - or torch refuses it
    return fully_shard(net, shard_placement_fn=lambda p: Shard(int(even(p))))


def fsdp1(net):
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    net.up = checkpoint_wrapper(net.up)
    net.down = FullyShardedDataParallel(net.down, **options)
    return FullyShardedDataParallel(net, ignored_modules=[net.head], **options)


def interleaved(net):
    """Every second layer, as a stage with two chunks of the model has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    chunks = (("embed", "down", "head"), ("up", "norm"))
    for name in chunks[1 - mesh.get_coordinate()[0]]:
        delattr(net, name)
    return fully_shard(net, mesh=mesh["dp"])


WRAPPED = {
    "norms in sequence parallel": (4, sequence_parallel, Net),
    "compiled": (2, compiled, Net),
    "ignored parameters": (2, ignoring, Net),
    "by columns": (2, by_columns, Net),
    "replicate": (2, replicate, Net),
    "DDP, compiled": (2, data_parallel, Net),
    "tied": (4, fsdp2(4), Tied),
    "frozen": (2, fsdp2(2), Frozen),
    "FSDP1": (2, fsdp1, Net),
    "FSDP1, tied": (3, fsdp1, Tied),
    "interleaved chunks": (4, interleaved, Net),
    "experts in one tensor": (4, expert_parallel, Stacked),
}

# Each stage stores the buffer; with FSDP1 each rank stores the step count of a cut parameter, and
# the state of an ignored one.
TWICE = {"interleaved chunks": 12, "FSDP1": 636, "FSDP1, tied": 1272}


QUICK = {"tied", "frozen", "FSDP1, tied", "interleaved chunks"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WRAPPED]
)
def test_a_wrapped_module_is_stored_and_restored_as_bare(name):
    count, place, make = WRAPPED[name]
    options = {"make": make, "optimize": adam_of_trained}
    plain, store = memory(), memory()
    bare = trained(alone, **options)
    with checkpointer(plain) as ckpt:
        ckpt.save(bare, STEP, mode="blocking")
    job = Job(count, store)
    readers = [Job(count, plain), Job(count, store)]

    def work(rank):
        state = trained(place, **options)
        with job.checkpointer(rank) as ckpt:
            saved = ckpt.save(state, STEP, mode="blocking").result(300)
        for reader in readers:
            fresh = trained(place, seed=1, **options)
            with reader.checkpointer(rank) as ckpt:
                report = ckpt.restore(fresh)
            assert (report.missing, report.unexpected, report.matched_by) == ((), (), "name")
            check(values_of(fresh), values_of(state))
        return saved.total.bytes_twice

    assert set(run_ranks(count, work)) == {TWICE.get(name, 0)}
    fresh = trained(alone, seed=1, **options)
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        report = ckpt.restore(fresh)
    assert (report.missing, report.unexpected, report.matched_by) == ((), (), "name")
    check(values_of(fresh), values_of(bare))


def adam_of_trained(net):
    """An optimizer of all parameters; frozen ones never get a gradient."""
    optimizer = adam(net)
    frozen = [p for p in net.parameters() if not p.requires_grad]

    def drop(*_):
        for parameter in frozen:
            parameter.grad = None

    optimizer.register_step_pre_hook(drop)
    return optimizer


def check(found, expected):
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert torch.equal(found[path], tensor), path


def test_a_module_can_be_moved_and_cast_after_a_save_and_a_restore():
    """torch swaps a `DTensor` for another, and refuses that while anything references it weakly."""
    store = memory()
    job = Job(2, store)

    def work(rank):
        state = trained(fsdp2(2))
        with job.checkpointer(rank) as ckpt:
            ckpt.save(state, 1, mode="lazy").result(300)
            ckpt.restore(state)
            state["model"].double()
            ckpt.save({"model": state["model"]}, 2).result(300)

    run_ranks(2, work)
    with checkpointer(store) as ckpt:
        single, double = ckpt.load(1)["model"], ckpt.load(2)["model"]
    for name, tensor in double.items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, single[name].double()), name


def test_names_are_known_after_a_forward_resharded_to_fewer_ranks():
    """Its tensors then replace the parameters; the optimizer is described first."""
    plain = memory()
    with checkpointer(plain) as ckpt:
        ckpt.save(trained(alone), STEP, mode="blocking")
    store = memory()
    reader, job = Job(4, plain), Job(4, store)

    def work(rank):
        net = Net(1)
        for part in (net.up, net.down, net):
            fully_shard(part, reshard_after_forward=2)
        state = {"epoch": 0, "optimizer": adam(net), "model": net}
        net(torch.arange(5))
        with reader.checkpointer(rank) as ckpt:
            assert ckpt.restore(state).matched_by == "name"
        net(torch.arange(5))
        with job.checkpointer(rank) as ckpt:
            ckpt.save(state, STEP, mode="blocking").result(300)

    run_ranks(4, work)
    fresh = trained(alone, seed=1)
    with checkpointer(store) as ckpt:
        assert ckpt.restore(fresh).matched_by == "name"
    check(values_of(fresh), values_of(trained(alone)))


class Fused(nn.Module):
    """Stores the halves of its weight separately, and joins them on load."""

    def __init__(self, seed=0):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).reshape(4, 2, 3) + 100 * seed)
        self.count = 7 * seed
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._fuse)

    @staticmethod
    def _split(_, state, prefix, *__):
        weight = state.pop(f"{prefix}weight")
        for n, half in enumerate("ab"):
            state[prefix + half] = weight[:, n].contiguous()

    @staticmethod
    def _fuse(_, state, prefix, *__):
        halves = [state.pop(prefix + half) for half in "ab"]
        state[f"{prefix}weight"] = torch.stack(halves, 1)

    def get_extra_state(self):
        return {"count": self.count, "mean": torch.full((2,), float(self.count))}

    def set_extra_state(self, state):
        assert state["mean"].tolist() == [state["count"]] * 2
        self.count = state["count"]


def behind_tensor_parallelism(module):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = distribute_tensor(module[0].weight.data, mesh["tp"], [Shard(0)], src_data_rank=None)
    module[0].weight = nn.Parameter(weight)
    return fully_shard(module, mesh=mesh["dp"])


@pytest.mark.parametrize(
    ("count", "place"), [(2, fully_shard), (4, behind_tensor_parallelism)], ids=["FSDP2", "and TP"]
)
def test_hooks_of_a_sharded_module_get_their_own_output(count, place):
    """They use `DTensor`s, which torch does not mix with plain tensors."""
    plain, store = memory(), memory()
    with checkpointer(plain) as ckpt:
        ckpt.save({"model": nn.Sequential(Fused(3))}, STEP, mode="blocking")
    reader, job = Job(count, plain), Job(count, store)

    def work(rank):
        state = {"model": place(nn.Sequential(Fused()))}
        with reader.checkpointer(rank) as ckpt:
            ckpt.restore(state)
        expected = place(nn.Sequential(Fused(3)))[0].weight
        assert torch.equal(local(state["model"][0].weight), local(expected))
        assert state["model"][0].count == 21
        with job.checkpointer(rank) as ckpt:
            ckpt.save(state, STEP, mode="blocking").result(300)

    run_ranks(count, work)
    found = nn.Sequential(Fused())
    with checkpointer(store) as ckpt:
        ckpt.restore({"model": found})
    assert torch.equal(found[0].weight, Fused(3).weight)


class Application:
    """A model and its optimizer in the form of `torch.distributed.checkpoint`."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "more": [1, {"n": 2}]}

    def load_state_dict(self, state):
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


Pair = namedtuple("Pair", "name tensor")


class InPairs(Application):
    """Its state is not a dict, and has tensors in named and other tuples."""

    def state_dict(self):
        return [(Pair(*pair),) for pair in self.net.state_dict().items()]

    def load_state_dict(self, state):
        self.net.load_state_dict({pair[0]: pair[1] for (pair,) in state})


@pytest.mark.parametrize("kind", [Application, pytest.param(InPairs, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "where", ["FSDP2 3", pytest.param("FSDP2 x TP 2 x 2", marks=pytest.mark.slow)]
)
def test_code_that_loads_sharded_state_gets_it_sharded(where, kind):
    count, place = PLACES[where]
    plain, store = memory(), memory()
    reader, job = Job(count, plain), Job(count, store)

    def state_of(place, seed=0):
        state = trained(place, seed=seed)
        state["optimizer"].zero_grad()  # as torch wants it here
        return state, {"app": kind(state["model"], state["optimizer"])}

    def shown(state):
        every = values_of(state)
        return every if kind is Application else {p: t for p, t in every.items() if len(p) == 2}

    bare, app = state_of(alone)
    with checkpointer(plain) as ckpt:
        ckpt.save(app, STEP, mode="blocking")

    def work(rank):
        found, app = state_of(place, seed=1)
        with reader.checkpointer(rank) as ckpt:
            report = ckpt.restore(app)
        check(shown(found), shown(state_of(place)[0]))
        with job.checkpointer(rank) as ckpt:
            ckpt.save(app, STEP, mode="blocking").result(300)
        return report.bytes_needed

    assert max(run_ranks(count, work)) < 0.8 * sum(t.nbytes for t in shown(bare).values())
    found, app = state_of(alone, seed=1)
    with checkpointer(store) as ckpt:
        ckpt.restore(app)
    check(shown(found), shown(bare))


@pytest.mark.parametrize(
    "where", ["FSDP2 x TP 3 x 2", pytest.param("HSDP 2 x 2", marks=pytest.mark.slow)]
)
def test_gradients_restore_in_the_parameters_placement(where):
    """Also uneven ones, which alone do not show a rank its rows."""
    count, place = PLACES[where]
    store = memory()
    job, reader = Job(count, store), Job(count, store)

    def state_of(place, seed=0):
        net = place(Net(seed))
        for parameter in net.parameters():
            parameter.grad = None if seed else 2 * parameter.detach()
        return {"model": net, "gradients": Grads(net)}

    def work(rank):
        state, fresh = state_of(place), state_of(place, seed=1)
        with job.checkpointer(rank) as ckpt:
            ckpt.save(state, STEP, mode="blocking").result(300)
        with reader.checkpointer(rank) as ckpt:
            ckpt.restore(fresh)
        for parameter, other in zip(
            state["model"].parameters(), fresh["model"].parameters(), strict=True
        ):
            assert torch.equal(local(other.grad), local(parameter.grad))

    run_ranks(count, work)
    fresh = state_of(alone, seed=1)
    with checkpointer(store) as ckpt:
        ckpt.restore(fresh)
    assert all(torch.equal(p.grad, 2 * p) for p in fresh["model"].parameters())


@pytest.mark.parametrize("depths", [(2, 4), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_stages_with_other_weights_under_one_name_fail_by_name(depths):
    """Like `nn.Sequential`, whose layers count from 0: one stage's weights would be lost."""
    store = memory()
    job = Job(4, store)

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depths[rank // 2])))
        with job.checkpointer(rank) as ckpt, torch.no_grad():
            for parameter in stage.parameters():
                parameter.fill_(1.0)
            fully_shard(stage, mesh=mesh["dp"])
            ckpt.save({"model": stage}, 1).result(300)  # copies of one tensor may be there
            for parameter in stage.parameters():
                local(parameter).fill_(1.0 + rank // 2)
            with pytest.raises((SaveError, RankError), match=r"model/[01]\.\w+ from .*rank [23]"):
                ckpt.save({"model": stage}, 2).result(300)

    run_ranks(4, work)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]


def test_an_optimizer_without_names_on_some_ranks_is_refused():
    """Two stages have other parameters in one place: one's state would be lost silently."""
    store = memory()
    job = Job(4, store)

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        state = trained(lambda net: fully_shard(net, mesh=mesh["dp"]))
        refused = pytest.raises(
            UnsupportedStateError, match="no names, and only 2 of the 4 ranks hold"
        )
        with job.checkpointer(rank) as ckpt, refused:
            ckpt.save({"optimizer": state["optimizer"]}, STEP).result(300)

    run_ranks(4, work)


class Loading:
    """Returns and loads the state of a module that is not in the state."""

    def __init__(self, net):
        self.net = net

    def state_dict(self):
        return self.net.state_dict()

    def load_state_dict(self, state):
        self.net.load_state_dict(state)


def test_code_that_loads_a_stage_must_leave_that_to_the_modules():
    store = memory()
    job, reader = Job(4, store), Job(4, store)

    def work(rank):
        state = trained(interleaved)
        app = {"app": Loading(state["model"])}
        with job.checkpointer(rank) as ckpt:
            ckpt.save(app, STEP, mode="blocking").result(300)
        refused = pytest.raises((RestoreMismatchError, RankError), match="the modules themselves")
        with reader.checkpointer(rank) as ckpt, refused:
            ckpt.restore(app)

    run_ranks(4, work)

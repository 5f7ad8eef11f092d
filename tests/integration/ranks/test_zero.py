"""`ZeroRedundancyOptimizer`: each rank saves its part, and any partition restores it."""

import warnings

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import Net, train, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import UnsupportedStateError

with warnings.catch_warnings():  # torch warns of its own use of TorchScript
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


def fresh(count, seed=1, **options):
    """The state of a rank that owns some parameters; without ranks of a plain optimizer."""
    net = Net(seed)
    split = [[*net.up.parameters(), *net.head.parameters()], [*net.embed.parameters()]]
    split[1] += [*net.down.parameters(), *net.norm.parameters()]
    groups = [{"params": split[0]}, {"params": split[1], "weight_decay": 0.5}]
    if not count:
        return {"model": net, "optimizer": torch.optim.AdamW(groups, lr=0.01), "epoch": 0}
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01, **options)
    return {"model": net, "optimizer": optimizer, "epoch": 0}


def state_of(optimizer):
    return getattr(optimizer, "optim", optimizer).state


def check(state, values):
    """Compare this rank's state with that of one process; return the names that it owns."""
    owned = set()
    for name, parameter in state["model"].named_parameters():
        assert torch.equal(parameter, values["model", name])
        for key, tensor in state_of(state["optimizer"]).get(parameter, {}).items():
            assert torch.equal(tensor, values["optimizer", name, key]), name
            owned.add(name)
    groups = state["optimizer"].param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.02, 0.01), (0.02, 0.5)]
    if hasattr(state["optimizer"], "optim"):
        inner = state["optimizer"].optim.param_groups
        assert [(g["lr"], g["weight_decay"]) for g in inner] == [(0.02, 0.01), (0.02, 0.5)]
    assert state["epoch"] == 7
    return owned


@pytest.fixture(scope="module")
def plain():
    """The values after two steps of one process, the losses of the next two, and its checkpoint."""
    state = fresh(0, seed=0) | {"epoch": 7}
    train(state["model"], state["optimizer"], 2)
    for group in state["optimizer"].param_groups:
        group["lr"] = 0.02
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save(state, STEP, mode="blocking")
    values = values_of(state)
    return values, train(state["model"], state["optimizer"], 2, start=2), store


def saved_by(count, mode="blocking", **options):
    """A checkpoint of this many ranks, and their reports."""
    store = memory()
    job = Job(count, store)

    def work(rank):
        state = fresh(count, seed=0, **options) | {"epoch": 7}
        train(state["model"], state["optimizer"], 2)
        for group in state["optimizer"].param_groups:
            group["lr"] = 0.02  # as a scheduler does; the local optimizer learns of it in the step
        with job.checkpointer(rank) as ckpt:
            handle = ckpt.save(state, STEP, mode=mode)
            train(state["model"], state["optimizer"], 1, start=2)
            return handle.result(300)

    return store, run_ranks(count, work)


CASES = {
    "4 ranks": (4, {}),
    "2 ranks, lazy": (2, {"mode": "lazy"}),
    "3 ranks, buckets": (3, {"parameters_as_bucket_view": True}),
}


@pytest.fixture(scope="module", params=["one process", *CASES])
def stored(request, plain):
    if request.param == "one process":
        return plain[2]
    count, options = CASES[request.param]
    return saved_by(count, **options)[0]


def test_one_process_restores_into_a_plain_optimizer(stored, plain):
    values, losses, _ = plain
    state = fresh(0)
    with checkpointer(stored) as ckpt:
        assert ckpt.verify().ok
        report = ckpt.restore(state)
    assert (report.missing, report.unexpected, report.matched_by) == ((), (), "name")
    assert check(state, values) == {name for name, _ in state["model"].named_parameters()}
    assert train(state["model"], state["optimizer"], 2, start=2) == losses


@pytest.mark.parametrize("count", [1, 3])
def test_each_partition_restores_before_the_first_step(stored, plain, count):
    values, losses, _ = plain
    job = Job(count, stored)

    def work(rank):
        state = fresh(count)
        with job.checkpointer(rank) as ckpt:
            report = ckpt.restore(state)
        assert (report.missing, report.unexpected, report.matched_by) == ((), (), "name")
        owned = check(state, values)
        assert train(state["model"], state["optimizer"], 2, start=2) == losses
        return owned

    owned = run_ranks(count, work)
    assert sorted(name for names in owned for name in names) == sorted(
        path[1] for path in values if path[2:] == ("step",)
    )


def test_state_of_other_ranks_is_not_unexpected_if_a_rank_restores_alone(plain):
    """With several ranks only objects missing in all templates count, and none lacks its own."""
    values, _, store = plain

    def work(_):
        state = fresh(2)
        with checkpointer(store, ranks="alone") as ckpt:
            report = ckpt.restore(state)
        assert (report.missing, report.unexpected) == ((), ())
        return check(state, values)

    first, second = run_ranks(2, work)
    assert first
    assert second
    assert not first & second


def test_a_rank_alone_writes_its_own_and_the_rest_is_written_once(plain):
    values, _, _ = plain
    _, reports = saved_by(4)
    raw = sum(tensor.nbytes for tensor in values.values())
    assert 0 <= sum(report.bytes_raw for report in reports) - raw < 500  # plain values
    assert all(report.bytes_raw for report in reports)


def test_loaded_state_is_that_of_a_plain_optimizer(plain):
    tree = checkpointer(saved_by(3)[0]).load()["optimizer"]
    state = fresh(0)
    state["optimizer"].load_state_dict(tree)
    for name, parameter in state["model"].named_parameters():
        for key, tensor in state["optimizer"].state[parameter].items():
            assert torch.equal(tensor, plain[0]["optimizer", name, key])


def test_functional_optimizers_in_the_backward_of_ddp_are_refused():
    def work(rank):
        net = torch.nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, overlap_with_ddp=True
        )
        job = Job(1, memory())
        refused = pytest.raises(UnsupportedStateError, match="overlap_with_ddp")
        with job.checkpointer(rank) as ckpt, refused:
            ckpt.save({"model": net, "optimizer": optimizer}, STEP)

    run_ranks(1, work)

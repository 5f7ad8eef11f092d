"""Checkpoints that many ranks save together, read by one process, bit by bit."""

import threading

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import PLACES, Net, adam, values_of
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

FEW = ["DDP 2", "FSDP2 3", "HSDP 2 x 2", "TP 4", "FSDP2 x TP 2 x 2", "FSDP2 x TP 3 x 2"]


_alone = threading.Lock()  # threads share torch's generator, and would draw different weights


def trained(place, *, seed=0):
    """A state after two steps; without a forward, which torch refuses under uneven TP."""
    with _alone:
        net = Net(seed)
    net = place(net)
    optimizer = adam(net)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": 7}


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("mode", ["blocking", "lazy"])
def test_what_ranks_save_is_loaded_by_one_process(name, mode):
    count, place = PLACES[name]
    store = memory()
    job = Job(count, store)

    def rank_saves(rank):
        state = trained(place)
        with job.checkpointer(rank) as ckpt:
            return ckpt.save(state, STEP, mode=mode).result(30)

    reports = run_ranks(count, rank_saves)
    # The same elements in one process; torch 2.13 cannot gather uneven ones itself.
    values = values_of(trained(lambda net: net))
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        tree = ckpt.load()
    assert tree["epoch"] == 7
    stored = {path: tree["model"][path[1]] for path in values if path[0] == "model"}
    assert stored
    for path, tensor in stored.items():
        assert torch.equal(tensor, values[path]), path
    net = Net(1)
    fresh = {"model": net, "optimizer": adam(net), "epoch": 0}
    with checkpointer(store) as ckpt:
        ckpt.restore(fresh)
    found = values_of(fresh)
    assert found.keys() == values.keys()
    for path, tensor in values.items():
        assert torch.equal(found[path], tensor), path
    assert {report.ranks for report in reports} == {count}
    # Each byte is written once: replicas share them.
    raw = sum(t.nbytes for t in values.values())
    values_bytes = sum(report.bytes_raw for report in reports) - raw
    assert 0 < values_bytes < 4096

"""Lazy saves of sharded state: a step unseen by the engine fails the save on all ranks.

The versions of a DTensor and of its local tensor do not change under foreach and fused steps, so
only memory samples can show such a step.
"""

import threading
from contextlib import suppress

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import Net, fsdp2, local
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import RankError, TornSnapshotError
from penstock.testing.faults import FaultyBackend

WORLD = 2


def step_unseen(optimizer):
    """A step that no hook of torch sees."""
    type(optimizer).step.__wrapped__(optimizer)


def trained(how):
    net = fsdp2(WORLD)(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **{how: True})
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": 1}


def tensors(state):
    moments = [t for of in state["optimizer"].state.values() for t in of.values()]
    return [*state["model"].parameters(), *moments]


def versions(state):
    return [(tensor._version, local(tensor)._version) for tensor in tensors(state) if tensor.ndim]


@pytest.mark.parametrize(("how", "changed_by"), [("foreach", 1), ("fused", 0)])
def test_a_step_of_dtensors_past_the_fence_fails_the_save_on_all_ranks(how, changed_by):
    store, go_on = memory(), threading.Event()
    job = Job(WORLD, lambda _: FaultyBackend(store))

    def work(rank):
        state = trained(how)
        with job.checkpointer(rank) as ckpt:
            ckpt.save(state, 1, mode="blocking")
            ckpt._backend.inner.block("create", go_on)  # committed state is never torn
            handle = ckpt.save(state, 2, mode="lazy")
            before = versions(state)
            if rank == changed_by:
                step_unseen(state["optimizer"])
                assert versions(state) == before
            with suppress(TornSnapshotError, RankError):  # `result` raises it again
                ckpt.fence()
            go_on.set()
            with pytest.raises((TornSnapshotError, RankError)) as caught:
                handle.result(300)
            return caught.value

    errors = run_ranks(WORLD, work)
    assert isinstance(errors[changed_by], TornSnapshotError)
    assert isinstance(errors[1 - changed_by], RankError)
    assert errors[1 - changed_by].rank == changed_by
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1]
        assert ckpt.verify(1).ok


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_a_step_of_dtensors_waits_at_the_fence(how):
    store = memory()
    job = Job(WORLD, store)

    def work(rank):
        state = trained(how)
        whole = [t.full_tensor().clone() for t in state["model"].parameters()]
        with job.checkpointer(rank) as ckpt:
            handle = ckpt.save(state, 1, mode="lazy")
            state["optimizer"].step()
            handle.result(300)
        return whole

    expected = run_ranks(WORLD, work)[0]
    with checkpointer(store) as ckpt:
        tree = ckpt.load()["model"]
    names = dict(Net().named_parameters())
    assert all(torch.equal(tree[n], t) for n, t in zip(names, expected, strict=True))

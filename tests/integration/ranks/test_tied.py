"""A weight shared by two pipeline stages: each holds a copy, under one name or two."""

import pytest
import torch
from tests.core.stored_ranks import STEP
from tests.integration.ranks.saving import Job
from tests.integration.ranks.topologies import Net, expected_of, held_of, pipeline, trained
from tests.integration.support import checkpointer, memory
from tests.providers.threads_as_ranks import run_ranks

from penstock import SaveError, Shard


def tied(seed=0):
    net = Net(seed)
    net.head.weight = net.embed.weight
    return net


def alone(net):
    return net


def one_name(net):
    """A pipeline whose last stage names its copy like the first one."""
    net = pipeline(net)
    if hasattr(net, "head"):
        net.embed = net.head
        del net.head
    return net


PLACES = {"one process": (1, alone), "two names": (4, pipeline), "one name": (4, one_name)}


def saved(where):
    count, place = PLACES[where]
    store = memory()
    job = Job(count, store)

    def work(rank):
        state = trained(place, make=tied)
        with job.checkpointer(rank) if count > 1 else checkpointer(store) as ckpt:
            return ckpt.save(state, STEP, mode="blocking").result(300)

    return store, run_ranks(count, work)


@pytest.mark.parametrize(
    ("there", "here"),
    [("one process", "two names"), ("two names", "one process"), ("one name", "one name")],
)
def test_each_stage_restores_its_copy_with_moments(there, here):
    store, _ = saved(there)
    count, place = PLACES[here]
    whole = held_of(trained(alone, make=tied))
    copies = {(p[0], "head.weight", *p[2:]): t for p, t in whole.items() if p[1] == "embed.weight"}
    job = Job(count, store)

    def work(rank):
        state = trained(place, make=tied, seed=1)
        with job.checkpointer(rank) if count > 1 else checkpointer(store) as ckpt:
            ckpt.restore(state)
        owned = {path[1] for path in held_of(state) if path[0] == "optimizer"}
        expected = expected_of(whole | copies, place, make=Net, owned=owned)
        return held_of(state), expected

    for held, expected in run_ranks(count, work):
        assert held.keys() == expected.keys()
        for path, tensor in expected.items():
            assert torch.equal(held[path], tensor), path


@pytest.mark.parametrize("tied_on", [{0}, {1}, {0, 1}])
def test_no_rank_rounds_its_part_of_a_tensor_with_an_exact_tie(tied_on):
    store, whole = memory(), torch.randn(300, 30)
    rules = [{"match": "best", "codecs": [{"type": "cast", "to": "bfloat16"}]}]

    def state(rank):
        tensor = Shard(whole[150 * rank : 150 * (rank + 1)], whole.shape, (150 * rank, 0))
        return {"best": tensor} | ({"model": tensor} if rank in tied_on else {})

    results = Job(2, store, rules=rules).save(state)
    with checkpointer(store) as ckpt:
        if tied_on == {0, 1}:
            assert torch.equal(ckpt.load(1)["model"], whole)
        else:
            assert any(isinstance(r, SaveError) and "tied to model" in str(r) for r in results)
            assert ckpt.steps() == []

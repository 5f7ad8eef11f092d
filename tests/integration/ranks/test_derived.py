"""Ranks that store weights as their rounded master weights."""

from functools import partial

import pytest
import torch
from tests.integration.ranks import saving
from tests.integration.support import blank, checkpointer, memory, same
from tests.providers.threads_as_ranks import run_ranks

from penstock import PerRank

NAMES = [f"layer{n}.weight" for n in range(6)]


# Replicas also share small objects.
Job = partial(saving.Job, writer_bytes=1)


def mixed(seed=0):
    """Weights in half precision, their masters, and a moment of each."""
    made = torch.Generator().manual_seed(seed)
    masters = {name: torch.randn(130, 300, generator=made) for name in NAMES}
    return {
        "model": {name: master.bfloat16() for name, master in masters.items()},
        "master": masters,
        "moment": {name: torch.randn(90, 30, generator=made) for name in NAMES},
        "epoch": 3,
    }


def derived(store, step):
    """The derived weights, each with the part that lists it."""
    with checkpointer(store) as ckpt:
        found = [o for o in ckpt.open(step).contents.objects() if o.derived]
    assert all(o.derived == ("master", o.path[1]) for o in found)
    return {o.path[1]: o.head.rank for o in found}


def restored(store, state, step):
    with checkpointer(store) as ckpt:
        assert ckpt.verify(step).ok
        assert same(ckpt.load(step), state)
        target = blank(state)
        ckpt.restore(target, step)
    assert same(target, state)


@pytest.mark.parametrize(
    ("mode", "count"), [("lazy", 2), pytest.param("blocking", 3, marks=pytest.mark.slow)]
)
def test_one_rank_decides_on_each_weight_and_only_it_stores_or_lists_it(mode, count):
    """In the first save no rank knows its writes before the capture, later each does."""
    store = memory()
    states = {step: mixed(step) for step in (1, 2)}
    job = Job(count, store, share=True, defer="**")

    def work(ckpt, rank):
        del rank
        found = []
        for step, state in states.items():
            handle = ckpt.save(state, step, mode=mode)
            ckpt.fence()
            found.append(handle.result(300).bytes_stored)
        return found

    results = job.run(work)
    assert not any(isinstance(result, Exception) for result in results), results
    others = Job(count, memory()).save(lambda _: states[1])
    whole = sum(report.bytes_stored for report in others)
    for step, state in states.items():
        found = derived(store, step)
        assert set(found.values()) - {0}  # not only rank 0 decides
        # A master that two ranks share is at each seam between two writers.
        assert len(found) >= len(NAMES) - (count - 1)
        restored(store, state, step)
        weights = sum(state["model"][name].nbytes for name in found)
        assert whole - sum(result[step - 1] for result in results) > 0.9 * weights


@pytest.mark.parametrize("step", [1, 2])
def test_a_weight_whose_master_two_ranks_store_is_stored(step):
    """Drift between the compared lines must not be rounded away."""
    store, state = memory(), {key: {"w": mixed()[key][NAMES[0]]} for key in ("model", "master")}

    def of(rank):
        own = {key: {"w": tensors["w"].clone()} for key, tensors in state.items()}
        if rank == 1:
            own["master"]["w"].view(-1)[30_000] += 5
            own["model"]["w"].view(-1)[30_000] = own["master"]["w"].view(-1)[30_000]
        return own

    def work(ckpt, rank):
        return [ckpt.save(of(rank), n).result(300).step for n in range(1, step + 1)]

    found = Job(2, store, share=True).run(work)
    assert found == [[*range(1, step + 1)]] * 2
    with checkpointer(store) as ckpt:
        contents = ckpt.open(step).contents
        assert len(contents.everywhere({("master", "w"): ()})) == 2
        assert not derived(store, step)
        assert torch.equal(ckpt.load(step)["model"]["w"], state["model"]["w"])


def test_ranks_of_several_structures_store_their_weights():
    store, state = memory(), mixed()

    def work(ckpt, rank):
        mine = state | ({"more": torch.ones(9)} if rank else {})
        return [ckpt.save(mine, step).result(300).step for step in (1, 2)]

    assert Job(3, store, writer_bytes=1 << 30, share=True).run(work) == [[1, 2]] * 3
    assert not derived(store, 1)
    assert not derived(store, 2)
    restored(store, state | {"more": torch.ones(9)}, 2)


def test_rank_specific_objects_decide_on_no_weight():
    """It may have a master's name and shape; the other ranks do not know of it."""
    store, state = memory(), mixed()

    def of(rank):
        own = {name: torch.zeros_like(master) for name, master in state["master"].items()}
        return {**state, "residual": PerRank({"none": 0} | (own if rank else {}))}

    for step in (1, 2):
        reports = Job(2, store, share=True).save(of, step)
        assert [report.ranks for report in reports] == [2, 2]
        with checkpointer(store) as ckpt:
            assert ckpt.verify(step).ok
            tree = ckpt.load(step)
        assert same({key: tree[key] for key in state}, state)
        assert derived(store, step)


def test_ranks_with_other_derivation_rules_delegate_no_weight():
    """One of them shares nothing by mistake, unseen by the other ranks."""
    store, state = memory(), mixed()

    jobs = [Job(2, store, share=rank == 0) for rank in range(2)]
    jobs[1].board = jobs[0].board

    def save(rank):
        with jobs[rank].checkpointer(rank) as ckpt:
            return ckpt.save(state, 1).result(300).ranks

    assert run_ranks(2, save) == [2, 2]
    restored(store, state, 1)
    assert not derived(store, 1)

"""`None` on some ranks where others have an object, and other differences at one path."""

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory

from penstock import Grads, PerRank
from penstock.core.errors import RankError, SaveError


def ema(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def net_with_gradients():
    net = ema()
    net(torch.ones(1, 3)).sum().backward()
    return net


def optimizer():
    found = torch.optim.SGD(net_with_gradients().named_parameters(), lr=0.1, momentum=0.9)
    found.step()
    return found


def tensors(seed=0):
    return [parameter.detach() for parameter in ema(seed).parameters()]


def state(rank, has, nothing=None, *, seed=0):
    """A state whose module is on the rank `has`, and zeros where it is restored."""
    return {"w": torch.full((4,), 2.0), "ema": ema(seed) if rank == has else nothing}


def assert_restored(state, has):
    assert torch.equal(state["w"], torch.full((4,), 2.0))
    if has:
        assert torch.equal(state["ema"].weight, ema().weight)
        assert torch.equal(state["ema"].bias, ema().bias)


@pytest.mark.parametrize(("nothing", "has"), [(None, 0), ({}, 1), ([], 0), ((), 1)], ids=repr)
def test_module_on_one_rank_and_nothing_on_another_round_trip(nothing, has):
    store = memory()

    def work(ckpt, rank):
        ckpt.save(state(rank, has, nothing), 1).result(30)
        assert ckpt.verify().ok
        live = state(rank, has, nothing, seed=5)
        report = ckpt.restore(live)
        assert report.unexpected == ()
        assert_restored(live, rank == has)
        assert rank == has or live["ema"] is nothing

    assert Job(2, store).run(work) == [None, None]
    with checkpointer(store) as ckpt:
        view = ckpt.open()
        assert sorted(view.keys()) == ["ema/bias", "ema/weight", "w"]
        assert len(view) == 3
        assert "ema" not in view
        assert view["ema"].keys() == {"weight", "bias"}
        assert torch.equal(ckpt.load()["ema"]["weight"], ema().weight)
        live = state(0, 0, seed=5)
        assert ckpt.restore(live).unexpected == ()
        assert_restored(live, has=True)


def test_ranks_without_objects_restore_saves_of_others_or_one_process(caplog):
    """The number of ranks changes, and with it the module's rank."""
    for count in (1, 3):
        store = memory()
        if count == 1:
            with checkpointer(store) as ckpt:
                ckpt.save(state(0, 0), 1, mode="blocking")
        else:
            Job(count, store).save(lambda rank: state(rank, 2))

        def work(ckpt, rank):
            live = state(rank, 1, seed=5)
            report = ckpt.restore(live)
            assert report.unexpected == ()
            assert_restored(live, rank == 1)
            return live["ema"] is None

        assert Job(2, store).run(work) == [True, False]
    assert "not in the template" not in caplog.text
    with checkpointer(store) as ckpt:
        live = state(0, 1)
        assert set(ckpt.restore(live).unexpected) == {"ema/weight", "ema/bias"}
        assert live["ema"] is None


KINDS = [
    optimizer,
    tensors,
    lambda: {"a": ema()},
    lambda: PerRank(3),
    lambda: Grads(net_with_gradients()),
    lambda: Grads(ema()),  # without a gradient: a node, and nothing below it
]


@pytest.mark.parametrize("make", KINDS)
def test_nothing_pairs_with_every_kind_of_object_of_others(make):
    store, made = memory(), make()  # here: the first optimizer imports half of torch

    def work(ckpt, rank):
        live = {"w": torch.ones(3), "x": made if rank else None}
        for step in (1, 2):
            ckpt.save(live, step).result(30)
        assert ckpt.verify().ok
        ckpt.restore(live)

    assert Job(2, store).run(work) == [None, None]


CONTRADICTIONS = {
    "a list of objects on rank 0, and a tuple of objects": (tensors, lambda: tuple(tensors())),
    "a module on rank 0, and a value": (ema, lambda: 0),
    "a tensor on rank 0, and a dict": (lambda: torch.ones(3), lambda: {"a": torch.ones(3)}),
    "a value on rank 0, and a penstock.PerRank": (lambda: {"a": 1}, lambda: PerRank({"a": 1})),
    "a dict of objects on rank 0, and an optimizer": (lambda: {"q": torch.ones(2)}, optimizer),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_other_contradictions_are_refused_by_name_on_all_ranks(words):
    store, made = memory(), [make() for make in CONTRADICTIONS[words]]
    errors = Job(2, store).save(lambda rank: {"w": torch.ones(3), "x": made[rank]})
    assert list(map(type, errors)) == [SaveError, RankError]
    for error in errors:
        assert f"x is {words}" in str(error)
        assert "on rank 1: a path must be of one kind" in str(error)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == []


def test_value_changing_kind_between_saves_of_one_structure_is_refused():
    """The tables of the parts equal those of the previous save, whose index rank 0 knows."""

    def work(ckpt, rank):
        ckpt.save(state(rank, 1), 1).result(30)
        words = "ema is a value on rank 0, and a module on rank 1"
        with pytest.raises(SaveError, match=words):
            ckpt.save(state(rank, 1, nothing=5), 2).result(30)

    assert Job(2, memory()).run(work) == [None, None]

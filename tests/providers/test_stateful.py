from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from penstock.core.errors import UnsupportedStateError
from penstock.testing.providers import check_provider


def optimizer():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)


SCHEDULERS = {
    "StepLR": lambda o: lr.StepLR(o, 3),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lr.ConstantLR,
    "LinearLR": lr.LinearLR,
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lr.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, 20),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda _: 0.9),
    "ReduceLROnPlateau": lr.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o), lr.MultiStepLR(o, [4])], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01),
}


class Run:
    def __init__(self, name, steps=0):
        self.optimizer = optimizer()
        self.scheduler = SCHEDULERS[name](self.optimizer)
        self.train(steps)

    @property
    def state(self):
        return {"sched": self.scheduler, "groups": self.optimizer}

    def train(self, steps):
        rates = []
        for _ in range(steps):
            self.optimizer.step()
            plateau = isinstance(self.scheduler, lr.ReduceLROnPlateau)
            self.scheduler.step(*([1.0] if plateau else []))
            rates += [group["lr"] for group in self.optimizer.param_groups]
        return rates


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR of torch 2.8 passes it
@pytest.mark.filterwarnings("ignore:.*by order.*")
def test_learning_rates_resume_exactly(save):
    for name in SCHEDULERS:
        for taken in (0, 4):
            run = Run(name, taken)
            stored = save(run.state)
            other = Run(name, 1)
            stored.restore(other.state)
            assert run.train(6) == other.train(6), (name, taken)


@pytest.mark.parametrize("enabled", [True, False])
def test_gradient_scalers_round_trip(save, enabled):
    def make(scale):
        return torch.amp.GradScaler("cpu", enabled=enabled, init_scale=scale, growth_interval=1)

    scaler = make(4.0)
    if enabled:
        parameter = nn.Parameter(torch.ones(2))
        inner = torch.optim.SGD([parameter], lr=0.1)
        scaler.scale(parameter.sum()).backward()
        scaler.step(inner)
        scaler.update()
    stored = save({"scaler": scaler, "x": 1})
    other = make(2.0)
    stored.restore({"scaler": other, "x": 0})
    assert other.state_dict() == scaler.state_dict()
    assert bool(other.state_dict()) is enabled
    assert stored.load()["scaler"] == scaler.state_dict()


class Keeper:
    """State of any shape."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


STATES = [
    {"a": 1, "b": [1, (2,)]},
    {"t": torch.arange(3), "deep": {"list": [torch.ones(1), 2]}, "n": {1: torch.ones(1)}},
    OrderedDict(b=1, a=2),
    {},
    {1: "x", 2: torch.ones(2)},
    [1, torch.ones(2)],
    None,
    {"a/b": 1, "": torch.ones(1), "%": {"": 2}},
]


def test_state_of_any_shape_goes_through_load_state_dict(save):
    for state in STATES:
        stored = save({"keeper": Keeper(state)})
        for old in ("other", {"t": 1}):
            target = Keeper(old)
            placement = stored.plan({"keeper": target})
            stored.fill(placement)
            assert target.state is old
            placement.finish()
            assert type(target.state) is type(state)
            assert repr(target.state) == repr(state)
        assert repr(stored.load()["keeper"]) == repr(state)


def test_stateful_objects_keep_the_contract(providers):
    def equal(one, other):
        return repr(one.state) == repr(other.state)

    def change(keeper):
        keeper.state = {"a": 5}

    check_provider(lambda: Keeper({"a": 1, "t": torch.ones(2)}), change, equal, providers=providers)


def test_a_plain_data_loader_is_refused_naming_the_stateful_one(save):
    loader = torch.utils.data.DataLoader([1, 2, 3])
    for value in (loader, iter(loader)):
        with pytest.raises(
            UnsupportedStateError, match=r"data/train is a \w*DataLoader.*StatefulDataLoader"
        ):
            save({"data": {"train": value}})


@pytest.mark.filterwarnings("ignore:.*set_vital.*")
@pytest.mark.parametrize("taken", [0, 2, 5])
def test_torchdata_loaders_resume_in_place(save, taken):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")

    def make():
        return stateful.StatefulDataLoader(
            list(range(12)), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    loader = make()
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    stored = save({"loader": loader})
    rest = [batch.tolist() for batch in iterator]
    other = make()
    stored.restore({"loader": other})
    assert [batch.tolist() for batch in other] == rest


def test_stateful_object_is_restored_whole_or_not_at_all(save):
    stored = save({"k": Keeper({"a": 1, "b": 2}), "x": 1})
    (problem,) = stored.plan({"k": Keeper(0)}, include="k/a").problems
    assert problem == (
        "k is a Keeper and is restored whole or not at all, but only 1 of its 2 objects are "
        "selected: select or exclude all of them"
    )
    target = Keeper(0)
    stored.restore({"k": target, "x": 5}, include="x")
    assert target.state == 0
    assert stored.load(include="k/a") == {"k": {"a": 1}}


def test_missing_state_and_state_of_another_kind_are_reported(save):
    stored = save({"a": 1, "b": {"t": torch.ones(1)}, "x": 1})
    placement = stored.plan({"a": Keeper(0), "b": Keeper(0), "c": Keeper(0)})
    assert placement.missing == [("c",)]
    assert [p.split(",")[0] for p in placement.problems] == [
        "a is stored as a plain value",
        "b is stored as a dict",
    ]
    assert not stored.plan({"c": Keeper(0)}, include="x").missing


def test_unstorable_state_is_refused_with_its_whole_path(save):
    with pytest.raises(UnsupportedStateError, match=r"^sched/lr_lambdas/f"):
        save({"sched": Keeper({"lr_lambdas": {"f": len}})})

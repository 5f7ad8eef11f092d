"""The replayer suite passes on every optimizer of torch, and catches broken replayers."""

import itertools

import pytest
import torch
from tests.integration.log.trainings import KINDS
from torch import nn, optim

from penstock.core.abc import Replayer, Unit
from penstock.testing.replayers import check_replayer

OPTIMIZERS = {
    **KINDS,
    "AdamW with a tensor": lambda p: optim.AdamW(p, torch.tensor(1e-3)),
    "Muon": lambda p: optim.Muon(p, 1e-3),
}


def make_with(kind):
    """Return a function that makes a model of this optimizer."""

    def make():
        model = nn.ParameterList([torch.full((5, 7), 0.5), torch.ones(3, 33)])
        if kind != "Muon":  # only matrices
            model.append(torch.ones(13))
        return model, OPTIMIZERS[kind](model.parameters())

    return make


# `test_replay.py` replays all others.
QUICK = {"AdamW", "AdamW fused", "AdamW with a tensor", "Muon", "SGD fused"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
        for kind in sorted(OPTIMIZERS)
    ],
)
def test_torch(kind):
    check_replayer(make_with(kind))


def test_every_optimizer_of_torch_is_tried():
    classes = {
        name for name, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }  # fmt: skip
    untried = classes - {kind.split()[0] for kind in OPTIMIZERS}
    assert untried == {"Optimizer", "LBFGS", "SparseAdam"}  # only sparse gradients


class Noisy(optim.Optimizer):
    """Adds noise of its own generator, counts in its groups, and normalizes all gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "turn": 0})
        self.generator = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self):
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in parameters).sqrt()
        for group in self.param_groups:
            group["turn"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.rand(p.shape, generator=self.generator)
                    p.sub_(group["lr"] / group["turn"] * (p.grad / norm + noise))


def make_noisy():
    model = nn.ParameterList([torch.ones(4, 2), torch.ones(3)])
    return model, Noisy(model.parameters())


class Good(Replayer):
    """Logs the generator and the counts as they are before a step."""

    api_version = 1
    name = "noisy"

    def handles(self, optimizer, /):
        return type(optimizer) is Noisy

    def capture_before(self, optimizer, /):
        turns = [group["turn"] for group in optimizer.param_groups]
        return {"generator": optimizer.generator.get_state(), "turns": turns}

    def step(self, optimizer, captured, /):
        optimizer.generator = torch.Generator()
        optimizer.generator.set_state(captured["generator"])
        for group, turn in zip(optimizer.param_groups, captured["turns"], strict=True):
            group["turn"] = turn
        optimizer.step()


def test_what_a_step_changes_is_captured_before_it():
    check_replayer(make_noisy, replayer=Good)


class Nested(optim.Optimizer):
    """Has lists in the state of a parameter, and state that belongs to none."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.state["all"] = {"count": torch.zeros(())}

    @torch.no_grad()
    def step(self):
        self.state["all"]["count"] += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                if not self.state[p]:
                    self.state[p]["sums"] = [torch.zeros_like(p), {"square": torch.zeros_like(p)}]
                total, squares = self.state[p]["sums"]
                total += p.grad
                squares["square"] += p.grad.square()
                rate = self.param_groups[0]["lr"] / self.state["all"]["count"]
                p.sub_(rate * total / (1 + squares["square"].sqrt()))


class NestedReplayer(Replayer):
    api_version = 1
    name = "nested"

    def handles(self, optimizer, /):
        return type(optimizer) is Nested


def test_state_in_lists_or_of_no_parameter_is_replayed():
    def make():
        model = nn.ParameterList([torch.ones(4, 2), torch.ones(3)])
        return model, Nested(model.parameters())

    check_replayer(make, replayer=NestedReplayer)


class HandlesAll(Good):
    def handles(self, optimizer, /):
        return isinstance(optimizer, optim.Optimizer)


class HandlesByTruth(Good):
    def handles(self, optimizer, /):
        return getattr(optimizer, "generator", None)


class HandlesWrongly(Good):
    def handles(self, optimizer, /):
        return optimizer.generator is not None


class Inherits(Good):
    pass


class OtherArguments(Good):
    def capture(self, optimizer, step, /):
        return {}


class VersionZero(Good):
    version = "1"


class EngineOfTensors(Good):
    def engine(self, optimizer, /):
        return {"rate": torch.ones(())}


class EngineOfTuples(Good):
    def engine(self, optimizer, /):
        return {"version": (1, 2)}


class EngineThatCounts(Good):
    def engine(self, optimizer, /):
        return {"turn": optimizer.param_groups[0]["turn"]}


class AlwaysObstructed(Good):
    def obstacle(self, optimizer, /):
        return "it is Tuesday"


class CapturesLive(Good):
    def capture(self, optimizer, /):
        return {"weight": optimizer.param_groups[0]["params"][0].detach()}


class CapturesLiveList(Good):
    turns = [0]  # noqa: RUF012 - the fault

    def capture(self, optimizer, /):
        self.turns[0] = optimizer.param_groups[0]["turn"]
        return {"seen": optimizer.param_groups}


class Remembers(Good):
    def capture(self, optimizer, /):
        self.last = optimizer
        return {}


class ClaimsParameters(Good):
    def unit(self, optimizer, /):
        return Unit.PARAMETER


class ClaimsByName(Good):
    def unit(self, optimizer, /):
        return "element"


class ForgetsTheGenerator(Good):
    def step(self, optimizer, captured, /):
        state = optimizer.generator.get_state()
        super().step(optimizer, captured | {"generator": state})


class CapturesTheUnstorable(Good):
    def capture(self, optimizer, /):
        return {"lock": object()}


class Fails(Good):
    def step(self, optimizer, captured, /):
        raise KeyError("generator")


class FailsToCapture(Good):
    counter = itertools.count()

    def capture(self, optimizer, /):
        if next(self.counter) > 2:
            raise RuntimeError("no count")
        return {}


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (HandlesAll, "handles returned True for _Stranger"),
        (HandlesByTruth, "it must be True or False"),
        (HandlesWrongly, "AttributeError"),
        (OtherArguments, "cannot be called by the contract"),
        (EngineOfTensors, "not JSON serializable"),
        (EngineOfTuples, r"JSON changes to \{'version': \[1, 2\]\}"),
        (EngineThatCounts, r"engine is \{'turn': 0\} at first"),
        (AlwaysObstructed, "these steps cannot be replayed: it is Tuesday"),
        (CapturesLive, "capture returned a tensor of the optimizer"),
        (CapturesLiveList, "return a copy|return copies"),
        (Remembers, "keep none between calls"),
        (ClaimsParameters, "parameter 0 gets other bits if it steps alone: unit"),
        (ClaimsByName, "must be a Unit"),
        (ForgetsTheGenerator, "gives other bits"),
        (CapturesTheUnstorable, "captured/lock"),
        (Fails, "failed: KeyError"),
        (FailsToCapture, "the replayer of Noisy failed: RuntimeError: no count"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_suite_catches(broken, complaint):
    named = type(broken.__name__, (broken,), {"api_version": 1, "__module__": __name__})
    with pytest.raises(AssertionError, match=complaint):
        check_replayer(make_noisy, replayer=named)


class Normed(optim.SGD):
    """Normalizes the gradient of each parameter."""

    def step(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad /= parameter.grad.norm()
        super().step()


class ClaimsElements(Replayer):
    api_version = 1
    name = "normed"

    def handles(self, optimizer, /):
        return type(optimizer) is Normed

    def unit(self, optimizer, /):
        return Unit.ELEMENT


def test_suite_catches_a_wrong_claim_of_elements():
    def make():
        model = nn.ParameterList([torch.ones(4, 2), torch.ones(3)])
        return model, Normed(model.parameters())

    with pytest.raises(AssertionError, match="gets other bits in pieces than whole"):
        check_replayer(make, replayer=ClaimsElements)

"""State as accelerate, Lightning Fabric and torchao make it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.core.errors import UnsupportedStateError
from penstock.testing.providers import check_provider

pytestmark = pytest.mark.filterwarnings("ignore")  # of their own, on being imported


def accelerator(**options):
    reason = "needs accelerate, which `pip install .[dev]` brings"
    accelerate = pytest.importorskip("accelerate", reason=reason)
    return accelerate.Accelerator(cpu=True, **options)


def by_accelerate(module, optimizer):
    return accelerator().prepare(module, optimizer)


def by_fabric(module, optimizer):
    reason = "needs lightning-fabric, which `pip install .[dev]` brings"
    fabric = pytest.importorskip("lightning_fabric", reason=reason)
    return fabric.Fabric(accelerator="cpu").setup(module, optimizer)


def bare(module, optimizer):
    return module, optimizer


WRAPS = [by_accelerate, by_fabric]


def job(wrap, order="ab", kind=torch.optim.AdamW, steps=1):
    """Two layers whose gradients differ by far, and an optimizer that has them in `order`."""
    torch.manual_seed(0)
    module = nn.ModuleDict({key: nn.Linear(4, 4, bias=False) for key in "ab"})
    module.forward = lambda x: module["a"](x).sum() + 100 * module["b"](x).sum()
    optimizer = kind([module[key].weight for key in order], lr=0.1)
    wrapped, optimizer = wrap(module, optimizer)
    for _ in range(steps):
        wrapped(torch.ones(1, 4)).backward()
        optimizer.step()
    return module, {"m": wrapped, "o": optimizer}


def moments(module, state):
    inner = getattr(state["o"], "optimizer", state["o"])
    return {key: inner.state[module[key].weight]["exp_avg"].clone() for key in "ab"}


@pytest.mark.parametrize(
    ("source", "target"), [(by_accelerate, bare), (bare, by_fabric), (by_fabric, by_accelerate)]
)
def test_state_of_wrapped_optimizers_is_matched_by_name(save, source, target):
    module, state = job(source)
    stored = save(state)
    expected = moments(module, state)
    other, state = job(target, order="ba")
    optimizer = state["o"]
    placement = stored.restore(state)
    assert state["o"] is optimizer
    assert placement.notes["matched_by"] == "name"
    assert ("o", "state", "b.weight", "exp_avg") in stored.data
    for key, moment in moments(other, state).items():
        assert torch.equal(moment, expected[key])
        assert torch.equal(other[key].weight, module[key].weight)


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_a_wrapped_optimizer_steps_is_deferred(save, wrap):
    _, plain = job(bare)
    _, wrapped = job(wrap)
    assert len(save(plain).description.deferrable) == 8  # parameters, their moments, steps
    assert len(save(wrapped).description.deferrable) == 8


@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_optimizers_keep_the_contract(providers, wrap):
    def change(state):
        with torch.no_grad():
            for tensors in state["o"].optimizer.state.values():
                tensors["exp_avg"] += 1

    def equal(one, other):
        ours, theirs = (x["o"].state_dict()["state"] for x in (one, other))
        return all(torch.equal(ours[i][key], theirs[i][key]) for i in ours for key in ours[i])

    options = "part/o/param_groups/**"  # older versions have fewer
    check_provider(lambda: job(wrap)[1], change, equal, providers=providers, optional=options)


class Averaging(torch.optim.SGD):
    """Has a state dict of its own."""

    mean = 0

    def state_dict(self):
        return super().state_dict() | {"mean": self.mean}

    def load_state_dict(self, state):
        state = dict(state)
        self.mean = state.pop("mean")
        super().load_state_dict(state)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_optimizer_with_a_state_dict_of_its_own_comes_whole(save, wrap):
    _, state = job(wrap, kind=Averaging, steps=0)
    state["o"].optimizer.mean = 5
    stored = save(state)
    assert not stored.description.deferrable
    for other in (wrap, bare):
        _, target = job(other, kind=Averaging, steps=0)
        assert "matched_by" not in stored.restore(target).notes
        assert getattr(target["o"], "optimizer", target["o"]).mean == 5


def test_a_prepared_scheduler_goes_on_in_a_bare_one_and_back(save):
    def make(prepare, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if prepare:
            optimizer, scheduler = accelerator().prepare(optimizer, scheduler)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return scheduler

    for source in (True, False):
        stored = save({"s": make(source, 3), "x": 1})
        scheduler = make(not source, 0)
        stored.restore({"s": scheduler, "x": 0})
        assert scheduler.state_dict() == make(source, 3).state_dict()


def test_a_prepared_loader_is_refused_until_it_can_say_where_it_stands(save):
    data = torch.arange(8.0)
    plain = accelerator().prepare(torch.utils.data.DataLoader(data, batch_size=2))
    with pytest.raises(UnsupportedStateError, match=r"a/loader is a DataLoaderShard.*use_stateful"):
        save({"a": {"loader": plain}})
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    from accelerate.utils import DataLoaderConfiguration

    # What the message says.
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    options = {"dataloader_config": config}

    def make():
        return accelerator(**options).prepare(torch.utils.data.DataLoader(data, batch_size=2))

    loader, other = make(), make()
    batches = iter(loader)
    next(batches)
    stored = save({"a": {"loader": loader}})
    rest = [batch.tolist() for batch in batches]
    with pytest.raises(UnsupportedStateError, match=r"a/loader is a DataLoaderShard.*use_stateful"):
        stored.plan({"a": {"loader": plain}})
    stored.restore({"a": {"loader": other}})
    assert [batch.tolist() for batch in other] == rest


def test_a_loader_that_fabric_has_set_up_is_the_one_that_it_wraps(save):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    reason = "needs lightning-fabric, which `pip install .[dev]` brings"
    fabric = pytest.importorskip("lightning_fabric", reason=reason).Fabric(accelerator="cpu")

    def make():
        loader = stateful.StatefulDataLoader(torch.arange(8.0), batch_size=2)
        return loader, fabric.setup_dataloaders(loader)

    prepared = make()[1]
    batches = iter(prepared)
    next(batches)
    stored = save({"loader": prepared})
    rest = [batch.tolist() for batch in batches]
    for number in (0, 1):  # the bare one, and the prepared one
        state = {"loader": (other := make())[number]}
        stored.restore(state)
        assert state["loader"] is other[number]
        assert [batch.tolist() for batch in other[1]] == rest
    plain = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.arange(8.0)))
    with pytest.raises(UnsupportedStateError, match=r"a/b is a DataLoader, .*StatefulDataLoader"):
        save({"a": {"b": plain}})


def torchao(name):
    reason = "needs torchao, which `pip install .[dev]` brings"
    pytest.importorskip("torchao", reason=reason)
    return pytest.importorskip(name, reason=reason)


def quantizing(kind, seed, steps):
    """A job whose optimizer keeps its moments quantized."""
    torch.manual_seed(seed)
    model = nn.Linear(128, 64, bias=False)
    optimizer = getattr(torchao("torchao.optim"), kind)(model.parameters())
    for step in range(steps):
        train(model, optimizer, step)
    return {"m": model, "o": optimizer}


def train(model, optimizer, step):
    model.weight.grad = torch.full_like(model.weight, 0.1) * (step + 1)
    optimizer.step()


def plain(state):
    weight = state["m"].weight
    moments = state["o"].state[weight]
    moment = moments["exp_avg"]
    parts = [getattr(moment, name) for name in moment.__tensor_flatten__()[0]]
    return [t.tolist() for t in (weight.detach(), moments["step"], *parts)]


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_optimizer_state_goes_on_where_it_was(save, kind, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # takes seconds
    state = quantizing(kind, 0, 2)
    stored = save(state)
    assert len(stored.description.deferrable) == 1 + 2 * len(plain(state)[2:]) + 1 - shared(state)
    expected = plain(state)
    train(state["m"], state["o"], 5)
    for steps in (0, 1):  # without state of its own to write into, and with
        other = quantizing(kind, 1, steps)
        stored.restore(other)
        assert plain(other) == expected
        train(other["m"], other["o"], 5)
        assert plain(other) == plain(state)
    moments = next(iter(state["o"].state.values()))["exp_avg"]
    assert type(stored.load()["o"]["state"][0]["exp_avg"]) is type(moments)


def shared(state):
    """Parts that both moments have in common."""
    one, other = (state["o"].state[state["m"].weight][key] for key in ("exp_avg", "exp_avg_sq"))
    names = one.__tensor_flatten__()[0]
    return sum(getattr(one, name) is getattr(other, name) for name in names)


CONFIGS = ["Int8WeightOnly", "Int8DynamicActivationInt8Weight", "Float8WeightOnly"]


@pytest.mark.parametrize("config", CONFIGS)
def test_quantized_weights_come_back_in_place_and_without_a_template(save, config):
    quantization = torchao("torchao.quantization")

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 16))
        quantization.quantize_(model, getattr(quantization, f"{config}Config")())
        return model

    model, x = make(0), torch.rand(2, 32)
    stored = save({"m": model})
    target = make(1)
    weight = target[0].weight
    stored.restore({"m": target})
    assert target[0].weight is weight
    assert torch.equal(target(x), model(x))
    loaded = make(2)
    loaded.load_state_dict(stored.load()["m"])
    assert torch.equal(loaded(x), model(x))

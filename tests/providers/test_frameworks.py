"""State of accelerate, Lightning Fabric and torchao."""

import pytest
import torch
from torch import nn

from penstock.core.errors import UnsupportedStateError
from penstock.testing.providers import check_provider

pytestmark = pytest.mark.filterwarnings("ignore")  # their own, on import


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


def test_a_prepared_loader_is_refused_without_its_position(save):
    data = torch.arange(8.0)
    plain = accelerator().prepare(torch.utils.data.DataLoader(data, batch_size=2))
    with pytest.raises(UnsupportedStateError, match=r"a/loader is a DataLoaderShard.*use_stateful"):
        save({"a": {"loader": plain}})
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    from accelerate.utils import DataLoaderConfiguration

    # The advice of the message.
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


def test_a_fabric_loader_is_unwrapped(save):
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


def plain(state):
    weight = state["m"].weight
    moments = state["o"].state[weight]
    moment = moments["exp_avg"]
    parts = [getattr(moment, name) for name in moment.__tensor_flatten__()[0]]
    return [t.tolist() for t in (weight.detach(), moments["step"], *parts)]


CONFIGS = ["Int8WeightOnly", "Int8DynamicActivationInt8Weight", "Float8WeightOnly"]


@pytest.mark.parametrize("config", CONFIGS)
def test_quantized_weights_restore_in_place_and_without_template(save, config):
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

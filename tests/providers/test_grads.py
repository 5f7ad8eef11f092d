import pytest
import torch
from torch import nn

from penstock.core.errors import UnsupportedStateError
from penstock.core.markers import Grads
from penstock.testing.providers import check_provider


def accumulated(seed=0, parts=("0", "2")):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    for name, module in model.named_children():
        for parameter in module.parameters():
            if name in parts:
                parameter.grad = torch.randn_like(parameter)
    return model


def equal(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
        for a, b in pairs
    )


@pytest.mark.parametrize("parts", [(), ("0",), ("0", "2")], ids=len)
def test_gradients_keep_the_contract(providers, parts):
    check_provider(
        lambda: Grads(accumulated(parts=parts)),
        lambda _: Grads(accumulated(1, parts=("2",))),
        equal,
        providers=providers,
    )


def test_existing_gradients_are_filled_in_place_and_absent_ones_become_none(save):
    stored = save({"grads": Grads(accumulated(parts=("0",)))})
    model = accumulated(1)
    live = model[0].weight.grad
    stored.restore({"grads": Grads(model)})
    assert model[0].weight.grad is live
    assert torch.equal(live, accumulated()[0].weight.grad)
    assert model[2].weight.grad is None


def test_tied_parameters_have_one_gradient(save):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].weight.grad = torch.ones(2, 2)
    stored = save({"grads": Grads(model)})
    assert [o.path for o in stored.tree.objects] == [("grads", "0.weight")]


def test_gradients_of_another_shape_or_dtype_are_problems(save):
    stored = save({"grads": Grads(accumulated())})
    other = accumulated(parts=())
    other[0] = nn.Linear(5, 3)
    other[2].double()
    problems = stored.plan({"grads": Grads(other)}).problems
    assert len(problems) == 3
    assert problems[0].startswith("grads/0.weight is a gradient of shape [3, 2]")
    assert problems[1].startswith("grads/2.weight: dtype float32 is stored")


def test_absent_gradients_are_created(save):
    stored = save({"grads": Grads(accumulated())})
    model = accumulated(parts=())
    stored.restore({"grads": Grads(model)}, include="grads/0")
    assert torch.equal(model[0].bias.grad, accumulated()[0].bias.grad)
    assert model[2].bias.grad is None


def test_unselected_gradients_stay(save):
    stored = save({"grads": Grads(accumulated(parts=())), "x": 1})
    model = accumulated()
    stored.restore({"grads": Grads(model), "x": 0}, include="x")
    assert model[0].weight.grad is not None


def test_gradients_that_the_checkpoint_lacks_are_missing(save):
    placement = save({"x": 1}).plan({"grads": Grads(accumulated())})
    assert placement.missing == [("grads",)]


def test_sparse_gradients_are_refused_with_their_path(save):
    model = nn.Embedding(3, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedStateError, match="grads/weight is sparse"):
        save({"grads": Grads(model)})

"""The first check or save names exactly the state missing in the tree."""

import logging

import pytest
import torch
from tests.integration.support import checkpointer, memory
from torch import nn


@pytest.fixture
def warned(caplog):
    """Returns the logs of a check, two saves and another check on missing state."""

    def run(state):
        caplog.set_level(logging.INFO, "penstock")
        with checkpointer(memory()) as ckpt:
            ckpt.check(state)
            for step in (1, 2):
                ckpt.save(state, step, mode="blocking")
            ckpt.check(state)
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if text.endswith("(logged once)")]

    return run


def masters_of(model):
    return [p.detach().float().clone().requires_grad_() for p in model.parameters()]


def test_masters_missing_in_the_tree_are_counted_once(warned):
    model = nn.Linear(3, 3).bfloat16()
    (text,) = warned({"model": model, "optimizer": torch.optim.AdamW(masters_of(model))})
    assert text.startswith("optimizer: 2 of the tensors that it changes are not stored")


def test_optimizer_is_named_when_it_joins(caplog):
    model = nn.Linear(3, 3)
    with checkpointer(memory()) as ckpt:
        ckpt.check({"model": model})
        assert "logged once" not in caplog.text
        ckpt.check({"model": model, "opt": torch.optim.SGD(masters_of(model))})
    assert "opt: 2 of the tensors" in caplog.text


def plain(model):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


def state_dict(model):
    return {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters())}


def tied(model):
    model.twin = model.weight
    return plain(model)


def list_of_tensors(model):
    masters = masters_of(model)
    return {"model": model, "masters": masters, "optimizer": torch.optim.SGD(masters)}


def views_of_a_flat_tensor(model):
    flat = torch.zeros(12)
    views = [flat[:9].view(3, 3).requires_grad_(), flat[9:].requires_grad_()]
    return {"flat": flat, "optimizer": torch.optim.SGD(views)}


def flat_tensor_of_views(model):
    flat = torch.zeros(12, requires_grad=True)
    views = {"w": flat.detach()[:9].view(3, 3), "b": flat.detach()[9:]}
    return {"model": views, "optimizer": torch.optim.SGD([flat])}


def wrapped(model):
    return {"model": nn.DataParallel(model), "optimizer": torch.optim.SGD(model.parameters())}


def empty_and_frozen(model):
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    model.bias.requires_grad_(requires_grad=False)
    return plain(model)


@pytest.mark.parametrize(
    "make",
    [
        plain,
        state_dict,
        tied,
        list_of_tensors,
        views_of_a_flat_tensor,
        flat_tensor_of_views,
        wrapped,
        empty_and_frozen,
    ],
    ids=lambda make: make.__name__,
)
def test_parameters_with_memory_in_the_tree_are_not_named(warned, make):
    assert warned(make(nn.Linear(3, 3))) == []


class Engine(nn.Module):
    """Like engines of other libraries: a module that keeps the rest of the training beside it."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.optimizer = self.basic_optimizer = torch.optim.SGD(self.module.parameters())
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.__dict__["parent"] = nn.Linear(2, 2)  # another's: a reference, no child
        self.generator = torch.Generator()
        self.config = {"lr": 0.1}


def test_engine_state_beside_its_module_is_named(warned):
    (text,) = warned({"e": Engine()})
    assert text.startswith("e is stored without e.optimizer (SGD), e.lr_scheduler (StepLR): ")

"""Tensors made of others: stored as these, restored in place, rebuilt if torch allows."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest
import torch
from tests.integration.support import memory
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import penstock
from penstock.core.errors import FormatError, UnsupportedStateError
from penstock.core.types import Role
from penstock.testing.providers import check_provider


class Rounding(enum.Enum):
    NEAREST = 1
    DOWN = 2


@dataclass
class Options:
    block: int
    rounding: Rounding


class Quantized(torch.Tensor):
    """Integers and their scale."""

    @staticmethod
    def __new__(cls, codes, scale, context):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, context):
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        made = Quantized(parts["codes"], parts["scale"], context)
        assert (made.size(), made.stride()) == (size, stride)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].codes, args[0].scale, args[0].context)
        raise NotImplementedError(func)


CONTEXT = {
    "block": [1, 128],
    "dtype": torch.float32,
    "options": (Options(2, Rounding.DOWN), None),
    "function": torch.nn.functional.relu,
}
SAFE = [Quantized, Options, torch.nn.functional.relu]


def quantized(seed=0, context=CONTEXT, shape=(3, 4)):
    torch.manual_seed(seed)
    codes = torch.randint(-128, 127, shape, dtype=torch.int8)
    return Quantized(codes, torch.rand(shape[0], 1), context)


def scramble(tensor):
    tensor.codes.zero_()
    tensor.scale.zero_()


def equal(one, other):
    return (
        torch.equal(one.codes, other.codes)
        and torch.equal(one.scale, other.scale)
        and one.context == other.context
    )


@pytest.fixture
def safe():
    with torch.serialization.safe_globals(SAFE):
        yield


def test_tensors_of_parts_keep_the_contract(providers, safe):
    check_provider(quantized, scramble, equal, providers=providers, loaded=equal)
    deep = TwoTensor(*(TwoTensor(torch.rand(3), torch.rand(3)) for _ in range(2)))
    with torch.serialization.safe_globals([TwoTensor]):
        same = lambda one, other: repr(one) == repr(other)  # noqa: E731
        check_provider(deep.clone, torch.Tensor.zero_, same, providers=providers, loaded=same)


def test_nested_parts_are_restored_in_place(save):
    def make(seed):
        module = nn.Module()
        module.weight = nn.Parameter(quantized(seed), requires_grad=False)
        module.register_buffer("table", quantized(seed + 10))
        return {"m": module, "loose": [quantized(seed + 20), 1]}

    def tensors(state):
        return [state["m"].weight, state["m"].table, state["loose"][0]]

    saved, target = make(0), make(1)
    stored = save(saved)
    before = [(t, t.codes.data_ptr()) for t in tensors(target)]
    versions = [t._version for t in tensors(target)]
    stored.restore(target)
    assert all(map(equal, tensors(target), tensors(saved)))
    for now, (tensor, place) in zip(tensors(target), before, strict=True):
        assert now is tensor
        assert now.codes.data_ptr() == place
    assert all(t._version > v for t, v in zip(tensors(target), versions, strict=True))
    roles = {o.path: o.role for o in stored.tree.objects}
    assert roles["m", "weight", "codes"] is Role.PARAMETER
    assert roles["m", "table", "scale"] is Role.BUFFER


OTHERS = {
    "context": lambda: quantized(context={**CONTEXT, "block": [1, 64]}),
    "nested context": lambda: quantized(
        context={**CONTEXT, "options": (Options(2, Rounding.NEAREST), None)}
    ),
    "shape": lambda: quantized(shape=(2, 4)),
    "class": lambda: TwoTensor(torch.ones(3, 4), torch.ones(3, 4)),
    "plain": lambda: torch.ones(3, 4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_mismatches_are_reported_and_left_alone(save, what):
    stored = save({"a": {"b": quantized()}, "x": torch.ones(1)})
    target = OTHERS[what]()
    before = repr(save({"t": target}).data)
    placement = stored.plan({"a": {"b": target}, "x": torch.zeros(1)})
    (problem,) = placement.problems
    assert problem.startswith("a/b is stored as ")
    assert [t.path for t in placement.targets] == [("x",)]
    assert [d.skippable for d in placement.differences] == [what == "shape"]
    assert repr(save({"t": target}).data) == before


def test_restores_all_parts_or_none(save):
    stored = save({"a": quantized(), "x": 1})
    (problem,) = stored.plan({"a": quantized(1), "x": 0}, include="a/codes").problems
    assert "a is restored whole or not at all, but only 1 of its 2" in problem
    target = quantized(1)
    stored.restore({"a": target, "x": 0}, include="x")
    assert equal(target, quantized(1))


def test_without_a_template_only_classes_torch_trusts_are_rebuilt(save):
    stored = save({"a": {"b": quantized()}, "x": 1})
    for known in ([], SAFE[1:], SAFE[:-1]):
        with torch.serialization.safe_globals(known):
            with pytest.raises(UnsupportedStateError, match=r"^a/b is stored as .*add_safe_"):
                stored.load()
            assert stored.load(exclude="a") == {"x": 1}
    # The advice of the message.
    with torch.serialization.safe_globals(SAFE):
        made = stored.load()["a"]["b"]
    assert type(made) is Quantized
    assert equal(made, quantized())
    assert made.context == CONTEXT


def test_a_class_that_recreates_its_parts_is_refused(save):
    class Fresh(Quantized):
        """Returns copies of its parts."""

        def __getattribute__(self, name):
            item = super().__getattribute__(name)
            return item.clone() if name == "codes" else item

    tensor = Fresh.__new__(Fresh, quantized().codes, None, None)
    Fresh.__init__(tensor, quantized().codes, quantized().scale, None)
    with pytest.raises(UnsupportedStateError, match=r"a is a .*Fresh whose part 'codes'"):
        save({"a": tensor})


def test_malformed_nodes_are_refused(save, safe):
    stored = save({"a": quantized()})
    (node,) = stored.tree.nodes
    for key, value in [
        ("class", "torch.Tensor"), ("class", None), ("parts", 3), ("context", {"form": "odd"}),
        ("context", None), ("strides", "x"),
    ]:  # fmt: skip
        before = node.meta[key]
        node.meta[key] = value
        with pytest.raises((FormatError, UnsupportedStateError)):
            stored.load()
        node.meta[key] = before
    assert equal(stored.load()["a"], quantized())


def job(seed, steps=1):
    """A layer whose weight and optimizer state consist of parts."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.rand(4, 4), torch.rand(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
    for _ in range(steps):
        train(model, optimizer)
    return {"m": model, "o": optimizer}


def train(model, optimizer):
    model.weight.grad = model.weight.detach() * 0.5
    optimizer.step()


def shown(state):
    weight = state["m"].weight
    return repr([weight.detach(), state["o"].state[weight]])


@pytest.mark.parametrize("mode", ["blocking", "lazy"])
def test_training_resumes_with_parameters_and_state_of_parts(mode):
    with penstock.Checkpointer(memory()) as ckpt, torch.serialization.safe_globals([TwoTensor]):
        state = job(0)
        handle = ckpt.save({**state, "grads": penstock.Grads(state["m"])}, 1, mode=mode)
        saved = shown(state)
        train(state["m"], state["o"])
        # Weight and momentum, each of two parts: only an optimizer step changes them.
        assert handle.result().deferred_bytes == (4 * 64 if mode == "lazy" else 0)
        for steps in (0, 2):  # without optimizer state to write into, and with
            other = job(1, steps)
            if not steps:
                other["m"].weight.grad = None
            ckpt.restore({**other, "grads": penstock.Grads(other["m"])})
            assert shown(other) == saved
            assert type(other["m"].weight.grad) is TwoTensor
            train(other["m"], other["o"])
            assert shown(other) == shown(state)


def test_without_strict_a_tensor_with_one_mismatched_part_is_left_alone():
    other = quantized(1)
    other.scale = torch.zeros(1, 1)
    kept = other.codes.clone()
    with penstock.Checkpointer(memory(), mode="blocking") as ckpt:
        ckpt.save({"q": quantized(), "deep": TwoTensor(torch.ones(3), torch.ones(3))}, 1)
        target = {"q": other, "deep": TwoTensor(torch.zeros(3), torch.zeros(3))}
        with pytest.raises(
            penstock.RestoreMismatchError, match="q is stored as a tensor whose part"
        ):
            ckpt.restore(target)
        report = ckpt.restore(target, strict=False)
    assert torch.equal(other.codes, kept)
    assert not other.scale.any()
    assert [m.path for m in report.mismatched] == ["q"]
    assert target["deep"].a.all()


def test_plain_tensor_is_not_restored_into_parts(save):
    placement = save({"a": torch.ones(3, 4)}).plan({"a": quantized()})
    (problem,) = placement.problems
    assert problem.startswith("a is stored as a tensor, but is a ")
    assert save({"x": 1}).plan({"a": quantized()}).missing == [("a",)]


def test_parts_can_be_read_one_by_one():
    backend = memory()
    with penstock.Checkpointer(backend) as ckpt:
        ckpt.save({"a": quantized()}, 1, mode="blocking")
        assert torch.equal(ckpt.open(1)["a/codes"], quantized().codes)
        with pytest.raises(UnsupportedStateError, match="read its parts"):
            ckpt.open(1)["a"]


@pytest.mark.parametrize(
    "context", [lambda: 1, {"f": [lambda: 1]}, object()], ids=["function", "in a list", "object"]
)
def test_a_context_that_cannot_be_stored_is_refused_by_name(save, context):
    with pytest.raises(
        UnsupportedStateError, match=r"a/b.* context that the tensor's __tensor_flatten__"
    ):
        save({"a": {"b": quantized(context=context)}})

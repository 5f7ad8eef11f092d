"""A save with the structure of the previous save reuses only its cuts."""

from __future__ import annotations

import pytest
import torch
from tests.integration.support import memory

import penstock
from penstock.core.plan import save as plan_module

CHUNK_BYTES = 1 << 16
LARGE = 44_000  # elements: cut into separate chunks


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.small = torch.nn.Linear(30, 40)
        self.large = torch.nn.Linear(90, 250, bias=False)
        self.register_buffer("steps", torch.zeros(()))


class Job:
    """A state with slabs, large tensors of several addresses, a tied tensor, and values."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.many = {f"{n:03}": torch.randn(100) for n in range(32)}
        self.memory = torch.randn(3 * LARGE + 1000)
        self.large = [self.memory[5:LARGE], torch.randn(LARGE)]
        self.state = {
            "net": self.net,
            "optimizer": self.optimizer,
            "many": self.many,
            "large": self.large,
            "tied": self.many["003"],
            "epoch": 3,
        }
        self.step()

    def step(self):
        loss = self.net.small(torch.ones(30)).sum() + self.net.large(torch.ones(90)).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def values_in_place(job):
    for tensor in [*job.many.values(), *job.large]:
        tensor.add_(1)


def another_tensor_at_another_address(job):
    job.many["007"] = torch.randn(100)
    job.large[1] = job.memory[LARGE + 321 : 2 * LARGE + 321]


def two_tensors_change_places(job):
    job.many["010"], job.many["020"] = job.many["020"], job.many["010"]
    job.large.reverse()


def other_memory_behind_a_tensor(job):
    job.large[1].data = job.memory[LARGE + 77 : 2 * LARGE + 77]
    job.many["011"].data = torch.randn(100)
    job.net.large.weight.data = torch.randn(250, 90)


def another_shape_of_as_many_elements(job):
    job.many["001"] = job.many["001"].view(4, 25)
    job.large[1] = job.large[1].view(100, -1)


def other_strides(job):
    job.many["002"] = torch.randn(10, 10).t()
    job.large[1] = torch.randn(200, 220).t()


def resized(job):
    job.many["005"].resize_(300).fill_(5)
    job.large[1].resize_(LARGE + 1000).fill_(6)


def another_dtype(job):
    job.many["006"] = job.many["006"].view(torch.int32)
    job.large[1] = job.large[1].view(torch.int32)


def no_longer_tied(job):
    job.state["tied"] = job.many["003"].clone().add_(1)


def tied_to_another(job):
    job.state["tied"] = job.many["004"]


def newly_tied(job):
    job.many["030"] = job.many["031"]
    job.large[0] = job.large[1]


def one_more(job):
    job.many["more"] = torch.randn(100)
    job.net.register_parameter("more", torch.nn.Parameter(torch.randn(7)))


def one_less(job):
    del job.many["008"]
    del job.large[0]


def another_order(job):
    job.many["000"] = job.many.pop("000")


def another_name(job):
    job.many["renamed"] = job.many.pop("029")


def another_value(job):
    job.state["epoch"] = 123_456


def a_value_for_a_tensor(job):
    job.many["009"] = "gone"


def another_module(job):
    job.net = job.state["net"] = Net()
    job.optimizer = job.state["optimizer"] = torch.optim.SGD(job.net.parameters(), momentum=0.9)
    job.step()


def state_of_the_optimizer_gone(job):
    job.optimizer.state.clear()


def another_role(job):
    weight = job.net.small.bias
    del job.net.small.bias
    job.net.small.register_buffer("bias", weight.detach())


CHANGES = [
    values_in_place,
    another_tensor_at_another_address,
    two_tensors_change_places,
    other_memory_behind_a_tensor,
    another_shape_of_as_many_elements,
    other_strides,
    resized,
    another_dtype,
    no_longer_tied,
    tied_to_another,
    newly_tied,
    one_more,
    one_less,
    another_order,
    another_name,
    another_value,
    a_value_for_a_tensor,
    another_module,
    state_of_the_optimizer_gone,
    another_role,
]


def flat(value, path=()):
    """Every leaf of a loaded tree, by path."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {path: value}
    return {p: leaf for key, child in pairs for p, leaf in flat(child, (*path, key)).items()}


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    return one == two


def known_and_new(job, change, options):
    """Return the loads of a save with a known structure, and of one without."""
    with penstock.Checkpointer(memory(), **options) as ckpt:
        ckpt.save(job.state, step=1).result()
        change(job)
        ckpt.save(job.state, step=2).result()
        known = flat(ckpt.load(2))
    with penstock.Checkpointer(memory(), **options) as ckpt:
        ckpt.save(job.state, step=2).result()
        return known, flat(ckpt.load(2))


@pytest.mark.parametrize(
    "codecs",
    [
        pytest.param((), id="raw"),
        pytest.param(("zstd",), id="encoded", marks=pytest.mark.slow),
    ],
)
def test_a_changed_structure_is_stored_exactly(codecs):
    rules = [{"match": ["many", "large"], "codecs": list(codecs)}] if codecs else []
    for change in CHANGES:
        job = Job()
        known, new = known_and_new(job, change, {"chunk_bytes": CHUNK_BYTES, "rules": rules})
        assert list(known) == list(new), change
        assert all(equal(known[path], new[path]) for path in new), change
        live = {("many", name): tensor for name, tensor in job.many.items()}
        live |= {("large", n): tensor for n, tensor in enumerate(job.large)}
        assert all(equal(known[path], value) for path, value in live.items()), change


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_a_known_structure_is_not_cut_again(mode, monkeypatch):
    job, cuts = Job(), []
    cut = plan_module._chunks
    monkeypatch.setattr(plan_module, "_chunks", lambda *each: cuts.append(step) or cut(*each))
    with penstock.Checkpointer(memory(), mode=mode) as ckpt:
        for step in (1, 2, 3):
            if step == 3:
                one_more(job)
            ckpt.save(job.state, step=step).result()
    assert cuts == [1, 3]

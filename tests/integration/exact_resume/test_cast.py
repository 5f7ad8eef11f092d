"""`restore(cast=True)` fills floats of one dtype from stored floats of another, in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.integration.support import checkpointer, memory
from torch import nn

from penstock import Grads, RestoreMismatchError


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def stepped(dtype, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 40), nn.LayerNorm(40), nn.Linear(40, 2)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(3, 300, dtype=dtype)).float().pow(2).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(params=[[], ["zstd"]], ids=["raw", "encoded"])
def store(request):
    rules = [{"match": "**", "codecs": request.param}] if request.param else []
    with checkpointer(memory(), rules=rules) as ckpt:
        yield ckpt


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_a_model_and_its_optimizer_are_restored_into_another_precision(store, stored, here):
    job, other = stepped(stored), stepped(here, seed=1)
    live = [*other["model"].parameters(), other["optimizer"].state[other["model"][0].weight]]
    places = [t.data_ptr() for t in live[:-1]] + [live[-1]["exp_avg"].data_ptr()]
    store.save(job, 1, mode="blocking")

    report = store.restore(other, cast=True)

    for one, two in zip(job["model"].parameters(), other["model"].parameters(), strict=True):
        assert two.dtype is here
        assert torch.equal(bits(two), bits(one.to(here)))
        mine, theirs = other["optimizer"].state[two], job["optimizer"].state[one]
        for key in ("exp_avg", "exp_avg_sq"):
            assert mine[key].dtype is here
            assert torch.equal(bits(mine[key]), bits(theirs[key].to(here)))
    again = [*other["model"].parameters(), other["optimizer"].state[other["model"][0].weight]]
    assert places == [t.data_ptr() for t in again[:-1]] + [again[-1]["exp_avg"].data_ptr()]
    names = {str(dtype).removeprefix("torch.") for dtype in (stored, here)}
    assert {frozenset((c.stored, c.here)) for c in report.cast} == {frozenset(names)}
    assert "model/0.weight" in {c.path for c in report.cast}
    assert len(report.cast) == 6 * 3  # `step` is float32 on both sides


def test_without_cast_the_error_names_it_and_nothing_changes(store):
    store.save(stepped(torch.float32), 1, mode="blocking")
    other = stepped(torch.bfloat16, seed=1)
    before = [p.clone() for p in other["model"].parameters()]

    with pytest.raises(RestoreMismatchError, match=r"model/0\.weight: .*\(cast=True converts it\)"):
        store.restore(other, include="model")

    assert all(map(torch.equal, before, other["model"].parameters()))


def test_tensors_of_any_layout_arrays_and_gradients_are_converted(store):
    model = nn.Linear(30, 40)
    model(torch.randn(5, 30)).sum().backward()
    other = nn.Linear(30, 40).bfloat16()
    array = np.random.default_rng(0).standard_normal((20, 30))
    fixed = np.zeros((20, 30), np.float16)
    fixed.flags.writeable = False
    wide = torch.randn(50, 60)
    state = {"grads": Grads(model), "array": array, "fixed": array, "strided": wide, "tied": wide}
    target = {
        "grads": Grads(other),
        "array": np.zeros((20, 30), np.float32),
        "fixed": fixed,
        "strided": torch.zeros(60, 50, dtype=torch.float16).t(),
        "tied": torch.zeros(50, 60, dtype=torch.bfloat16),
    }
    store.save(state, 1, mode="blocking")

    store.restore(target, cast=True)

    assert torch.equal(bits(other.weight.grad), bits(model.weight.grad.bfloat16()))
    np.testing.assert_array_equal(target["array"], array.astype(np.float32))
    half = array.astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(target["fixed"], half)
    assert torch.equal(bits(target["strided"]), bits(wide.half()))
    assert torch.equal(bits(target["tied"]), bits(wide.bfloat16()))


def test_views_of_one_memory_are_compared_after_the_conversion(store):
    base = torch.randn(8)
    store.save({"all": base, "part": base[:4].bfloat16().float()}, 1, mode="blocking")
    memory_of_both = torch.zeros(8, dtype=torch.bfloat16)
    target = {"all": memory_of_both, "part": memory_of_both[:4]}

    store.restore(target, cast=True)
    assert torch.equal(bits(memory_of_both), bits(base.bfloat16()))

    store.save({"all": base, "part": base[:4] + 1}, 2, mode="blocking")
    with pytest.raises(RestoreMismatchError, match="share memory"):
        store.restore(target, cast=True)


def test_a_part_of_a_checkpoint_is_converted(store):
    job, other = stepped(torch.float32), stepped(torch.bfloat16, seed=1)
    before = other["model"][2].weight.clone()
    store.save(job, 1, mode="blocking")

    report = store.restore(other, cast=True, include="model/0")

    assert [c.path for c in report.cast] == ["model/0.weight", "model/0.bias"]
    assert torch.equal(bits(other["model"][0].weight), bits(job["model"][0].weight.bfloat16()))
    assert torch.equal(before, other["model"][2].weight)

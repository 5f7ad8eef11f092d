"""A training with Lion continues from its last logged step, to the same bits."""

import penstock
import pytest
import torch
from penstock.core.plugins.registry import default_registry
from penstock.testing.replayers import check_replayer

from penstock_example_plugin.lion import Lion, LionReplayer, rounded


def made(dtype=torch.float32, **options):
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Linear(33, 1)).to(dtype)
    return model, Lion(model.parameters(), lr=1e-3, weight_decay=0.1, **options)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayer(dtype, stochastic):
    check_replayer(lambda: made(dtype, stochastic=stochastic))


def test_installed_replayer_is_the_one_under_test():
    assert isinstance(default_registry().replayer(made()[1]), LionReplayer)


def train(root, until):
    model, optimizer = made(torch.bfloat16, stochastic=True)
    state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng()}
    with penstock.Checkpointer(root) as ckpt:
        first = ckpt.resume(state)
        for step in range(first, until):
            optimizer.zero_grad()
            model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            if step % 10 == 0:
                ckpt.save(state, step, mode="blocking")
            else:
                assert ckpt.log(state, step)
    return first, [parameter.detach().clone() for parameter in model.parameters()]


def test_training_continues_from_the_last_logged_step(tmp_path):
    torch.manual_seed(1)
    expected = train(tmp_path / "whole", 8)[1]
    torch.manual_seed(1)
    train(tmp_path / "cut", 5)
    torch.manual_seed(2)
    first, got = train(tmp_path / "cut", 8)
    assert first == 5
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_random_rounding_keeps_the_mean_and_what_is_not_finite():
    value = torch.full((100_000,), 1 + 2**-9)  # between 1 and the next bfloat16, 1 + 2**-7
    got = rounded(value, torch.Generator().manual_seed(0))
    assert sorted({*got.tolist()}) == [1, 1 + 2**-7]
    assert abs(got.mean().item() - value[0].item()) < 2**-13
    odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert torch.equal(rounded(odd, torch.Generator()).isfinite(), torch.zeros(3, dtype=bool))

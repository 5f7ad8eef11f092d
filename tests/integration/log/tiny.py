"""A training so small that a checkpoint and its log take milliseconds."""

import functools
from dataclasses import replace

import torch
from torch import nn, optim

import penstock
from penstock.core.abc import DelegatingBackend


class Tiny:
    """Four weights, their momentum, and a mean that no optimizer changes."""

    def __init__(self, seed=0, turn=0.0):
        self.weight = nn.Parameter(torch.full((4,), float(seed)))
        self.optimizer = optim.SGD([self.weight], 0.1, momentum=0.9)
        self.mean = torch.full((2,), float(seed))
        self.state = {"weight": self.weight, "optimizer": self.optimizer, "mean": self.mean}
        self.turn = turn

    def step(self, number):
        self.weight.grad = torch.sin(torch.arange(4.0) + number + self.turn)
        self.optimizer.step()
        self.mean.lerp_(torch.full((2,), float(number)), 0.1)

    def bits(self):
        momentum = self.optimizer.state[self.weight].get("momentum_buffer", torch.zeros(4))
        return torch.cat([self.weight.detach(), momentum, self.mean]).numpy().tobytes()


@functools.cache
def bits_of(step):
    """The state after a training from step 0 to `step`."""
    training = Tiny()
    for number in range(step + 1):
        training.step(number)
    return training.bits()


def logged(store, *, last=4, **options):
    """Train, save step 0, and log the steps up to `last`."""
    with penstock.Checkpointer(store, **options) as ckpt:
        return logged_with(ckpt, last)


def logged_with(ckpt, last):
    """Train, save step 0, and log the steps up to `last`; return the training."""
    training = Tiny()
    for number in range(last + 1):
        training.step(number)
        if number:
            assert ckpt.log(training.state, number)
        else:
            ckpt.save(training.state, 0, mode="blocking")
    return training


def restored(store, wanted=bits_of):
    """Restore the newest step; return it after a comparison with training at that step."""
    other = Tiny(seed=9)
    with penstock.Checkpointer(store) as ckpt:
        report = ckpt.restore(other.state)
        assert other.bits() == wanted(report.step)
    return report.step


class WithoutAppends(DelegatingBackend):
    """An object store: blobs exist once they are sealed."""

    @property
    def capabilities(self):
        return replace(super().capabilities, appends=False)

"""What saves cost the training thread if `due` chooses the interval, against its bound of 1 %.

    python benchmarks/schedule.py --rounds 1

A perceptron trains on a CPU with steps of three lengths. After a third of the time the store
becomes ten times slower. Counts the time in `due` and `save`, and the waits of `Optimizer.step`,
from the begin of one save to that of a later one.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from bench import Benchmark

import penstock
from penstock.core.save import fence
from penstock.core.storage.open import open_backend
from penstock.testing.faults import LatencyBackend

FAST_S = 0.001


class Slowing(LatencyBackend):
    """A store whose calls can become slower."""

    def slow_down(self, latency_s: float) -> None:
        """Set the delay of each call."""
        self._latency_s = latency_s


def train(mode, step_s, folder, options):
    """Train, and save when a save is due; return the share of the time that saves cost."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def step(batches):
        optimizer.zero_grad()
        for _ in range(batches):
            model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()

    batches = calibrated(step, step_s)
    store = Slowing(open_backend(f"posix://{folder}"), latency_s=FAST_S)
    starts, steps = [], []
    with penstock.Checkpointer(store, mode=mode, retention={"keep_last": 2}) as ckpt:
        ckpt.prepare(state)
        began, slow_from, spent, number = time.monotonic(), None, 0.0, 0
        while (now := time.monotonic()) - began < options.seconds:
            if slow_from is None and now - began > options.seconds / 3:
                slow_from = now
                store.slow_down(10 * FAST_S)
            step(batches)
            called = time.monotonic()
            if ckpt.due(number):
                starts.append((called, spent + fence.waited_s(), number))
                ckpt.save(state, number)
            returned = time.monotonic()
            spent += returned - called
            steps.append(called - now)
            number += 1
    fast = [one for one in starts if one[0] < slow_from]
    slow = [one for one in starts if one[0] >= slow_from]
    return {
        "step, ms": 1000 * sorted(steps)[len(steps) // 2],
        "overhead %": share(fast[1:]),
        "steps between": between(fast[1:]),
        "overhead %, slow store": share(slow),
        "steps between, slow store": between(slow),
        "saves": len(starts),
    }


def calibrated(step, step_s):
    """The number of batches for a step of this length."""
    times = []
    for _ in range(40):
        began = time.monotonic()
        step(1)
        times.append(time.monotonic() - began)
    return max(1, round(step_s / sorted(times)[10]))


def share(starts):
    """The share of the training time, in percent, from the first save to the last."""
    (first, spent_then, _), *_, (last, spent, _) = starts
    return 100 * (spent - spent_then) / (last - first - (spent - spent_then))


def between(starts):
    return (starts[-1][2] - starts[0][2]) / (len(starts) - 1)


GROUPS = {
    mode: {f"Penstock, steps of {ms} ms": partial(train, mode, ms / 1000) for ms in (20, 80, 250)}
    for mode in ("lazy", "blocking")
}
BENCHMARK = Benchmark(__file__, __doc__, GROUPS, {"seconds": (80.0, "of each measurement")})

if __name__ == "__main__":
    BENCHMARK.run()

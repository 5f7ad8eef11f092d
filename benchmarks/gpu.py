"""A state on a CUDA device: how long saves block, their cost in a training loop, and a restore.

    python benchmarks/gpu.py --gb 3 --folder /dev/shm
    python benchmarks/gpu.py --small 5000 --rounds 5 --folder /dev/shm

Trains linear layers with fused AdamW, in fp32 with bf16 autocast; with `--small`, parameters of
4 KiB. Penstock, DCP (`async_save` with one stager, which reuses its pinned memory), and a plain
copy to pinned memory. The first save of a process allocates memory. `blocks` is the call plus the
extra time of the next step.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from bench import Benchmark, State, check, tensors_of, timed
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import penstock

WIDTH, STEPS_ALONE = 4096, 20


class Job:
    """A model on the device whose step takes some milliseconds."""

    def __init__(self, options):
        if options.small:
            model = nn.ParameterList(torch.randn(1024) for _ in range(options.small // 4))
            self.output = lambda: torch.cat([*model])
        else:
            layers = max(1, round(options.gb * 1e9 / (12 * WIDTH * WIDTH)))
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
            batch = torch.randn(4 * WIDTH, WIDTH, device="cuda")
            self.output = lambda: model(batch)
        self.optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-5, fused=True)
        self.step()
        self.state = State(model, self.optimizer, tensors_of(model, self.optimizer))

    def step(self):
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.output().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()


class Penstock:
    """Saves in one mode; its fence is a hook of the optimizer."""

    def __init__(self, folder, mode):
        self.ckpt = penstock.Checkpointer(folder / "run", retention={"keep_last": 1})
        self.mode, self.number = mode, 0

    def begin(self, state):
        self.number += 1
        return self.ckpt.save(state.tree, self.number, mode=self.mode)

    def restore(self, state):
        self.ckpt.restore(state.tree)


class DcpKept:
    def __init__(self, folder):
        self.folder, self.stager = folder / "dcp", BlockingAsyncStager(cache_staged_state_dict=True)

    def begin(self, state):
        return dcp.async_save(state.tensors, checkpoint_id=self.folder, async_stager=self.stager)

    def restore(self, state):
        dcp.load(state.tensors, checkpoint_id=self.folder)


def save(make, folder, options):
    """Three saves, each with training around it, and restores of the last."""
    job, contender, rows = Job(options), make(folder), []
    for _ in range(3):
        row = {}
        with timed(row, "alone"):
            for _ in range(STEPS_ALONE):
                job.step()
        step_s = row.pop("alone, s") / STEPS_ALONE
        with timed(row, "saved"):
            with timed(row, "call"):
                pending = contender.begin(job.state)
            with timed(row, "next"):
                job.step()
            steps, began = 0, time.perf_counter()
            while not pending.done():
                job.step()
                steps += 1
            if steps:
                row["steps/s meanwhile"] = steps / (time.perf_counter() - began)
            pending.result()
        row["blocks, s"] = row["call, s"] + row.pop("next, s") - step_s
        row["steps/s alone"] = 1 / step_s
        rows.append(row)
    first = {f"first {name}": rows[0][name] for name in ("call, s", "blocks, s")}
    later = {
        name: statistics.median(row[name] for row in rows[1:])
        for name in rows[1]
        if all(name in row for row in rows[1:])
    }
    return first | later | restore(contender, job)


@torch.no_grad()
def restore(contender, job):
    """Restore twice, and compare; the time is the second restore's."""
    figures, sums = {}, []
    for _ in range(2):
        for tensor in job.state.tensors.values():
            tensor.zero_()
        torch.cuda.synchronize()
        with timed(figures, "restore"):
            contender.restore(job.state)
            torch.cuda.synchronize()
        words = [t.view(torch.int32).sum() for t in job.state.tensors.values()]
        sums.append(torch.stack(words).tolist())
    check(any(sums[0]) and sums[0] == sums[1], contender)
    return figures


def copy(_, options):
    """A plain copy into pinned memory."""
    tensors, figures = Job(options).state.tensors, {}
    pinned = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for n, t in tensors.items()}
    for name in ("first call", "call"):
        torch.cuda.synchronize()
        with timed(figures, name):
            for path, tensor in tensors.items():
                pinned[path].copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
    return figures


MODES = ("blocking", "async", "lazy")
GROUPS = {
    "gpu": {
        **{f"Penstock, {mode}": partial(save, partial(Penstock, mode=mode)) for mode in MODES},
        "DCP, kept stager": partial(save, DcpKept),
        "plain copy to pinned memory": copy,
    }
}

OPTIONS = {"gb": (3.0, "size of the state"), "small": (0, "tensors of 4 KiB instead")}
BENCHMARK = Benchmark(__file__, __doc__, GROUPS, OPTIONS, base="Penstock, async")

if __name__ == "__main__":
    BENCHMARK.run()

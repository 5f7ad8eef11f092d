"""A state on a CUDA device: how long saves block, what they cost a training loop, and a restore.

Trains linear layers with AdamW, in fp32 with bf16 autocast. Penstock, DCP (`async_save` with pinned
staging) and a plain copy into pinned memory take turns in each round. Penstock saves to memory
unless a folder is named; DCP needs one, and has one in memory (/dev/shm) then.

    python benchmarks/gpu.py --gb 6 --rounds 5 --folder /mnt/nvme/bench
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import staging

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig

WIDTH = 4096
STEPS = 40


class Job:
    """Layers of 4096 x 4096, in which a step takes some milliseconds."""

    def __init__(self, gb):
        layers = max(1, round(gb * 1e9 / (3 * 4 * WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.randn(4 * WIDTH, WIDTH, device="cuda")
        self.step()

    def step(self):
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finished_step(self):
        self.step()
        torch.cuda.synchronize()

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self):
        states = self.optimizer.state.values()
        moments = [t for s in states for t in s.values() if t.ndim]
        return {str(n): t for n, t in enumerate([*self.model.state_dict().values(), *moments])}


class Measurement:
    """Seconds by name, one for each round."""

    def __init__(self):
        self.found = {}

    def add(self, name, seconds):
        self.found.setdefault(name, []).append(seconds)

    def timed(self, name, action):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = action()
        self.add(name, time.perf_counter() - began)
        return result


def blocked(job, ckpt, peer, steps, measured):
    """Time what the loop waits for; each save is over before the next measurement."""
    for mode in ("lazy", "async"):
        save = partial(ckpt.save, job.state, next(steps), mode=mode)
        handle = measured.timed(f"Penstock {mode}", save)
        measured.timed(f"step right after Penstock {mode}", job.finished_step)
        handle.result()
    pending = measured.timed("DCP async_save", partial(peer, job.tensors()))
    measured.timed("step right after DCP", job.finished_step)
    pending.result()
    measured.timed("step alone", job.finished_step)


def plain_copy(job, pinned, measured):
    def copy():
        for name, tensor in job.tensors().items():
            pinned[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    measured.timed("plain copy to pinned memory", copy)


def loops(job, ckpt, steps, measured):
    """Train with and without a save at the first step; a save has the whole loop to end."""
    for name in ("no save", "lazy save", "async save"):
        torch.cuda.synchronize()
        began = time.perf_counter()
        handle = None
        if name != "no save":
            handle = ckpt.save(job.state, next(steps), mode=name.split()[0])
        for _ in range(STEPS):
            job.step()
        torch.cuda.synchronize()
        measured.add(f"loop of {STEPS} steps, {name}", time.perf_counter() - began)
        if handle is not None:
            handle.result()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--folder", type=Path, help="where to save; default: memory")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    folder = Path(tempfile.mkdtemp(dir=args.folder or "/dev/shm"))
    store = folder / "penstock" if args.folder else MemoryBackend(MemoryConfig())
    job, steps, measured = Job(args.gb), count(), Measurement()
    stager = staging.BlockingAsyncStager(cache_staged_state_dict=True)
    peer = partial(dcp.async_save, checkpoint_id=folder / "dcp", async_stager=stager, no_dist=True)
    tensors = job.tensors()
    pinned = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for n, t in tensors.items()}
    first = measured
    with penstock.Checkpointer(store, retention={"keep_last": 1}) as ckpt:
        for number in range(args.rounds + 1):
            if number == 1:  # the round before made memory and loaded kernels
                measured = Measurement()
            blocked(job, ckpt, peer, steps, measured)
            plain_copy(job, pinned, measured)
            loops(job, ckpt, steps, measured)
            save = partial(ckpt.save, job.state, next(steps), mode="blocking")
            measured.timed("Penstock blocking save", save)
            measured.timed("Penstock restore", partial(ckpt.restore, job.state))
            print(f"round {number} of {args.rounds} is over", file=sys.stderr)
    shutil.rmtree(folder)
    report(args, sum(t.nbytes for t in tensors.values()), first.found, measured.found)


def report(args, nbytes, first, found):
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {nbytes / 1e9:.2f} GB, {args.rounds} rounds\n")
    print("|  | median s | lowest | highest | GB/s | first |\n|---|---:|---:|---:|---:|---:|")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        rate = "" if "step" in name else f"{nbytes / middle / 1e9:.1f}"
        numbers = f"{middle:.4f} | {min(seconds):.4f} | {max(seconds):.4f} | {rate}"
        print(f"| {name} | {numbers} | {first[name][0]:.3f} |")
    if args.json:
        args.json.write_text(json.dumps({"bytes": nbytes, "seconds": found, "first": first}))


if __name__ == "__main__":
    main()

"""A state on a CUDA device: how long saves block, what they cost a training loop, and a restore.

Trains linear layers with AdamW, in fp32 with bf16 autocast. Penstock, DCP (`async_save` with pinned
staging that is kept) and a plain copy into pinned memory take turns in each round. The first round
makes memory and loads kernels; it is printed, and left out of the table.

    python benchmarks/gpu.py --gb 3 --rounds 3                          # in memory
    python benchmarks/gpu.py --gb 3 --rounds 3 --folder /mnt/nvme/bench
    python benchmarks/gpu.py --small 5000                               # many small tensors
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
import warnings
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig

WIDTH = 4096
STEPS_ALONE = 20
MODES = ("blocking", "async", "lazy")


class Job:
    """Layers of 4096 x 4096, in which a step takes some milliseconds."""

    def __init__(self, gb):
        layers = max(1, round(gb * 1e9 / (3 * 4 * WIDTH * WIDTH)))
        self.batch = torch.randn(4 * WIDTH, WIDTH, device="cuda")
        self.start(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))))

    def start(self, model):
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.step()

    def output(self):
        return self.model(self.batch)

    def step(self, before_update=lambda: None):
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.output().square().mean()
        loss.backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self):
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        weights = [p.detach() for p in self.model.parameters()]
        return {str(n): t for n, t in enumerate([*weights, *moments])}


class SmallJob(Job):
    """Parameters of 4 KiB; with two moments and a step count of each, so many tensors in all."""

    def __init__(self, number):
        self.start(nn.ParameterList(torch.randn(1024) for _ in range(number // 4)))

    def output(self):
        return torch.cat([*self.model])


class Timings:
    """Seconds, and steps per second, by name; one for each round."""

    def __init__(self, nbytes, ends_at):
        self.nbytes = nbytes
        self.ends_at = ends_at
        self.round = 0
        self.values = {}

    def add(self, name, value, unit="s"):
        self.values.setdefault((name, unit), {})[self.round] = value
        print(f"round {self.round}: {name}: {value:.4f} {unit}", flush=True)

    def timed(self, name, action):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = action()
        self.add(name, time.perf_counter() - began)
        return result

    def now(self, name, unit="s"):
        """The value of this round."""
        return self.values[name, unit][self.round]

    def over(self):
        return time.monotonic() > self.ends_at

    def table(self):
        print("\n|  | median | lowest | highest | GB/s | first |\n|---|---:|---:|---:|---:|---:|")
        for (name, unit), by_round in self.values.items():
            later = [value for number, value in by_round.items() if number] or [math.nan]
            middle = statistics.median(later)
            rate = "" if unit != "s" or "step" in name else f"{self.nbytes / middle / 1e9:.1f}"
            numbers = f"{middle:.4f} {unit} | {min(later):.4f} | {max(later):.4f} | {rate}"
            print(f"| {name} | {numbers} | {by_round.get(0, math.nan):.4f} |")


class Penstock:
    """Saves in one mode."""

    def __init__(self, ckpt, mode, steps):
        self.name = f"Penstock {mode}"
        self._save = lambda job: ckpt.save(job.state, next(steps), mode=mode)

    def begin(self, job):
        handle = self._save(job)
        # The fence is a hook of the optimizer, so there is nothing to call before an update.
        return (lambda: None), handle

    def end(self):
        pass


class DcpKept:
    """Saves by `async_save`; the stager copies before the call returns, and keeps its memory."""

    name = "DCP, kept stager"

    def __init__(self, folder):
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._save = partial(dcp.async_save, checkpoint_id=folder, async_stager=stager)

    def begin(self, job):
        return (lambda: None), self._save(job.tensors())

    def end(self):
        pass


class DcpBehind:
    """Saves by `async_save`; the stager copies behind forward and backward.

    A new one for each save: that of torch 2.11 fails when it is used again.
    """

    name = "DCP, async stager"

    def __init__(self, folder):
        self._folder = folder

    def begin(self, job):
        self._stager = DefaultStager(StagingOptions(use_shared_memory=False))
        pending = dcp.async_save(
            job.tensors(), checkpoint_id=self._folder, async_stager=self._stager
        )
        return pending.staging_completion.result, pending.upload_completion

    def end(self):
        self._stager.close()


def measure_save(contender, job, timings):
    """Time the call, the step that comes next, and steps until the save is over."""
    name = contender.name
    measure_alone(job, timings)  # meanwhile the store deletes what was saved before
    before_update, pending = timings.timed(f"{name}: call", partial(contender.begin, job))
    began = time.perf_counter()
    timings.timed(f"{name}: next step", partial(job.step, before_update))
    blocked = timings.now(f"{name}: call") + timings.now(f"{name}: next step")
    timings.add(f"{name}: blocks", blocked - 1 / timings.now("no save", "steps/s"))
    steps, at = 0, time.perf_counter()
    while not pending.done() and not timings.over():
        job.step()
        steps += 1
    seconds = time.perf_counter() - at
    pending.result()
    contender.end()
    if steps:
        timings.add(f"{name}: while it writes", steps / seconds, "steps/s")
        timings.add(f"{name}: saved after the call", time.perf_counter() - began)


def measure_alone(job, timings):
    """Time steps; the last ones of a round count."""
    began = time.perf_counter()
    for _ in range(STEPS_ALONE):
        job.step()
    timings.add("no save", STEPS_ALONE / (time.perf_counter() - began), "steps/s")


def measure_plain_copies(job, pinned, timings):
    tensors = job.tensors()

    def out():
        for name, tensor in tensors.items():
            pinned[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def back():
        for name, tensor in tensors.items():
            tensor.copy_(pinned[name], non_blocking=True)
        torch.cuda.synchronize()

    timings.timed("plain copy to pinned memory", out)
    timings.timed("plain copy from pinned memory", back)


def sums(job):
    """Sums of all words, by which a restore is checked."""
    return torch.stack([t.view(torch.int32).sum() for t in job.tensors().values()]).tolist()


@torch.no_grad()
def measure_restores(job, ckpt, dcp_folder, timings):
    """Time restores of what was saved last; each is checked after its clock."""
    loads = {"Penstock restore": partial(ckpt.restore, job.state)}
    if (dcp_folder / ".metadata").exists():
        loads["DCP load"] = lambda: dcp.load(job.tensors(), checkpoint_id=dcp_folder)
    for name, load in loads.items():
        load()
        expected = sums(job)
        for tensor in job.tensors().values():
            tensor.zero_()
        timings.timed(name, lambda load=load: (load(), torch.cuda.synchronize()))
        if sums(job) != expected:
            raise SystemExit(f"{name}: the tensors differ from those that were restored before")


def free_memory():
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state")
    parser.add_argument("--small", type=int, help="so many tensors of 4 KiB instead of a training")
    parser.add_argument("--only", default="", help="the name of what saves begins so")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--seconds", type=float, default=300, help="begins nothing after so many")
    parser.add_argument("--folder", type=Path, help="where to save; default: memory")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    ends_at = time.monotonic() + args.seconds
    warnings.filterwarnings("ignore")
    job, steps = SmallJob(args.small) if args.small else Job(args.gb), count()
    tensors = job.tensors()
    timings = Timings(sum(t.nbytes for t in tensors.values()), ends_at)
    where = args.folder or "memory (DCP: /dev/shm)"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {where}")
    print(f"{timings.nbytes / 1e9:.2f} GB of state, {free_memory() / 1e9:.1f} GB of free memory")
    folder = Path(tempfile.mkdtemp(dir=args.folder or "/dev/shm"))
    store = folder / "penstock" if args.folder else MemoryBackend(MemoryConfig())
    pinned = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for n, t in tensors.items()}
    dcp_folder = folder / "dcp"
    try:
        with penstock.Checkpointer(store, retention={"keep_last": 1}) as ckpt:
            contenders = [
                *(Penstock(ckpt, mode, steps) for mode in MODES),
                DcpKept(dcp_folder),
                DcpBehind(dcp_folder),
            ]
            for number in range(args.rounds + 1):
                timings.round = number
                measure_plain_copies(job, pinned, timings)
                for contender in contenders:
                    if contender.name.startswith(args.only) and not timings.over():
                        measure_save(contender, job, timings)
                if timings.over():
                    print("the time is up", flush=True)
                    break
                measure_restores(job, ckpt, dcp_folder, timings)
    finally:
        shutil.rmtree(folder)
        timings.table()
    if args.json:
        found = {f"{name} ({unit})": v for (name, unit), v in timings.values.items()}
        args.json.write_text(json.dumps({"bytes": timings.nbytes, "values": found}))


if __name__ == "__main__":
    main()

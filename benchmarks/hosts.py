"""Recovery of a job from the memory of its hosts, and what copies between hosts cost.

    python benchmarks/hosts.py

Each rank is a host with a root of its own in memory, on this machine. `recovery`: after the loss of
one host, and of all, in front of a store that reads 200 MB/s in all. `training`: a loop of steps
that saves in the background, and whose copies are limited; or another process copies as many bytes.
`memory`: how much more memory a host takes while it copies.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import bench
import torch
import torch.distributed as dist
from ranks import fsdp_state, quiet, slowest
from torch.nn.functional import mse_loss

import penstock
from penstock.backends.hosts import HostsBackend, HostsConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.storage.open import open_backend
from penstock.testing.faults import LatencyBackend

COPY = """
import sys, time
for line in sys.stdin:
    due = time.monotonic()
    with open(line.strip(), "rb") as source, open(sys.argv[1], "wb") as target:
        while data := source.read(4 << 20):
            target.write(data)
            due += len(data) / float(sys.argv[2])
            time.sleep(max(0, due - time.monotonic()))
"""


@contextmanager
def job(folder, options):
    """Join the ranks; give the root of this one, which is deleted at the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    root = Path(f"{options.memory}-{folder.name}-{dist.get_rank()}")
    try:
        yield root
    finally:
        dist.barrier()
        shutil.rmtree(root, ignore_errors=True)


def hosts(root, **options):
    host = f"host-{dist.get_rank()}"
    return {"type": "hosts", "path": str(root), "domain": host, **options}


class CountedStore(LatencyBackend):
    """A store with a limited rate, which lists the bytes of each read."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.read_bytes = []  # threads append: a sum of theirs could lose some

    def read(self, requests, /):
        self.read_bytes += [request.target.nbytes for request in requests]
        super().read(requests)

    def read_record(self, name, /, *, limit_bytes):
        data = super().read_record(name, limit_bytes=limit_bytes)
        self.read_bytes.append(len(data))
        return data


def recovery(lost, folder, options):
    """Restore after `lost` of the hosts have lost their roots."""
    with job(folder, options) as root:
        rank, count = dist.get_rank(), dist.get_world_size()
        state, figures = fsdp_state(options.gb), {}
        expected = bench.digests(state.tensors)

        def tiers():
            fast = HostsBackend(
                HostsConfig(path="", copies=1, domain=str(rank)),
                root=open_backend(str(root)),
            )
            rate = options.store_mb_per_s * 1e6 / count
            store = CountedStore(open_backend(str(folder / "store")), bytes_per_s=rate)
            config = TieredConfig(fast="memory://", durable="memory://")
            return store, TieredBackend(config, fast=fast, durable=store)

        with penstock.Checkpointer(tiers()[1]) as ckpt:
            handle = ckpt.save(state.tree, 1)
            bench.check(handle.replicated.result(), "replicated")
            handle.result()
        if rank in range(1, 1 + lost) or lost >= count:
            shutil.rmtree(root)
        state.wipe()
        quiet()  # the store stays in the page cache: its rate alone counts
        store, backend = tiers()
        with penstock.Checkpointer(backend) as ckpt, slowest(figures, "restore"):
            ckpt.restore(state.tree)
        bench.check(bench.digests(state.tensors) == expected, "restored")
        read = torch.tensor(float(sum(store.read_bytes)))
        dist.all_reduce(read)
        figures["read from the store, MB"] = float(read) / 1e6
    return figures


def training(kind, folder, options):
    """The time of a step while the host copies, or another process does."""
    with job(folder, options) as root:
        rate = options.copy_mb_per_s * 1e6
        copies = {"copies": 1, "copy_bytes_per_s": rate} if kind == "copies" else {}
        state = fsdp_state(options.training_gb)
        layer = torch.nn.Linear(512, 512)
        inputs = torch.randn(options.rows, 512)
        words = [sys.executable, "-c", COPY, f"{root}-copy", str(rate)]
        other = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
        saved, took, cpu_s = None, [], 0.0
        with penstock.Checkpointer(hosts(root, **copies)) as ckpt:
            for step in range(options.steps):
                if step % options.save_every == 0:
                    if kind == "copies" and saved is not None:
                        bench.check(saved.replicated.done(), "copies, in time")
                    saved = ckpt.save(state.tree, step)
                    saved.committed.result()
                    if kind == "other process" and step:  # the copy of step 0 would not count
                        files = root.rglob("*.raw")
                        newest = max(files, key=lambda path: path.stat().st_mtime)
                        print(newest, file=other.stdin, flush=True)
                began = time.perf_counter()
                mse_loss(layer(inputs), inputs).backward()
                took.append(time.perf_counter() - began)
                if step == options.save_every:
                    cpu_s = time.process_time()
            cpu_s = time.process_time() - cpu_s
        other.communicate()
        cpu_s += sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        Path(f"{root}-copy").unlink(missing_ok=True)
    steps = options.steps - options.save_every
    return {"step, s": statistics.mean(took[-steps:]), "CPU of a step, s": cpu_s / steps}


def memory(copies, folder, options):
    """The rise of anonymous memory between the commit of a save and the end of its copies."""
    with job(folder, options) as root:
        state, most = fsdp_state(options.memory_gb), 0
        with penstock.Checkpointer(hosts(root, copies=copies)) as ckpt:
            ckpt.save(fsdp_state(0.05).tree, 0).result()
            quiet()
            handle = ckpt.save(state.tree, 1)
            handle.committed.result()
            before = bench.proc_field("status", "RssAnon")
            began = time.perf_counter()
            while not handle.replicated.done() or time.perf_counter() < began + 1:
                most = max(most, bench.proc_field("status", "RssAnon") - before)
                time.sleep(0.005)
            took_s = time.perf_counter() - began
        highest = torch.tensor(float(most))
        dist.all_reduce(highest, dist.ReduceOp.MAX)
    return {"rise, MB": float(highest) * 1024 / 1e6, "copies, s": took_s}


BENCHMARK = bench.Benchmark(
    __file__,
    __doc__,
    {
        "recovery": {
            "Penstock, all hosts lost": partial(recovery, 1 << 10),
            "Penstock, one host lost": partial(recovery, 1),
        },
        "training": {
            f"Penstock, {kind}": partial(training, kind)
            for kind in ("other process", "copies", "no copies")
        },
        "memory": {f"Penstock, copies = {n}": partial(memory, n) for n in (0, 1)},
    },
    {
        "ranks": (2, "hosts"),
        "gb": (1.0, "state of all hosts for `recovery`, in 10^9 bytes"),
        "store_mb_per_s": (200.0, "rate of the store, in 10^6 bytes per second"),
        "training_gb": (0.2, "state of all hosts for `training`"),
        "memory_gb": (4.0, "state of all hosts for `memory`"),
        "rows": (4096, "rows of a batch"),
        "steps": (240, "steps of `training`"),
        "save_every": (80, "steps between saves"),
        "copy_mb_per_s": (50.0, "bytes that a host copies per second"),
        "memory": ("/dev/shm/penstock-hosts", "prefix of the roots"),
    },
    base="Penstock, all",
    of_groups={"recovery": {"ranks": 4}},
)

if __name__ == "__main__":
    BENCHMARK.run()

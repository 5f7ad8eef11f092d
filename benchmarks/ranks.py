"""Several ranks save and restore one sharded state, with Penstock and with torch's checkpoints.

    python benchmarks/ranks.py --ranks 4

A stack of linear layers is cut by FSDP2, with AdamW state (gloo, CPU): two background saves (the
second counts) and a cold restore. Times are the slowest rank's.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import bench
import torch
import torch.distributed as dist
from compare import Dcp, Penstock
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH = 2048


def quiet(folder=None):
    """Wait until all ranks are here, and writes are on the disk; drop the cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        bench.settle(0.3)
        if folder is not None:
            bench.drop_cache(folder)
    dist.barrier()


@contextmanager
def slowest(figures, name):
    """Measure a block as `bench.timed` does; keep the highest value of all ranks."""
    own = {}
    with bench.timed(own, name):
        yield
    for figure, value in own.items():
        highest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        figures[figure] = float(highest)


def fsdp_state(gb):
    """Return linear layers cut by FSDP2, with AdamW's moments."""
    layers = max(1, round(gb * 1e9 / (WIDTH * WIDTH * 12)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = bench.adamw(model)
    all_tensors = bench.tensors_of(model, optimizer)
    tensors = {name: tensor for name, tensor in all_tensors.items() if not name.endswith("step")}
    bench.fill(tensors, dist.get_rank())
    return bench.State(model, optimizer, tensors)


def sharded(make, folder, options):
    """Saves in the background, and a cold restore."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warm, small = make(folder / "warm"), fsdp_state(0.05)
    warm.save(small, 0).wait()
    warm.restore(small, 0, "")
    warm.close()
    state, figures = fsdp_state(options.gb), {}
    expected, contender = bench.digests(state.tensors), make(folder / "run")
    for step in (0, 1):  # the first save of a process makes its staging memory
        quiet()
        with slowest(figures, "durable"):
            with slowest(figures, "call"):
                pending = contender.save(state, step)
            pending.wait()
    state.wipe()
    quiet(folder)
    with slowest(figures, "restore"):
        contender.restore(state, 1, "")
    bench.check(bench.digests(state.tensors) == expected, make)
    contender.close()
    dist.barrier()
    return figures


DCP = partial(Dcp, background=True, keep_staging=True, threads=1, alone=False)
BENCHMARK = bench.Benchmark(
    __file__,
    __doc__,
    {
        "ranks": {
            "Penstock, async": partial(sharded, partial(Penstock, mode="async")),
            "Penstock, lazy": partial(sharded, partial(Penstock, mode="lazy")),
            "DCP async_save, kept stager": partial(sharded, DCP),
        }
    },
    {"ranks": (2, "processes"), "gb": (0.5, "state over all ranks, in 10^9 bytes")},
    base="DCP",
)

if __name__ == "__main__":
    BENCHMARK.run()

"""Several ranks save and restore one sharded state, beside torch's own checkpoints.

    python benchmarks/ranks.py --ranks 2 --only save
    python benchmarks/ranks.py --ranks 4 --only replicas "to columns"
    python benchmarks/ranks.py --ranks 6 --only "from 8" --side 1440 --block-bytes 4194304

Each measurement is a job under torchrun (gloo, CPU); a time is that of the slowest rank. `save`: a
stack of linear layers cut by FSDP2, with AdamW state; two saves, two in the background, and a cold
restore. The other groups: matrices that some ranks saved are restored by others, and `read/needed`
is what all ranks read of blobs beside what the host needs. Penstock reads once per host, or once
per job as if each rank was a host (by sockets of this machine), or each rank alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import bench
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import dcp_stager
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import penstock

WIDTH = 2048


def joined(measure):
    """A measure that all ranks of a job take part in."""

    def rank(*arguments):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = measure(*arguments)
        dist.barrier()
        return found

    return rank


def quiet(folder=None):
    """Wait until all ranks are here, and what was written is on the disk; drop the cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        bench.settle(0.3)
        if folder is not None:
            bench.drop_cache(folder)
    dist.barrier()


@contextmanager
def slowest(found, name, *more):
    """Measure a block as `bench.timed` does; the highest value of all ranks counts."""
    own = {}
    with bench.timed(own, name, *more):
        yield
    for figure, value in own.items():
        highest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        found[figure] = float(highest)


# -- a sharded training state ------------------------------------------------------------------


class Ours:
    """Penstock, by module and optimizer."""

    def __init__(self, folder, mode="async"):
        self.ckpt, self.mode = penstock.Checkpointer(folder), mode

    def save(self, state, step):
        self.ckpt.save(state.tree, step, mode="blocking")

    def begin(self, state, step):
        return self.ckpt.save(state.tree, step, mode=self.mode).result

    def restore(self, state, step):
        self.ckpt.restore(state.tree, step)

    def close(self):
        self.ckpt.close()


class Theirs:
    """torch.distributed.checkpoint with one thread per rank and a kept stager; it syncs files."""

    def __init__(self, folder):
        self.folder, self.stager = folder, dcp_stager()

    def _writer(self, step):
        return dcp.FileSystemWriter(self.folder / str(step), sync_files=True)

    def save(self, state, step):
        dcp.save(state.tensors, storage_writer=self._writer(step))

    def begin(self, state, step):
        writer = self._writer(step)
        return dcp.async_save(state.tensors, storage_writer=writer, async_stager=self.stager).result

    def restore(self, state, step):
        dcp.load(state.tensors, storage_reader=dcp.FileSystemReader(self.folder / str(step)))

    def close(self):
        self.stager.close()


def fsdp_state(gb):
    """Linear layers cut by FSDP2, and AdamW's moments of them."""
    layers = max(1, round(gb * 1e9 / (WIDTH * WIDTH * 12)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = bench.adamw(model)
    found = bench.tensors_of(model, optimizer)
    tensors = {name: tensor for name, tensor in found.items() if not name.endswith("step")}
    bench.fill(tensors, dist.get_rank())
    return bench.State(model, optimizer, tensors)


@joined
def sharded(make, folder, options):
    """Saves, saves in the background, and a cold restore."""
    warm, small = make(folder / "warm"), fsdp_state(0.05)
    warm.save(small, 0)
    warm.restore(small, 0)
    warm.close()
    state, found = fsdp_state(options.gb), {}
    expected, contender = bench.digests(state.tensors), make(folder / "run")
    for step in (0, 1):  # the first save of a process allocates its staging memory
        quiet()
        with slowest(found, "save"):
            contender.save(state, step)
    for step in (2, 3):
        quiet()
        with slowest(found, "durable"):
            with slowest(found, "blocks"):
                wait = contender.begin(state, step)
            wait()
    state.wipe()
    quiet(folder)
    with slowest(found, "restore", "MB"):
        contender.restore(state, 3)
    bench.check(bench.digests(state.tensors) == expected, make)
    contender.close()
    return found


# -- a state that others have saved ------------------------------------------------------------


def matrices(placement, options, *, filled):
    """Matrices whose elements say where they stand; zeros unless filled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for number in range(max(1, round(options.gb * 1e9 / (4 * options.side**2)))):
        part = expected_part(number, placement, options.side)
        part = part.contiguous() if filled else torch.zeros(part.shape)
        cut = isinstance(placement, Shard)
        state[f"w{number}"] = DTensor.from_local(part, mesh, [placement]) if cut else part
    return state


def expected_part(number, placement, side):
    """What this rank holds of a matrix."""
    places = torch.arange(side * side, dtype=torch.float32).view(side, side).mul_(number + 1)
    if isinstance(placement, Shard):
        return places.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()]
    return places


@joined
def written(placement, folder, options):
    """Save by both systems: a job of its own, which `reshard` starts."""
    state = matrices(placement, options, filled=True)
    with penstock.Checkpointer(folder / "ours", block_bytes=options.block_bytes or None) as ckpt:
        ckpt.save(state, 1, mode="blocking")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "theirs"))
    return {}


def reshard(saved, restore, placement, folder, options):
    """Restore what `saved` says how many ranks saved, after a first restore that warms up."""
    ranks, job = saved
    if int(os.environ["RANK"]) == 0:
        own = ("RANK", "MASTER_", "TORCHELASTIC_", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        launch = launched(ranks)
        arguments = [a for a in sys.argv[1:] if not a.startswith("--worker")]
        command = [sys.executable, *launch, sys.argv[0], *arguments, f"--worker=saved/{job}"]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return restored(restore, placement, folder, options)


@joined
def restored(restore, placement, folder, options):
    for _ in range(2):
        state, found = matrices(placement, options, filled=False), {}
        quiet(folder)
        with slowest(found, "restore", "MB"):
            read = torch.tensor(restore(state, folder), dtype=torch.float64)
        for number, tensor in enumerate(state.values()):
            expected = expected_part(number, placement, options.side)
            bench.check(torch.equal(bench.local(tensor), expected), f"w{number}")
        dist.all_reduce(read)
    return {"read/needed": float(read) / (len(state) * options.side**2 * 4)} | found


def ours(state, folder, **how):
    """Restore with Penstock; returns the bytes of blobs that this rank read."""
    with penstock.Checkpointer(folder / "ours", **how) as ckpt:
        return ckpt.restore(state, 1).bytes_read


def theirs(state, folder):
    """Restore with DCP; returns the bytes that this process read by system calls."""
    before = bench.proc_field("io", "rchar")
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "theirs"))
    metadata = (folder / "theirs" / ".metadata").stat().st_size
    return max(0, bench.proc_field("io", "rchar") - before - metadata)


WAYS = {
    "Penstock": ours,
    "Penstock, hosts of one rank": partial(ours, read_once_per_host=False, read_once_per_job=True),
    "Penstock, each rank alone": partial(ours, read_once_per_host=False),
    "DCP": theirs,
}
SAVED = {"replicas": Replicate(), "rows": Shard(0)}
CASES = {
    "4 replicas": ((4, "replicas"), Replicate()),
    "rows of 4 to columns": ((4, "rows"), Shard(1)),
    "rows from 8": ((8, "rows"), Shard(0)),
    "rows from 6": ((6, "rows"), Shard(0)),
}
GROUPS = {
    "save": {
        "Penstock, async": partial(sharded, Ours),
        "Penstock, lazy": partial(sharded, partial(Ours, mode="lazy")),
        "DCP": partial(sharded, Theirs),
    },
    **{
        case: {name: partial(reshard, saved, way, place) for name, way in WAYS.items()}
        for case, (saved, place) in CASES.items()
    },
}


def launched(ranks):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


if __name__ == "__main__":
    if any(argument.startswith("--worker=saved/") for argument in sys.argv):
        GROUPS["saved"] = {name: partial(written, place) for name, place in SAVED.items()}
    sizes = {
        "ranks": (2, "ranks that save, or restore what others saved"),
        "gb": (1.0, "state over all ranks, in 10^9 bytes"),
        "side": (6144, "rows of a matrix: 8 and 6 should divide it"),
        "block_bytes": (0, "of a checksum; 0: by default"),
    }
    bench.run(__doc__, GROUPS, sizes, base="DCP", launch=lambda options: launched(options.ranks))

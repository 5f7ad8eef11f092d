"""How many bytes ranks read in a restore, together or each alone, and how long it takes.

    python benchmarks/reshard.py --gb 1
    python benchmarks/reshard.py --gb 0.3 --side 1440 --block-bytes 4194304

Each measurement is a job of its own under torchrun (gloo, CPU). A state of large matrices is saved
by some ranks and restored by others: replicas, other rows, columns of rows. Penstock reads once per
host, or once per job as if each rank was on a host of its own (by sockets of this machine), or each
rank by itself, and torch.distributed.checkpoint as it does. Reads are those of blobs
(of the data files with DCP), over all ranks, beside the bytes of the state that the host needs. The
page cache is dropped before each restore; a time is that of the slowest rank.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from disk import drop_cache, settle
from ranks import most, peak_mb
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import Placement

BUILD = Path(__file__).resolve().parent.parent / "build"
OURS, HOSTS, ALONE, THEIRS = "Penstock", "Penstock, hosts of one rank", "Penstock, alone", "DCP"

CASES: dict[str, tuple[int, Placement, int, Placement]] = {
    "4 replicas": (4, Replicate(), 4, Replicate()),
    "rows of 4 to columns of 4": (4, Shard(0), 4, Shard(1)),
    "rows of 8 to rows of 6": (8, Shard(0), 6, Shard(0)),
    "rows of 6 to rows of 8": (6, Shard(0), 8, Shard(0)),
}
"""What is saved by how many ranks, and restored by how many."""


class Sizes(NamedTuple):
    """How large the state is, how long the side of its matrices, and the blocks; 0: by default."""

    gb: float
    side: int
    block_bytes: int


console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    case: Annotated[list[str] | None, typer.Option(help="A case; repeatable.")] = None,
    gb: Annotated[float, typer.Option(help="Size of the state, in 10^9 bytes.")] = 1,
    side: Annotated[int, typer.Option(help="Rows of a matrix: 8 and 6 should divide it.")] = 6144,
    block_bytes: Annotated[int, typer.Option(help="Of a checksum; 0: by default.")] = 0,
    rounds: int = 2,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = BUILD / "bench",
    worker: Annotated[str, typer.Option(help="For its own processes.", hidden=True)] = "",
) -> None:
    """Measure."""
    sizes = Sizes(gb, side, block_bytes)
    if worker:
        work(worker, folder, sizes, rounds)
        return
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(title=f"{gb:g} GB on one host, each rank cold")
    for name in ("", "", "read / needed", "seconds", "extra MB of a rank"):
        table.add_column(name, justify="left" if not name else "right")
    for name in track(case or [*CASES], "cases", console=console):
        with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
            before, _, after, _ = CASES[name]
            in_processes(f"save/{name}", before, scratch, sizes, rounds)
            found = in_processes(f"restore/{name}", after, scratch, sizes, rounds)
        for system, runs in found.items():
            cells = [f"{statistics.median(column):.2f}" for column in zip(*runs, strict=True)]
            table.add_row(name, system, *cells)
    console.print(table)


def in_processes(
    what: str, ranks: int, folder: str, sizes: Sizes, rounds: int
) -> dict[str, list[list[float]]]:
    """Run one job under torchrun; returns what rank 0 printed last."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    options = [f"--worker={what}", f"--folder={folder}", f"--rounds={rounds}"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in sizes._asdict().items()]
    done = subprocess.run(
        [sys.executable, *launch, __file__, *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- one rank --------------------------------------------------------------------------------------


def work(what: str, folder: Path, sizes: Sizes, rounds: int) -> None:
    """Be one rank of a job that saves, or restores."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    verb, _, name = what.partition("/")
    found: dict[str, list[list[float]]] = defaultdict(list)
    if verb == "save":
        state = made(CASES[name][1], sizes, fill=True)
        with penstock.Checkpointer(folder / "ours", block_bytes=sizes.block_bytes or None) as ckpt:
            ckpt.save(state, 1, mode="blocking")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "theirs"))
    else:
        for number in range(rounds + 1):
            for system, restore in SYSTEMS.items():
                result = one(restore, CASES[name][3], folder, sizes)
                if number:  # the first restore of a process imports, and finds the other ranks
                    found[system].append(result)
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def made(placement: Placement, sizes: Sizes, *, fill: bool) -> dict[str, Any]:
    """Matrices whose elements say where they stand; zeros without `fill`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    side = sizes.side
    for number in range(max(1, round(sizes.gb * 1e9 / (4 * side * side)))):
        shape = [side, side]
        if isinstance(placement, Shard):
            shape[placement.dim] //= dist.get_world_size()
        local = torch.zeros(shape)
        if fill:
            local.copy_(expected(number, placement, side))
        tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
        state[f"w{number}"] = local if isinstance(placement, Replicate) else tensor
    return state


def expected(number: int, placement: Placement, side: int) -> torch.Tensor:
    """Return what this rank holds of a matrix."""
    places = torch.arange(side * side, dtype=torch.float32).view(side, side).mul_(number + 1)
    if isinstance(placement, Shard):
        return places.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()]
    return places


def one(
    restore: Callable[[dict[str, Any], Path], int], placement: Placement, folder: Path, sizes: Sizes
) -> list[float]:
    """Restore once; returns reads over needs, seconds, and memory."""
    state = made(placement, sizes, fill=False)
    dist.barrier()
    if dist.get_rank() == 0:
        drop_cache(folder)
        settle(0.3)
    dist.barrier()
    before = peak_mb(reset=True)
    began = time.perf_counter()
    read = torch.tensor(restore(state, folder), dtype=torch.float64)
    found: dict[str, float] = {}
    most(found, "seconds", time.perf_counter() - began)
    most(found, "memory", peak_mb() - before)
    for number, tensor in enumerate(state.values()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(local, expected(number, placement, sizes.side)):
            message = f"rank {dist.get_rank()}: w{number} was not restored"
            raise SystemExit(message)
    dist.all_reduce(read)
    return [float(read) / (len(state) * sizes.side**2 * 4), found["seconds"], found["memory"]]


def ours(state: dict[str, Any], folder: Path, **options: bool) -> int:
    """Restore with Penstock; returns the bytes of blobs that this rank has read."""
    with penstock.Checkpointer(folder / "ours", **options) as ckpt:
        return ckpt.restore(state, 1).bytes_read


def hosts(state: dict[str, Any], folder: Path) -> int:
    """The same, as if each rank was on a host of its own; what they share goes by the network."""
    return ours(state, folder, read_once_per_host=False, read_once_per_job=True)


def alone(state: dict[str, Any], folder: Path) -> int:
    """The same, each rank by itself."""
    return ours(state, folder, read_once_per_host=False)


def theirs(state: dict[str, Any], folder: Path) -> int:
    """Restore with DCP; returns the bytes that this process has read by system calls."""
    metadata = (folder / "theirs" / ".metadata").stat().st_size
    before = read_so_far()
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "theirs"))
    return max(0, read_so_far() - before - metadata)


def read_so_far() -> int:
    """Return the bytes that this process has read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


SYSTEMS = {OURS: ours, HOSTS: hosts, ALONE: alone, THEIRS: theirs}

if __name__ == "__main__":
    typer.run(main)

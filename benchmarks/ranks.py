"""Several ranks save and restore one sharded state, with Penstock and with torch's own checkpoints.

    python benchmarks/ranks.py --ranks 2 --ranks 4 --gb 2

Each measurement is a job of its own under torchrun (gloo, CPU): a stack of linear layers cut by
FSDP2, with AdamW state. Systems take turns. A time is that of the slowest rank, from a barrier on;
a save ends when its files are durable, and a restore begins with an empty page cache.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
import xxhash
from disk import drop_cache, settle
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD = Path(__file__).resolve().parent.parent / "build"
WIDTH = 2048
OURS, THEIRS = "Penstock", "DCP"
LAZY = "Penstock, lazy"

console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    ranks: Annotated[list[int] | None, typer.Option(help="How many; repeatable.")] = None,
    gb: Annotated[float, typer.Option(help="Size of the state over all ranks, in 10^9 bytes.")] = 2,
    rounds: int = 3,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = BUILD / "bench",
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = BUILD / "ranks.json",
    worker: Annotated[str, typer.Option(help="For its own processes.", hidden=True)] = "",
) -> None:
    """Measure saves and restores of a sharded state."""
    warnings.filterwarnings("ignore")
    if worker:
        work(worker, folder, gb)
        return
    folder.mkdir(parents=True, exist_ok=True)
    counts = ranks or [2]
    found: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    for _ in track(range(rounds), "rounds", console=console):
        for count in counts:
            for system in SYSTEMS:
                found[count, system].append(in_processes(system, count, folder, gb))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([[count, name, runs] for (count, name), runs in found.items()]))
    for count in counts:
        console.print(table_of({name: found[count, name] for name in SYSTEMS}, count, gb))


def in_processes(system: str, ranks: int, folder: Path, gb: float) -> dict[str, float]:
    """Run one measurement under torchrun; returns what rank 0 printed."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
        settle(0.5)
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        options = [f"--worker={system}", f"--folder={scratch}", f"--gb={gb}"]
        done = subprocess.run(
            [sys.executable, *launch, __file__, *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result


def table_of(found: dict[str, list[dict[str, float]]], ranks: int, gb: float) -> Table:
    """Medians, and how many times as fast as torch's own checkpoints."""
    table = Table(title=f"{ranks} ranks, {gb:g} GB in all, seconds (times DCP's)")
    table.add_column("")
    lines = list(dict.fromkeys(line for runs in found.values() for run in runs for line in run))
    for line in lines:
        table.add_column(line, justify="right")
    theirs = {line: middle(found[THEIRS], line) for line in lines}
    for name, runs in found.items():
        cells = []
        for line in lines:
            value = middle(runs, line)
            if value is None:
                cells.append("")
            elif name == THEIRS or "MB" in line or not theirs[line]:
                cells.append(f"{value:.3f}")
            else:
                cells.append(f"{value:.3f} ({theirs[line] / value:.2f})")
        table.add_row(name, *cells)
    return table


def middle(runs: list[dict[str, float]], line: str) -> float | None:
    """Return the median of a line, None where it was not measured."""
    values = [run[line] for run in runs if line in run]
    return statistics.median(values) if values else None


# -- one rank --------------------------------------------------------------------------------------


class State:
    """A sharded model and its optimizer, and the same tensors as a flat dict."""

    def __init__(self, gb: float) -> None:
        layers = max(1, round(gb * 1e9 / (WIDTH * WIDTH * 12)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tensors: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(dist.get_rank())
        for name, parameter in self.model.named_parameters():
            moments = {key: torch.empty_like(parameter.data) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(100.0), **moments}
            self.tensors[f"model/{name}"] = parameter.data
            self.tensors |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
        for local in self.locals():
            local.normal_(generator=generator)

    def locals(self) -> list[torch.Tensor]:
        """The tensors of this rank itself."""
        return [tensor.to_local() for tensor in self.tensors.values()]  # type: ignore[attr-defined]

    def digest(self) -> list[int]:
        """Of every local tensor's bytes."""
        return [
            xxhash.xxh3_64_intdigest(local.contiguous().view(torch.uint8).numpy())
            for local in self.locals()
        ]

    def wipe(self) -> None:
        """Overwrite every tensor, so that a restore that does nothing is noticed."""
        for local in self.locals():
            local.fill_(-1.0)


class Ours:
    """Penstock, by its module and its optimizer."""

    def __init__(self, folder: Path, mode: str = "async") -> None:
        self.ckpt = penstock.Checkpointer(folder)
        self.mode = mode

    def save(self, state: State, step: int) -> None:
        self.ckpt.save(self._tree(state), step, mode="blocking")

    def begin(self, state: State, step: int) -> Any:
        """Start a save in the background; its result waits."""
        return self.ckpt.save(self._tree(state), step, mode=self.mode).result

    def restore(self, state: State, step: int) -> None:
        self.ckpt.restore(self._tree(state), step)

    def close(self) -> None:
        self.ckpt.close()

    @staticmethod
    def _tree(state: State) -> dict[str, Any]:
        return {"model": state.model, "optimizer": state.optimizer}


class Theirs:
    """torch.distributed.checkpoint with one thread per rank, files synced by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Everything that wants an accelerator is off. A stager that is kept reuses its memory.
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self.stager = DefaultStager(options)

    def _writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.folder / str(step), sync_files=True)

    def save(self, state: State, step: int) -> None:
        dcp.save(state.tensors, storage_writer=self._writer(step))

    def begin(self, state: State, step: int) -> Any:
        """Start a save in the background; its result waits."""
        writer = self._writer(step)
        return dcp.async_save(state.tensors, storage_writer=writer, async_stager=self.stager).result

    def restore(self, state: State, step: int) -> None:
        dcp.load(state.tensors, storage_reader=dcp.FileSystemReader(self.folder / str(step)))

    def close(self) -> None:
        self.stager.close()


SYSTEMS: dict[str, Any] = {OURS: Ours, LAZY: lambda folder: Ours(folder, "lazy"), THEIRS: Theirs}


def work(system: str, folder: Path, gb: float) -> None:
    """Be one rank: a save, two in the background, and a cold restore."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    warm = SYSTEMS[system](folder / "warm")
    small = State(0.05)
    warm.save(small, 0)
    warm.restore(small, 0)
    warm.close()
    state = State(gb)
    expected = state.digest()
    contender = SYSTEMS[system](folder / "run")
    for step in (0, 1):  # the first save of a process allocates its staging memory
        quiet()
        with slowest(found, "save"):
            contender.save(state, step)
    for step in (2, 3):
        quiet()
        with slowest(found, "until durable"):
            with slowest(found, "blocked"):
                wait = contender.begin(state, step)
            wait()
    state.wipe()
    if dist.get_rank() == 0:
        drop_cache(folder)
    quiet()
    before = peak_mb(reset=True)
    with slowest(found, "restore"):
        contender.restore(state, 3)
    most(found, "extra MB", peak_mb() - before)
    if state.digest() != expected:
        message = f"rank {dist.get_rank()}: {system} did not restore what it had saved"
        raise SystemExit(message)
    contender.close()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def quiet() -> None:
    """Wait until all ranks are here, and what was written before is on the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        settle(0.3)
    dist.barrier()


@contextmanager
def slowest(found: dict[str, float], line: str) -> Iterator[None]:
    """Time a block that all ranks run; the slowest counts."""
    began = time.perf_counter()
    yield
    most(found, line, time.perf_counter() - began)


def most(found: dict[str, float], line: str, value: float) -> None:
    """Keep the highest value of all ranks."""
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    found[line] = float(highest)


def peak_mb(*, reset: bool = False) -> float:
    """Return the highest memory of this process so far, in MB, or since it was reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    typer.run(main)

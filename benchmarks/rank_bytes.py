"""How many bytes each of several ranks writes, how evenly, and how many of them twice.

    python benchmarks/rank_bytes.py --gb 40 --ranks 8

Arithmetic, no time: each rank is a process group of torch's fake backend, one after the other, with
a state of memory that nobody touches. Its plan is the one of a save; nothing is written. The state
is a stack of layers as of a transformer in float32, with two moments for each weight.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from penstock.core.plan.ranks import RankPlaces, chunks_of_rank, spans_of_rank
from penstock.core.ranks.group import RankGroup
from penstock.core.ranks.structure import classes_of, place_in, structure_digest
from penstock.core.testing.memory_coordination import MemoryBoard, MemoryCoordination
from penstock.core.types import Kind, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.plan.save import SavePlan

VOCABULARY = 32_000
WIDTH = 4096
MESH = "cpu"
TIED = ("embed.weight", "head.weight")

console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    gb: Annotated[float, typer.Option(help="Size of the state, in 10^9 bytes.")] = 40,
    ranks: Annotated[int, typer.Option(help="How many; divisible by 4.")] = 8,
) -> None:
    """Count."""
    warnings.filterwarnings("ignore")
    table = Table(title=f"{ranks} ranks, {gb:g} GB of state")
    table.add_column("topology")
    for column in ("GB written", "most by one rank", "imbalance", "written twice"):
        table.add_column(column, justify="right")
    for name, (place, stage_of) in TOPOLOGIES.items():
        written, twice = counted(ranks, gb, place, stage_of)
        sizes = [size for size in written if size]
        most = max(sizes)
        table.add_row(
            name,
            f"{sum(sizes) / 1e9:.2f}",
            f"{most / 1e9:.3f}",
            f"{100 * (most * len(sizes) / sum(sizes) - 1):.2f} %",
            f"{twice / 1e6:.1f} MB",
        )
    console.print(table)


def counted(
    ranks: int, gb: float, place: Place, stage_of: Callable[[int, int], Stage]
) -> tuple[list[int], int]:
    """Return the bytes that each rank writes, and those of tensors that are written twice."""
    plans: list[SavePlan] = []
    digests: list[str] = []
    with tempfile.TemporaryDirectory() as root, penstock.Checkpointer(root) as ckpt:
        for rank in range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            state = state_of(gb, place(ranks), stage_of(rank, ranks))
            group = RankGroup(rank, ranks, MemoryCoordination(MemoryBoard()))
            saver = ckpt._saver  # noqa: SLF001 - plans as a save does, and writes nothing
            request = saver._planned(state, 1, 0, mode="async", group=group)  # noqa: SLF001
            digests.append(structure_digest(request.entries, request.own_paths))
            plans.append(request.plan)
            dist.destroy_process_group()
    classes = classes_of(digests)
    written = []
    held: dict[Any, int] = defaultdict(int)
    sizes: dict[Any, int] = {}
    for rank, plan in enumerate(plans):
        mine = chunks_of_rank(plan, RankPlaces(place_in(classes, rank)))
        written.append(plan.bytes_of_chunks(mine))
        spans = spans_of_rank(plan, mine)
        for item, planned in enumerate(plan.objects):
            entry = planned.entry
            if entry.kind is Kind.TENSOR:
                whole = [Region.whole(entry.spec.shape)]
                regions = [span.region for span in spans[item]] if item in spans else whole
                held[entry.path] += sum(one.numel for one in regions) * entry.spec.itemsize
                sizes[entry.path] = entry.spec.nbytes
    assert all(held[path] >= size for path, size in sizes.items())
    return written, sum(held.values()) - sum(sizes.values())


def state_of(gb: float, make: Make, stage: Stage) -> dict[str, Any]:
    """Return what one stage has of the state."""
    number, count, tied = stage
    layers = 2 * max(1, round((gb * 1e9 / 24 - VOCABULARY * WIDTH) / (12 * WIDTH * WIDTH)))
    shapes = {"embed.weight": (VOCABULARY, WIDTH)} if number == 0 else {}
    for layer in range(layers * number // count, layers * (number + 1) // count):
        shapes |= {
            f"layers.{layer}.qkv.weight": (3 * WIDTH, WIDTH),
            f"layers.{layer}.out.weight": (WIDTH, WIDTH),
            f"layers.{layer}.up.weight": (4 * WIDTH, WIDTH),
            f"layers.{layer}.down.weight": (WIDTH, 4 * WIDTH),
            f"layers.{layer}.norm.weight": (WIDTH,),
        }
    if number == count - 1:
        head = "embed.weight" if tied else "head.weight"
        shapes |= {"norm.weight": (WIDTH,), head: (VOCABULARY, WIDTH)}
    state = {key: {n: make(n, s) for n, s in shapes.items()} for key in ("model", "m", "v")}
    return {**state, "epoch": 1}


def plain(_: int) -> Make:
    """Every rank holds all."""
    return lambda _name, shape: torch.empty(shape)


def sharded(ranks: int) -> Make:
    """`fully_shard` over all ranks."""
    return over(init_device_mesh(MESH, (ranks,)), lambda _: [Shard(0)])


def hybrid(ranks: int) -> Make:
    """Two replicas, each sharded over half of the ranks."""
    mesh = init_device_mesh(MESH, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return over(mesh, lambda _: [Replicate(), Shard(0)])


def tensor_parallel(ranks: int) -> Make:
    """Columns of the first and rows of the second of two layers; norms are plain."""
    mesh = init_device_mesh(MESH, (ranks,))
    return over(mesh, lambda name: None if "norm" in name else [Shard(1 if _rows(name) else 0)])


def stages(ranks: int) -> Make:
    """Two stages, each sharded over half of the ranks."""
    mesh = init_device_mesh(MESH, (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    return over(mesh["dp"], lambda _: [Shard(0)])


def both(ranks: int) -> Make:
    """Tensor parallelism over pairs, and FSDP2 of all; norms and embeddings know only FSDP2."""
    mesh = init_device_mesh(MESH, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    on_both = over(mesh, lambda name: [Shard(0), Shard(1 if _rows(name) else 0)])
    on_dp = over(mesh["dp"], lambda _: [Shard(0)])
    return lambda name, shape: (on_dp if "norm" in name or name in TIED else on_both)(name, shape)


def over(mesh: Any, placements_of: Callable[[str], Sequence[Any] | None]) -> Make:
    """Return what makes a tensor of a mesh, cut evenly, in memory that nobody touches."""

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        placements = placements_of(name)
        if placements is None:
            return torch.empty(shape)
        local = list(shape)
        for dimension, placement in enumerate(placements):
            if isinstance(placement, Shard):
                local[placement.dim] //= mesh.size(dimension)
        return DTensor.from_local(
            torch.empty(local), mesh, placements, run_check=False, shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    return make


def _rows(name: str) -> bool:
    return "out" in name or "down" in name


class Stage(NamedTuple):
    """A stage of a pipeline: its number, the number of stages, whether the embedding is tied."""

    number: int
    stages: int
    tied: bool = False


def one_stage(_rank: int, _ranks: int) -> Stage:
    """Every rank has all layers."""
    return Stage(0, 1)


def two_stages(rank: int, ranks: int) -> Stage:
    """The first half of the ranks has the first half of the layers."""
    return Stage(2 * rank // ranks, 2)


def tied_stages(rank: int, ranks: int) -> Stage:
    """The last stage has the embedding of the first one as its head."""
    return Stage(2 * rank // ranks, 2, tied=True)


if TYPE_CHECKING:
    Make = Callable[[str, tuple[int, ...]], torch.Tensor]
    Place = Callable[[int], Make]

TOPOLOGIES: dict[str, tuple[Any, Any]] = {
    "DDP": (plain, one_stage),
    "FSDP2": (sharded, one_stage),
    "HSDP, 2 replicas": (hybrid, one_stage),
    "TP": (tensor_parallel, one_stage),
    "2 stages x FSDP2": (stages, two_stages),
    "2 stages x DDP": (plain, two_stages),
    "2 stages x FSDP2, tied embedding": (stages, tied_stages),
    "FSDP2 x TP 2, embeddings plain to TP": (both, one_stage),
}

if __name__ == "__main__":
    typer.run(main)

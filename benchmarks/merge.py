"""What rank 0 does between the last seal and the commit, beside torch's planner on the same plans.

    python benchmarks/merge.py --ranks 1024 --objects 1024

Each rank holds a row of each object, and has stored a real part. Rank 0 reads the parts back from a
folder, checks that they cover everything, and encodes the index. torch.distributed.checkpoint's
planner gets as many plans, in memory; what it gathers is pickled and unpickled once, as a gather
through the network would, and nothing is sent.
"""

from __future__ import annotations

import gc
import pickle
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.core.manifests import UID, tensor  # noqa: E402
from tests.core.stored_ranks import part_of_rank  # noqa: E402

from penstock.core.format.index import index_of  # noqa: E402
from penstock.core.format.records import blob_name  # noqa: E402
from penstock.core.plan.bases import PartTables  # noqa: E402
from penstock.core.plugins.registry import default_registry  # noqa: E402
from penstock.core.save.manifest import PartSummary, RankManifest  # noqa: E402
from penstock.core.save.merge import KnownParts, PartsOfRanks  # noqa: E402
from penstock.core.storage.open import open_backend  # noqa: E402
from penstock.core.types import Region  # noqa: E402

if TYPE_CHECKING:
    from penstock.core.abc import Backend, StateObject
    from penstock.core.format.index import EncodedIndex

WIDTH = 4
console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    ranks: Annotated[int, typer.Option(help="Ranks, each with a part.")] = 1024,
    objects: Annotated[int, typer.Option(help="Objects, each with a row on every rank.")] = 1024,
    rounds: int = 3,
    folder: Annotated[Path, typer.Option(help="Parent of a scratch folder.")] = ROOT / "build",
) -> None:
    """Measure."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="merge-", dir=folder) as scratch:
        ours(Path(scratch), ranks, objects, rounds)
    theirs(ranks, objects, rounds)


def ours(folder: Path, ranks: int, objects: int, rounds: int) -> None:
    """Write the parts, then merge them."""
    backend = open_backend(folder, default_registry())
    paths = [("model", f"layers.{n // 8}.mlp.weight{n % 8}") for n in range(objects)]
    array = np.zeros((ranks, WIDTH), np.float32)
    posts: dict[int, dict[str, Any]] = {}
    own = None
    lengths = 0
    for rank in track(range(ranks), "parts", console=console):
        region = Region((rank, 0), (1, WIDTH))
        part, blob = part_of_rank(rank, ranks, [(path, array, [region]) for path in paths])
        # Past the backend, whose every file is durable: that would take longer than all the rest.
        store(folder / blob_name(UID, rank, 0, "raw"), blob)
        store(folder / part.entry.name, part.data)
        entry = part.entry
        lengths += entry.length
        if rank == 0:
            summary = PartSummary(entry, {}, (), 0, len(blob), 1)
            own = RankManifest(
                part.data, summary, part.shards, part.listing_bytes, {}, PartTables((), ((),))
            )
        row = [entry.length, entry.head_length, entry.head_sha256]
        posts[rank] = {"part": row, "listing": part.listing_bytes, "raw": 0}
    assert own is not None
    del posts[0]
    shards = ranks * objects
    entries = [tensor(path, (ranks, WIDTH)) for path in paths]
    known = KnownParts()
    for number in range(rounds):
        took = []
        for _ in range(2):  # the first knows no structure
            gc.collect()
            began = time.perf_counter()
            index = merge(backend, ranks, own, posts, entries, known)
            took.append(time.perf_counter() - began)
        known = KnownParts()
        new, again = took
        manifest = len(index.data) + lengths
        console.print(
            f"Penstock {number}: structure new {new:.2f} s, known {again:.2f} s; index "
            f"{len(index.data) / 1e3:.0f} KB, manifest {manifest / shards:.1f} B a shard"
        )
    tracemalloc.start()
    merge(backend, ranks, own, posts, entries, known)
    held, most = tracemalloc.get_traced_memory()
    console.print(
        f"Penstock: {most / 1e6:.0f} MB at most on rank 0, {held / 1e6:.0f} MB kept for the next"
    )
    tracemalloc.stop()


def merge(  # noqa: PLR0917 - what rank 0 has
    backend: Backend,
    ranks: int,
    own: RankManifest,
    posts: dict[int, dict[str, Any]],
    entries: list[StateObject],
    known: KnownParts,
) -> EncodedIndex:
    """Do what rank 0 does once all have sealed."""
    reader = PartsOfRanks(
        backend,
        uid=UID,
        step=1,
        world_size=ranks,
        references=(),
        tick=lambda: None,
        known=known,
    )
    parts = reader.read(own.summary, posts)
    blocks = reader.merge(own.shards, entries).blocks
    return index_of(UID, blocks, [one.entry for one in parts])


def store(path: Path, data: bytes) -> None:
    """Write a file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def theirs(ranks: int, objects: int, rounds: int) -> None:
    """Gather plans, and plan."""
    for _ in range(rounds):
        plans = [
            SavePlan([item(n, rank, ranks) for n in range(objects)], planner_data={})
            for rank in range(ranks)
        ]
        pickled = [pickle.dumps(plan) for plan in plans]
        del plans
        began = time.perf_counter()
        gathered = [pickle.loads(data) for data in pickled]
        unpickled = time.perf_counter() - began
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        planned, metadata = planner.create_global_plan(gathered)
        took = time.perf_counter() - began
        size = len(pickle.dumps(metadata))
        console.print(
            f"DCP: {sum(map(len, pickled)) / 1e6:.0f} MB unpickled {unpickled:.2f} s, planned "
            f"{took:.2f} s; metadata {size / ranks / objects:.0f} B a shard"
        )
        del planned, metadata, gathered


def item(number: int, rank: int, ranks: int) -> WriteItem:
    """Return what DCP plans for one row of one object."""
    name = f"model.layers.{number // 8}.mlp.weight{number % 8}"
    offsets, sizes = torch.Size((rank, 0)), torch.Size((1, WIDTH))
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=torch.float32),
            size=torch.Size((ranks, WIDTH)),
        ),
    )


if __name__ == "__main__":
    typer.run(main)

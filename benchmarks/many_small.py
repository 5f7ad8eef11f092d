"""Many small tensors: what a save and a restore take for each object, not for each byte.

Saves and restores a dict of tensors of 4 KiB, and restores one tensor out of a dict of many. Every
measurement runs in a process of its own, so that `--against` can name the interpreter of another
installation: the two take turns, round by round, and the table has the medians of both.

    python benchmarks/many_small.py --rounds 3 --against ../other/.venv/bin/python
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from disk import drop_cache, settle
from rich.console import Console
from rich.progress import track
from rich.table import Table

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD = Path(__file__).resolve().parent.parent / "build"
ELEMENTS = 1024  # float32, so 4 KiB
HERE = "here"

console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    tensors: Annotated[int, typer.Option(help="Tensors of 4 KiB to save and restore.")] = 50_000,
    objects: Annotated[int, typer.Option(help="Tensors of which one is restored.")] = 300_000,
    rounds: Annotated[int, typer.Option(help="Measurements of each kind.", min=1)] = 3,
    against: Annotated[
        Path | None, typer.Option(help="Python of another installation, measured in turns.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = BUILD / "bench",
    only: Annotated[str, typer.Option(help="One kind: `save`, `restore` or `one`.")] = "",
    measure: Annotated[str, typer.Option(help="Used by this script itself.")] = "",
) -> None:
    """Measure saves and restores of many small tensors."""
    warnings.filterwarnings("ignore")
    if measure:
        print(json.dumps(MEASURES[measure](folder, objects if measure == "one" else tensors)))
        return
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in MEASURES if only in {"", kind}]
    pythons = {HERE: sys.executable} | ({"against": str(against)} if against else {})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in track(range(rounds), "rounds", console=console):
        for kind in kinds:
            for name, python in pythons.items():
                for line, values in in_process(python, kind, folder, tensors, objects).items():
                    found.setdefault((line, name), []).append(values)
    console.print(table_of(found, list(pythons), f"{tensors:,} of 4 KiB; one of {objects:,}"))


def in_process(
    python: str, kind: str, folder: Path, tensors: int, objects: int
) -> dict[str, dict[str, float]]:
    """Measure in a process of its own; returns seconds by line of the table."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
        sizes = ["--tensors", str(tensors), "--objects", str(objects)]
        command = [python, __file__, "--measure", kind, "--folder", scratch, *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
        return result


def measure_save(folder: Path, tensors: int) -> dict[str, Any]:
    """A blocking save, then two asynchronous ones: the call, and until they are durable."""
    state = build(tensors, ELEMENTS)
    warm_up(folder)
    found = {}
    with penstock.Checkpointer(folder / "run") as ckpt:
        settle(0.3)
        with measured(found, "save, blocking"):
            ckpt.save(state, step=0, mode="blocking")
        for step, order in ((1, "first"), (2, "second")):
            settle(0.3)
            with measured(found, f"save, async, until durable, {order}"):
                with measured(found, f"save, async, the call, {order}"):
                    handle = ckpt.save(state, step=step)
                handle.result()
    return found


def measure_restore(folder: Path, tensors: int) -> dict[str, Any]:
    """A restore of all into live tensors, the page cache being empty."""
    state = build(tensors, ELEMENTS)
    warm_up(folder)
    with penstock.Checkpointer(folder / "run") as ckpt:
        ckpt.save(state, step=0, mode="blocking")
    found: dict[str, Any] = {}
    expected = total(state)
    for tensor in state["m"].values():
        tensor.zero_()
    with penstock.Checkpointer(folder / "run") as ckpt:
        drop_cache(folder)
        with measured(found, "restore"):
            ckpt.restore(state)
    check(actual=total(state), expected=expected)
    return found


def measure_one(folder: Path, objects: int) -> dict[str, Any]:
    """A restore of one tensor of many, and reading it through `open`."""
    state = build(objects, 4)
    state["m"]["one"] = torch.full((4,), 1.0)
    warm_up(folder)
    with penstock.Checkpointer(folder / "run") as ckpt:
        ckpt.save(state, step=0, mode="blocking")
    found: dict[str, Any] = {}
    state["m"]["one"].zero_()
    with penstock.Checkpointer(folder / "run") as ckpt:
        drop_cache(folder)
        with measured(found, "restore, one of many"):
            ckpt.restore(state, include="m/one")
        check(actual=float(state["m"]["one"].sum()), expected=4.0)
        drop_cache(folder)
        with measured(found, "load, one of many"):
            ckpt.load(include="m/one")
        with measured(found, "open, one of many"):
            ckpt.open()["m/one"]
    return found


MEASURES = {"save": measure_save, "restore": measure_restore, "one": measure_one}


def build(count: int, elements: int) -> dict[str, dict[str, torch.Tensor]]:
    """A dict of tensors, each with memory of its own."""
    torch.manual_seed(0)
    return {"m": {f"{number:06}": torch.randn(elements) for number in range(count)}}


def total(state: dict[str, dict[str, torch.Tensor]]) -> float:
    """What tells one content from another."""
    return sum(float(tensor.sum()) for tensor in state["m"].values())


def check(*, actual: float, expected: float) -> None:
    """End the measurement if something else was restored than was saved."""
    if actual != expected:
        raise SystemExit("something else was restored than was saved")


def warm_up(folder: Path) -> None:
    """Run every code path once, so that imports are not measured."""
    state = build(8, ELEMENTS)
    with penstock.Checkpointer(folder / "warm") as ckpt:
        ckpt.save(state, step=0)
        ckpt.save(state, step=1, mode="blocking")
        ckpt.restore(state)


@contextmanager
def measured(found: dict[str, Any], line: str) -> Iterator[None]:
    """Put wall clock and CPU seconds of the block into `found`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    found[line] = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def table_of(
    found: dict[tuple[str, str], list[dict[str, float]]], names: list[str], title: str
) -> Table:
    """Medians of seconds and CPU seconds, one line for each measurement."""
    table = Table(title=title)
    table.add_column("")
    for name in names:
        table.add_column(f"{name}: s", justify="right")
        table.add_column("CPU s", justify="right")
    for line in dict.fromkeys(line for line, _ in found):
        rows = [found[line, name] for name in names]
        medians = [statistics.median(v[u] for v in row) for row in rows for u in ("s", "cpu_s")]
        table.add_row(line, *(f"{median:.2f}" for median in medians))
    return table


if __name__ == "__main__":
    typer.run(main)

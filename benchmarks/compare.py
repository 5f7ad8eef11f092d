"""Compare Penstock with its peers, side by side in one run.

Blocking saves (durable before the clock stops) and cold restores (page cache dropped, into
tensors that exist, verified afterwards) of one state; then how long background saves block.
Every measurement has a process of its own. Systems take turns within each round, and the order
rotates, so that a disk that gets slower does so for all. Only ratios of one run mean anything.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from disk import file_system, fio_version, remove, run_fio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from systems import BACKGROUND, BLOCKING
from tables import summarize, terminal_tables

MEASURE = Path(__file__).with_name("measure.py")
BUILD = Path(__file__).resolve().parent.parent / "build"
PACKAGES = ("penstock", "torch", "safetensors", "torchsnapshot", "liburing", "xxhash", "numpy")
AGAINST = ", against"  # behind the name of a system that another installation measures
IN_MEMORY = {"tmpfs", "ramfs", "overlay"}

console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    size_gb: Annotated[float, typer.Option(help="State size in GB (10^9 bytes).", min=0.05)] = 3.0,
    rounds: Annotated[int, typer.Option(help="Measurements per system.", min=1)] = 3,
    folder: Annotated[
        Path, typer.Option(help="Folder on the disk to measure; what is made there is removed.")
    ] = BUILD / "bench",
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = BUILD
    / "benchmarks.json",
    only: Annotated[
        list[str] | None, typer.Option(help="Systems whose name contains this; repeatable.")
    ] = None,
    blocking: Annotated[bool, typer.Option(help="Measure blocking saves and restores.")] = True,
    background: Annotated[bool, typer.Option(help="Measure background saves.")] = True,
    fio: Annotated[bool, typer.Option(help="Ask fio for what the disk can do.")] = True,
    saves: Annotated[int, typer.Option(help="Background saves in a row.", min=2)] = 4,
    pause_s: Annotated[float, typer.Option(help="Pause for the disk before each clock.")] = 1.0,
    against: Annotated[
        Path | None,
        typer.Option(help="Python of another installation of Penstock, which takes turns."),
    ] = None,
) -> None:
    """Compare with torch.save, safetensors, DCP and TorchSnapshot.

    Takes about 15 minutes at 3 GB and 3 rounds, 2.5 times the state in disk space and in memory.
    Drop caches as root, or the restores are only as cold as posix_fadvise makes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder, size_gb)
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
        work = Path(scratch)
        plan = _plan(only, blocking=blocking, background=background, fio=fio)
        if against is not None:
            own = [(kind, name) for kind, name in plan if name.startswith("Penstock")]
            plan += [(kind, name + AGAINST) for kind, name in own]
        results: list[dict[str, Any]] = []
        load = [os.getloadavg()[0]]
        with _bar() as bar:
            task = bar.add_task("", total=len(plan) * rounds)
            for number in range(rounds):
                turn = number * len(plan) // rounds
                for kind, system in plan[turn:] + plan[:turn]:
                    bar.update(task, description=f"round {number + 1}: {system}")
                    found = _measure(
                        kind,
                        system,
                        work,
                        size_gb=size_gb,
                        saves=saves,
                        pause_s=pause_s,
                        against=against,
                    )
                    load.append(os.getloadavg()[0])
                    results += [{"round": number, **r} for r in found]
                    bar.advance(task)
    run = {
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "options": {"size_gb": size_gb, "rounds": rounds, "saves": saves, "pause_s": pause_s},
        "machine": _machine(folder, load),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(run, indent=1) + "\n")
    for table in terminal_tables(summarize(run)):
        console.print(table)
    failed = [r for r in results if "error" in r]
    for result in failed:
        console.print(f"[red]failed[/] {result['system']}: {result['error']}")
    console.print(f"Results: {out}. For the documentation: benchmarks/report.py --results {out}")
    if any(r["system"].startswith("Penstock") for r in failed):
        raise typer.Exit(1)


def _plan(
    only: list[str] | None, *, blocking: bool, background: bool, fio: bool
) -> list[tuple[str, str]]:
    plan: list[tuple[str, str]] = []
    if fio and blocking:
        if fio_version() is None:
            console.print("fio is not installed: no raw reference for the disk is measured.")
        else:
            plan.append(("fio", "fio"))
    if blocking:
        plan += [("blocking", name) for name in BLOCKING]
    if background:
        plan += [("background", name) for name in BACKGROUND] + [("copy", "memory copy")]
    if only:
        plan = [(kind, name) for kind, name in plan if any(o in name for o in only)]
    if not plan:
        message = f"nothing to measure; systems: {', '.join([*BLOCKING, *BACKGROUND])}"
        raise typer.BadParameter(message)
    return plan


def _measure(
    kind: str,
    system: str,
    work: Path,
    *,
    size_gb: float,
    saves: int,
    pause_s: float,
    against: Path | None,
) -> list[dict[str, Any]]:
    if kind == "fio":
        points = run_fio(work, int(size_gb * 1e9), pause_s)
        return [{"system": "fio", **point} for point in points]
    folder, answer = work / "data", work / "answer.json"
    answer.unlink(missing_ok=True)
    python = against if system.endswith(AGAINST) else sys.executable
    command = [
        str(python),
        str(MEASURE),
        f"--system={system.removesuffix(AGAINST)}",
        f"--kind={kind}",
        f"--folder={folder}",
        f"--out={answer}",
        f"--size-gb={size_gb}",
        f"--saves={saves}",
        f"--pause-s={pause_s}",
    ]
    env = {**os.environ, "TYPER_USE_RICH": "0", "_TYPER_STANDARD_TRACEBACK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    remove(folder)
    if done.returncode or not answer.exists():
        lines = (done.stderr or done.stdout).strip().splitlines()
        return [{"system": system, "kind": kind, "error": lines[-1] if lines else "no answer"}]
    found: list[dict[str, Any]] = json.loads(answer.read_text())
    return [{**result, "system": system} for result in found]


def _check_disk(folder: Path, size_gb: float) -> None:
    if file_system(folder) in IN_MEMORY:
        message = f"{folder} is on {file_system(folder)}; pass --folder on a real disk"
        raise typer.BadParameter(message)
    free = shutil.disk_usage(folder).free
    if free < 2.5e9 * size_gb:
        message = f"{folder} has {free / 1e9:.1f} GB free; {2.5 * size_gb:.1f} GB are needed"
        raise typer.BadParameter(message)


def _machine(folder: Path, load: list[float]) -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model n")), "")
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages * page / 1e9, 1),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system(folder),
        "python": platform.python_version(),
        "fio": fio_version(),
        "torch_threads": torch.get_num_threads(),
        "load_before": round(load[0], 2),
        "load_during": round(statistics.median(load[1:]), 2),
    }


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


if __name__ == "__main__":
    typer.run(main)

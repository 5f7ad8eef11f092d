"""What chains of deltas, sharing and derived weights save, on checkpoints of a real training.

    python benchmarks/deltas.py            # all; some ten minutes on two cores, 6 GB of disk
    python benchmarks/deltas.py --only frozen

`sizes` trains the GPT of `make_state.py`, saves ten checkpoints of each of several schedules by
each way of storing, restores every one of them, and compares it bit for bit. `frozen` saves a model
of which nine tenths stand still. `chain` restores, from a cold cache, a checkpoint that takes the
frames of five others.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import xxhash
from disk import drop_cache, remove, settle
from make_state import training
from rich.console import Console
from rich.table import Table

import penstock

BUILD = Path(__file__).resolve().parent.parent / "build"
GB = 1e9

console = Console(width=None if sys.stdout.isatty() else 110)

SCHEDULES = {
    "each step, peak": range(100, 110),
    "every 10 steps, peak": range(60, 151, 10),
    "each step, late": range(200, 210),
}
"""The steps of which checkpoints are saved; the learning rate falls from 150 to 195."""

SPLIT = [{"match": "**", "codecs": ["floatsplit"]}]
DELTA = [{"match": "**", "codecs": ["delta", "floatsplit"]}]
WAYS: dict[str, dict[str, Any]] = {
    "floatsplit": {"rules": SPLIT},
    "delta": {"rules": DELTA, "deltas": {"every": 10, "max_chain": 9}},
    "delta, shared": {
        "rules": DELTA,
        "deltas": {"every": 10, "max_chain": 9},
        "share": True,
    },
}


@dataclass
class Run:
    """The checkpoints of one schedule, of one kind of state, stored in one way."""

    root: Path
    schedule: str
    state: str
    way: str
    checkpointer: penstock.Checkpointer
    raw: int = 0
    stored: int = 0
    digests: dict[int, dict[str, int]] = field(default_factory=dict)

    def save(self, step: int, state: dict[str, Any]) -> None:
        report = self.checkpointer.save(state, step=step, mode="blocking").result()
        self.raw += report.bytes_raw
        self.stored += report.bytes_stored
        self.digests[step] = digests(state)

    def check(self) -> None:
        """Restore every checkpoint, and compare it with what was saved."""
        for step, expected in self.digests.items():
            if digests(self.checkpointer.load(step)) != expected:
                message = f"{self.schedule}, {self.state}, {self.way}: step {step} differs"
                raise SystemExit(message)


def main(
    *,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = BUILD / "bench",
    only: Annotated[str, typer.Option(help="`sizes`, `frozen` or `chain`.")] = "",
    rounds: Annotated[int, typer.Option(help="Measurements of each time.", min=1)] = 5,
) -> None:
    """Measure what each way of storing takes."""
    warnings.filterwarnings("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    if only in {"", "sizes"}:
        sizes(folder)
    if only in {"", "frozen"}:
        frozen(folder, rounds)
    if only in {"", "chain"}:
        chain(folder, rounds)


def sizes(folder: Path) -> None:
    """Save ten checkpoints of each schedule by each way, and show the bytes."""
    runs = []
    for schedule in SCHEDULES:
        for state in ("bf16 weights", "whole state"):
            for way, options in WAYS.items():
                root = folder / f"deltas-{len(runs)}"
                remove(root)
                runs.append(Run(root, schedule, state, way, penstock.Checkpointer(root, **options)))
    last = max(step for steps in SCHEDULES.values() for step in steps)
    for step, model, optimizer in training(last):
        due = [run for run in runs if step in SCHEDULES[run.schedule]]
        if due:
            states = states_of(model, optimizer)
            for run in due:
                run.save(step, states[run.state])
    table = Table("ten checkpoints", "state", "stored as", "MB", "ratio", "to floatsplit")
    alone = 1
    for run in runs:
        run.check()
        alone = run.stored if run.way == "floatsplit" else alone
        table.add_row(
            run.schedule,
            run.state,
            run.way,
            f"{run.stored / 1e6:.1f}",
            f"{run.raw / run.stored:.2f}x",
            f"{run.stored / alone:.3f}",
        )
        run.checkpointer.close()
        remove(run.root)
    console.print(table)


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the trees to save: bf16 weights alone, or with fp32 master weights and moments."""
    masters = {name: p.detach() for name, p in model.named_parameters()}
    weights = {name: p.bfloat16() for name, p in masters.items()}
    moments = {
        key: {name: optimizer.state[p][key] for name, p in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {
        "bf16 weights": {"model": weights},
        "whole state": {"model": weights, "master": masters, **moments},
    }


def digests(tree: dict[str, Any], path: str = "") -> dict[str, int]:
    """Return a hash of the bytes of each tensor."""
    found = {}
    for name, child in tree.items():
        if isinstance(child, dict):
            found |= digests(child, f"{path}{name}/")
        else:
            data = child.contiguous().view(torch.uint8).numpy()
            found[f"{path}{name}"] = xxhash.xxh3_64_intdigest(data)
    return found


def frozen(folder: Path, rounds: int) -> None:
    """Save twice a model of which nine tenths stand still, with sharing and without."""
    blocked: dict[bool, list[float]] = {False: [], True: []}
    stored: dict[bool, list[float]] = {False: [], True: []}
    model = {f"layer{n}": torch.randn(16 << 20) for n in range(10)}  # 671 MB
    for _ in range(rounds):
        for share in (False, True):
            root = folder / "frozen"
            remove(root)
            settle(0.5)
            with penstock.Checkpointer(root, share=share) as ckpt:
                ckpt.save(model, step=0).result()
                model["layer9"].add_(1)
                settle(0.5)
                report = ckpt.save(model, step=1).result()
                blocked[share].append(report.seconds["blocked"])
                stored[share].append(report.bytes_stored / report.bytes_raw)
                if digests(ckpt.load(1)) != digests(model):
                    raise SystemExit("step 1 differs")
            remove(root)
    table = Table("second checkpoint, 90 % frozen", "blocked, ms", "bytes stored / raw")
    for share in (False, True):
        table.add_row(
            "shared" if share else "whole",
            f"{1e3 * statistics.median(blocked[share]):.0f}",
            f"{statistics.median(stored[share]):.4f}",
        )
    console.print(table)
    ratio = statistics.median(blocked[True]) / statistics.median(blocked[False])
    console.print(f"blocked with sharing: {ratio:.2f} x")


def chain(folder: Path, rounds: int) -> None:
    """Restore a checkpoint that takes the frames of five others; compare with reading the bytes."""
    root, raw = folder / "chain", folder / "raw"
    remove(root)
    generator = torch.Generator().manual_seed(0)
    model = {f"layer{n}": torch.randn(16 << 20, generator=generator) for n in range(8)}  # 537 MB
    drift = torch.randn(16 << 20, generator=generator).mul_(1e-5)
    options = {"rules": DELTA, "deltas": {"every": 6, "max_chain": 5}}
    with penstock.Checkpointer(root, **options) as ckpt:
        for step in range(6):
            ckpt.save(model, step=step, mode="blocking")
            for tensor in model.values():
                tensor.add_(drift)
    took, rates, read = [], [], 0
    for _ in range(rounds):
        target = {name: torch.empty_like(tensor) for name, tensor in model.items()}
        settle(0.5)
        drop_cache(root)
        with penstock.Checkpointer(root) as ckpt:
            began = time.monotonic()
            report = ckpt.restore(target, step=5)
            took.append(time.monotonic() - began)
        read = report.bytes_read
        rates.append(disk_rate(raw, read))
    seconds, rate = statistics.median(took), statistics.median(rates)
    console.print(
        f"chain of 5: {read / 1e6:.0f} MB read in {seconds:.3f} s; the disk reads "
        f"{rate / GB:.2f} GB/s: {seconds / (read / rate):.2f} x the bytes of the links / disk rate"
    )
    remove(root)


def disk_rate(root: Path, size_bytes: int) -> float:
    """Restore so many raw bytes from a cold cache; return bytes per second."""
    remove(root)
    state = {"raw": torch.randint(256, (size_bytes,), dtype=torch.uint8)}
    with penstock.Checkpointer(root) as ckpt:
        ckpt.save(state, step=0, mode="blocking")
        settle(0.5)
        drop_cache(root)
        began = time.monotonic()
        ckpt.restore(state, step=0)
        took = time.monotonic() - began
    remove(root)
    return size_bytes / took


if __name__ == "__main__":
    typer.run(main)

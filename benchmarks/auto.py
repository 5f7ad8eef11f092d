"""What `codecs = "auto"` chooses and gains, against raw and each codec, on a fast and a slow store.

Saves a GPT with AdamW state (fp32, and a copy of the weights in bfloat16) again and again, to the
disk as it is and to the same disk behind a limit of bytes per second. The systems take turns, save
by save, so that a disk that gets slower does so for all. The first save of each, which has to
measure the store, stands apart; later ones are medians.

    python benchmarks/auto.py --size-gb 0.5 --rounds 7
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from disk import settle
from rich.console import Console
from rich.progress import track
from rich.table import Table
from states import build_state

import penstock
from penstock.core.storage.open import open_backend
from penstock.core.testing.latency import LatencyBackend

if TYPE_CHECKING:
    from penstock.core.abc import Backend

BUILD = Path(__file__).resolve().parent.parent / "build"
CHAINS: dict[str, Any] = {
    "raw": [],
    "floatsplit": ["floatsplit"],
    "lz4": ["lz4"],
    "zstd 1": [{"type": "zstd", "level": 1}],
    "auto": "auto",
}

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass
class Contender:
    """A checkpointer with one rule, and what its saves took."""

    ckpt: penstock.Checkpointer
    total_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    report: penstock.SaveReport | None = None
    step: int = 0

    def save(self, state: dict[str, Any], mode: str, pause_s: float) -> None:
        settle(pause_s)
        self.step += 1
        self.report = self.ckpt.save(state, step=self.step, mode=mode).result()
        self.ckpt.wait()
        self.total_s.append(self.report.seconds["total"])
        self.blocked_s.append(self.report.seconds["blocked"])


def main(
    *,
    size_gb: Annotated[float, typer.Option(help="State size in GB (10^9 bytes).", min=0.05)] = 0.5,
    rounds: Annotated[int, typer.Option(help="Later saves of each.", min=1)] = 7,
    limit_mb: Annotated[float, typer.Option(help="MB per second of the slow store.")] = 200,
    mode: Annotated[str, typer.Option(help="`blocking`, `async` or `lazy`.")] = "blocking",
    pause_s: Annotated[float, typer.Option(help="Pause for the disk before each save.")] = 0.3,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = BUILD / "bench",
    only: Annotated[str, typer.Option(help="One place: `disk` or `slow`.")] = "",
    chains: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(CHAINS),
) -> None:
    """Compare raw, every codec and auto on a disk and on a slow store."""
    warnings.filterwarnings("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    made = build_state(size_gb * 12 / 14)
    half = {name: p.data.to(torch.bfloat16) for name, p in made.model.named_parameters()}
    state = {"model": made.model, "optimizer": made.optimizer, "half": half}
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
        for place in ("disk", "slow"):
            if only in {"", place}:
                contenders = {}
                for number, name in enumerate(chains.split(",")):
                    store: Backend = open_backend(Path(scratch) / f"{place}-{number}")
                    if place == "slow":
                        store = LatencyBackend(store, bytes_per_s=limit_mb * 1e6)
                    rules = [{"match": "**", "codecs": CHAINS[name]}]
                    ckpt = penstock.Checkpointer(store, rules=rules, retention={"keep_last": 1})
                    contenders[name] = Contender(ckpt)
                for _ in track(range(rounds + 1), place, console=console):
                    for contender in contenders.values():
                        contender.save(state, mode, pause_s)
                title = "the disk" if place == "disk" else f"a store of {limit_mb:g} MB/s"
                show(contenders, f"{mode} saves to {title}")
                for contender in contenders.values():
                    contender.ckpt.close()


def show(contenders: dict[str, Contender], title: str) -> None:
    """Print a table, and what auto said."""
    table = Table(title=title)
    for column in ("", "first s", "later s", "against raw", "size", "blocked ms"):
        table.add_column(column, justify="right" if column else "left")
    raw_s = statistics.median(contenders["raw"].total_s[1:])
    for name, one in contenders.items():
        later_s = statistics.median(one.total_s[1:])
        assert one.report is not None
        table.add_row(
            name,
            f"{one.total_s[0]:.3f}",
            f"{later_s:.3f}",
            f"{raw_s / later_s:.2f}x",
            f"{one.report.bytes_raw / one.report.bytes_stored:.2f}x",
            f"{statistics.median(one.blocked_s[1:]) * 1e3:.0f}",
        )
    console.print(table)
    report = contenders["auto"].report
    assert report is not None
    for choice in report.codecs:
        console.print(f"  {choice.objects}: {choice.why}")


if __name__ == "__main__":
    typer.run(main)

"""What saving costs a training loop: step times without, during and after a background save.

Trains a stack of linear layers with AdamW, and saves once per window of steps. Systems take turns,
window by window, in one process and on one model; windows without saving lie between. What one
save costs is the time of its window beyond as many undisturbed steps: blocked calls, fences,
waiting for an earlier save, and slower steps while bytes go to disk.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from disk import settle, sync_tree
from rich.console import Console
from rich.progress import track
from states import TrainingState
from systems import BACKGROUND, ENCODED
from tables import LOOP_COLUMNS, loop_cells, terminal_table
from torch import nn

BUILD = Path(__file__).resolve().parent.parent / "build"
QUIET = "no saving"
WIDTH = 2048

console = Console(width=None if sys.stdout.isatty() else 110)


def main(
    *,
    size_gb: Annotated[float, typer.Option(help="State size in GB (10^9 bytes).", min=0.1)] = 1.5,
    rounds: Annotated[int, typer.Option(help="Windows per system.", min=2)] = 6,
    steps: Annotated[int, typer.Option(help="Steps per window.", min=2)] = 8,
    batch: Annotated[int, typer.Option(help="Rows per step: how long a step takes.")] = 16,
    threads: Annotated[
        int, typer.Option(help="Threads of torch. With all cores, saving competes with training.")
    ] = 1,
    folder: Annotated[Path, typer.Option(help="Folder on the disk to use.")] = BUILD / "bench",
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = BUILD / "blocked.json",
    only: Annotated[
        list[str] | None, typer.Option(help="Systems whose name contains this; repeatable.")
    ] = None,
    codecs: Annotated[
        bool, typer.Option("--codecs", help="Penstock alone, raw and with codecs.")
    ] = False,
) -> None:
    """Measure how much a background save slows training down."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    made = ENCODED if codecs else BACKGROUND
    names = [n for n in made if not only or any(o in n for o in only)]
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as scratch:
        loop = Loop(size_gb, batch)
        systems = {n: made[n](Path(scratch) / str(i)) for i, n in enumerate(names)}
        windows: dict[str, list[Window]] = {name: [] for name in [QUIET, *names]}
        for number in track(range(rounds + 1), "windows", console=console):
            for name in [QUIET, *names]:
                window = run_window(loop, systems.get(name), number, steps)
                if number:  # the first save of each allocates its staging memory
                    windows[name].append(window)
        for system in systems.values():
            system.close()
    results = {name: summary(windows, name, steps) for name in windows}
    out.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "rounds": rounds,
        "steps": steps,
        "batch": batch,
        "threads": threads,
        "bytes": loop.state.nbytes,
    }
    out.write_text(json.dumps({"options": options, "results": results}, indent=1) + "\n")
    size = f"{loop.state.nbytes / 1e9:.2f} GB every {steps} steps"
    cells = [loop_cells(name, values) for name, values in results.items()]
    console.print(terminal_table(f"A training loop that saves {size}", LOOP_COLUMNS, cells))
    console.print("Cost: a window with one save, less as many undisturbed steps. All are medians.")
    if codecs:
        for name, values in results.items():
            raw = results.get(name.partition(":")[0] + ": raw")
            if raw and values is not raw:
                ratio = values["held_s"] / raw["held_s"]
                console.print(f"{name} blocks {ratio:.2f} times as long as raw")


class Loop:
    """A model, its optimizer, and a step."""

    def __init__(self, size_gb: float, batch: int) -> None:
        torch.manual_seed(0)
        layers = max(2, round(size_gb * 1e9 / 12 / (WIDTH * WIDTH)))
        model = nn.Sequential(
            *(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self._input = torch.randn(batch, WIDTH)
        self._model, self._optimizer = model, optimizer
        for _ in range(3):
            self.step()
        tensors = {f"model/{n}": p.data for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{key}"] = value
        self.state = TrainingState(model, optimizer, tensors)

    def step(self) -> float:
        """One training step; how long it took."""
        began = time.perf_counter()
        self._model(self._input).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began


class Window:
    """What happened in one window."""

    def __init__(self) -> None:
        self.call_s = 0.0
        self.held_s = 0.0
        self.steps_s: list[float] = []
        self.busy: list[bool] = []


def run_window(loop: Loop, system: Any, number: int, steps: int) -> Window:
    """`steps` steps, with a save before the first of them unless `system` is None."""
    settle(0.3)
    window = Window()
    pending = None
    if system is not None:
        began = time.perf_counter()
        pending = system.save_in_background(loop.state, number)
        window.call_s = time.perf_counter() - began
    for _ in range(steps):
        window.steps_s.append(loop.step())
        window.busy.append(pending is not None and not pending.done())
    if pending is not None:
        pending.wait()
        window.held_s = pending.held_s()
        if not system.durable_by_itself:
            sync_tree(system.folder)
        system.forget(number)
    return window


def summary(windows: dict[str, list[Window]], name: str, steps: int) -> dict[str, Any]:
    """Medians in seconds; None where no step lay wholly inside a background write."""
    quiet = statistics.median(s for w in windows[QUIET] for s in w.steps_s)
    mine = windows[name]
    # The first step of a window holds the fence, so it says nothing about what follows.
    busy = [s for w in mine for s, b in zip(w.steps_s[1:], w.busy[1:], strict=True) if b]
    return {
        "call_s": statistics.median(w.call_s for w in mine),
        "held_s": statistics.median(w.held_s for w in mine),
        "fence_s": statistics.median(max(0.0, w.held_s - w.call_s) for w in mine),
        "step_s": statistics.median(s for w in mine for s in w.steps_s),
        "busy_step_s": statistics.median(busy) if busy else None,
        "busy_steps": len(busy),
        "cost_s": statistics.median(w.call_s + sum(w.steps_s) for w in mine) - steps * quiet,
        "quiet_step_s": quiet,
        "saves": name != QUIET,
    }


if __name__ == "__main__":
    typer.run(main)

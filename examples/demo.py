"""Save, crash, resume, restore a part: the purpose of Penstock, in under a minute.

Trains a small GPT twice with the same seed: once undisturbed, and once killed by SIGKILL twice: in
the middle of a save, and eight steps after a save, while steps are logged. Each time a new process
resumes. Then compares every loss, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from train_gpt import build

import penstock

STEPS, SAVE_EVERY, KILL_IN_SAVE = 30, 5, 20
LOG_SAVE_EVERY, KILL_IN_STEP = 20, 29  # of the training that logs the steps that it does not save
TRAINER = Path(__file__).with_name("train_gpt.py")
console = Console()


class Trainer:
    """A trainer in its own process, followed through its JSON lines."""

    def __init__(self, run: Path, *options: str) -> None:
        self.run = run
        self.losses: dict[int, str] = {}
        self.facts: dict[str, dict] = {}
        self.process = subprocess.Popen(
            [
                *(sys.executable, TRAINER, run, f"--steps={STEPS}"),
                *(options or [f"--save-every={SAVE_EVERY}"]),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # stays fast on a busy machine
        )

    def follow(
        self, bar: Progress, task: int, *, in_save: int | None = None, in_step: int | None = None
    ) -> str:
        """Read the lines to the end, or kill the trainer; return how it ended."""
        for line in self.process.stdout:
            fact = json.loads(line)
            self.facts[fact["event"]] = fact
            if fact["event"] == "step":
                self.losses[fact["step"]] = fact["loss"]
                bar.update(task, completed=fact["step"])
                if fact["step"] == in_step:
                    bar.stop_task(task)
                    self.process.kill()
                    self.process.wait()
                    return "killed"
            if fact["event"] == "save" and fact["step"] == in_save:
                bar.stop_task(task)
                return self.kill()
        if self.process.wait() != 0:
            sys.exit(f"the trainer failed with status {self.process.returncode}")
        return "finished"

    def kill(self) -> str:
        """Send SIGKILL once bytes of the new, uncommitted checkpoint are in a file."""
        while not (torn := unfinished(self.run)):
            time.sleep(0)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return f"killed while {next(iter(torn))[:8]}... was being written"


def unfinished(run: Path) -> set[str]:
    """Return saves that have blobs but no commit record."""
    started = {path.parts[-3] for path in run.glob("data/*/blobs/*")}
    records = "".join(path.read_text() for path in run.glob("commits/*.json"))
    return {uid for uid in started if uid not in records}


def main() -> None:
    """Run the demonstration."""
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        straight, crashed = Path(folder, "undisturbed"), Path(folder, "crashed")
        console.rule("[bold]Penstock: save, crash, resume, restore a part")
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as bar:
            reference = Trainer(straight)
            reference.follow(bar, bar.add_task("undisturbed", total=STEPS))
            victim = Trainer(crashed)
            task = bar.add_task(f"killed in the save of step {KILL_IN_SAVE}", total=STEPS)
            ending = victim.follow(bar, task, in_save=KILL_IN_SAVE)
            torn = unfinished(crashed)
            steps = penstock.Checkpointer(crashed).steps()
            logging = "--log", f"--save-every={LOG_SAVE_EVERY}"
            heir = Trainer(crashed, *logging)
            task = bar.add_task(f"resumed, killed in step {KILL_IN_STEP}", total=STEPS)
            heir.follow(bar, task, in_step=KILL_IN_STEP)
            saved = penstock.Checkpointer(crashed).steps()[-1]
            last = Trainer(crashed, *logging)
            last.follow(bar, bar.add_task("resumed from the log", total=STEPS))
        resumed = heir.facts["resumed"]
        show_losses(reference, victim, heir, last)
        proofs = Table(title="Proofs", title_justify="left", show_header=False)
        proofs.add_column(style="green")
        proofs.add_column()
        proofs.add_column(overflow="fold")
        check(proofs, "the crash", ending.startswith("killed"), f"{ending} (SIGKILL)")
        check(
            proofs,
            "no torn checkpoint",
            KILL_IN_SAVE not in steps or not torn,
            f"committed then: {steps}; the torn one has no commit record, so it does not exist",
        )
        combined = {**victim.losses, **heir.losses, **last.losses}
        same = sum(combined.get(step) == loss for step, loss in reference.losses.items())
        check(
            proofs,
            "exact resume",
            same == STEPS,
            f"{same} of {STEPS} losses are bit-identical; resumed at step {resumed['step']} "
            f"in {resumed['seconds'] * 1000:.0f} ms",
        )
        again = last.facts["resumed"]["step"]
        check(
            proofs,
            "a step lost at most",
            again >= KILL_IN_STEP - 2,
            f"killed in step {KILL_IN_STEP}, {KILL_IN_STEP - saved} steps after the last save; "
            f"resumed after step {again}: {again - saved} steps replayed from the log",
        )
        restore_optimizer(crashed, proofs)
        console.print(proofs)
    console.print(
        Panel.fit(
            f"{reference.facts['ready']['parameters'] / 1e6:.1f} M parameters, {STEPS} steps, "
            f"a lazy save every {SAVE_EVERY}; all of it in {time.monotonic() - began:.0f} s"
        )
    )


def show_losses(reference: Trainer, victim: Trainer, heir: Trainer, last: Trainer) -> None:
    """Print the losses at every save."""
    table = Table(title="Losses", title_justify="left")
    for name in ("step", "undisturbed", "killed", "resumed", "from the log", "bits"):
        table.add_column(name, justify="right")
    for step in sorted({1, *range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)}):
        shown = [
            f"{float.fromhex(t.losses[step]):.6f}" if step in t.losses else "-"
            for t in (reference, victim, heir, last)
        ]
        bits = {t.losses[step] for t in (reference, victim, heir, last) if step in t.losses}
        table.add_row(str(step), *shown, "same" if len(bits) == 1 else "[red]differ")
    console.print(table)


def restore_optimizer(run: Path, proofs: Table) -> None:
    """Restore only the optimizer, into a fresh one, and count the bytes read for it."""
    with penstock.Checkpointer(run) as ckpt:
        fresh = build(STEPS, seed=99)
        before = [p.clone() for p in fresh["model"].parameters()]
        saved = ckpt.steps()[-1]  # a logged step needs the parameters, too
        report = ckpt.restore(fresh, saved, include="optimizer")
        stored = ckpt.open(saved)
        exact = all(
            torch.equal(value, stored[f"optimizer/state/{name}/{key}"])
            for name, parameter in fresh["model"].named_parameters()
            for key, value in fresh["optimizer"].state[parameter].items()
        )
        kept = all(map(torch.equal, before, fresh["model"].parameters()))
        total = ckpt.info().bytes_raw
        check(
            proofs,
            "only the optimizer",
            exact and kept and report.bytes_read <= 1.02 * report.bytes_needed,
            f"{len(report.restored)} objects of step {report.step}; needed "
            f"{report.bytes_needed / 1e6:.2f} MB, read {report.bytes_read / 1e6:.2f} MB of "
            f"{total / 1e6:.2f} MB; the model was not touched",
        )
        verdict = ckpt.verify()
        check(
            proofs,
            "verified",
            verdict.ok,
            f"{verdict.objects} objects in {verdict.frames} frames, every checksum compared",
        )
        engine = "io_uring" if report.engine == "uring" else report.engine
        direct = "direct I/O" if report.direct_io else "the page cache"
        proofs.add_row("", "engine", f"{engine}, through {direct}")


def check(table: Table, name: str, holds: bool, detail: str) -> None:
    """Add a row; a broken promise ends the demo with status 1."""
    table.add_row("yes" if holds else "[red]NO", name, detail)
    if not holds:
        console.print(table)
        sys.exit(1)


if __name__ == "__main__":
    main()

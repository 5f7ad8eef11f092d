"""The cost of a log of gradients: in training, in bytes, and in a restore.

    python benchmarks/log.py --rounds 5 --out benchmarks/recorded/log.json     # some 5 minutes
    python benchmarks/page.py                              # the picture and the figures of logs.md
    python benchmarks/log.py --kills 200                   # some 7 minutes
    python benchmarks/log.py --rounds 1                    # quick: some 60 s

Trains the GPT of `examples/train_gpt.py` with one thread, in fp32 with AdamW.

`training`: windows of steps without saves, with `log` after each step, and with a lazy save after
each step, in turns. `share` is the time of the call, and that by which it makes the step of the
optimizer longer, divided by that of a step without saves, on the clock and in CPU time of the
training thread. `wall` is the time of a window, until all of it is durable, divided by that of a
window without saves.

`bytes`: what the store gets for one step, in bytes per parameter. A delta is that to a save
`N steps` earlier.

`replay`: restores of a checkpoint without and with its log, into a fresh state. `entry` is their
difference, divided by the number of entries. After `2x after` entries the restore takes twice as
long. Cold: nothing of the run is in the page cache.

`--kills` kills trainings at random moments by SIGKILL and resumes them. A lost step is one whose
call of `log` had returned. Wrong losses differ from those of a training that was not killed.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from bench import BUILD, ROOT, Benchmark, check, digests, drop_cache, settle, tensors_of
from torch.nn import functional

import penstock

sys.path.append(str(ROOT / "examples"))

import train_gpt

GAPS = (1, 2, 5, 10, 20, 50, 100)  # steps between two saves
DELTA = {
    "rules": [{"match": "**", "codecs": ["delta", "floatsplit"]}],
    "deltas": {"every": 64, "max_chain": 63},
}
FLOATSPLIT = {"rules": [{"match": "**", "codecs": ["floatsplit"]}]}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
SMALL_BATCH = 2  # where the time of a step does not matter
KILL_STEPS, KILL_SAVE_EVERY = 40, 10


class Training:
    """The GPT of the examples."""

    def __init__(self, kind, batch, *, seed=1, bf16=False, clip=False):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        train_gpt.BATCH = batch
        self.bf16, self.clip = bf16, clip
        self.model = train_gpt.GPT()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.loader = train_gpt.SourceLoader(seed)
        self.number = 0

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
            "rng": penstock.Rng(),
        }

    @property
    def parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def step(self):
        """Train one step."""
        tokens, targets = next(self.loader)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.model(tokens)
        functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        start, own = time.perf_counter(), time.thread_time()
        self.optimizer.step()
        self.optimizer_s = time.perf_counter() - start, time.thread_time() - own
        self.number += 1

    def steps(self, count):
        for _ in range(count):
            self.step()

    def digests(self):
        return digests(tensors_of(self.model, self.optimizer))


def median(rows, key):
    return statistics.median(row[key] for row in rows)


def training(folder, options):
    """Windows of steps in turns: without saves, with a log, with lazy saves."""
    made = Training("AdamW", options.batch)
    lazily = {"mode": "lazy", "retention": {"keep_last": 2}}
    with (
        penstock.Checkpointer(folder / "log") as log,
        penstock.Checkpointer(folder / "lazy", **lazily) as lazy,
    ):
        ways = {
            "none": (lambda: None, lambda: None),
            "log": (partial(logged, log, made), log.latest),  # it waits for the last entry
            "lazy": (lambda: lazy.save(made.state, made.number), lazy.wait),
        }
        for way, calls in ways.items():  # allocates, compiles, and proves the first steps
            window(made, log, way, *calls, count=2)
        rows = {way: [] for way in ways}
        names = [*ways]
        for number in range(2):
            for way in names[number:] + names[:number]:
                rows[way].append(window(made, log, way, *ways[way], count=options.steps))
    step_s = median(rows["none"], "step, s")
    figures = {"step, s": step_s}
    for way in ("log", "lazy"):
        figures |= {
            f"{way}, share": share(rows, way, "s"),
            f"{way}, CPU share": share(rows, way, "CPU s"),
            f"{way}, wall": median(rows[way], "window, s") / median(rows["none"], "window, s"),
            f"{way}, process CPU": median(rows[way], "CPU, s") / median(rows["none"], "CPU, s"),
        }
    return figures


def share(rows, way, unit):
    call = median(rows[way], f"call, {unit}") + median(rows[way], f"optimizer, {unit}")
    return (call - median(rows["none"], f"optimizer, {unit}")) / median(rows["none"], "step, s")


def logged(log, made):
    check(log.log(made.state, made.number), "log")


def window(made, log, way, after, wait, *, count):
    """Take some steps, each followed by a call; return medians of a step and the whole time."""
    made.step()
    if way == "log":
        log.save(made.state, made.number, mode="blocking")
    gc.collect()
    settle(0.1)
    rows, cpu, began = [], time.process_time(), time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        made.step()
        stepped, own = time.perf_counter(), time.thread_time()
        after()
        called = time.perf_counter()
        times = {"step, s": stepped - start, "call, s": called - stepped}
        times |= {"call, CPU s": time.thread_time() - own}
        rows.append(
            times | dict(zip(("optimizer, s", "optimizer, CPU s"), made.optimizer_s, strict=True))
        )
    wait()
    whole = {"window, s": time.perf_counter() - began, "CPU, s": time.process_time() - cpu}
    return {key: median(rows, key) for key in rows[0]} | whole


def stored(root):
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def saved(root, state, step, how):
    """Return the bytes of one more save."""
    before = stored(root)
    with penstock.Checkpointer(root, **how) as ckpt:
        ckpt.save(state, step, mode="blocking")
    return stored(root) - before


def bytes_of(kind, ways, gaps, folder, options):
    """The bytes of a step, after some steps of training."""
    made = Training(kind, SMALL_BATCH, **ways)
    made.steps(40 // options.shorten)
    figures = {
        "raw": saved(folder / "raw", made.state, 0, {}),
        "floatsplit": saved(folder / "floatsplit", made.state, 0, FLOATSPLIT),
    }
    count = 4
    with penstock.Checkpointer(folder / "log") as ckpt:
        ckpt.save(made.state, 0, mode="blocking")
        whole = stored(folder / "log")
        for step in range(1, count + 1):
            made.step()
            check(ckpt.log(made.state, step), "log")
    figures["log"] = (stored(folder / "log") - whole) / count
    before = copy.deepcopy(made.state)
    for number in range(1, max(gaps) // options.shorten + 1):
        made.step()
        for gap in gaps:
            if number == max(1, gap // options.shorten):
                root = folder / f"delta{gap}"
                saved(root, before, 0, DELTA)
                name = f"delta, {gap} step{'s' * (gap > 1)}"
                figures[name] = saved(root, made.state, 1, DELTA)
    return {name: value / made.parameters for name, value in figures.items()}


def replay(kind, folder, options):
    """Restores with and without entries, cold and warm."""
    made = Training(kind, SMALL_BATCH)
    root, count = folder / "run", options.entries
    made.step()
    with penstock.Checkpointer(root) as ckpt:
        ckpt.save(made.state, 0, mode="blocking")
        base = made.digests()
        for step in range(1, count + 1):
            made.step()
            logged_step = ckpt.log(made.state, step)
            check(logged_step, "log")
    end = made.digests()
    fresh = Training(kind, options.batch, seed=2)
    fresh.steps(2)
    step_s = []
    for _ in range(5):
        began = time.perf_counter()
        fresh.step()
        step_s.append(time.perf_counter() - began)
    restored(root, fresh, count, end, cold=False)  # compiles, and touches memory
    rows = []
    for _ in range(3):
        row = {}
        for name, cold in (("cold", True), ("warm", False)):
            row[f"{name} restore, s"] = restored(root, fresh, 0, base, cold=cold)
            row[f"{name} with log, s"] = restored(root, fresh, count, end, cold=cold)
        rows.append(row)
    figures = {"step, ms": statistics.median(step_s) * 1e3, "entries": count}
    figures |= {key: median(rows, key) for key in rows[0]}
    for name in ("cold", "warm"):
        base_s = figures[f"{name} restore, s"]
        entry_s = (figures[f"{name} with log, s"] - base_s) / count
        figures[f"{name} entry, ms"] = entry_s * 1e3
        figures[f"{name} entry, steps"] = entry_s * 1e3 / figures["step, ms"]
        figures[f"{name}, 2x after"] = base_s / entry_s
    return figures


def restored(root, fresh, step, same, *, cold):
    """Restore into a state with other values; return the seconds."""
    for tensor in tensors_of(fresh.model, fresh.optimizer).values():
        tensor.detach().fill_(-1.0)
    gc.collect()
    settle(0.1)
    if cold:
        drop_cache(root)
    began = time.perf_counter()
    with penstock.Checkpointer(root) as ckpt:
        report = ckpt.restore(fresh.state, step=step)
    took_s = time.perf_counter() - began
    check(report.step == step and fresh.digests() == same, f"step {step}")
    return took_s


# -- kills ---------------------------------------------------------------------------------------


class Job:
    """A training in a process of its own, a fork of this one."""

    def __init__(self, root, *, log):
        out, into = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(out)
                os.dup2(into, 1)
                train_gpt.train(str(root), KILL_STEPS, KILL_SAVE_EVERY, log=log)
                sys.stdout.flush()
                os._exit(0)
            finally:
                os._exit(1)
        os.close(into)
        self.lines = os.fdopen(out)

    def follow(self, kill_after, delay_s):
        """Kill it some time after a number of steps; return its losses and what it resumed from.

        Returns:
            Losses by step; the step that it resumed from; the last step that was logged.
        """
        losses, first, last, killed = {}, 0, 0, False
        for line in self.lines:
            with suppress(json.JSONDecodeError):  # the kill cuts a line
                fact = json.loads(line)
                if fact["event"] == "resumed":
                    first = fact["step"]
                elif fact["event"] == "step":
                    losses[fact["step"]] = fact["loss"]
                elif fact["event"] == "log":
                    last = fact["step"]
            if len(losses) >= kill_after and not killed:
                time.sleep(delay_s)
                os.kill(self.pid, signal.SIGKILL)
                killed = True
        self.lines.close()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        check(status in {0, -signal.SIGKILL if killed else 0}, f"a training, status {status},")
        return losses, first, last


def kills(count, folder):
    """Kill trainings at random moments; return the worst loss of steps and the wrong losses."""
    torch.set_num_threads(1)
    train_gpt.BATCH = 2
    with penstock.Checkpointer("memory://", **FLOATSPLIT) as ckpt:  # compiles loops for all forks
        ckpt.save({"floats": torch.randn(1 << 20)}, 0, mode="blocking")
    choice = random.Random(0)
    right, _, _ = Job(folder / "whole", log=False).follow(KILL_STEPS + 1, 0)
    most = wrong = reached = number = 0
    for _ in range(count):
        job = Job(folder / f"killed{number}", log=True)
        losses, first, last = job.follow(choice.randint(1, 12), choice.uniform(0, 0.1))
        most = max(most, reached - first)
        wrong += sum(right[step] != loss for step, loss in losses.items())
        reached = max(first, last)
        if KILL_STEPS in losses:  # it was over: the next one begins again
            number, reached = number + 1, 0
    return most, wrong


GROUPS = {
    "training": {"Penstock": training},
    "bytes": {
        "Penstock, AdamW in fp32": partial(bytes_of, "AdamW", {}, GAPS),
        "Penstock, AdamW in bf16 with clip": partial(
            bytes_of, "AdamW", {"bf16": True, "clip": True}, GAPS[:1]
        ),
        "Penstock, SGD with momentum": partial(bytes_of, "SGD", {}, GAPS[:1]),
    },
    "replay": {f"Penstock, {kind}": partial(replay, kind) for kind in ("foreach", "fused")},
}

OPTIONS = {
    "batch": (16, "sequences of a step; 16 take more than 200 ms"),
    "steps": (8, "steps of a window"),
    "entries": (16, "entries that a restore replays"),
    "shorten": (1, "divides the steps between saves, for a trial"),
}
BENCHMARK = Benchmark(__file__, __doc__, GROUPS, OPTIONS)

if __name__ == "__main__":
    if "--kills" in sys.argv[1:2]:
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kills-", dir=BUILD) as scratch:
            tried = int(sys.argv[2])
            lost, differing = kills(tried, Path(scratch))
        print(f"kills {tried} most steps lost {lost} wrong losses {differing}")
        sys.exit(lost > 1 or differing > 0)
    BENCHMARK.run()

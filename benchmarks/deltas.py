"""What chains of deltas, sharing and derived weights save, on checkpoints of a real training.

    python benchmarks/deltas.py --rounds 1 --only sizes    # ten minutes on two cores, 6 GB of disk
    python benchmarks/deltas.py --rounds 5 --only chain frozen

`sizes` trains the GPT of `make_state.py`, saves ten checkpoints of each of several schedules by
each way of storing, restores every one of them, and compares it bit for bit. `frozen` saves a model
of which nine tenths stand still. `chain` restores, from a cold cache, a checkpoint that takes the
frames of five others; beside it the time in which the disk reads as many raw bytes.
"""

from __future__ import annotations

from functools import partial

import torch
from bench import check, digests, drop_cache, run, settle, timed
from make_state import training

import penstock

SCHEDULES = {
    "each step, peak": range(100, 110),
    "every 10 steps, peak": range(60, 151, 10),
    "each step, late": range(200, 210),
}
"""The steps of which checkpoints are saved; the learning rate falls from 150 to 195."""

DELTA = [{"match": "**", "codecs": ["delta", "floatsplit"]}]
CHAIN = {"rules": DELTA, "deltas": {"every": 10, "max_chain": 9}}
WAYS = {
    "floatsplit": {"rules": [{"match": "**", "codecs": ["floatsplit"]}]},
    "delta": CHAIN,
    "delta, shared": {**CHAIN, "share": True},
}
ELEMENTS = 16 << 20


class Run:
    """The checkpoints of one schedule, of one kind of state, stored in one way."""

    def __init__(self, root, options):
        self.checkpointer = penstock.Checkpointer(root, **options)
        self.raw = self.stored = 0
        self.digests = {}

    def save(self, step, state):
        report = self.checkpointer.save(state, step=step, mode="blocking").result()
        self.raw += report.bytes_raw
        self.stored += report.bytes_stored
        self.digests[step] = digests(state)


def sizes(schedule, folder, options):
    """Save ten checkpoints by each way, and restore each of them."""
    steps = SCHEDULES[schedule]
    steps = range(steps[0] // options.shorten, steps[-1] // options.shorten + 1, steps.step)
    runs = {
        (kind, way): Run(folder / f"{number}-{way}", how)
        for number, kind in enumerate(("bf16 weights", "whole state"))
        for way, how in WAYS.items()
    }
    for step, model, optimizer in training(steps[-1]):
        if step in steps:
            states = states_of(model, optimizer)
            for (kind, _), run_ in runs.items():
                run_.save(step, states[kind])
    found = {}
    for (kind, way), run_ in runs.items():
        for step, expected in run_.digests.items():
            check(digests(run_.checkpointer.load(step)) == expected, f"{kind}, {way}: {step}")
        run_.checkpointer.close()
        found[f"{kind}, {way}: MB"] = run_.stored / 1e6
        found[f"{kind}, {way}: smaller by"] = run_.raw / run_.stored
    return found


def states_of(model, optimizer):
    """The trees to save: bf16 weights alone, or with fp32 master weights and moments."""
    masters = {name: p.detach() for name, p in model.named_parameters()}
    weights = {name: p.bfloat16() for name, p in masters.items()}
    moments = {
        key: {name: optimizer.state[p][key] for name, p in model.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    whole = {"model": weights, "master": masters, **moments}
    return {"bf16 weights": {"model": weights}, "whole state": whole}


def frozen(share, folder, options):
    """Save twice a model of which nine tenths stand still."""
    model = {f"layer{n}": torch.randn(ELEMENTS // options.shorten) for n in range(10)}
    with penstock.Checkpointer(folder / "frozen", share=share) as ckpt:
        ckpt.save(model, step=0).result()
        model["layer9"].add_(1)
        settle(0.5)
        report = ckpt.save(model, step=1).result()
        check(digests(ckpt.load(1)) == digests(model), "step 1")
    ratio = report.bytes_stored / report.bytes_raw
    return {"blocked, s": report.seconds["blocked"], "stored/raw": ratio}


def chain(folder, options):
    """Restore a checkpoint that takes the frames of five others, and as many raw bytes."""
    generator = torch.Generator().manual_seed(0)
    size = ELEMENTS // options.shorten
    model = {f"layer{n}": torch.randn(size, generator=generator) for n in range(8)}  # 537 MB
    drift = torch.randn(size, generator=generator).mul_(1e-5)
    how = {"rules": DELTA, "deltas": {"every": 6, "max_chain": 5}}
    with penstock.Checkpointer(folder / "chain", **how) as ckpt:
        for step in range(6):
            ckpt.save(model, step=step, mode="blocking")
            for tensor in model.values():
                tensor.add_(drift)
    found = {}
    report = restored(found, "restore", folder / "chain", 5, model)
    raw = {"raw": torch.randint(256, (report.bytes_read,), dtype=torch.uint8)}
    with penstock.Checkpointer(folder / "raw") as ckpt:
        ckpt.save(raw, step=0, mode="blocking")
    restored(found, "raw bytes", folder / "raw", 0, raw)
    ratio = found["restore, s"] / found["raw bytes, s"]
    return found | {"MB read": report.bytes_read / 1e6, "times the raw bytes": ratio}


def restored(found, name, root, step, like):
    """Restore from a cold cache."""
    target = {path: torch.empty_like(tensor) for path, tensor in like.items()}
    settle(0.5)
    drop_cache(root)
    with penstock.Checkpointer(root) as ckpt, timed(found, name):
        return ckpt.restore(target, step=step)


GROUPS = {
    "sizes": {f"Penstock, {name}": partial(sizes, name) for name in SCHEDULES},
    "frozen": {
        "Penstock, whole": partial(frozen, False),  # noqa: FBT003
        "Penstock, shared": partial(frozen, True),  # noqa: FBT003
    },
    "chain": {"Penstock": chain},
}

if __name__ == "__main__":
    options = {"shorten": (1, "divides steps and sizes, to try this out")}
    run(__doc__, GROUPS, options, base="Penstock, whole")

"""The gain of delta chains and sharing, and the time to restore a chain.

    python benchmarks/deltas.py --rounds 5

`frozen` saves a model with nine tenths frozen. `chain` restores, from a cold cache, a checkpoint
that needs the frames of five others, and then the same number of raw bytes.
"""

from __future__ import annotations

from functools import partial

import torch
from bench import Benchmark, check, digests, drop_cache, settle, timed

import penstock

DELTA = [{"match": "**", "codecs": ["delta", "floatsplit"]}]
ELEMENTS = 16 << 20


def frozen(share, folder, options):
    """Save a model twice, with nine tenths frozen."""
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
    """Restore a checkpoint that needs five others' frames, and the same number of raw bytes."""
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
    figures = {}
    report = restored(figures, "restore", folder / "chain", 5, model)
    raw = {"raw": torch.randint(256, (report.bytes_read,), dtype=torch.uint8)}
    with penstock.Checkpointer(folder / "raw") as ckpt:
        ckpt.save(raw, step=0, mode="blocking")
    restored(figures, "raw bytes", folder / "raw", 0, raw)
    ratio = figures["restore, s"] / figures["raw bytes, s"]
    return figures | {"MB read": report.bytes_read / 1e6, "times the raw bytes": ratio}


def restored(figures, name, root, step, like):
    """Restore from a cold cache."""
    target = {path: torch.empty_like(tensor) for path, tensor in like.items()}
    settle(0.5)
    drop_cache(root)
    with penstock.Checkpointer(root) as ckpt, timed(figures, name):
        return ckpt.restore(target, step=step)


GROUPS = {
    "frozen": {
        "Penstock, whole": partial(frozen, False),  # noqa: FBT003
        "Penstock, shared": partial(frozen, True),  # noqa: FBT003
    },
    "chain": {"Penstock": chain},
}

OPTIONS = {"shorten": (1, "divides steps and sizes, for a trial")}
BENCHMARK = Benchmark(__file__, __doc__, GROUPS, OPTIONS, base="Penstock, whole")

if __name__ == "__main__":
    BENCHMARK.run()

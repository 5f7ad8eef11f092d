"""The cost and gain of a fast tier: time until training continues, until committed, until durable.

    python benchmarks/tiers.py --folder /data/penstock --rounds 16

The same saves go to the fast place only, to the durable place only, and to both. The durable
place should be another device.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from bench import Benchmark, gpt_state, settle, timed

import penstock


def save(kind, folder, options):
    """Two saves; the first touches new memory."""
    state, fast = gpt_state(options.gb), Path(f"{options.fast}-{folder.name}")
    places = {"fast": str(fast), "durable": str(folder / "durable")}
    backend = places.get(kind) or {"type": "tiered", "keep_fast": 1, **places}
    try:
        with penstock.Checkpointer(backend, retention={"keep_last": 1}) as ckpt:
            for step in range(2):
                settle(0.3)
                figures = {}
                with timed(figures, "durable"):
                    with timed(figures, "committed"):
                        with timed(figures, "call"):
                            handle = ckpt.save(state.tree, step)
                        handle.committed.result()
                    handle.result()
                ckpt.wait()
    finally:
        shutil.rmtree(fast, ignore_errors=True)
    return figures


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    {"tiers": {f"Penstock, {kind}": partial(save, kind) for kind in ("fast", "durable", "tiers")}},
    {
        "gb": (1.0, "state in 10^9 bytes"),
        "fast": ("/dev/shm/penstock-tiers", "prefix of the fast path"),
    },
    base="Penstock, fast",
)

if __name__ == "__main__":
    BENCHMARK.run()

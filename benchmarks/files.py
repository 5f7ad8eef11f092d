"""Files of other tools: times of an export, an import, and a plain copy of the files.

    python benchmarks/files.py --gb 1

All of them read with a cold cache, and end when the written files are durable.
"""

from __future__ import annotations

import subprocess
from functools import partial

import torch
from bench import Benchmark, check, digests, drop_cache, fill, sync_tree, timed

import penstock


def there_and_back(to, folder, options):
    """Export a checkpoint, copy the files, and import them to a new run."""
    shapes = {f"layer{n}": (4096, 1024) for n in range(max(1, round(options.gb * 1e9 / 2**24)))}
    state, figures = {"model": {name: torch.empty(shape) for name, shape in shapes.items()}}, {}
    fill(state["model"])
    with penstock.Checkpointer(folder / "run") as ckpt:
        ckpt.save(state, step=0, mode="blocking")
    out, copy = folder / "export" / "model", folder / "copy"
    with penstock.Checkpointer(folder / "run") as ckpt:
        drop_cache(folder)
        with timed(figures, "export", "CPU", "MB"):
            penstock.export_checkpoint(ckpt, out, to=to)
    drop_cache(folder)
    with timed(figures, "copy"):
        subprocess.run(["cp", "-r", out.parent, copy], check=True)
        sync_tree(copy)
    drop_cache(folder)
    with timed(figures, "import", "CPU", "MB"):
        penstock.import_checkpoint(out, folder / "new", format=to)
    with penstock.Checkpointer(folder / "new") as ckpt:
        check(digests(ckpt.load()["model"]) == digests(state["model"]), to)
    return figures


FORMATS = ("safetensors", "torch", "dcp")
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    {"files": {f"Penstock, {to}": partial(there_and_back, to) for to in FORMATS}},
    {"gb": (1.0, "GB of fp32 to move")},
)

if __name__ == "__main__":
    BENCHMARK.run()

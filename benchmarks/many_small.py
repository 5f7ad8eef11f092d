"""Many small tensors: what a save and a restore take for each object, not for each byte.

    python benchmarks/many_small.py
    python benchmarks/many_small.py --against ../before/.venv/bin/python

`all`: tensors of 4 KiB in a dict, saved and restored. `one`: one tensor is restored of many.
"""

from __future__ import annotations

import torch
from bench import check, digests, drop_cache, run, settle, small_tensors, timed

import penstock


def warm_up(folder):
    """Run every code path once, so that imports are not measured."""
    state = {"m": small_tensors(8)}
    with penstock.Checkpointer(folder / "warm") as ckpt:
        ckpt.save(state, step=0).result()
        ckpt.save(state, step=1, mode="blocking")
        ckpt.restore(state)


def every_one(folder, options):
    """A blocking save, two in the background, and a cold restore of all."""
    warm_up(folder)
    state, found = {"m": small_tensors(options.tensors)}, {}
    with penstock.Checkpointer(folder / "run") as ckpt:
        settle(0.3)
        with timed(found, "save", "CPU"):
            ckpt.save(state, step=0, mode="blocking")
        for step, order in ((1, "first"), (2, "second")):
            settle(0.3)
            with timed(found, f"{order} async, durable"):
                with timed(found, f"{order} async, call"):
                    handle = ckpt.save(state, step=step)
                handle.result()
    expected = digests(state)
    for tensor in state["m"].values():
        tensor.zero_()
    with penstock.Checkpointer(folder / "run") as ckpt:
        drop_cache(folder)
        with timed(found, "restore", "CPU"):
            ckpt.restore(state)
    check(digests(state) == expected, "Penstock")
    return found


def one_of_many(folder, options):
    """A restore of one tensor, a load of it, and a read through `open`."""
    warm_up(folder)
    state, found = {"m": small_tensors(options.objects, 4)}, {}
    state["m"]["one"] = torch.ones(4)
    with penstock.Checkpointer(folder / "run") as ckpt:
        ckpt.save(state, step=0, mode="blocking")
    state["m"]["one"].zero_()
    with penstock.Checkpointer(folder / "run") as ckpt:
        drop_cache(folder)
        with timed(found, "restore", "CPU"):
            ckpt.restore(state, include="m/one")
        check(state["m"]["one"].tolist() == [1.0] * 4, "Penstock")
        drop_cache(folder)
        with timed(found, "load", "CPU"):
            ckpt.load(include="m/one")
        with timed(found, "open, cache warm", "CPU"):
            ckpt.open()["m/one"]
    return found


if __name__ == "__main__":
    sizes = {
        "tensors": (50_000, "tensors of 4 KiB to save and restore"),
        "objects": (300_000, "tensors of which one is restored"),
    }
    run(__doc__, {"all": {"Penstock": every_one}, "one": {"Penstock": one_of_many}}, sizes)

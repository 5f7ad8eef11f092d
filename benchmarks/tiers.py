"""What a fast tier costs and saves: time until training goes on, until committed, until durable.

    python benchmarks/tiers.py --fast /dev/shm/penstock --durable /data/penstock

Interleaved rounds of the same save to the fast place alone and to both; medians. Then a training
loop with and without a drain under way. The durable place should be another device.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import torch

import penstock

GIB = 1 << 30


def state_of(size_bytes):
    generator = torch.Generator().manual_seed(0)
    count = max(1, size_bytes // (64 << 20))
    return {
        "model": {
            f"layer{n}": torch.randn(size_bytes // count // 4, generator=generator)
            for n in range(count)
        }
    }


def save_once(ckpt, state, step):
    """Seconds until `save` returns, until committed, until durable."""
    began = time.perf_counter()
    handle = ckpt.save(state, step)
    returned = time.perf_counter() - began
    handle.committed.result()
    committed = time.perf_counter() - began
    handle.result()
    return returned, committed, time.perf_counter() - began


def compare(fast, durable, state, rounds):
    """Saves to the fast place alone, and to both, in turns."""
    rows = {"fast alone": [], "tiered": []}
    both = {"type": "tiered", "fast": f"{fast}-tiered", "durable": durable, "keep_fast": 1}
    retention = {"keep_last": 1}
    with (
        penstock.Checkpointer(f"{fast}-alone", retention=retention) as alone,
        penstock.Checkpointer(both, retention=retention) as tiered,
    ):
        for step in range(rounds + 1):
            for name, ckpt in (("fast alone", alone), ("tiered", tiered)):
                times = save_once(ckpt, state, step)
                ckpt.wait()
                if step:  # the first one touches new memory
                    rows[name].append(times)
    return {
        name: [statistics.median(t) for t in zip(*times, strict=True)]
        for name, times in rows.items()
    }


def work(model, data, seconds):
    """Steps of training in so many seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        steps += 1
    return steps / seconds


def cost_of_draining(fast, durable, state, rounds, limit):
    """Steps per second while nothing is copied, and while something is."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    data = torch.randn(64, 512)
    name = f"drain-{bool(limit)}"
    options = {"type": "tiered", "fast": f"{fast}-{name}", "durable": f"{durable}-{name}"}
    if limit:
        options["drain_bytes_per_s"] = limit
    quiet, draining = [], []
    with penstock.Checkpointer({**options, "keep_fast": 0}, retention={"keep_last": 1}) as ckpt:
        for step in range(rounds):
            quiet.append(work(model, data, 2.0))
            handle = ckpt.save(state, step)
            handle.committed.result()
            draining.append(work(model, data, 2.0))
            if handle.durable.done():
                print("  (the drain was over before the measurement was)")
            handle.result()
    return statistics.median(quiet), statistics.median(draining)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", default="/dev/shm/penstock-tiers")
    parser.add_argument("--durable", default="/tmp/penstock-tiers")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", help="drain_bytes_per_s of the last part, such as '200 MB'")
    arguments = parser.parse_args()
    state = state_of(int(arguments.gib * GIB))
    try:
        rows = compare(arguments.fast, arguments.durable, state, arguments.rounds)
        print(f"{arguments.gib:g} GiB, medians of {arguments.rounds}, in s")
        print(f"{'':12}{'returned':>10}{'committed':>11}{'durable':>9}")
        for name, (returned, committed, durable) in rows.items():
            print(f"{name:12}{returned:10.3f}{committed:11.3f}{durable:9.3f}")
        alone, tiered = rows["fast alone"], rows["tiered"]
        print(
            f"tiered / alone: returned {tiered[0] / alone[0]:.3f}, "
            f"committed {tiered[1] / alone[1]:.3f}"
        )
        for limit in dict.fromkeys([None, arguments.limit]):
            quiet, draining = cost_of_draining(
                arguments.fast, arguments.durable, state, arguments.rounds, limit
            )
            print(
                f"training beside a drain ({limit or 'no limit'}): {quiet:.2f} steps/s without, "
                f"{draining:.2f} with: {100 * (1 - draining / quiet):.1f} % slower"
            )
    finally:
        for base in (arguments.fast, arguments.durable):
            for folder in Path(base).parent.glob(f"{Path(base).name}*"):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

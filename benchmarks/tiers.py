"""What a fast tier costs and saves: time until training goes on, until committed, until durable.

    python benchmarks/tiers.py --fast /dev/shm/penstock --durable /data/penstock

Interleaved rounds of the same save to the fast place alone and to both; medians. Then a training
loop by itself, beside a drain, and beside another process that does nothing but read, write and
sync as many bytes as fast: what that costs is the machine's doing, the rest is ours (the GIL,
checksums). Memory is that of the process, beyond what it had before the drain. The durable place
should be another device.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import penstock
from penstock.core.abc.plugin import parse_size

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
            # Each goes first as often as the other: what one leaves behind costs the next.
            turns = (("fast alone", alone), ("tiered", tiered))[:: 1 if step % 2 else -1]
            for name, ckpt in turns:
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


class Memory:
    """Watches how much more memory this process has than when it began, in MiB."""

    def __init__(self):
        self._before = self.peak = rss_bytes()
        self._over = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        self._thread.join()

    @property
    def more(self):
        return (self.peak - self._before) / (1 << 20)

    def _watch(self):
        while not self._over.wait(0.05):
            self.peak = max(self.peak, rss_bytes())


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


COPIER = """
import os, sys, time
source, target, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
size = 16 << 20
inside = os.open(source, os.O_RDONLY)
try:
    outside = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
except OSError:
    outside = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
import mmap
buffer = mmap.mmap(-1, size)
began, done = time.monotonic(), 0
print("begun", flush=True)
while True:
    done += os.preadv(inside, [buffer], done % (os.fstat(inside).st_size - size + 1) // 4096 * 4096)
    os.pwrite(outside, buffer, done % (1 << 30))
    if rate:
        time.sleep(max(0.0, began + done / rate - time.monotonic()))
"""


class Copier:
    """Another process that copies the bytes of a file, again and again, at a rate."""

    def __init__(self, fast, durable, rate):
        self._paths = Path(f"{fast}-plain"), Path(f"{durable}-plain")
        self._paths[0].write_bytes(bytes(256 << 20))
        arguments = [*map(str, self._paths), str(rate or 0)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", COPIER, *arguments], stdout=subprocess.PIPE
        )
        self._process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.kill()
        self._process.wait()
        for path in self._paths:
            path.unlink(missing_ok=True)


def cost_of_draining(places, state, rounds, limit, seconds):
    """Steps per second by itself, beside a drain, beside a plain copy; and MiB of memory."""
    fast, durable = places
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    data = torch.randn(64, 512)
    name = f"drain-{bool(limit)}"
    options = {"type": "tiered", "fast": f"{fast}-{name}", "durable": f"{durable}-{name}"}
    if limit:
        options["drain_bytes_per_s"] = limit
    alone, draining, copying, memory = [], [], [], []
    with penstock.Checkpointer({**options, "keep_fast": 0}, retention={"keep_last": 1}) as ckpt:
        for step in range(rounds + 1):
            alone.append(work(model, data, seconds))
            handle = ckpt.save(state, step)
            handle.committed.result()
            with Memory() as watched:
                draining.append(work(model, data, seconds))
                if handle.durable.done():
                    print("  (the drain was over before the measurement was)")
                handle.result()
            memory.append(watched.more)
            with Copier(fast, durable, limit and parse_size(limit)):
                copying.append(work(model, data, seconds))
    # The first round touches new memory.
    by_round = zip(alone[1:], draining[1:], copying[1:], strict=True)
    slower = [
        (1 - beside / by_itself, 1 - plain / by_itself) for by_itself, beside, plain in by_round
    ]
    drains, plain = (100 * statistics.median(column) for column in zip(*slower, strict=True))
    return statistics.median(alone[1:]), drains, plain, max(memory[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", default="/dev/shm/penstock-tiers")
    parser.add_argument("--durable", default="/tmp/penstock-tiers")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of training, for each figure")
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
            alone, drain, plain, memory = cost_of_draining(
                (arguments.fast, arguments.durable),
                state,
                arguments.rounds,
                limit,
                arguments.seconds,
            )
            print(
                f"training ({limit or 'no limit'}): {alone:.2f} steps/s; beside a drain "
                f"{drain:.1f} % slower, beside a plain copy by another process {plain:.1f} %; "
                f"memory of the drain {memory:.0f} MiB"
            )
    finally:
        for base in (arguments.fast, arguments.durable):
            for folder in Path(base).parent.glob(f"{Path(base).name}*"):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

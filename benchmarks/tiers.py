"""What a fast tier costs and saves: time until training goes on, until committed, until durable.

    python benchmarks/tiers.py --fast /dev/shm/penstock --durable /data/penstock

Interleaved rounds of the same save to the fast place alone and to both; medians. Then a training
loop by itself, beside a drain by a process and by a thread, and beside a program that does nothing
but read and write as many bytes as fast: what that costs is the machine's doing, the rest is ours.
What the loop waits for is neither a processor nor the clock: it is the interpreter, and locks of
the memory map. Memory is that of the trainer beyond what it had before the drain, and all of the
process that copies. The durable place should be another device.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
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
    return rows


def print_times(rows):
    """Medians, and how the two are to each other: also by round, since memory is not alike."""
    print(f"{'':12}{'returned':>10}{'committed':>11}{'durable':>9}")
    typical = {name: medians(found) for name, found in rows.items()}
    for name, (returned, committed, durable) in typical.items():
        print(f"{name:12}{returned:10.3f}{committed:11.3f}{durable:9.3f}")
    alone, tiered = rows["fast alone"], rows["tiered"]
    for number, what in enumerate(("returned", "committed")):
        pairs = [b[number] / a[number] for a, b in zip(alone, tiered, strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        ratio = typical["tiered"][number] / typical["fast alone"][number]
        print(
            f"tiered / alone, {what}: {ratio:.3f} "
            f"(by round: median {statistics.median(pairs):.3f}, half in {low:.3f} .. {high:.3f})"
        )


def medians(times):
    return [statistics.median(found) for found in zip(*times, strict=True)]


@dataclass
class Pace:
    """How training got on.

    Attributes:
        rate: Steps per second.
        waiting: Share of the time in which it neither ran nor waited for a processor.
    """

    rate: float
    waiting: float


def work(model, data, seconds):
    """Train for so many seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, began, busy = 0, time.perf_counter(), busy_s()
    while time.perf_counter() < began + seconds:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        steps += 1
    wall = time.perf_counter() - began
    return Pace(steps / wall, 1 - (busy_s() - busy) / wall)


def busy_s():
    """Seconds in which this thread ran, or could have run."""
    ran_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran_ns) + int(queued_ns)) / 1e9


class Memory:
    """Watches how much more memory this process and its children have than when it began."""

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
        """MiB."""
        return (self.peak - self._before) / (1 << 20)

    def _watch(self):
        while not self._over.wait(0.2):
            self.peak = max(self.peak, rss_bytes())


def rss_bytes():
    children = [
        pid for task in Path("/proc/self/task").glob("*/children") for pid in read(task).split()
    ]
    pages = [read(Path(f"/proc/{pid}/statm")).split()[1:2] for pid in ["self", *children]]
    return sum(int(number) for found in pages for number in found) * 4096


def read(path):
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


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
    """How training gets on alone, beside drains, beside a plain copy; and MiB of memory."""
    fast, durable = places
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    data = torch.randn(64, 512)
    paces = {name: [] for name in ("alone", "process", "thread", "plain copy")}
    memory = {"process": [], "thread": []}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(open_run(fast, durable, name, limit)) for name in memory}
        for step in range(rounds + 1):
            paces["alone"].append(work(model, data, seconds))
            for name, ckpt in runs.items():
                handle = ckpt.save(state, step)
                handle.committed.result()
                with Memory() as watched:
                    paces[name].append(work(model, data, seconds))
                    if handle.durable.done():
                        print(f"  (the drain by a {name} was over before the measurement was)")
                    handle.result()
                memory[name].append(watched.more)
                ckpt.wait()
            with Copier(fast, durable, limit and parse_size(limit)):
                paces["plain copy"].append(work(model, data, seconds))
    # The first round touches new memory.
    return (
        {name: found[1:] for name, found in paces.items()},
        {name: max(found[1:]) for name, found in memory.items()},
    )


def open_run(fast, durable, name, limit):
    run = f"{name}-{bool(limit)}"
    options = {"fast": f"{fast}-{run}", "durable": f"{durable}-{run}", "drain_in": name}
    if limit:
        options["drain_bytes_per_s"] = limit
    return penstock.Checkpointer(
        {"type": "tiered", "keep_fast": 0, **options}, retention={"keep_last": 1}
    )


def print_cost(paces, memory, limit):
    """One line for each of what training had beside it."""
    rate = statistics.median(pace.rate for pace in paces["alone"])
    print(f"training, at most {limit or 'as much as goes'} per second: {rate:.2f} steps/s alone")
    for name, found in paces.items():
        slower = statistics.median(
            1 - beside.rate / alone.rate
            for beside, alone in zip(found, paces["alone"], strict=True)
        )
        waiting = statistics.median(pace.waiting for pace in found)
        more = f", memory {memory[name]:.0f} MiB" if name in memory else ""
        print(f"  {name:12}{100 * slower:6.1f} % slower, waits {100 * waiting:4.1f} %{more}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", default="/dev/shm/penstock-tiers")
    parser.add_argument("--durable", default="/tmp/penstock-tiers")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of training, for each figure; 0: no training"
    )
    parser.add_argument("--limit", help="drain_bytes_per_s of the last part, such as '200 MB'")
    arguments = parser.parse_args()
    state = state_of(int(arguments.gib * GIB))
    try:
        rows = compare(arguments.fast, arguments.durable, state, arguments.rounds)
        print(f"{arguments.gib:g} GiB, medians of {arguments.rounds}, in s")
        print_times(rows)
        limits = dict.fromkeys([None, arguments.limit]) if arguments.seconds else ()
        for limit in limits:
            places = arguments.fast, arguments.durable
            found = cost_of_draining(places, state, arguments.rounds, limit, arguments.seconds)
            print_cost(*found, limit)
    finally:
        for base in (arguments.fast, arguments.durable):
            for folder in Path(base).parent.glob(f"{Path(base).name}*"):
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

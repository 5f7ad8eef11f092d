"""What a fast tier costs and saves: time until training goes on, until committed, until durable.

    python benchmarks/tiers.py --folder /data/penstock --rounds 16 --only save
    python benchmarks/tiers.py --only drain --limit "200 MB"

`save`: the same saves to the fast place alone, to the durable place alone, and to both. `drain`: a
training loop alone, then beside a drain by a process or by a thread, or beside a program that only
reads and writes as many bytes. The loop *waits* while it neither runs nor could run: for the
interpreter, and for locks of the memory map. MB is the memory of the trainer beyond what it had
before, and all of the process that copies. The durable place should be another device.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from bench import run, settle, timed

import penstock
from penstock.core.abc.plugin import parse_size


def state_of(gb):
    count = max(1, round(gb * 16))
    size = int(gb * 1e9) // count // 4
    generator = torch.Generator().manual_seed(0)
    return {"model": {f"layer{n}": torch.randn(size, generator=generator) for n in range(count)}}


@contextmanager
def opened(kind, folder, options, **how):
    """A run in the fast place, the durable place, or both."""
    fast = Path(f"{options.fast}-{folder.name}")
    places = {"fast": str(fast), "durable": str(folder / "durable")}
    backend = places.get(kind) or {"type": "tiered", "keep_fast": 1, **places, **how}
    try:
        with penstock.Checkpointer(backend, retention={"keep_last": 1}) as ckpt:
            yield ckpt
    finally:
        shutil.rmtree(fast, ignore_errors=True)


def save(kind, folder, options):
    """Two saves; the first touches new memory."""
    state = state_of(options.gb)
    with opened(kind, folder, options) as ckpt:
        for step in range(2):
            settle(0.3)
            found = {}
            with timed(found, "durable"):
                with timed(found, "committed"):
                    with timed(found, "returned"):
                        handle = ckpt.save(state, step)
                    handle.committed.result()
                handle.result()
            ckpt.wait()
    return found


# -- what a drain costs a training loop --------------------------------------------------------


def pace(model, data, seconds):
    """Train for some seconds; steps per second, and the share of time in which the loop waits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, began, busy = 0, time.perf_counter(), busy_s()
    while time.perf_counter() < began + seconds:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        steps += 1
    wall_s = time.perf_counter() - began
    return steps / wall_s, 1 - (busy_s() - busy) / wall_s


def busy_s():
    """Seconds in which this thread ran, or could have run."""
    ran_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran_ns) + int(queued_ns)) / 1e9


@contextmanager
def watched(found):
    """How much more memory this process and its children have than when the block began."""
    peaks, over = [rss_mb()], threading.Event()

    def watch():
        while not over.wait(0.2):
            peaks.append(rss_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    over.set()
    thread.join()
    found["MB"] = max(peaks) - peaks[0]


def rss_mb():
    tasks = Path("/proc/self/task").glob("*/children")
    pids = ["self", *(pid for task in tasks for pid in text(task).split())]
    return sum(int((text(f"/proc/{pid}/statm").split() or "00")[1]) for pid in pids) * 4096 / 1e6


def text(path):
    try:
        return Path(path).read_text()
    except OSError:  # it has ended
        return ""


COPIER = """
import mmap, os, sys, time
size, rate = 16 << 20, float(sys.argv[3])
source = os.open(sys.argv[1], os.O_RDONLY)
target = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
buffer, began, done = mmap.mmap(-1, size), time.monotonic(), 0
while True:
    done += os.preadv(source, [buffer], done % (15 * size))
    os.pwrite(target, buffer, done % (64 * size))
    if rate:
        time.sleep(max(0.0, began + done / rate - time.monotonic()))
"""


@contextmanager
def plain_copy(folder, options):
    """Another process that copies the bytes of a file, again and again, at a rate."""
    source = Path(f"{options.fast}-{folder.name}-plain")
    source.write_bytes(bytes(256 << 20))
    rate = parse_size(options.limit) if options.limit else 0
    paths = [str(source), str(folder / "plain")]
    process = subprocess.Popen([sys.executable, "-c", COPIER, *paths, str(rate)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        source.unlink()


def drain(beside, folder, options):
    """Steps alone and beside something else, in turns; the first turn touches new memory."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    data, state, turns = torch.randn(64, 512), state_of(options.gb), []
    how = {"keep_fast": 0, "drain_bytes_per_s": options.limit or None}
    drained = beside in {"process", "thread"}
    with opened("tiers", folder, options, **how, drain_in=beside if drained else "thread") as ckpt:
        for step in range(3):
            found = {}
            alone, _ = pace(model, data, options.seconds)
            if drained:
                handle = ckpt.save(state, step)
                handle.committed.result()
                with watched(found):
                    rate, waits = pace(model, data, options.seconds)
                    found["over too soon"] = float(handle.durable.done())
                    handle.result()
                ckpt.wait()
            else:
                with plain_copy(folder, options) if beside == "plain copy" else nullcontext():
                    rate, waits = pace(model, data, options.seconds)
            turns.append({"slower, %": 100 * (1 - rate / alone), "waits, %": 100 * waits, **found})
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[1]}


GROUPS = {
    "save": {f"Penstock, {kind}": partial(save, kind) for kind in ("fast", "durable", "tiers")},
    "drain": {
        f"Penstock, {beside}": partial(drain, beside)
        for beside in ("nothing", "process", "thread", "plain copy")
    },
}

if __name__ == "__main__":
    options = {
        "gb": (1.074, "state in 10^9 bytes"),
        "fast": ("/dev/shm/penstock-tiers", "begins the path of the fast place"),
        "seconds": (2.0, "of training for each figure of `drain`"),
        "limit": (None, "drain_bytes_per_s of `drain`, such as '200 MB'"),
    }
    run(__doc__, GROUPS, options, base="Penstock, fast")

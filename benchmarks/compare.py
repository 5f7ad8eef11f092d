"""Penstock beside torch.save, safetensors, DCP and TorchSnapshot, on one disk in one run.

    python benchmarks/compare.py                        # all; some 20 minutes, 10 GB of disk
    python benchmarks/compare.py --only blocking --gb 1
    python benchmarks/compare.py --only blocking/Penstock --against ../before/.venv/bin/python
    python benchmarks/compare.py --only "loop, codecs"

`blocking`: saves, durable before the clock stops, and restores from an empty page cache into live
tensors, compared afterwards. `background`: how long saves hold training (`fenced` adds a fence
right after the call, the worst case of a lazy save). `loop`: what a save costs a training loop.
`auto`: blocking saves with `codecs = "auto"`, to the disk and behind a limit of 200 MB/s.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable  # noqa: TC003 - a dataclass reads its annotations
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import bench
import torch
from torch import nn

WARM_UP_GB = 0.02

# -- the contenders ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A background save in flight."""

    wait: Callable[[], object]
    done: Callable[[], bool]
    fence: Callable[[], object] = lambda: None
    held_s: Callable[[], float] = lambda: 0.0
    """How long training was held, in `save` and at fences; 0 where nothing says so."""


class System(ABC):
    """One way to save and restore, called in the fastest way that was found for it.

    Peers get a flat dict of tensors, the cheapest form; Penstock gets module and optimizer.
    """

    durable_by_itself = False

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def save(self, state):
        """Save below `folder`; the caller syncs what this leaves unsynced."""

    @abstractmethod
    def restore(self, state):
        """Restore into the tensors of `state`, in place."""

    def forget(self, number):
        """Delete background save `number`."""
        shutil.rmtree(self.folder / str(number), ignore_errors=True)

    def close(self):  # noqa: B027 - most keep nothing
        """Release what is kept from save to save."""


class TorchSave(System):
    def save(self, state):
        torch.save(state.tensors, self.folder / "state.pt")

    def restore(self, state):
        # Faster here than without mmap, which reads into new memory first.
        loaded = torch.load(self.folder / "state.pt", weights_only=True, mmap=True)
        for name, tensor in state.tensors.items():
            tensor.copy_(loaded[name])


class Safetensors(System):
    def __init__(self, folder):
        super().__init__(folder)
        self._open = import_module("safetensors").safe_open
        self._save = import_module("safetensors.torch").save_file

    def save(self, state):
        self._save(state.tensors, self.folder / "state.safetensors")

    def restore(self, state):
        # Faster here than load_file, and than backend="pread".
        with self._open(self.folder / "state.safetensors", framework="pt") as stored:
            for name, tensor in state.tensors.items():
                tensor.copy_(stored.get_tensor(name))


def dcp_stager():
    """A stager that is kept, so reuses its memory; all that wants an accelerator is off."""
    staging = import_module("torch.distributed.checkpoint.staging")
    off = ("pinned_memory", "shared_memory", "async_staging", "non_blocking_copy")
    return staging.DefaultStager(staging.StagingOptions(**{f"use_{name}": False for name in off}))


class Dcp(System):
    """One process; it syncs its files itself."""

    def __init__(self, folder, threads, *, keep_staging=False):
        super().__init__(folder)
        self._dcp, self._threads = import_module("torch.distributed.checkpoint"), threads
        self._stager = dcp_stager() if keep_staging else None

    def _writer(self, folder):
        return self._dcp.FileSystemWriter(folder, thread_count=self._threads, sync_files=True)

    def save(self, state):
        self._dcp.save(state.tensors, storage_writer=self._writer(self.folder), no_dist=True)

    def restore(self, state):
        reader = self._dcp.FileSystemReader(self.folder)
        self._dcp.load(state.tensors, storage_reader=reader, no_dist=True)

    def save_in_background(self, state, number):
        pending = self._dcp.async_save(
            state.tensors,
            storage_writer=self._writer(self.folder / str(number)),
            async_stager=self._stager,
            no_dist=True,
        )
        return Pending(pending.result, pending.done)


class TorchSnapshot(System):
    def __init__(self, folder):
        super().__init__(folder)
        self._lib = import_module("torchsnapshot")

    def _app(self, state):
        return {"state": self._lib.StateDict(**state.tensors)}

    def save(self, state):
        self._lib.Snapshot.take(str(self.folder), self._app(state))

    def restore(self, state):
        self._lib.Snapshot(str(self.folder)).restore(self._app(state))

    def save_in_background(self, state, number):
        pending = self._lib.Snapshot.async_take(str(self.folder / str(number)), self._app(state))
        return Pending(pending.wait, pending.done)


class Penstock(System):
    """Checksums on; durable and committed when it says so. Opening and closing is timed too."""

    durable_by_itself = True

    def __init__(self, folder, backend="", mode="blocking", codecs=()):
        super().__init__(folder)
        self._lib, self._mode = import_module("penstock"), mode
        # A plain path goes through io_uring, or through threads where that is not to be had.
        self._spec = {"type": backend, "path": str(folder)} if backend else str(folder)
        self._rules = [{"match": "**", "codecs": codecs}] if codecs else []
        self._kept = None

    def save(self, state):
        with self._lib.Checkpointer(self._spec, mode="blocking") as ckpt:
            ckpt.save(state.tree, step=1).result()

    def restore(self, state):
        with self._lib.Checkpointer(self._spec) as ckpt:
            ckpt.restore(state.tree)

    def save_in_background(self, state, number):
        if self._kept is None:
            self._kept = self._lib.Checkpointer(self._spec, rules=self._rules)
        handle = self._kept.save(state.tree, step=number, mode=self._mode)
        held_s = lambda: handle.result().seconds["blocked"]  # noqa: E731
        return Pending(handle.result, handle.done, self._kept.fence, held_s)

    def forget(self, number):
        if number:  # the newest one stays until there is a newer one
            self._kept.delete(number - 1)

    def close(self):
        if self._kept is not None:
            self._kept.close()


BLOCKING = {
    "Penstock": Penstock,
    "Penstock, threads": partial(Penstock, backend="posix"),
    "safetensors": Safetensors,
    **{f"DCP, {n} thread{'s' * (n > 1)}": partial(Dcp, threads=n) for n in (1, 2, 4)},
    "TorchSnapshot": TorchSnapshot,
    "torch.save": TorchSave,
}
BACKGROUND = {
    "Penstock, lazy": partial(Penstock, mode="lazy"),
    "Penstock, async": partial(Penstock, mode="async"),
    "DCP async_save": partial(Dcp, threads=2),
    "DCP async_save, kept stager": partial(Dcp, threads=2, keep_staging=True),
    "TorchSnapshot async_take": TorchSnapshot,
}
CODECS = {
    "raw": (),
    "floatsplit": ["floatsplit"],
    "delta, floatsplit": ["delta", "floatsplit"],
    "auto": "auto",
}
ENCODED = {
    f"Penstock, {mode}: {name}": partial(Penstock, mode=mode, codecs=codecs)
    for mode in ("lazy", "async")
    for name, codecs in CODECS.items()
}

# -- measures ----------------------------------------------------------------------------------


def blocking(make, folder, options):
    """A save until it is durable, and a cold restore."""
    warm = make(folder / "warm")
    small = bench.gpt_state(WARM_UP_GB)
    warm.save(small)  # imports, thread pools and caches of code are nobody's save
    warm.restore(small)
    state = bench.gpt_state(options.gb)
    expected, contender = bench.digests(state.tensors), make(folder / "data")
    found = {}
    bench.settle()
    with bench.timed(found, "save", "CPU", "MB"):
        contender.save(state)
        if not contender.durable_by_itself:
            bench.sync_tree(folder / "data")
    state.wipe()
    bench.settle()
    bench.drop_cache(folder)
    with bench.timed(found, "restore", "CPU", "MB"):
        contender.restore(state)
    bench.check(bench.digests(state.tensors) == expected, make)
    rates = {f"{n}, GB/s": state.nbytes / found[f"{n}, s"] / 1e9 for n in ("save", "restore")}
    return rates | found


def background(make, folder, options):
    """Background saves in a row; the first allocates staging memory."""
    warm = make(folder / "warm")
    pending = warm.save_in_background(bench.gpt_state(WARM_UP_GB), 0)
    pending.fence()
    pending.wait()
    warm.close()
    state, contender = bench.gpt_state(options.gb), make(folder / "data")
    rows, memory = [], {}
    with bench.timed(memory, "all", "MB"):
        for number in range(4):
            bench.settle()
            row = {}
            with bench.timed(row, "durable"):
                with bench.timed(row, "fenced"):
                    with bench.timed(row, "call"):
                        pending = contender.save_in_background(state, number)
                    pending.fence()
                pending.wait()
                if not contender.durable_by_itself:
                    bench.sync_tree(contender.folder)
            contender.forget(number)
            rows.append(row)
    contender.close()
    first = {f"first {name}": rows[0][name] for name in ("call, s", "fenced, s")}
    later = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    return first | later | {"MB": memory["all, MB"]}


def loop(make, folder, options):
    """Windows of training steps with one save each, and windows without, in turns."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layers = max(2, round(options.gb * 1e9 / 12 / 2048**2))
    parts = [part for _ in range(layers) for part in (nn.Linear(2048, 2048), nn.ReLU())]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    data = torch.randn(options.batch, 2048)

    def step():
        began = time.perf_counter()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    step()
    state = bench.State(model, optimizer, bench.tensors_of(model, optimizer))
    contender = make(folder / "data")
    quiet, calls, fences, busy, windows = [], [], [], [], []
    for number in range(options.windows + 1):
        bench.settle(0.3)
        without = [step() for _ in range(options.steps)]
        began = time.perf_counter()
        pending = contender.save_in_background(state, number)
        called_s = time.perf_counter() - began
        steps = []
        for place in range(options.steps):
            under_way = not pending.done()
            took_s = step()
            steps.append(took_s)
            # The first step holds the fence, so it says nothing about those that follow.
            if number and place and under_way and not pending.done():
                busy.append(took_s)
        whole_s = time.perf_counter() - began
        pending.wait()
        if not contender.durable_by_itself:
            bench.sync_tree(contender.folder)
        contender.forget(number)
        if number:  # the first save allocates staging memory
            quiet += without
            calls.append(called_s)
            fences.append(max(0.0, pending.held_s() - called_s))
            windows.append(whole_s)
    contender.close()
    step_s = statistics.median(quiet)
    found = {"save(), s": statistics.median(calls), "fence, s": statistics.median(fences)}
    found |= {"step, s": step_s} | ({"step meanwhile, s": statistics.median(busy)} if busy else {})
    return found | {"cost of a save, s": statistics.median(windows) - options.steps * step_s}


def auto(codecs, slow, folder, options):
    """Blocking saves of a GPT with bfloat16 copies of its weights; the first measures the store."""
    import penstock  # noqa: PLC0415 - another installation's, with --against
    from penstock.core.storage.open import open_backend  # noqa: PLC0415
    from penstock.testing.faults import LatencyBackend  # noqa: PLC0415

    state = bench.gpt_state(options.gb * 12 / 14)
    half = {name: p.data.bfloat16() for name, p in state.model.named_parameters()}
    store = open_backend(folder / "data")
    if slow:
        store = LatencyBackend(store, bytes_per_s=200e6)
    rules = [{"match": "**", "codecs": codecs}]
    took = []
    with penstock.Checkpointer(store, rules=rules, retention={"keep_last": 1}) as ckpt:
        for number in range(5):
            bench.settle(0.3)
            report = ckpt.save({**state.tree, "half": half}, step=number, mode="blocking").result()
            took.append(report.seconds["total"])
    ratio = report.bytes_raw / report.bytes_stored
    return {"first, s": took[0], "later, s": statistics.median(took[1:]), "smaller by": ratio}


def fio(folder, options):
    """Raw writes and reads past the page cache."""
    found = {}
    for name, flags in (("save", ["--rw=write", "--end_fsync=1"]), ("restore", ["--rw=read"])):
        bench.settle()
        bench.drop_cache(folder)
        command = ["fio", "--output-format=json", "--name=raw", f"--directory={folder}"]
        command += [f"--size={int(options.gb * 1e9) >> 20}M", "--bs=8M", "--iodepth=16"]
        command += ["--ioengine=io_uring", "--direct=1", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job["write" if name == "save" else "read"]
        found[f"{name}, GB/s"] = moved["io_bytes"] / moved["runtime"] / 1e6
    return found


GROUPS = {
    "blocking": {name: partial(blocking, make) for name, make in BLOCKING.items()},
    "background": {name: partial(background, make) for name, make in BACKGROUND.items()},
    "loop": {name: partial(loop, make) for name, make in BACKGROUND.items()},
    "loop, codecs": {name: partial(loop, make) for name, make in ENCODED.items()},
    **{
        f"auto, {place}": {
            f"Penstock: {name}": partial(auto, CODECS[name], place != "disk")
            for name in ("raw", "floatsplit", "auto")
        }
        for place in ("disk", "200 MB per s")
    },
}
if shutil.which("fio"):
    GROUPS["blocking"]["fio"] = fio

if __name__ == "__main__":
    sizes = {
        "gb": (3.0, "state size in GB (10^9 bytes)"),
        "windows": (6, "saves in a training loop"),
        "steps": (8, "steps between them"),
        "batch": (16, "rows of a step: how long it takes"),
        "threads": (1, "threads of torch in the loop"),
    }
    bench.run(__doc__, GROUPS, sizes, base="Penstock")

"""Compares Penstock with torch.save, safetensors, DCP and TorchSnapshot, on one disk in one run.

    python benchmarks/compare.py --only state/ --gb 1
    python benchmarks/compare.py --only state/Penstock --against ../before/.venv/bin/python
    python benchmarks/compare.py --only state/ --small 50000

`state`: how long saves hold training, when they are durable, and restores of all and of the model
from an empty page cache into live tensors, compared afterwards. `staging`: async saves with less
staging memory than the state has. `limits`: the rates of memory and disk. `loop`: the cost of
a save in a training loop. `one`: one tensor out of many. `auto`: blocking saves with `codecs =
"auto"`, to the disk and with a limit of 200 MB/s.
"""

from __future__ import annotations

import json
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
MODEL = "model/"

# -- the contenders ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A save in flight, or a finished one."""

    wait: Callable[[], object] = lambda: None
    done: Callable[[], bool] = lambda: True
    fence: Callable[[], object] = lambda: None
    held_s: Callable[[], float] = lambda: 0.0
    """How long training was held, in `save` and at fences; 0 if unknown."""


class System(ABC):
    """One way to save and restore, with its fastest known call.

    Peers get a flat dict of tensors, the cheapest form; Penstock gets module and optimizer.
    """

    durable_by_itself = False

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def save(self, state, number):
        """Begin or make a save; the caller syncs the remaining files."""

    @abstractmethod
    def restore(self, state, number, part):
        """Restore tensors whose names begin with `part` in place."""

    def close(self):  # noqa: B027 - most hold nothing
        """Release resources that last from save to save."""


class TorchSave(System):
    def save(self, state, number):
        torch.save(state.tensors, self.folder / f"{number}.pt")
        return Pending()

    def restore(self, state, number, part):
        # Faster here than without mmap, which reads into new memory first.
        loaded = torch.load(self.folder / f"{number}.pt", weights_only=True, mmap=True)
        for name, tensor in state.part(part).items():
            tensor.copy_(loaded[name])


class Safetensors(System):
    def __init__(self, folder):
        super().__init__(folder)
        self._open = import_module("safetensors").safe_open
        self._save = import_module("safetensors.torch").save_file

    def save(self, state, number):
        self._save(state.tensors, self.folder / f"{number}.safetensors")
        return Pending()

    def restore(self, state, number, part):
        # Faster here than load_file, and than backend="pread".
        with self._open(self.folder / f"{number}.safetensors", framework="pt") as stored:
            for name, tensor in state.part(part).items():
                tensor.copy_(stored.get_tensor(name))


class Dcp(System):
    """`dcp.save` with two threads, or `async_save`, maybe with a stager that reuses memory."""

    def __init__(self, folder, *, background=False, keep_staging=False, threads=2, alone=True):
        super().__init__(folder)
        self._dcp, self._threads = import_module("torch.distributed.checkpoint"), threads
        self._background, self._stager, self._how = background, None, {"no_dist": alone}
        if not alone:  # its own group: its threads would meet the measure's collectives
            self._how["process_group"] = import_module("torch.distributed").new_group()
        if keep_staging:  # without the options that need an accelerator
            staging = import_module("torch.distributed.checkpoint.staging")
            off = ("pinned_memory", "shared_memory", "async_staging", "non_blocking_copy")
            options = staging.StagingOptions(**{f"use_{name}": False for name in off})
            self._stager = staging.DefaultStager(options)

    def save(self, state, number):
        folder = self.folder / str(number)
        writer = self._dcp.FileSystemWriter(folder, thread_count=self._threads, sync_files=True)
        how = {"storage_writer": writer, **self._how}
        if self._background:
            pending = self._dcp.async_save(state.tensors, async_stager=self._stager, **how)
            return Pending(pending.result, pending.done)
        self._dcp.save(state.tensors, **how)
        return Pending()

    def restore(self, state, number, part):
        reader = self._dcp.FileSystemReader(self.folder / str(number))
        self._dcp.load(state.part(part), storage_reader=reader, **self._how)

    def close(self):
        if self._stager is not None:
            self._stager.close()


class TorchSnapshot(System):
    def __init__(self, folder):
        super().__init__(folder)
        self._lib = import_module("torchsnapshot")

    def save(self, state, number):
        app = {"state": self._lib.StateDict(**state.tensors)}
        pending = self._lib.Snapshot.async_take(str(self.folder / str(number)), app)
        return Pending(pending.wait, pending.done)

    def restore(self, state, number, part):
        snapshot = self._lib.Snapshot(str(self.folder / str(number)))
        if not part:
            snapshot.restore({"state": self._lib.StateDict(**state.tensors)})
            return
        for name, tensor in state.part(part).items():
            path = f"0/state/{name.replace('/', '%2F')}"
            snapshot.read_object(path, obj_out=tensor)


class Penstock(System):
    """With checksums; a save that it reports is durable and committed."""

    durable_by_itself = True

    def __init__(self, folder, mode="blocking", **how):
        super().__init__(folder)
        self._lib, self._mode = import_module("penstock"), mode
        # A plain path uses io_uring, or threads where that is not available.
        self._ckpt = self._lib.Checkpointer(str(folder), **how)

    def save(self, state, number):
        handle = self._ckpt.save(state.tree, step=number, mode=self._mode)
        held_s = lambda: handle.result().seconds["blocked"]  # noqa: E731
        return Pending(handle.result, handle.done, self._ckpt.fence, held_s)

    def restore(self, state, number, part):
        self._ckpt.restore(state.tree, number, include=part.rstrip("/") or None)

    def close(self):
        self._ckpt.close()


BACKGROUND = {
    "Penstock, lazy": partial(Penstock, mode="lazy"),
    "Penstock, async": partial(Penstock, mode="async"),
    "DCP async_save, kept stager": partial(Dcp, background=True, keep_staging=True),
    "DCP async_save": partial(Dcp, background=True),
    "TorchSnapshot async_take": TorchSnapshot,
}
SYSTEMS = {
    "Penstock, blocking": Penstock,
    **BACKGROUND,
    "DCP save": Dcp,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
}

# -- measures ----------------------------------------------------------------------------------


def state(make, folder, options):
    """Saves in a row (the first one makes staging memory), and cold restores of the last."""
    small = bench.gpt_state(WARM_UP_GB)
    warm, _ = saved_by(make, folder / "warm", small, 1)  # imports and thread pools
    warm.restore(small, 0, "")
    warm.close()
    whole = bench.small_state(options.small) if options.small else bench.gpt_state(options.gb)
    expected = bench.digests(whole.tensors)
    contender, rows = saved_by(make, folder / "data", whole, options.saves)
    figures = {f"first {name}": value for name, value in rows[0].items()}
    for name in rows[0] if options.saves > 1 else ():
        figures[f"later {name}"] = statistics.median(row[name] for row in rows[1:])
    contender.close()
    contender = make(folder / "data")
    for name, part in (("restore", ""), ("restore of the model", MODEL)):
        whole.wipe()
        bench.settle(0.1)
        bench.drop_cache(folder)
        with bench.timed(figures, name, "CPU", "MB"):
            contender.restore(whole, options.saves - 1, part)
        wanted = {n: digest for n, digest in expected.items() if n.startswith(part)}
        bench.check(bench.digests(whole.part(part)) == wanted, make)
    return figures


def staging(mode, share, folder, options):
    """`state`, with staging memory for a share of the state."""
    how = {"mode": mode, "staging_bytes": int(share * options.gb * 1e9)}
    return state(partial(Penstock, **how), folder, options)


def saved_by(make, folder, whole, saves):
    contender, rows = make(folder), []
    for number in range(saves):
        bench.settle(0.1)
        row = {}
        with bench.timed(row, "durable", "CPU", "MB"):
            with bench.timed(row, "fenced"):
                with bench.timed(row, "call"):
                    pending = contender.save(whole, number)
                pending.fence()
            pending.wait()
            if not contender.durable_by_itself:
                bench.sync_tree(contender.folder)
        rows.append(row)
    return contender, rows


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
    whole = bench.State(model, optimizer, bench.tensors_of(model, optimizer))
    contender = make(folder / "data")
    quiet, calls, fences, busy, costs = [], [], [], [], []
    for number in range(options.windows + 1):
        bench.settle(0.3)
        step()  # caches are cold after the pause
        without = [step() for _ in range(options.steps)]
        began = time.perf_counter()
        pending = contender.save(whole, number)
        called_s = time.perf_counter() - began
        steps = []
        for place in range(options.steps):
            under_way = not pending.done()
            took_s = step()
            steps.append(took_s)
            # The first step holds the fence, so it is not like the later steps.
            if number and place and under_way and not pending.done():
                busy.append(took_s)
        whole_s = time.perf_counter() - began
        pending.wait()
        if not contender.durable_by_itself:
            bench.sync_tree(contender.folder)
        if number:  # the first save allocates staging memory
            quiet += without
            calls.append(called_s)
            fences.append(max(0.0, pending.held_s() - called_s))
            costs.append(whole_s - sum(without))  # speeds of the machine change between windows
    contender.close()
    step_s = statistics.median(quiet)
    figures = {"call, s": statistics.median(calls), "fence, s": statistics.median(fences)}
    figures |= {"step, s": step_s} | (
        {"step meanwhile, s": statistics.median(busy)} if busy else {}
    )
    return figures | {"cost of a save, s": statistics.median(costs)}


def one_of_many(folder, options):
    """A restore of one tensor, a load of it, and a read through `open`."""
    saved_by(Penstock, folder / "warm", bench.gpt_state(WARM_UP_GB), 1)
    many = bench.small_state(options.objects, 4)
    contender, rows = saved_by(Penstock, folder / "run", many, 1)
    name, tensor = next(iter(many.tensors.items()))
    figures, wanted = {"save, s": rows[0]["durable, s"]}, tensor.tolist()
    contender.close()
    with import_module("penstock").Checkpointer(str(folder / "run")) as ckpt:
        tensor.zero_()
        bench.drop_cache(folder)
        with bench.timed(figures, "restore"):
            ckpt.restore(many.tree, include=name)
        bench.check(tensor.tolist() == wanted, "Penstock")
        bench.drop_cache(folder)
        with bench.timed(figures, "load"):
            ckpt.load(include=name)
        with bench.timed(figures, "open, cache warm"):
            ckpt.open()[name]
    return figures


def auto(codecs, slow, folder, options):
    """Blocking saves of a GPT with bfloat16 copies of its weights; the first measures the store."""
    import penstock  # noqa: PLC0415 - another installation's, with --against
    from penstock.core.storage.open import open_backend  # noqa: PLC0415
    from penstock.testing.faults import LatencyBackend  # noqa: PLC0415

    whole = bench.gpt_state(options.gb * 12 / 14)
    half = {name: p.data.bfloat16() for name, p in whole.model.named_parameters()}
    store = open_backend(folder / "data")
    if slow:
        store = LatencyBackend(store, bytes_per_s=200e6)
    rules = [{"match": "**", "codecs": codecs}]
    took = []
    with penstock.Checkpointer(store, rules=rules, retention={"keep_last": 1}) as ckpt:
        for number in range(options.saves + 1):
            bench.settle(0.3)
            report = ckpt.save({**whole.tree, "half": half}, step=number, mode="blocking").result()
            took.append(report.seconds["total"])
    ratio = report.bytes_raw / report.bytes_stored
    return {"first, s": took[0], "later, s": statistics.median(took[1:]), "smaller by": ratio}


# -- limits --------------------------------------------------------------------------------------


def copy(_, options):
    """A plain copy in memory, to new memory and to the same memory again."""
    tensors, figures = bench.gpt_state(options.gb).tensors, {}
    with bench.timed(figures, "first call"):
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
    with bench.timed(figures, "later call"):
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
    return figures


def fio(folder, options):
    """Raw writes and reads that bypass the page cache."""
    figures = {}
    for name, flags in (("durable", ["--rw=write", "--end_fsync=1"]), ("restore", ["--rw=read"])):
        bench.settle(0.1)
        bench.drop_cache(folder)
        command = ["fio", "--output-format=json", "--name=raw", f"--directory={folder}"]
        command += [f"--size={max(16, int(options.gb * 1e9) >> 20)}M", "--bs=8M", "--iodepth=16"]
        command += ["--ioengine=libaio", "--direct=1", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job["write" if name == "durable" else "read"]
        figures[f"{name}, s"] = options.gb * 1e6 * moved["runtime"] / moved["io_bytes"]
    return figures


BENCHMARK = bench.Benchmark(
    __file__,
    __doc__,
    {
        "state": {name: partial(state, make) for name, make in SYSTEMS.items()},
        "staging": {
            "Penstock, async": partial(staging, "async", 1.1),
            "Penstock, async, a third": partial(staging, "async", 1 / 3),
            "Penstock, blocking": partial(staging, "blocking", 1.1),
        },
        "limits": {"plain copy in memory": copy, "fio": fio},
        "loop": {name: partial(loop, make) for name, make in BACKGROUND.items()},
        "one": {"Penstock": one_of_many},
        **{
            f"auto, {place}": {
                f"Penstock: {name}": partial(auto, codecs, place != "disk")
                for name, codecs in (("raw", ()), ("floatsplit", ["floatsplit"]), ("auto", "auto"))
            }
            for place in ("disk", "200 MB per s")
        },
    },
    {
        "gb": (1.0, "state size in GB (10^9 bytes)"),
        "small": (0, "tensors of 4 KiB instead"),
        "saves": (2, "per process; for `auto`, after the first"),
        "objects": (300_000, "tensors; one is read"),
        "windows": (3, "saves in a training loop"),
        "steps": (6, "steps between them"),
        "batch": (16, "rows of a step, which set its time"),
        "threads": (1, "threads of torch in the loop"),
    },
    base="Penstock",
)

if __name__ == "__main__":
    BENCHMARK.run()

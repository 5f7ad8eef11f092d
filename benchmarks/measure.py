"""One measurement of one system, in a process of its own; `compare.py` starts these.

    python benchmarks/measure.py --system Penstock --kind blocking --folder F --out result.json

The state is made, and every code path run once on a small state, before the clock starts.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from disk import drop_cache, remove, settle, sync_tree
from states import build_state
from systems import BACKGROUND, BLOCKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_WARM_UP_GB = 0.02


def main(
    *,
    system: Annotated[str, typer.Option(help="A name of systems.py.")],
    kind: Annotated[str, typer.Option(help="`blocking`, `background` or `copy`.")],
    folder: Annotated[Path, typer.Option(help="Where to write; emptied.")],
    out: Annotated[Path, typer.Option(help="JSON goes here.")],
    size_gb: float = 3.0,
    saves: Annotated[int, typer.Option(help="Background saves in a row.")] = 4,
    pause_s: float = 1.0,
    seed: int = 0,
) -> None:
    """Measure, and write a JSON list of results."""
    warnings.filterwarnings("ignore")
    if kind == "copy":
        results = _copies(size_gb, seed)
    elif kind == "blocking":
        results = _blocking(system, folder, size_gb=size_gb, pause_s=pause_s, seed=seed)
    else:
        results = _background(system, folder, size_gb=size_gb, saves=saves, pause_s=pause_s)
    out.write_text(json.dumps([{"system": system, **r} for r in results]))


def _blocking(
    system: str, folder: Path, *, size_gb: float, pause_s: float, seed: int
) -> list[dict[str, Any]]:
    make = BLOCKING[system]
    _warm_up(make, folder)
    state = build_state(size_gb, seed=seed)
    expected = state.checksums()
    contender = make(folder)
    settle(pause_s)
    drop_cache(folder.parent)
    with _measured() as saved:
        how_saved = contender.save(state)
        if not contender.durable_by_itself:
            sync_tree(folder)
    stored = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    state.wipe()
    settle(pause_s)
    dropped = drop_cache(folder)
    with _measured() as restored:
        how_restored = contender.restore(state)
    if state.checksums() != expected:
        message = f"{system} did not restore what it had saved"
        raise SystemExit(message)
    shared = {"bytes": state.nbytes, "tensors": len(expected)}
    return [
        {"kind": "save", **shared, **saved, "bytes_stored": stored, "details": how_saved},
        {"kind": "restore", **shared, **restored, "cache": dropped, "details": how_restored},
    ]


def _background(
    system: str, folder: Path, *, size_gb: float, saves: int, pause_s: float
) -> list[dict[str, Any]]:
    make = BACKGROUND[system]
    _warm_up_background(make, folder)
    state = build_state(size_gb)
    contender = make(folder)
    blocked, fenced, durable = [], [], []
    before = _memory()
    _reset_peak()
    for number in range(saves):
        settle(pause_s)
        began = time.perf_counter()
        pending = contender.save_in_background(state, number)
        returned = time.perf_counter()
        pending.fence()
        free = time.perf_counter()
        pending.wait()
        if not contender.durable_by_itself:
            sync_tree(folder)
        durable.append(time.perf_counter() - began)
        blocked.append(returned - began)
        fenced.append(free - began)
        contender.forget(number)
    peak = _memory("VmHWM") - before
    contender.close()
    return [
        {
            "kind": "background",
            "bytes": state.nbytes,
            "tensors": len(state.tensors),
            "first_s": blocked[0],
            "later_s": statistics.median(blocked[1:]),
            "first_fenced_s": fenced[0],
            "later_fenced_s": statistics.median(fenced[1:]),
            "durable_s": statistics.median(durable[1:]),
            "extra_memory_bytes": max(0, peak),
        }
    ]


def _copies(size_gb: float, seed: int) -> list[dict[str, Any]]:
    """What one copy of the state costs in memory, into memory that was touched before and not."""
    state = build_state(size_gb, seed=seed)
    began = time.perf_counter()
    copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
    fresh = time.perf_counter() - began
    again = []
    for _ in range(3):
        began = time.perf_counter()
        for name, tensor in state.tensors.items():
            copies[name].copy_(tensor)
        again.append(time.perf_counter() - began)
    return [
        {
            "kind": "copy",
            "bytes": state.nbytes,
            "first_s": fresh,
            "later_s": statistics.median(again),
            "torch_threads": torch.get_num_threads(),
        }
    ]


def _warm_up(make: Any, folder: Path) -> None:
    """Imports, thread pools and caches of code are nobody's save."""
    small = build_state(_WARM_UP_GB)
    contender = make(folder)
    contender.save(small)
    contender.restore(small)
    remove(folder)


def _warm_up_background(make: Any, folder: Path) -> None:
    contender = make(folder)
    pending = contender.save_in_background(build_state(_WARM_UP_GB), 0)
    pending.fence()
    pending.wait()
    contender.close()
    remove(folder)


@contextmanager
def _measured() -> Iterator[dict[str, Any]]:
    """Fills in seconds, CPU seconds, and how far memory rose above where it was."""
    into: dict[str, Any] = {}
    before = _memory()
    _reset_peak()
    used = _cpu_s()
    began = time.perf_counter()
    yield into
    into["seconds"] = time.perf_counter() - began
    into["cpu_s"] = _cpu_s() - used
    into["extra_memory_bytes"] = max(0, _memory("VmHWM") - before)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _memory(field: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def _reset_peak() -> None:
    fd = os.open("/proc/self/clear_refs", os.O_WRONLY)
    os.write(fd, b"5")
    os.close(fd)


if __name__ == "__main__":
    typer.run(main)

"""What all benchmarks share: states, clocks, the disk, turns, tables, and JSON.

A benchmark is a table of measures, `{group: {name: measure}}`, handed to `run`. Each measure runs
in a process of its own, takes a folder and the options, and returns numbers by name. Within a round
the names take turns, and each round begins with another one, so that a disk that gets slower does
so for all. Tables show medians over the rounds; the JSON file has every round.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Measure = Callable[[Path, argparse.Namespace], dict[str, float]]
    Groups = dict[str, dict[str, Measure]]
    Runs = dict[str, list[dict[str, float]]]

BUILD = Path(__file__).resolve().parent.parent / "build"
PACKAGES = ("penstock", "torch", "safetensors", "torchsnapshot", "numpy", "zipnn", "blosc2")
AGAINST = " (against)"


def run(
    doc: str,
    groups: Groups,
    options: dict[str, tuple[Any, str]] | None = None,
    *,
    base: str = "",
    launch: Callable[[argparse.Namespace], list[str]] = lambda _: [],
    around: Callable[[argparse.Namespace], Any] = nullcontext,
) -> None:
    """Be a benchmark, or the process that measures one name.

    Args:
        doc: Docstring of the benchmark.
        groups: Its measures; each group is a table.
        options: Default and help of each option besides those of all benchmarks.
        base: Begins the name that the times of its group are compared with.
        launch: Arguments of Python before the script: several ranks run under torchrun.
        around: Context manager for the whole run; sets options, such as the URL of a server.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each name")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names or groups")
    parser.add_argument("--folder", type=Path, default=BUILD / "bench", help="on the disk to use")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; default: in build/")
    parser.add_argument("--against", help="Python of another installation, which takes turns")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for name, (default, text) in (options or {}).items():
        kind = type(default) if default is not None else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if given.worker:
        group, _, name = given.worker.partition("/")
        found = groups[group][name](given.folder, given)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(found), flush=True)
        os._exit(0)  # without waiting for threads of a peer
    with around(given):
        extra = [f"--{n.replace('_', '-')}={getattr(given, n)}" for n in options or ()]
        extra = [one for one in extra if not one.endswith("=None")]
        plan = planned(groups, given)
        results: dict[str, Runs] = {}
        load = os.getloadavg()[0]
        failed = False
        for number in range(given.rounds):
            turn = number * len(plan) // given.rounds
            for group, name in plan[turn:] + plan[:turn]:
                found = in_process(group, name, given, [*launch(given)], extra)
                print(f"round {number + 1}: {group}, {name}: {found}", file=sys.stderr)
                failed |= not found and name.startswith("Penstock")
                if found:
                    results.setdefault(group, {}).setdefault(name, []).append(found)
    about = machine(given.folder, load)
    for group, runs in results.items():
        print(f"\n{group}, medians of {given.rounds}\n\n{table(runs, base)}")
    print(f"\n{'; '.join(f'{key} {value}' for key, value in about.items())}")
    out = given.out or BUILD / f"{Path(sys.argv[0]).stem}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": about, "options": vars(given), "results": results}
    out.write_text(json.dumps(whole, indent=1, default=str))
    sys.exit(failed)


def planned(groups: Groups, given: argparse.Namespace) -> list[tuple[str, str]]:
    """Groups and names to measure; with `--against` those of Penstock twice."""
    everything = [(group, name) for group, names in groups.items() for name in names]
    plan = [p for p in everything if not given.only or any(o in "/".join(p) for o in given.only)]
    if not plan:
        sys.exit(f"nothing to measure; there are {', '.join('/'.join(p) for p in everything)}")
    if given.against:
        plan += [(group, n + AGAINST) for group, n in plan if n.startswith("Penstock")]
    return plan


def in_process(
    group: str, name: str, given: argparse.Namespace, launch: list[str], extra: list[str]
) -> dict[str, float]:
    """Measure once in a process of its own; empty if it failed, which is printed."""
    given.folder.mkdir(parents=True, exist_ok=True)
    python, environment = sys.executable, dict(os.environ)
    if name.endswith(AGAINST):
        python = given.against
        environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="run-", dir=given.folder) as scratch:
        worker = f"--worker={group}/{name.removesuffix(AGAINST)}"
        command = [python, *launch, sys.argv[0], worker, f"--folder={scratch}", *extra]
        settle(0.3)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(f"FAILED {name}: {done.stderr[-2000:] or done.stdout[-2000:]}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(runs: Runs, base: str) -> str:
    """Medians in Markdown; times also in times of those of `base`: above 1 is faster than it."""
    columns = list(dict.fromkeys(c for found in runs.values() for one in found for c in one))
    middle = {
        n: {c: statistics.median([one[c] for one in f if c in one] or [math.nan]) for c in columns}
        for n, f in runs.items()
    }
    compared = next((n for n in middle if base and n.startswith(base)), None)
    lines = [f"|  | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for name, values in middle.items():
        cells = []
        for column, value in values.items():
            cell = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
            their = middle[compared][column] if compared else 0.0
            if their and value and column.endswith(", s") and name != compared:
                cell += f" ({their / value:.2f}x)"
            cells.append(cell)
        line = f"| {name} | {' | '.join(cells)} |"
        lines.append(line.replace("nan (nanx)", "").replace("nan", ""))
    return "\n".join(lines)


def machine(folder: Path, load_before: float) -> dict[str, Any]:
    """Where this ran; a load of about 1 is that of the benchmark itself."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model n")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "made": time.strftime("%Y-%m-%d"),
        "cpu": f"{len(os.sched_getaffinity(0))} x {model or platform.machine()}",
        "memory": f"{memory / 1e9:.0f} GB",
        "kernel": platform.release().split("-")[0],
        "free": f"{shutil.disk_usage(folder).free / 1e9:.0f} GB of {folder}",
        "load": f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "python": platform.python_version(),
        **versions,
    }


# -- clocks and the disk -----------------------------------------------------------------------


@contextmanager
def timed(found: dict[str, float], name: str, *more: str) -> Iterator[None]:
    """Put the seconds of a block into `found`; `more` is of "CPU" and "MB".

    MB is how far the memory of the process rose above what it was.
    """
    before_kb, cpu = proc_field("status", "VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    yield
    found[f"{name}, s"] = time.perf_counter() - began
    if "CPU" in more:
        found[f"{name}, CPU s"] = time.process_time() - cpu
    if "MB" in more:
        found[f"{name}, MB"] = max(0, proc_field("status", "VmHWM") - before_kb) / 1e3


def proc_field(file: str, field: str) -> int:
    """A field of a file in /proc/self."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def settle(pause_s: float = 1.0) -> None:
    """Write out what others left behind, and wait a moment, so that no contender pays for it."""
    os.sync()
    time.sleep(pause_s)  # file systems discard deleted blocks after the next journal commit
    os.sync()


def drop_cache(root: Path) -> None:
    """Empty the page cache (as root), or at least of the files below `root`."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in (path for path in root.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_tree(root: Path) -> None:
    """Make a folder durable: every file, then every folder, then the folder's own name."""
    paths = sorted(root.rglob("*"), key=lambda path: path.is_dir())
    for path in [*paths, root, root.parent]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# -- states ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A model and its optimizer, and the same memory as a flat dict of tensors."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def wipe(self) -> None:
        """Overwrite every tensor, so that a restore that does nothing is noticed."""
        for tensor in self.tensors.values():
            local(tensor).fill_(-1.0)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, and what the optimizer keeps of each."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model/{name}"] = parameter.data
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/{name}/{key}"] = value
    return found


def gpt_state(size_gb: float) -> State:
    """The shapes of a GPT and its AdamW state in fp32, about `size_gb` GB (10^9 bytes).

    About half of its tensors are matrices of 4 to 16 MB (at 1 GB and more), the others vectors and
    single numbers, and there is a large embedding. Values are random: nothing can be compressed.
    """
    width = 1024 if size_gb >= 1 else 512
    layers = max(1, round((size_gb * 1e9 / 12 - 16 * width * width) / (12 * width * width)))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (16 * width, width)}
    for layer in range(layers):
        for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"layer{layer}_{name}_weight"] = (rows * width, columns * width)
            shapes[f"layer{layer}_{name}_bias"] = (rows * width,)
        shapes |= {f"layer{layer}_norm{n}_{k}": (width,) for n in (1, 2) for k in ("w", "b")}
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.empty(shape)))
    optimizer = adamw(model)
    state = State(model, optimizer, tensors_of(model, optimizer))
    fill(state.tensors)
    return state


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer with the moments of each parameter, which are not filled."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {key: torch.empty_like(parameter.data) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1000.0), **moments}
    return optimizer


def fill(tensors: dict[str, torch.Tensor], seed: int = 0) -> None:
    """Random values; drawing every one anew would take longer than what is measured."""
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(seed))
    start = 0
    for tensor in tensors.values():
        for part in local(tensor).view(-1).split(pool.numel() // 2):
            part.copy_(pool[start : start + part.numel()])
            start = (start + part.numel() + 7919) % (pool.numel() // 2)


def small_tensors(count: int, elements: int = 1024) -> dict[str, torch.Tensor]:
    """Tensors of 4 KiB, or of `elements` numbers, each with memory of its own."""
    torch.manual_seed(0)
    return {f"{number:06}": torch.randn(elements) for number in range(count)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return own


def digests(tree: dict[str, Any]) -> dict[str, Any]:
    """A hash of the bytes of each tensor."""
    return {
        name: digests(value) if isinstance(value, dict) else xxhash.xxh3_64_intdigest(
            local(value).detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        )
        for name, value in tree.items()
    }  # fmt: skip


def check(same: bool, who: object) -> None:  # noqa: FBT001 - a verdict
    """End the measurement if something else was restored than was saved."""
    if not same:
        raise SystemExit(f"{who} did not restore what it had saved")

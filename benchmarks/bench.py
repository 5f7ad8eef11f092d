"""Code that all benchmarks share: states, clocks, the disk, turns, tables, and JSON.

Each script is described by a `Benchmark`: measures by name, in groups. Each measurement is a
separate process. A measure takes a folder and the options, and returns numbers by name. The names
take turns in each round, and each round begins with another name, so that a slowing disk affects
all of them. A name that fails is reported and then left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from penstock.core.cli.bench.scratch import drop_cache as drop_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Measure = Callable[[Path, argparse.Namespace], dict[str, float]]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PACKAGES = ("penstock", "torch", "safetensors", "torchsnapshot", "numpy", "xxhash")
AGAINST = " (against)"
LIMIT_S = 90.0  # a measurement that takes longer counts as failed
FAILED = "failed"
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b: ")


@dataclass(frozen=True)
class Benchmark:
    """A script with measures.

    Attributes:
        script: Its path.
        doc: Its docstring.
        groups: Measures by group and name.
        options: Default and help of each option. `ranks`: the number of processes.
        base: Prefix of the name with which a group's times are compared.
        around: Context manager for each measurement; may set options, such as the URL of a server.
        of_groups: Other defaults of options, by group and option.
    """

    script: str
    doc: str
    groups: dict[str, dict[str, Measure]]
    options: dict[str, tuple[Any, str]] = field(default_factory=dict)
    base: str = ""
    around: Callable[[argparse.Namespace], Any] = nullcontext
    of_groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Measure what the command line selects; print tables, and write JSON."""
        parser = argparse.ArgumentParser(description=self.doc.partition("\n")[0])
        parser.add_argument("--rounds", type=int, default=3, help="measurements of each name")
        parser.add_argument("--only", nargs="+", default=[], help="parts of names or groups")
        parser.add_argument("--folder", type=Path, default=BUILD / "bench", help="on the disk")
        parser.add_argument("--out", type=Path, help="JSON file; default: in build/")
        parser.add_argument("--against", help="Python of another installation, measured in turns")
        parser.add_argument("--worker", help=argparse.SUPPRESS)
        for name, (default, text) in self.options.items():
            kind = type(default) if default is not None else str
            parser.add_argument(
                f"--{name.replace('_', '-')}", type=kind, default=default, help=text
            )
        given = parser.parse_args()
        if given.worker:
            here(self, given.worker, given.folder, given)
        defaults = {name: default for name, (default, _) in self.options.items()}
        changed = {n: getattr(given, n) for n in defaults if getattr(given, n) != defaults[n]}
        parts = []
        for group, measures in self.groups.items():
            options = defaults | self.of_groups.get(group, {}) | changed
            names = [
                n
                for n in measures
                if not given.only or any(o in f"{group}/{n}" for o in given.only)
            ]
            if given.against:
                names += [n + AGAINST for n in names if n.startswith("Penstock")]
            parts += (
                [Part(group, self, group, tuple(names), options, given.rounds)] if names else []
            )
        if not parts:
            sys.exit(f"nothing to measure; there are {', '.join(self.groups)}")
        measured = measure(parts, given.folder, against=given.against)
        for title, part in measured["parts"].items():
            rows = rows_of(part["results"])
            base = next((n for n in rows if self.base and n.startswith(self.base)), "")
            keys = dict.fromkeys(k for row in rows.values() if isinstance(row, dict) for k in row)
            columns = [key + "*" * key.endswith(", s") for key in keys]
            print(f"\n{title}, medians\n\n{table(rows, columns, base)}")
        out = given.out or BUILD / f"{Path(self.script).stem}.json"
        write_json(out, measured)
        sys.exit(bool(failed(measured)))


@dataclass(frozen=True)
class Part:
    """Measures that take turns: names of one group of a benchmark, with some options."""

    title: str
    benchmark: Benchmark
    group: str
    names: tuple[str, ...]
    options: dict[str, Any]
    rounds: int

    def with_defaults(self) -> dict[str, Any]:
        """Return all options of the benchmark."""
        return {key: default for key, (default, _) in self.benchmark.options.items()} | self.options

    def round(self, number: int, folder: Path, against: str | None, into: dict[str, Any]) -> None:
        """Measure each name once, unless it has failed before."""
        turn = number * len(self.names) // self.rounds
        for name in self.names[turn:] + self.names[:turn]:
            row = into.setdefault(name, {"rounds": []})
            if FAILED not in row:
                began = time.monotonic()
                figures = self.once(name, folder, against)
                took_s = time.monotonic() - began
                figures = {key: short(value) for key, value in figures.items()}
                print(f"{self.title}, {name}: {figures} ({took_s:.0f} s)", file=sys.stderr)
                if FAILED in figures:
                    row[FAILED] = figures[FAILED]
                else:
                    row["rounds"].append(figures)

    def once(self, name: str, folder: Path, against: str | None = None) -> dict[str, Any]:
        """Measure once, in a separate process, or in one for each rank."""
        options = argparse.Namespace(**self.with_defaults())
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(
                prefix="run-", dir=folder, ignore_cleanup_errors=True
            ) as scratch,
            self.benchmark.around(options),
        ):
            settle(0.3)
            python = "" if not against else against if name.endswith(AGAINST) else sys.executable
            return self.apart(name.removesuffix(AGAINST), Path(scratch), options, python)

    def apart(
        self, name: str, folder: Path, options: argparse.Namespace, python: str
    ) -> dict[str, Any]:
        """Measure in a process, or in one for each rank; the first writes JSON."""
        ranks, port = getattr(options, "ranks", 0), free_port()
        pids = []
        for rank in range(ranks or 1):
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    os.setsid()  # so that its children can be ended with it
                    for number, file in ((1, "stdout"), (2, "stderr")):
                        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
                        os.dup2(os.open(folder / f"{file}{rank}", flags, 0o600), number)
                    if ranks:
                        own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
                        own |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                        os.environ |= {key: str(value) for key, value in own.items()}
                        os.environ["MASTER_ADDR"] = "127.0.0.1"
                    worker = f"{self.group}/{name}"
                    if python:  # another installation; without this one's modules
                        words = [python, self.benchmark.script, f"--worker={worker}"]
                        words.append(f"--folder={folder}")
                        words += [
                            f"--{key.replace('_', '-')}={value}"
                            for key, value in vars(options).items()
                            if value is not None
                        ]
                        os.execv(python, words)
                    here(self.benchmark, worker, folder, options)
                except BaseException:  # noqa: BLE001 - the parent reads it
                    traceback.print_exc()
                finally:
                    os._exit(1)
        try:
            problem = problem_of(pids)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        lines = (folder / "stdout0").read_text().splitlines()
        if problem or not lines:
            messages = [
                line
                for file in sorted(folder.glob("stderr*"))
                for line in file.read_text(errors="replace").splitlines()
            ]
            print(*messages[-20:], sep="\n", file=sys.stderr)
            reasons = [line for line in messages if ERROR.match(line)] or [problem or "no result"]
            return {FAILED: reasons[-1][:160]}
        figures: dict[str, Any] = json.loads(lines[-1])
        return figures


def here(benchmark: Benchmark, worker: str, folder: Path, options: argparse.Namespace) -> None:
    """Measure in this process, print JSON, and end it."""
    warnings.filterwarnings("ignore")
    group, _, name = worker.partition("/")
    figures = benchmark.groups[group][name](folder, options)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(figures), flush=True)
    os._exit(0)  # without waiting for a peer's threads


def problem_of(pids: list[int]) -> str:
    """Wait until all have ended, one has failed, or time is up; return what went wrong."""
    deadline, left = time.monotonic() + LIMIT_S, set(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid in tuple(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                if code:
                    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
    return f"took longer than {LIMIT_S:.0f} s" if left else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(
    parts: list[Part], folder: Path, *, against: str | None = None, seconds: float = math.inf
) -> dict[str, Any]:
    """Measure all parts, in rounds; return when, where, and with which commit.

    Every part gets its first round. Further rounds fit into `seconds`: earlier parts in the list
    get all their rounds first.

    Raises:
        SystemExit: The commit changed during the run.
    """
    commit, began, loads = commit_now(), time.monotonic(), [os.getloadavg()[0]]
    results: dict[str, Any] = {part.title: {} for part in parts}
    took_s: dict[str, float] = {}

    def one_round(part: Part, number: int) -> None:
        left_s = began + seconds - time.monotonic()
        print(f"-- {part.title}, round {number + 1} ({left_s:.0f} s left)", file=sys.stderr)
        start = time.monotonic()
        part.round(number, folder, against, results[part.title])
        took_s[part.title] = time.monotonic() - start
        loads.append(os.getloadavg()[0])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its processes
    for part in parts:
        one_round(part, 0)
    spare_s = seconds - (time.monotonic() - began)
    further = []
    for part in parts:
        for number in range(1, part.rounds):
            if took_s[part.title] <= spare_s:
                spare_s -= took_s[part.title]
                further.append((number, part))
    for number, part in sorted(further, key=lambda one: one[0]):
        if took_s[part.title] <= began + seconds - time.monotonic():
            one_round(part, number)
    if commit_now() != commit:
        raise SystemExit("the commit changed during the run; nothing is kept")
    return {
        "about": {
            "commit": commit,
            "made": time.strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - began),
            "load before": round(loads[0], 2),
            "load during": [round(statistics.median(loads[1:]), 2), round(max(loads[1:]), 2)],
            **machine(folder),
        },
        "parts": {
            part.title: {"options": part.with_defaults(), "results": results[part.title]}
            for part in parts
        },
    }


def failed(measured: dict[str, Any]) -> list[str]:
    """Return the names of Penstock that failed."""
    return [
        f"{title}, {name}"
        for title, part in measured["parts"].items()
        for name, row in part["results"].items()
        if FAILED in row and name.startswith("Penstock")
    ]


def commit_now() -> str:
    """Return the commit of this tree; with "+" if files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "HEAD")[:12] + "+" * bool(git("status", "--porcelain", "-uno"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(value))


def as_json(value: dict[str, Any]) -> str:
    """Return JSON in which a measurement is one line."""
    lines = json.dumps(value, indent=1, default=str)
    flat = re.compile(r"\{[^{}\[\]]*\}|\[[^{}\[\]]*\]")
    return flat.sub(lambda match: re.sub(r"\s*\n\s*", " ", match[0]), lines) + "\n"


def short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def rows_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return the median of each figure over the rounds, by name; a text for a failed name."""
    rows: dict[str, Any] = {}
    for name, row in results.items():
        keys = dict.fromkeys(key for figures in row["rounds"] for key in figures)
        rows[name] = f"failed: {row[FAILED]}" if FAILED in row else {
            key: statistics.median(figures[key] for figures in row["rounds"] if key in figures)
            for key in keys
        }  # fmt: skip
    return rows


def table(rows: dict[str, Any], columns: Sequence[str], base: str = "") -> str:
    """Return Markdown. A column is a key; with "*" at its end, cells have ratios to `base`."""
    known = {name: values for name, values in rows.items() if isinstance(values, dict)}
    theirs = known.get(base, {})
    compared = [key.rstrip("*") for key in columns if key.endswith("*")]
    keys = [key.rstrip("*") for key in columns]
    lines = [f"|  | {' | '.join(key.removesuffix(', s') for key in keys)} |"]
    lines.append("|---" + "|---:" * len(keys) + "|")
    for name, values in rows.items():
        label = f"**{name}**" if name.startswith("Penstock") else name
        if name in known:
            cells = [figure(values.get(key), key) for key in keys]
            for place, key in enumerate(keys):
                if (
                    key in compared
                    and name != base
                    and min(values.get(key, 0), theirs.get(key, 0)) > 0
                ):
                    cells[place] += f" ({times(values[key] / theirs[key])}x)"
        else:
            cells = [values.replace("|", "/"), *[""] * (len(keys) - 1)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def figure(value: float | None, key: str = "") -> str:
    """Return a number as a table shows it."""
    if value is None:
        return ""
    if "MB" in key or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def machine(folder: Path) -> dict[str, Any]:
    """Return a description of this machine."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model n")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["findmnt", "-no", "FSTYPE", "-T", folder]
    system = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} cores ({model or platform.machine()})",
        "memory": f"{memory / 1e9:.0f} GB",
        "system": f"Linux {platform.release().split('-')[0]}, {system}",
        "versions": versions,
    }


# -- clocks and the disk -----------------------------------------------------------------------


@contextmanager
def timed(figures: dict[str, float], name: str, *more: str) -> Iterator[None]:
    """Put the seconds of a block into `figures`; `more` may add "CPU" and "MB".

    MB is the rise of the process's memory in the block.
    """
    before_kb, cpu = proc_field("status", "VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    yield
    figures[f"{name}, s"] = time.perf_counter() - began
    if "CPU" in more:
        figures[f"{name}, CPU s"] = time.process_time() - cpu
    if "MB" in more:
        figures[f"{name}, MB"] = max(0, proc_field("status", "VmHWM") - before_kb) / 1e3


def proc_field(file: str, field: str) -> int:
    """Return a field of a file in /proc/self."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def settle(pause_s: float = 1.0) -> None:
    """Write out earlier data, and wait a moment, so that no contender pays for it."""
    os.sync()
    time.sleep(pause_s)  # file systems discard deleted blocks after the next journal commit
    os.sync()


def drop_cache(root: Path) -> None:
    """Drop the files below a folder from the page cache."""
    os.sync()
    gone = [drop_file(path) for path in root.rglob("*") if path.is_file()]
    if not all(gone):
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3")


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

    model: Any
    optimizer: Any
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def part(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with a prefix."""
        return {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def wipe(self) -> None:
        """Overwrite every tensor, so that a restore without effect is noticed."""
        for tensor in self.tensors.values():
            local(tensor).fill_(-1.0)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters, and the optimizer's state of each."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.data
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def gpt_state(size_gb: float) -> State:
    """Return a GPT's shapes and its AdamW state in fp32, about `size_gb` GB (10^9 bytes).

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
    """Return an optimizer with the moments of each parameter, which are not filled."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {key: torch.empty_like(parameter.data) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1000.0), **moments}
    return optimizer


def fill(tensors: dict[str, torch.Tensor], seed: int = 0) -> None:
    """Fill tensors from a pool: drawing all values would take longer than the measurement."""
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))
    start = 0
    for tensor in tensors.values():
        for part in local(tensor).view(-1).split(pool.numel() // 2):
            part.copy_(pool[start : start + part.numel()])
            start = (start + part.numel() + 7919) % (pool.numel() // 2)


def small_state(count: int, elements: int = 1024) -> State:
    """Return tensors of 4 KiB, or N numbers, each with its own memory; a third is the model's."""
    tensors = {
        f"{'optimizer' if number % 3 else 'model'}/{number:06}": torch.empty(elements)
        for number in range(count)
    }
    fill(tensors)
    model, optimizer = (
        {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(part)}
        for part in ("model", "optimizer")
    )
    return State(model, optimizer, tensors)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return own


def digests(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a hash of the bytes of each tensor."""
    return {
        name: digests(value) if isinstance(value, dict) else xxhash.xxh3_64_intdigest(
            local(value).detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        )
        for name, value in tree.items()
    }  # fmt: skip


def check(same: bool, who: object) -> None:  # noqa: FBT001 - a verdict
    """End the measurement if the restored state differs from the saved one."""
    if not same:
        raise SystemExit(f"{who} did not restore what it had saved")

"""A sweep of saves, restores and partial reads by the engine, with one option changed at a time.

Tested in `tests/core/cli/test_bench.py`.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock import Checkpointer
from penstock.core.cli.bench.raw import measure, measure_limit
from penstock.core.cli.bench.scratch import (
    STUCK_S,
    Below,
    drop_cache,
    in_time,
    opened,
    remove,
    scratch_place,
    spec_with,
)
from penstock.core.cli.output.runs_on_disk import local_root
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.concurrency.workers import default_workers, usable_cores
from penstock.core.config.model import CheckpointerConfig
from penstock.core.config.plugin_choice import BackendConfig
from penstock.core.errors import ConfigError, PenstockError, StorageError, StorageFullError
from penstock.core.pipeline.staging import container_memory, machine_memory
from penstock.core.plugins.registry import default_registry
from penstock.core.reporting.reports import Progress
from penstock.core.units import size_text

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from penstock.core.abc import Backend

Kind: TypeAlias = Literal["default", "engine", "backend", "state", "processes"]

MOST_BYTES = 1 << 30
_LEAST_BYTES = 8 << 20
_MOST_PROCESSES = 8  # each imports torch: hundreds of MiB
_PILOT_BYTES = 64 << 20
_TENSORS = 16
_SLICE_BYTES = 1 << 20
_SMALL_TENSOR_BYTES = 64 << 10
_OVERHEAD_S = 0.3  # roughly the time of a save and a restore of no data
_PASSES = 2.5  # a case writes and reads the state once, more slowly than a raw loop: 2.5, not 2

_ENGINE: Mapping[str, tuple[int | str, ...]] = {
    "chunk_bytes": (4 << 20, 16 << 20, 64 << 20),
    "block_bytes": (256 << 10, 4 << 20),
    "workers": (1, 2, 4),
}
SWEPT = tuple(_ENGINE)
"""The options of the engine that the sweep changes, unless the user has set them."""
_BACKEND: Mapping[str, tuple[int | str, ...]] = {
    "depth": (4, 16, 64),
    "direct_io": ("off",),
    "allocate_bytes": (0,),
    "parallel": (4, 16, 64),
    "part_bytes": (8 << 20, 32 << 20),
}
"""The values to try for options of shipped backends, and for options of other backends with the
same names."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one round, or the medians of several rounds.

    Attributes:
        save_bytes_per_s: The speed of a save, which ends when the checkpoint is durable.
        restore_bytes_per_s: The speed of a restore, from a cold cache if `Report.cold`.
        partial_s: Seconds to read 1 MiB of a tensor, or all of a smaller tensor: the time to open
            the checkpoint and to read from 16 tensors, divided by 16.
        save_cores: The cores that a save keeps busy: CPU seconds per second.
        restore_cores: The same for a restore.
    """

    save_bytes_per_s: float
    restore_bytes_per_s: float
    partial_s: float
    save_cores: float
    restore_cores: float


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one configuration, which is the default with one change.

    Attributes:
        kind: The kind of change: an option of the engine or of the backend, the state, or the
            number of processes; `default` for no change.
        option: The option's name; `tensor_bytes` for `state`, `processes` for `processes`, None for
            `default`.
        value: The option's value; None for `default`.
        median: The medians of the rounds.
        rounds: The figures of each round in which the time sufficed for this case.
    """

    kind: Kind
    option: str | None
    value: int | str | None
    median: Figures
    rounds: tuple[Figures, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """The median speeds of a plain loop of large writes and reads.

    Attributes:
        blobs: The number of blobs written and read at once.
        write_bytes_per_s: The speed of writing, until the bytes are durable.
        read_bytes_per_s: The speed of reading them back.
    """

    blobs: int
    write_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The results of `bench`.

    Attributes:
        url: The store.
        engine: The name of the backend.
        direct_io: Whether the backend bypasses the page cache.
        local: Whether the store is a folder of this machine. If so, plain system calls measured its
            raw limit; if not, the backend did.
        cold: Whether it is certain that no read of the default case got a blob from the page cache;
            always False if not `local`.
        cores: The cores that this process may use.
        bytes: The size of the state.
        raw: The raw limit.
        rows: The sweep; the first row is the default.
    """

    url: str
    engine: str
    direct_io: bool
    local: bool
    cold: bool
    cores: float
    bytes: int
    raw: tuple[Raw, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of the sweep; see `Row`."""

    kind: Kind = "default"
    option: str | None = None
    value: int | str | None = None

    @property
    def label(self) -> str:
        """The case as one line of text."""
        return label_of(self.option, self.value)

    @property
    def change(self) -> dict[str, Any]:
        """The option and its value, as keywords; empty for the default."""
        return {} if self.option is None else {self.option: self.value}


def cases_of(spec: str | BackendConfig, options: Mapping[str, Any], backend: Backend) -> list[Case]:
    """Return the cases to measure.

    These are the default, each other value of each option that the user has not set, a state of
    small tensors, and, if other processes can open the store, several processes at once.
    """
    fields = default_registry().backend_class(backend.name).Config.model_fields
    if isinstance(spec, BackendConfig):
        fixed = {*options, *spec.options}
    else:
        fixed = {*options, *(pair.partition("=")[0] for pair in spec.partition("?")[2].split("&"))}
    defaults = {name: field.default for name, field in fields.items()}
    defaults["chunk_bytes"] = CheckpointerConfig.model_fields["chunk_bytes"].default
    defaults["workers"] = default_workers()
    kinds: dict[Kind, Mapping[str, tuple[int | str, ...]]] = {
        "engine": _ENGINE,
        "backend": {name: values for name, values in _BACKEND.items() if name in fields},
    }
    cases = [
        Case(kind, name, value)
        for kind, swept in kinds.items()
        for name, values in swept.items()
        for value in values
        if name not in fixed and value != defaults.get(name)
    ]
    cases.append(Case("state", "tensor_bytes", _SMALL_TENSOR_BYTES))
    if backend.capabilities.outlives_process:
        counts = sorted({2, max(2, min(_MOST_PROCESSES, int(usable_cores())))})
        cases += [Case("processes", "processes", count) for count in counts]
    return [Case(), *cases]


def label_of(option: str | None, value: int | str | None) -> str:
    """Return a case as text, such as `chunk_bytes = 4.0 MiB`, or `default`."""
    if option is None:
        return "default"
    sized = isinstance(value, int) and value and option.endswith("_bytes")
    return f"{option} = {size_text(float(value or 0)) if sized else value}"


def run_sweep(
    spec: str | BackendConfig,
    options: Mapping[str, Any],
    *,
    size: int | None,
    rounds: int,
    seconds: float,
    on_progress: Callable[[Progress], None],
) -> Report:
    """Measure a store, and leave nothing in it.

    Args:
        spec: A path, a URL or a table.
        options: Options of the engine that all cases share; they are not swept.
        size: The bytes of the state; default: as many as the store, memory and time allow.
        rounds: How often to measure each case; each round measures all cases once.
        seconds: No further case begins after this time, but the raw limit and the default are
            measured at least once.
        on_progress: Called before each case; `bytes_total` covers all rounds.

    Raises:
        ConfigError: The run is in tiers, or the memory is too small for `size`.
        StorageFullError: The store has too little room.
        StorageError: The store failed.
    """
    with scratch_place(spec) as (backend, prefix):
        sweep = _Sweep(backend, prefix, spec, options, Deadline(seconds), local_root(backend))
        return sweep.run(size, rounds, on_progress)


@dataclass(frozen=True, slots=True)
class _Sweep:
    backend: Backend
    prefix: str
    spec: str | BackendConfig
    options: Mapping[str, Any]
    deadline: Deadline
    root: Path | None

    def run(self, size: int | None, rounds: int, on_progress: Callable[[Progress], None]) -> Report:
        cases = cases_of(self.spec, self.options, self.backend)
        fits = _size_that_fits(self.backend, size)
        size = fits if size else self._default_size(fits, (len(cases) + 2) * rounds)
        cold = True
        raw: dict[int, list[tuple[float, float]]] = {1: [], 4: []}
        found: dict[Case, list[Figures]] = {case: [] for case in cases}
        steps: list[int | Case] = [*raw, *cases]
        for number in range(1, rounds):
            # Each round has its own order: otherwise a case would always run after the same other
            # case, with the store's caches as that case left them.
            steps += random.Random(number).sample([*raw, *cases], len(raw) + len(cases))  # noqa: S311
        for done, step in enumerate(steps):
            if self.deadline.is_over() and done > len(raw):  # the default is measured in any case
                break
            label = step.label if isinstance(step, Case) else "raw"
            on_progress(Progress(done * size, len(steps) * size, label))
            if isinstance(step, Case):
                figures, was_cold = self._measured(step, size)
                found[step].append(figures)
                cold = cold and (was_cold or step.kind != "default")
            else:
                speed = measure_limit(
                    self.backend, size, root=self.root, blobs=step, stuck_s=STUCK_S
                )
                raw[step].append((speed.write_bytes_per_s, speed.read_bytes_per_s))
        return Report(
            url=self.backend.url,
            engine=self.backend.name,
            direct_io=self.backend.direct_io,
            local=self.root is not None,
            cold=cold,
            cores=usable_cores(),
            bytes=size,
            raw=tuple(
                Raw(blobs, *map(statistics.median, zip(*speeds, strict=True)))
                for blobs, speeds in raw.items()
            ),
            rows=tuple(
                Row(case.kind, case.option, case.value, _medians(rounds), tuple(rounds))
                for case, rounds in found.items()
                if rounds
            ),
        )

    def _default_size(self, limit: int, steps: int) -> int:
        pilot = measure(self.backend, min(limit, _PILOT_BYTES), root=self.root, stuck_s=STUCK_S)
        per_s = min(pilot.write_bytes_per_s, pilot.read_bytes_per_s)
        left_s = self.deadline.left_s() / steps - _OVERHEAD_S
        return max(_LEAST_BYTES, min(limit, int(per_s * left_s / _PASSES) >> 20 << 20))

    def _measured(self, case: Case, size: int) -> tuple[Figures, bool]:
        count = case.value if case.kind == "processes" else 1
        assert isinstance(count, int)
        share = size // count
        tensor_bytes = share // _TENSORS >> 12 << 12
        task = _Task(
            spec=spec_with(self.spec, self.backend, case.change if case.kind == "backend" else {}),
            prefix=self.prefix,
            options={**self.options, **(case.change if case.kind == "engine" else {})},
            size=share,
            tensor_bytes=_SMALL_TENSOR_BYTES if case.kind == "state" else tensor_bytes,
        )
        try:
            spans = [task.run(None)] if count == 1 else _in_processes(task, count)
        finally:
            in_time(self.backend, lambda: remove(self.backend, self.prefix))
        return _figures(spans, task.size), all(span.cold for span in spans)


@dataclass(frozen=True, slots=True)
class _Spans:
    """When a process began and ended each phase (monotonic, the same clock in all processes)."""

    save: tuple[float, float]
    restore: tuple[float, float]
    partial: tuple[float, float]
    save_cpu_s: float
    restore_cpu_s: float
    cold: bool


@dataclass(frozen=True, slots=True)
class _Task:
    """One save, restore and partial read, with its own checkpointer."""

    spec: str | dict[str, Any]
    prefix: str
    options: Mapping[str, Any]
    size: int
    tensor_bytes: int

    def run(self, barrier: threading.Barrier | None) -> _Spans:
        with opened(self.spec) as backend:
            place = Below(backend, f"{self.prefix}{os.getpid()}/")
            state = _state(self.size, self.tensor_bytes)
            with Checkpointer(
                place, ranks="alone", io_timeout_s=STUCK_S, **self.options
            ) as checkpointer:
                # Not measured: a first save has additional work, such as imports.
                checkpointer.save({"warm": state["tensors"]["0"]}, 1, mode="blocking")
                return self._measured(checkpointer, backend, state, barrier)

    def _measured(
        self,
        checkpointer: Checkpointer,
        backend: Backend,
        state: Any,
        barrier: threading.Barrier | None,
    ) -> _Spans:
        root = local_root(backend)
        save, save_cpu_s = _timed(lambda: checkpointer.save(state, 2, mode="blocking"), barrier)
        cold = _dropped(backend, root, self.prefix)
        restore, restore_cpu_s = _timed(lambda: checkpointer.restore(state, 2), barrier)
        cold = _dropped(backend, root, self.prefix) and cold
        partial, _ = _timed(lambda: _read_slices(checkpointer, self.tensor_bytes), barrier)
        return _Spans(save, restore, partial, save_cpu_s, restore_cpu_s, cold)


def _state(size: int, tensor_bytes: int) -> dict[str, dict[str, np.ndarray]]:
    """Return arrays of random bytes, since a file system may compress or deduplicate zeros."""
    import numpy as np  # noqa: PLC0415 - takes a tenth of a second

    count = size // tensor_bytes
    words = np.random.default_rng().integers(0, 1 << 32, count * tensor_bytes // 4, dtype=np.uint32)
    tensors = np.split(words, count)
    return {"tensors": {str(number): tensor for number, tensor in enumerate(tensors)}}


def _read_slices(checkpointer: Checkpointer, tensor_bytes: int) -> None:
    checkpoint = checkpointer.open(2)
    length = min(_SLICE_BYTES, tensor_bytes)
    out = bytearray(length)
    for number in range(min(_TENSORS, len(checkpoint))):
        checkpoint.read_into(f"tensors/{number}", out, start=(tensor_bytes - length) // 2)


def _timed(
    call: Callable[[], object], barrier: threading.Barrier | None
) -> tuple[tuple[float, float], float]:
    """Run `call` when all processes are ready; return its span, and this process's CPU seconds."""
    if barrier is not None:
        barrier.wait(STUCK_S)
    began, cpu_s = time.monotonic(), time.process_time()
    call()
    return (began, time.monotonic()), time.process_time() - cpu_s


def _dropped(backend: Backend, root: Path | None, prefix: str) -> bool:
    """Drop all files below the prefix from the page cache; return whether no blob can be in it."""
    if root is None:
        return False
    gone = {info.name: drop_cache(root / info.name) for info in backend.list(prefix)}
    # The kernel sometimes keeps a page of a small record, whose read takes no time anyway.
    return backend.direct_io or all(done for name, done in gone.items() if "/blobs/" in name)


_barrier: threading.Barrier | None = None


def _begin_process(barrier: threading.Barrier) -> None:
    global _barrier  # noqa: PLW0603 - an initializer has no other way to pass something on
    _barrier = barrier
    logging.disable(logging.WARNING)  # the command has already printed the same warnings


def _run_in_process(task: _Task) -> _Spans:
    assert _barrier is not None
    try:
        return task.run(_barrier)
    except BaseException:
        _barrier.abort()
        raise


def _in_processes(task: _Task, count: int) -> list[_Spans]:
    """Run the task in several processes at once, each with its own root."""
    context = get_context("spawn")
    barrier = context.Barrier(count)
    with ProcessPoolExecutor(count, context, _begin_process, (barrier,)) as pool:
        # Ctrl-C sends SIGINT to these processes too. It is blocked while they start, since they
        # inherit that: they finish, this process waits for them, then removes everything.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_run_in_process, task) for _ in range(count)]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        errors = [error for future in futures if (error := future.exception()) is not None]
    # The error of a process that waited for the failed one shows no reason: it comes last.
    errors.sort(key=lambda error: not isinstance(error, PenstockError))
    if errors and not isinstance(errors[0], PenstockError):
        msg = f"one of {count} processes of the measurement failed: {errors[0]!r}"
        raise StorageError(msg) from errors[0]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _figures(spans: Sequence[_Spans], size: int) -> Figures:
    def seconds(of: Sequence[tuple[float, float]]) -> float:
        return max(1e-6, max(end for _, end in of) - min(began for began, _ in of))

    save_s = seconds([span.save for span in spans])
    restore_s = seconds([span.restore for span in spans])
    return Figures(
        save_bytes_per_s=len(spans) * size / save_s,
        restore_bytes_per_s=len(spans) * size / restore_s,
        partial_s=seconds([span.partial for span in spans]) / _TENSORS,
        save_cores=sum(span.save_cpu_s for span in spans) / save_s,
        restore_cores=sum(span.restore_cpu_s for span in spans) / restore_s,
    )


def _medians(rounds: Sequence[Figures]) -> Figures:
    tables = [asdict(figures) for figures in rounds]
    return Figures(**{name: statistics.median(t[name] for t in tables) for name in tables[0]})


def _size_that_fits(backend: Backend, wanted: int | None) -> int:
    """Return the size to use: the user's, or one that takes little of the free space and memory.

    Raises:
        ConfigError: The user's size does not fit into memory.
        StorageFullError: The size does not fit into the store.
    """
    free = backend.free_bytes()
    memory = min(machine_memory(), container_memory() or MOST_BYTES << 20)
    if wanted is None:
        limit = min(MOST_BYTES, memory // 4, MOST_BYTES if free is None else free // 10)
        if limit >= _LEAST_BYTES:
            return limit >> 20 << 20
        least = 10 * _LEAST_BYTES
    else:
        wanted = max(wanted, 1 << 20)
        # The state and a copy are in memory at once; the store needs a little more than the state.
        least = wanted + wanted // 8
        if 2 * wanted > memory:
            msg = (
                f"a state of {size_text(wanted)} and a copy do not fit into {size_text(memory)} of "
                "memory: choose a smaller --size"
            )
            raise ConfigError(msg)
        if free is None or least <= free:
            return wanted
    msg = (
        f"{backend.url} has {size_text(free or 0)} free, but this needs {size_text(least)}: make "
        "room, or choose a smaller --size"
    )
    raise StorageFullError(msg)

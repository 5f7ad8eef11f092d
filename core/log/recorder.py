"""Records the log of a run: one entry for each step of training, appended in the background.

Tested in `tests/core/log/test_recorder.py`.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, replace
from queue import Queue
from typing import TYPE_CHECKING, Any

from penstock.core.abc import ByteSource, StateObject
from penstock.core.config.model import load_config
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.format.segment import FIRST
from penstock.core.log.segments import SegmentWriter
from penstock.core.log.steps import NotLoggedError, Step, StepWatch, digest_of, stored_step
from penstock.core.save.job import SaveJob
from penstock.core.save.manifest import ManifestWriter
from penstock.core.save.pending import Pending
from penstock.core.save.prepare import KeptStaging, plan_state
from penstock.core.save.request import Destination, SaveSurroundings
from penstock.core.save.rules import ChainTable
from penstock.core.storage.open import open_backend
from penstock.core.tree.containers import Scan
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.known import Known
from penstock.core.tree.paths import show_path
from penstock.core.types import Kind, Role, valid_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import Backend, Node, PendingCopy
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.plugins.registry import Registry
    from penstock.core.tree.describe import Description
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

STATE, STEPS = "state", "steps"
"""The keys of an entry: what no optimizer changes, and the steps."""

_IN_FLIGHT = 2  # entries whose gradients are held
_DIGEST_EVERY = 64  # entries; the first has one, so that a wrong engine shows at the first replay


class CopiedSource(ByteSource):
    """The bytes of an object as they were when it was logged."""

    __slots__ = ("_data", "address", "device", "memory", "nbytes")

    def __init__(self, source: ByteSource) -> None:
        self.nbytes = source.nbytes
        self.device = "cpu"
        self.address = None
        self.memory = None
        self._data = memoryview(bytearray(source.nbytes))
        pending = source.copy_out(0, self._data) if source.nbytes else None
        if pending is not None:
            pending.wait()

    def view(self) -> memoryview | None:
        """Return the bytes."""
        return self._data

    def copy_out(self, start: int, out: memoryview, /) -> PendingCopy | None:
        """Copy some of the bytes."""
        out[:] = self._data[start : start + out.nbytes]
        return None


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    rest: Sequence[StateObject | Node]
    providers: Mapping[str, int]
    steps: Sequence[tuple[str, Step]]


class Recorder:
    """Logs the steps since the newest checkpoint. For the training thread."""

    def __init__(
        self, backend: Backend, config: CheckpointerConfig, registry: Registry, workers: Workers
    ) -> None:
        """Prepare; nothing is watched before `begin`."""
        self._backend = backend
        self._config = config
        self._registry = registry
        self._workers = workers
        self._watch = StepWatch()
        self._base: tuple[str, int] | None = None  # uid and step
        self._previous = FIRST
        self._last = -1
        self._logged = 0
        self._writing: _Writing | None = None
        self._known = Known()
        self._stored: dict[ObjectPath, tuple[object, int | None]] = {}
        self.ended = "no checkpoint was saved or restored yet"
        """Why steps are not logged; empty while they are."""

    def begin(
        self,
        uid: str,
        step: int,
        state: Mapping[str, Any],
        *,
        last: int | None = None,
        previous: bytes = FIRST,
    ) -> None:
        """Log from now on what follows a checkpoint.

        Args:
            uid: The uid of the checkpoint.
            step: Its step.
            state: The state tree.
            last: The step of the entry that was replayed last; None: none was.
            previous: The digest of that entry.
        """
        self._finish()
        self._base, self._previous = (uid, step), previous
        self._last = step if last is None else last
        self._logged = 0
        self._stored.clear()
        self.ended = ""
        if "torch" in sys.modules:
            self._watch.start(optimizers_of(state, self._registry).values())

    def log(self, state: Mapping[str, Any], step: int) -> bool:
        """See `Checkpointer.log`."""
        number = valid_step(step)
        self._watch.keeps = True
        if self.ended:
            return False
        assert self._base is not None
        if number <= self._last:
            msg = f"step {number} is not after step {self._last}, which is saved or logged"
            raise ConfigError(msg)
        try:
            entry = self._entry(state, number)
        except NotLoggedError as error:
            self.end(str(error))
            return False
        if self._writing is None:
            writer = SegmentWriter(self._backend, self._base[0], 0, 1, previous=self._previous)
            self._writing = _Writing(self, writer, self._workers, self._config, self._registry)
        self._writing.put(entry)
        self._last = number
        return not self.ended

    def end(self, reason: str) -> None:
        """End the log: training goes on, and the next save begins a new one."""
        if not self.ended:
            self.ended = reason
            log.warning(
                "the log of gradients ends after step %d: %s. The next save begins a new one.",
                self._last, reason,
            )  # fmt: skip

    def close(self) -> None:
        """Wait until all entries are durable."""
        self._finish()
        self._watch.stop()
        self.ended = "the checkpointer is closed"

    def flush(self) -> None:
        """Wait until all entries are durable; the log continues."""
        if self._writing is not None:
            self._writing.flush()

    def _finish(self) -> None:
        if self._writing is not None:
            self._writing.close()
            self._writing = None
        self._watch.clear()

    def _entry(self, state: Mapping[str, Any], number: int) -> _Entry:
        steps = self._watch.steps
        try:
            self._watch.check()
        finally:
            self._watch.clear()
        for step in steps:
            step.keep()
            if self._logged % _DIGEST_EVERY == 0:
                step.digest = digest_of(step.optimizer)
        self._logged += 1
        known = Known(self._known)
        description = describe_tree(
            {STATE: state},
            providers=self._registry.providers,
            allow_pickle=self._config.allow_pickle,
            known=known,
        )
        self._known = known
        optimizers = optimizers_of(state, self._registry)
        paths = {id(optimizer): path for path, optimizer in optimizers.items()}
        named = []
        for step in steps:
            path = paths.get(id(step.optimizer))
            if path is None:
                if _shares_memory(step, description):
                    msg = f"{type(step.optimizer).__name__}, which is not in the state, changed it"
                    raise NotLoggedError(msg)
                continue
            named.append((path, step))
        return _Entry(number, self._rest(description), dict(description.providers_used), named)

    def _rest(self, description: Description) -> list[StateObject | Node]:
        """Return what no optimizer changes, with copies of its bytes."""
        rest: list[StateObject | Node] = []
        for entry in description.entries:
            if not isinstance(entry, StateObject) or entry.kind is Kind.VALUE:
                rest.append(entry)
            elif entry.path in description.deferrable or entry.same_as is not None:
                continue
            else:
                now = entry.source.memory, entry.source.version()
                # Operations such as batch norm change buffers, and leave their version.
                if entry.role is Role.PARAMETER and now[1] is not None:
                    if self._stored.get(entry.path) == now:
                        continue  # frozen: an earlier entry has it
                    self._stored[entry.path] = now
                rest.append(entry._replace(source=CopiedSource(entry.source)))
        return rest


def optimizers_of(state: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """Return the optimizers of torch in a state tree, by their shown path."""
    scan = Scan(registry.providers)
    scan.is_container(state, ())
    return {show_path(f.path): f.value for f in scan.found if f.provider.name == "optimizer"}


class _Writing:
    """The thread that encodes and appends entries."""

    def __init__(
        self,
        recorder: Recorder,
        writer: SegmentWriter,
        workers: Workers,
        config: CheckpointerConfig,
        registry: Registry,
    ) -> None:
        self._recorder = recorder
        self._writer = writer
        self._workers = workers
        self._queue: Queue[_Entry | threading.Event | None] = Queue(_IN_FLIGHT)
        self._config = load_config(
            {
                "backend": "memory://",
                "mode": "blocking",
                "allow_pickle": config.allow_pickle,
                "chunk_bytes": config.chunk_bytes,
                "rules": [{"match": f"{STEPS}/*/grads/**", "codecs": ["floatsplit"]}],
            }
        )
        self._registry = registry
        self._staging = KeptStaging(self._config, workers, Pending())
        self._thread = workers.spawn("log", self._run)

    def put(self, entry: _Entry) -> None:
        """Queue an entry; waits while two are under way."""
        self._queue.put(entry)

    def flush(self) -> None:
        """Wait until all queued entries are durable."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Make all queued entries durable, and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self._staging.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    self._writer.sync()
                    item.set()
                elif not self._recorder.ended:
                    files = self._encode(item)
                    self._writer.append(item.step, files, sync_every=1)
            except Exception as error:  # noqa: BLE001 - ends the log; training goes on
                self._recorder.end(str(error))
                if isinstance(item, threading.Event):
                    item.set()
            del item
        try:
            self._writer.close()
        except PenstockError as error:
            self._recorder.end(str(error))

    def _encode(self, entry: _Entry) -> dict[str, bytes]:
        """Save an entry in memory; return its files."""
        steps = [stored_step(step, path) for path, step in entry.steps]
        description = describe_tree(
            {STEPS: steps},
            providers=self._registry.providers,
            allow_pickle=self._config.allow_pickle,
        )
        providers = {**entry.providers, **dict(description.providers_used)}
        both = replace(
            description,
            entries=(*entry.rest, *description.entries),
            deferrable=frozenset(),
            providers_used=tuple(sorted(providers.items())),
        )
        request = plan_state(
            both, config=self._config, table=ChainTable(self._config, self._registry),
            step=entry.step, generation=0, mode="blocking", share=False, derive=False,
        )  # fmt: skip
        backend = open_backend("memory://", registry=self._registry)
        try:
            job = SaveJob(
                request,
                manifest=ManifestWriter(request, {}, shipper=self._registry.shipper),
                destination=Destination(backend),
                staging=self._staging.get(request, skip=()),
                workers=self._workers,
                surroundings=SaveSurroundings(),
                log_failure=False,
            )
            job.begin_capture()
            job.wait_durable()
            job.handle.result()
            job.released.wait()
            names = [
                info.name for info in backend.list("") if not info.name.endswith("intent.json")
            ]
            return {name: backend.read_record(name, limit_bytes=1 << 62) for name in names}
        finally:
            backend.close()


def _shares_memory(step: Step, description: Description) -> bool:
    """Return whether an optimizer outside the state has changed something in it."""
    memories = (e.source.memory for e in description.entries if isinstance(e, StateObject))
    inside = {memory.storage for memory in memories if memory is not None}
    return any(
        p.untyped_storage().data_ptr() in inside
        for group in step.optimizer.param_groups
        for p in group["params"]
        if not hasattr(p, "_local_tensor")
    )

"""Records the log of a run: appends one entry per step of training, in the background.

Tested in `tests/integration/log/test_ends.py`.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.core.abc import ByteSource, Node, StateObject
from penstock.core.catalog.survey import places_of
from penstock.core.errors import CommitUnknownError, ConfigError, PenstockError
from penstock.core.foreign import said
from penstock.core.format.segment import FIRST, NO_SESSION, log_prefix
from penstock.core.log.encoding import STATE, Entry, EntryEncoder
from penstock.core.log.grads import NotLoggedError, local_of
from penstock.core.log.proof import RefutedError, begin_proof
from penstock.core.log.recut import cuts_of
from penstock.core.log.replayed import digest_of
from penstock.core.log.segments import SegmentWriter
from penstock.core.log.steps import (
    LoggedStep,
    StepWatch,
    has_only,
    options_of,
    parameters_of,
    storages_of,
    version_of,
)
from penstock.core.save.fence import address_of
from penstock.core.tree.containers import Scan
from penstock.core.tree.describe import describe_tree
from penstock.core.tree.known import Known
from penstock.core.tree.paths import show_path
from penstock.core.types import Kind, Role, valid_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch.optim import Optimizer

    from penstock.core.abc import Backend, PendingCopy
    from penstock.core.concurrency.workers import Workers
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.log.grads import Cut
    from penstock.core.log.host_logs import HostLogs
    from penstock.core.plugins.registry import Registry
    from penstock.core.reporting.reports import Outcome
    from penstock.core.tiers.room import TierRoom
    from penstock.core.tree.describe import Description
    from penstock.core.types import ObjectPath

log = logging.getLogger("penstock")

# The first entry has a digest, so that a wrong engine shows at the first replay. After it, digests
# may take this share of the time, but at least every 64th entry has one.
_DIGEST_EVERY, _DIGEST_SHARE = 64, 0.003
_DIGEST_FREE_S = 0.0005  # if digests take at most this long, every entry has one
_SAMPLED, _SAMPLE_BYTES = 64, 4096  # blocks compared of each parameter that no optimizer changes

_LOOK_AGAIN_S = 0.1
_SYNC_REMOTE = 8  # entries made durable together, if the store is not local


class CopiedSource(ByteSource):
    """A copy of an object's bytes from the time when the object was logged."""

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
        """Copy the bytes from `start` on into `out`."""
        out[:] = self._data[start : start + out.nbytes]
        return None


@dataclass(eq=False, slots=True)
class _Log:
    """The log after one checkpoint. The checkpoint may not be committed yet."""

    uid: str
    step: int
    writer: SegmentWriter
    committed: Outcome[Any] | None = None


class Recorder:
    """Logs the steps since the newest checkpoint. Only the training thread may use it.

    While the newest checkpoint is not committed, each entry also goes to the log of the checkpoint
    before it. So a crash loses no logged step, and a failed save does not end the log.
    """

    def __init__(
        self,
        backend: Backend,
        config: CheckpointerConfig,
        registry: Registry,
        workers: Workers,
        *,
        copies: HostLogs,
        room: TierRoom | None = None,
    ) -> None:
        """Prepare; nothing is watched before a save or a restore begins the log.

        See `RunLog` for `copies` and `room`.
        """
        self._copies = copies
        self._backend = backend
        self._room = room
        self._config = config
        self._registry = registry
        self._workers = workers
        self._watch = StepWatch(registry.replayer, begin_proof, self._cut_of, self._idle)
        self._logs: list[_Log] = []
        self._last = -1
        self._skipped = _DIGEST_EVERY  # entries without a digest
        self._digested_s = self._digest_s = 0.0  # time of the last digest, and its duration
        self._writing: _Writing | None = None
        self._known = Known()
        self._keys: frozenset[str] = frozenset()  # of the saved or restored state
        self._obstacle: Callable[[], str] | None = None  # see `begin_after_restore`
        self._cuts: dict[object, Cut] = {}
        self._busy = self._interrupted = False  # see `_alone`
        # For each parameter that no optimizer changes: the memory, version and sample that it had
        # when the log or the base stored it. The source keeps the memory alive, so that no other
        # tensor gets its address.
        self._stored: dict[ObjectPath, tuple[object, ByteSource]] = {}
        # Version, sample and storage of each such parameter when the log began, by address.
        self._at_base: dict[int, tuple[int, int, object]] = {}
        self._rounded = self._warned = ""  # why no log follows the last save; the warned reason
        self.place: tuple[int, int] = 0, 1
        """The rank and the number of ranks."""
        self._refuted = ""  # why no step of this process can be replayed
        self.ended = "no checkpoint was saved or restored yet"
        """The reason why steps are not logged; empty while they are logged."""

    def begin_after_save(
        self,
        uid: str,
        step: int,
        state: Mapping[str, Any],
        committed: Outcome[Any],
        *,
        rounded: str = "",
    ) -> None:
        """From now on, log the steps that follow a save.

        Args:
            uid: The uid of the save.
            step: The saved step.
            state: The state tree.
            committed: Resolves when the checkpoint is committed, and copied to other hosts if it
                must be; or when its save has failed.
            rounded: The state that the checkpoint holds only rounded, so that no log can follow;
                empty if it holds all state exactly.
        """
        with self._alone() as alone:
            if alone:
                self._begin_after_save(uid, step, state, committed, rounded)

    def _begin_after_save(
        self,
        uid: str,
        step: int,
        state: Mapping[str, Any],
        committed: Outcome[Any],
        rounded: str,
    ) -> None:
        self._settle()
        if rounded:
            self._drop(self._logs)
            self._watch.stop()
            self._rounded = f"{rounded} in checkpoints, so replayed steps would differ"
            self.ended = self._rounded
            return
        # An overwrite, or a save of the last replayed step, adds no step to the log before it.
        continues = self._watch.keeps and step > self._last
        if self._logs and continues and not self.ended and not _is_committed(committed):
            self._log(state, step)
        else:
            self._drop(self._logs)
        if self.ended:
            self._drop(self._logs)
        writer = self._writer(uid, uid[: len(NO_SESSION)], FIRST)  # all ranks have this uid
        self._begin(_Log(uid, step, writer, committed), state)

    def begin_after_restore(
        self,
        uid: str,
        step: int,
        state: Mapping[str, Any],
        *,
        session: str,
        previous: bytes = FIRST,
        obstacle: Callable[[], str] = str,
    ) -> None:
        """From now on, log the steps that follow a restored step.

        Args:
            uid: The uid of the checkpoint.
            step: The restored step.
            state: The state tree.
            session: See `EntryHeader`.
            previous: The digest of the last replayed entry; `FIRST` if none was replayed.
            obstacle: Called at the first call of `log`; returns why no step can be logged, or an
                empty string.
        """
        self._drop(self._logs)
        self._stored.clear()
        # A run that has a log will log again: keep gradients before its first call of `log`.
        self._watch.keeps = self._watch.keeps or previous != FIRST
        self._begin(_Log(uid, step, self._writer(uid, session, previous)), state)
        self._obstacle = obstacle

    def skipped(self, state: Mapping[str, Any], step: int) -> None:
        """Log a step whose save was skipped, if steps are logged."""
        if self._watch.keeps and not self.ended and step > self._last:
            self.log(state, step)

    def pause(self, reason: str) -> None:
        """Log nothing until the next save or restore, because the state is not a checkpoint's."""
        self._drop(self._logs)
        self._watch.pause(reason)
        self.ended = reason

    def log(self, state: Mapping[str, Any], step: int) -> bool:
        """See `Checkpointer.log`."""
        with self._alone() as alone:
            return alone and self._log(state, step)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yield whether the block may log or begin a log: False in a nested call.

        A call is nested if it comes from a signal handler that interrupted another call. Then the
        log ends after the interrupted call, since its entry and the handler's save may have the
        same step.
        """
        if self._busy:
            self._interrupted = True
            yield False
            return
        self._busy = True
        try:
            yield True
        finally:
            self._busy = False
            if self._interrupted:
                self._interrupted = False
                self.end("a signal handler has saved or logged during this call")

    def _log(self, state: Mapping[str, Any], step: int) -> bool:
        number = valid_step(step)
        self._watch.keeps = True
        if self._obstacle is not None:
            obstacle, self._obstacle = self._obstacle, None
            if why := obstacle():
                self.pause(why)
        self._settle()
        if self.ended:
            if self._rounded not in {"", self._warned}:
                self._warned = self._rounded
                log.warning("steps are not logged: %s", self._rounded)
            return False
        if number <= self._last:
            msg = f"step {number} is not after step {self._last}, which is saved or logged"
            raise ConfigError(msg)
        try:
            entry = self._entry(state, number)
            if self._writing is None:
                self._writing = _Writing(self, self._workers, self._config, self._registry)
            self._writing.flush()
            # The loss of this process, or of this host, costs no step before the previous one.
            self._copies.wait()
            self._last = number  # first: the log thread may end the log at once
            self._writing.put(entry, [log.writer for log in self._logs])
        except NotLoggedError as error:
            self.end(str(error))
            return False
        except BaseException as error:  # Ctrl-C, too: the next entry would follow a gap
            self.end(f"log failed: {said(error)}")
            raise
        return not self.ended

    def end(self, reason: str, *, refuted: bool = False) -> None:
        """End the log; training continues.

        Args:
            reason: Why it ends.
            refuted: Whether no later step of this process can be logged either. Otherwise the next
                save begins a new log.
        """
        if not self.ended:
            self.ended = reason
            self._watch.pause(reason)
            self._refuted = reason if refuted else ""
            log.warning(
                "the log of gradients ends after step %d: %s. %s",
                self._last,
                reason,
                "This process logs no more." if refuted else "The next save begins a new log.",
            )

    def replaced(self, step: int) -> None:
        """End the log if it continues the checkpoint of `step`, which is deleted or compacted."""
        if any(log.step == step for log in self._logs):
            self.end(f"the checkpoint of step {step} was deleted or compacted")
            self._drop(self._logs)

    def forget(self, uid: str) -> None:
        """Delete the log of the checkpoint `uid` after a rewind to that checkpoint."""
        self.pause("training was rewound: restore first")
        self._backend.delete([info.name for info in self._backend.list(log_prefix(uid))])

    def close(self) -> None:
        """Wait until all entries are durable."""
        self._drop(self._logs)
        if self._writing is not None:
            self._writing.close()
            self._writing = None
        self._watch.stop()
        self.ended = "the checkpointer is closed"

    def flush(self) -> None:
        """Wait until all entries are durable. The log continues, unless a store fails."""
        if self._writing is None:
            return
        self._writing.flush()
        for kept in self._logs:  # the log thread has nothing to do now
            try:
                kept.writer.sync()
            except PenstockError as error:
                kept.writer.end()
                self.end(str(error))

    def sync_every(self) -> int:
        """Return the number of entries that are made durable together."""
        local = places_of(self._backend)[0].capabilities.local
        return self._config.log_sync or (1 if local else _SYNC_REMOTE)

    def make_room(self, entry_bytes: int) -> None:
        """On rank 0, make room for the entries of all ranks, if there are tiers."""
        rank, world_size = self.place
        if self._room is not None and rank == 0:
            self._room.make_room_for_log(entry_bytes * world_size)

    def _idle(self) -> None:
        if self._writing is not None:
            self._writing.flush()

    def _cut_of(self, tensor: Any) -> Cut:
        """Return the whole shape of a DTensor and this rank's regions, cached for later entries."""
        key = tensor.device_mesh, tensor.placements, tensor.shape
        if key not in self._cuts:
            (self._cuts[key],) = cuts_of([tensor], self._registry.providers)
        return self._cuts[key]

    def _writer(self, uid: str, session: str, previous: bytes) -> SegmentWriter:
        rank, world_size = self.place
        fastest = places_of(self._backend)[0]
        return SegmentWriter(
            fastest, uid, rank, world_size, session=session, previous=previous,
            number=self._copies.first_number, synced=self._copies.offer,
        )  # fmt: skip

    def _begin(self, begun: _Log, state: Mapping[str, Any]) -> None:
        self._keys, self._obstacle = frozenset(state), None
        self._logs = [*self._logs, begun]
        self._last = begun.step
        self._skipped = _DIGEST_EVERY
        self.ended, self._rounded = self._refuted, ""
        if "torch" in sys.modules:
            optimizers = optimizers_of(state, self._registry).values()
            self._watch.start(optimizers)
            claimed = self._watch.claimed()
            modules = values_of(state, self._registry, "module").values()
            frozen = [p for module in modules for p in module.parameters()]
            # Holding the memory keeps other tensors from its address. A run that never logs does
            # not need that.
            self._at_base = {
                address: (
                    version_of(p),
                    _sample(_view_of(p)),
                    p.untyped_storage() if self._watch.keeps else None,
                )
                for p in map(local_of, frozen)
                if (address := address_of(p)) and address not in claimed
            }

    def _settle(self) -> None:
        """Keep the newest checkpoint's log, and the logs before it until it is committed."""
        for number in reversed(range(len(self._logs))):
            committed = self._logs[number].committed
            if committed is None or _is_committed(committed):
                if number:
                    self._drop(self._logs[:number])
                return
            # If the outcome is unknown, a restore may find either checkpoint: both logs stay.
            if committed.done() and not isinstance(committed.peek_error(), CommitUnknownError):
                self._drop([self._logs[number]])
        if not self._logs and self._watch.keeps:
            self.end("the save that it followed has failed")

    def _drop(self, logs: Sequence[_Log]) -> None:
        """Close these logs: write no more entries to them."""
        self.flush()
        for old in logs:
            try:
                old.writer.close()
            except PenstockError as error:
                log.warning("the end of the log of gradients may be lost: %s", str(error))
        self._logs = [kept for kept in self._logs if kept not in logs]

    def _entry(self, state: Mapping[str, Any], number: int) -> Entry:
        steps = self._watch.steps
        strangers = [
            optimizer for known in self._watch.strangers.values() if (optimizer := known())
        ]
        try:
            self._watch.check()
        finally:
            self._watch.clear()
        self._digest(steps)
        found = _paths_of(state, self._registry, "optimizer")
        optimizers = {show_path(path): optimizer for path, optimizer in found.items()}
        self._check_same_state(state, optimizers)
        known = Known(self._known)
        description = describe_tree(
            {STATE: _without_claimed(state, optimizers)},
            providers=self._registry.providers,
            allow_pickle=self._config.allow_pickle,
            known=known,
        )
        self._known = known
        paths = {id(optimizer): path for path, optimizer in optimizers.items()}
        strangers += [s.optimizer for s in steps if id(s.optimizer) not in paths]
        named = [(paths[id(s.optimizer)], s) for s in steps if id(s.optimizer) in paths]
        options = {path: options_of(optimizer) for path, optimizer in optimizers.items()}
        claimed = self._watch.claimed()
        memories = (e.source.memory for e in description.entries if isinstance(e, StateObject))
        inside = claimed | {memory.storage for memory in memories if memory is not None}
        for optimizer in strangers:
            if not inside.isdisjoint(storages_of([optimizer])):
                msg = (
                    f"{type(optimizer).__name__} changed memory of the state, but is not in the "
                    "state"
                )
                raise NotLoggedError(msg)
        rest = self._rest(description, claimed, {(STATE, *path) for path in found})
        self._at_base = {}
        return Entry(number, rest, dict(description.providers_used), named, options)

    def _check_same_state(
        self, state: Mapping[str, Any], optimizers: Mapping[str, Optimizer]
    ) -> None:
        """Check that the state has the same keys and optimizers as the checkpoint.

        Raises:
            NotLoggedError: Something is missing or was replaced, and would keep the checkpoint's
                values in a replay.
        """
        if lacking := sorted(self._keys.difference(state)):
            msg = f"the state of this call lacks {', '.join(lacking)}, which the checkpoint has"
            raise NotLoggedError(msg)
        for path, optimizer in optimizers.items():
            if not self._watch.knows(optimizer):
                msg = f"{path} is not the optimizer that was saved or restored"
                raise NotLoggedError(msg)

    def _digest(self, steps: Sequence[LoggedStep]) -> None:
        """Take digests of the steps, unless they would take too large a share of training's time.

        A digest finds changes that leave no mark, such as those through `Tensor.data`.
        """
        now = time.monotonic()
        self._skipped += 1
        pause_s = self._digest_s / _DIGEST_SHARE if self._digest_s > _DIGEST_FREE_S else 0.0
        if now < self._digested_s + pause_s and self._skipped < _DIGEST_EVERY:
            return
        for step in steps:
            step.digest = digest_of(step.optimizer)
        self._skipped, self._digested_s, self._digest_s = 0, now, time.monotonic() - now

    def _rest(
        self, description: Description, claimed: Collection[int], roots: Collection[ObjectPath]
    ) -> list[StateObject | Node]:
        """Return the state that no optimizer changes, with copies of its bytes.

        Leaves out all state below `roots`, the paths of the optimizers: restoring a part of an
        optimizer would empty the rest of it.
        """
        lengths = {len(root) for root in roots}
        rest: list[StateObject | Node] = []
        left: list[ObjectPath] = []
        for entry in description.entries:
            if any(entry.path[:length] in roots for length in lengths):
                continue
            if not isinstance(entry, StateObject) or entry.kind is Kind.VALUE:
                rest.append(entry)
            elif entry.same_as is not None or (entry.spec.nbytes and not entry.source.nbytes):
                # This rank has no part. Ranks with parts end the log if no optimizer changes them.
                left.append(entry.path)
            else:
                memory = entry.source.memory
                if memory is not None and memory.storage in claimed:
                    if self._watch.covers(memory, _itemsize(entry)):
                        left.append(entry.path)
                        continue
                    msg = (
                        f"{show_path(entry.path)} shares an allocation with tensors of an "
                        "optimizer, but is not entirely within one of them"
                    )
                    raise NotLoggedError(msg)
                # Not buffers: operations such as batch norm change a buffer but not its version.
                if entry.role is Role.PARAMETER and self._is_stored(entry):
                    left.append(entry.path)
                    continue
                if entry.source.nbytes != entry.spec.nbytes:
                    msg = f"{show_path(entry.path)} is sharded, and no optimizer changes it"
                    raise NotLoggedError(msg)
                rest.append(entry._replace(source=CopiedSource(entry.source)))
        return _whole_or_absent(rest, left)

    def _is_stored(self, parameter: StateObject) -> bool:
        """Return whether the base or an earlier entry has the parameter's current value.

        Remembers this value as stored, since the caller stores it if the result is False.
        """
        memory, version = parameter.source.memory, parameter.source.version()
        if memory is None or version is None:
            return False
        sample = _sample(parameter.source.view())
        if parameter.path in self._stored:
            stored = self._stored[parameter.path][0] == (memory, version, sample)
        else:
            stored = self._at_base.get(memory.storage, (None, 0))[:2] == (version, sample)
        self._stored[parameter.path] = (memory, version, sample), parameter.source
        return stored


def _sample(data: memoryview | None) -> int:
    """Return a hash of a parameter, or of blocks of a large one.

    A change through `Tensor.data` or numpy leaves no other mark.
    """
    if data is None:
        return 0
    digest, gap = xxhash.xxh3_64(), data.nbytes // _SAMPLED
    if gap <= _SAMPLE_BYTES:
        digest.update(data)
    else:
        for number in range(_SAMPLED):
            digest.update(data[number * gap :][:_SAMPLE_BYTES])
    return digest.intdigest()


def _itemsize(entry: StateObject) -> int:
    return entry.spec.nbytes // max(1, math.prod(entry.spec.shape))


def _view_of(tensor: torch.Tensor) -> memoryview | None:
    """Return the bytes of a tensor in host memory; None if they are not in one piece there."""
    import torch  # noqa: PLC0415 - torch is loaded only to log

    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _is_committed(committed: Outcome[Any]) -> bool:
    return committed.done() and committed.peek_error() is None  # peek: the user still gets it


def optimizers_of(state: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    """Return the torch optimizers in a state tree, by their shown path."""
    return values_of(state, registry, "optimizer")


def values_of(state: Mapping[str, Any], registry: Registry, provider: str) -> dict[str, Any]:
    """Return the values in a state tree that `provider` describes, by their shown path."""
    found = _paths_of(state, registry, provider)
    return {show_path(path): value for path, value in found.items()}


def _paths_of(state: Mapping[str, Any], registry: Registry, provider: str) -> dict[ObjectPath, Any]:
    scan = Scan(registry.providers)
    scan.is_container(state, ())
    return {f.path: f.value for f in scan.found if f.provider.name == provider}


def _without_claimed(state: Mapping[str, Any], optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without its optimizers, and without modules that they change entirely.

    Describing these would take most of the time, and an entry contains nothing of them.
    """
    own = {*map(id, optimizers.values())}
    stepped = {id(p) for optimizer in optimizers.values() for p in parameters_of(optimizer)}
    return {
        key: value
        for key, value in state.items()
        if id(value) not in own and not has_only(value, stepped)
    }


def _whole_or_absent(
    rest: list[StateObject | Node], left: Iterable[ObjectPath]
) -> list[StateObject | Node]:
    """Return `rest` without values whose objects are all in `left`.

    Only for values that are restored whole or not at all; their nodes count their objects.

    Raises:
        NotLoggedError: Only a part of such a value is in `left`.
    """
    wholes = {e.path for e in rest if isinstance(e, Node) and "objects" in e.meta}
    lengths = {len(path) for path in wholes}
    absent = {path[:n]: path for path in left for n in lengths if path[:n] in wholes}
    if not absent:
        return rest
    for entry in rest:
        for n in lengths if isinstance(entry, StateObject) else ():
            if entry.path[:n] in absent:
                msg = (
                    f"{show_path(entry.path[:n])} is restored whole or not at all, but its part "
                    f"{show_path(absent[entry.path[:n]])} is elsewhere in the state or is changed "
                    "by an optimizer: put models and optimizers into the state under their own "
                    "keys, not inside such an object"
                )
                raise NotLoggedError(msg)
    return [e for e in rest if not any(e.path[:n] in absent for n in lengths)]


class _Writing:
    """The thread that encodes and appends entries."""

    def __init__(
        self, recorder: Recorder, workers: Workers, config: CheckpointerConfig, registry: Registry
    ) -> None:
        self._recorder = recorder
        # Simple queues: a signal handler that flushes may interrupt any of their calls.
        self._queue: SimpleQueue[tuple[Entry, Sequence[SegmentWriter]] | None] = SimpleQueue()
        self._answers: SimpleQueue[None] = SimpleQueue()
        self._sent = self._written = 0
        self._make_encoder = partial(EntryEncoder, workers, config, registry)
        self._encoder: EntryEncoder | None = None
        self._thread = workers.spawn("log", self._run)

    def put(self, entry: Entry, writers: Sequence[SegmentWriter]) -> None:
        """Append an entry in the background; call `flush` first."""
        self._sent += 1
        self._queue.put((entry, writers))

    def flush(self) -> None:
        """Wait until all entries are written."""
        while self._written < self._sent:
            # A signal handler that interrupts this may take the answer.
            with suppress(Empty):
                self._answers.get(timeout=_LOOK_AGAIN_S)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._append(*work)
            except BaseException as error:  # noqa: BLE001 - recorded: training continues
                for writer in work[1]:
                    writer.end()  # a later entry would follow a gap
                self._encoder = None  # a backend may still read its memory
                self._recorder.end(str(error), refuted=isinstance(error, RefutedError))
            del work
            self._written += 1
            if self._answers.empty():
                self._answers.put(None)

    def _append(self, entry: Entry, writers: Sequence[SegmentWriter]) -> None:
        if self._encoder is None:  # made on this thread, because importing codecs takes long
            self._encoder = self._make_encoder()
        files = self._encoder.encode(entry)
        size = sum(len(buffer) for buffers in files.values() for buffer in buffers)
        self._recorder.make_room(size * len(writers))
        for writer in writers:
            writer.append(entry.step, files, sync_every=self._recorder.sync_every())

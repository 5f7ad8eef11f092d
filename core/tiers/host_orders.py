"""Moves files of a checkpoint on each host, as rank 0 orders, and replaces damaged ones.

A pull copies files of other hosts to the host's root. A push copies files to the next tier.

Tested in `tests/integration/ranks/test_host_copies.py`.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from penstock.core.abc import DelegatingBackend, copies_of, host_roots
from penstock.core.catalog.survey import read_commit, sizes_below, sizes_of
from penstock.core.concurrency.watchdog import NEVER, Watchdog, call_all_with_deadline
from penstock.core.copy.copy_source import CopySource
from penstock.core.copy.lease import SILENT_S, Lease
from penstock.core.copy.mover import BlobMover, BlobTransfer, Callbacks
from penstock.core.errors import (
    BlobNotFoundError,
    DamagedError,
    PenstockError,
    SaveAbortedError,
    StorageError,
)
from penstock.core.foreign import said
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import commit_name
from penstock.core.suggest import listed
from penstock.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, BlobWriter, HostRoot, HostRoots, Tier
    from penstock.core.concurrency.timing import Timing
    from penstock.core.concurrency.workers import Workers
    from penstock.core.copy.checkpoint_copy import BlobHelper, HelperCalls
    from penstock.core.copy.mover import CheckedBlob
    from penstock.core.format.records import CommitRecord
    from penstock.core.types import ByteRange

log = logging.getLogger("penstock")

_LANDING = "/pulled/"
"""The folder of blobs that are being copied, instead of `/blobs/`."""

_BUFFER_BYTES = 24 << 20  # of a pull and of a push
_FIRST_LOOK_S, _MOST_LOOK_S, _GROWTH = 0.05, 1.0, 1.5
_SILENT_S = SILENT_S / 4  # in which rank 0 must ask again; it ends before rank 0's lease can end


@dataclass(frozen=True, slots=True)
class Order:
    """Files of one checkpoint to copy.

    Attributes:
        record: The name of the commit record.
        files: The size of each file in bytes, by name; a push without files ends the last one.
        token: The token of the lease under which files are pushed.
        bytes_per_s: Maximum bytes to push per second; None sets no limit.
    """

    record: str
    files: Mapping[str, int]
    token: str = ""
    bytes_per_s: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for orders that are the same: all pulls of a checkpoint are."""
        return self.record, self.token, *(sorted(self.files) if self.token else ())

    def encoded(self) -> bytes:
        """Return the order as bytes, which `HostOrders.execute` decodes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, body: bytes) -> Self:
        """Decode an order.

        Raises:
            StorageError: It is invalid.
        """
        try:
            found: Any = json.loads(body)
            files = {str(name): int(size) for name, size in found["files"].items()}
            rate = found["bytes_per_s"]
            limit = None if rate is None else float(rate)
            return cls(str(found["record"]), files, str(found["token"]), limit)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"the order to copy files cannot be read: {error}"
            raise StorageError(msg) from error


class HostOrders:
    """Executes the orders of rank 0 for the roots of this host, and gives them on rank 0."""

    def __init__(self, store: Backend, workers: Workers) -> None:
        """Prepare, without I/O."""
        self._store = store
        self._places = host_roots(store)
        self._workers = workers
        self._tasks: dict[tuple[int, str], _HostTask] = {}
        for number, place in self._places.items():
            self._tasks[number, "pull"] = _HostTask(workers, partial(_pull, place))
            if number + 1 < len(store.tiers):
                push = partial(_push, place, store.tiers[number + 1])
                self._tasks[number, "push"] = _HostTask(workers, push)
            repair = partial(_repair, store, place)
            self._tasks[number, "repair"] = _HostTask(workers, repair, silent_s=None)

    def execute(self, number: int, kind: str, body: bytes) -> bytes:
        """Begin to execute an order in tier `number`; return the progress as bytes.

        Does nothing if it is being executed. If another order is, cancels that, and the next call
        begins.

        Raises:
            StorageError: The order is invalid, or the last one of its kind has failed.
        """
        task = self._tasks.get((number, kind))
        if task is None:
            msg = f"this host has no {kind!r} in tier {number}: give all ranks one configuration"
            raise StorageError(msg)
        return task.execute(Order.decoded(body))

    def helper(self, number: int, bytes_per_s: float | None, stuck_s: float) -> BlobHelper | None:
        """Return what lets all hosts copy from tier `number`; None if that is one place.

        Args:
            number: The number of the tier.
            bytes_per_s: Maximum bytes per second of all hosts; None sets no limit.
            stuck_s: The longest wait for a host that makes no progress.
        """
        if (place := self._places.get(number)) is None:
            return None
        order = partial(self.execute, number)
        return HostPushes(place, order, bytes_per_s, stuck_s, self._workers.timing).copy

    def repair(self, record: CommitRecord, names: Collection[str]) -> None:
        """Begin to replace those of these files that are damaged on this host."""
        order = Order(commit_name(record.step, record.generation), dict.fromkeys(names, 0))
        for number in self._places:
            with suppress(StorageError):  # the last repair has failed, so this one does not begin
                self._tasks[number, "repair"].execute(order)

    def settle(self) -> None:
        """Wait until `repair` has ended, or makes no progress."""
        for number in self._places:
            self._tasks[number, "repair"].join()

    def damaged(
        self, record: CommitRecord, names: Collection[str] | None = None, *, deep: bool = True
    ) -> dict[str, str]:
        """Verify files of a checkpoint on this host; return what is wrong, by name.

        Args:
            record: The commit record.
            names: The files; None: all that this host has.
            deep: Whether to read blobs; if not, only their sizes are compared.

        Raises:
            DamagedError: A part that describes them has no whole copy.
            CheckpointGoneError: The checkpoint was deleted meanwhile.
            StorageError: The root of this host does not answer.
        """
        found: dict[str, str] = {}
        for number, place in self._places.items():
            task = self._tasks[number, "repair"]
            found |= _damaged(self._store, place, record, task, names, deep=deep)
        return found

    def close(self) -> None:
        """Cancel all copies, and wait for their ends."""
        for task in self._tasks.values():
            task.close()


class _HostTask:
    """Executes one order at a time, on a thread."""

    def __init__(
        self,
        workers: Workers,
        copy: Callable[[Order, _HostTask], None],
        *,
        silent_s: float | None = _SILENT_S,
    ) -> None:
        self.workers = workers
        self._copy = copy
        self._asked = Watchdog(silent_s, workers.timing.clock)
        self._lock = threading.Lock()  # guards everything below
        self._order: Order | None = None
        self._mover: BlobMover | None = None
        self._thread: threading.Thread | None = None
        self._pushed: tuple[str, ...] = ()  # the key of the last push
        self._sealed: list[str] = []
        self._moved_bytes = 0
        self._failure: tuple[tuple[str, ...], str] = (), ""  # the order's key, and the error
        self._closed = False

    def execute(self, order: Order) -> bytes:
        key = order.key
        with self._lock:
            self._asked.moved()
            (failed, error), self._failure = self._failure, ((), "")
            if self._closed:
                failed, error = key, "the run was closed on this host"
            if failed == key:
                raise StorageError(error)
            if self._order is None and order.files and key != self._pushed:
                self._order = order
                # Pushed files exist under their names, so they are not pushed twice.
                self._pushed = key if order.token else ()
                self._sealed, self._moved_bytes = [], 0
                self._thread = self.workers.spawn("host-copy", self._run)
            is_other = self._order is not None and self._order.key != key
            if is_other and self._mover is not None:
                self._mover.cancel()
            progress = _Progress() if is_other else _Progress(self._moved_bytes, (*self._sealed,))
        if not order.files and self._thread is not None:
            self._thread.join(self.workers.timing.interrupt_s)
        return progress.encoded()

    def move(
        self,
        transfers: Iterable[BlobTransfer],
        target: Backend,
        wrong: Callable[[BlobTransfer, list[ByteRange] | StorageError], None],
        *,
        bytes_per_s: float | None = None,
        sealed: Callable[[str], None] = lambda _: None,
        owned: Callable[[], bool] = lambda: True,
    ) -> None:
        """Move blobs, and compare their checksums; return when they are durable.

        Calls `wrong` with damaged ranges of a blob, or with the error for a missing blob.

        Raises:
            SaveAbortedError: The order was cancelled, or rank 0 no longer asks for it.
            StorageError: A store failed.
        """

        def moved(size_bytes: int) -> None:
            self._moved_bytes += size_bytes

        def done(name: str) -> None:
            sealed(name)
            with self._lock:
                self._sealed.append(name)

        def alive() -> None:
            if self._asked.is_over():
                msg = "rank 0 no longer asks for the copy"
                raise SaveAbortedError(msg)

        units = target.capabilities.offset_alignment, target.capabilities.memory_alignment
        mover = BlobMover(
            workers=self.workers,
            buffer_bytes=_BUFFER_BYTES,
            unit_bytes=max(PAGE_BYTES, *units),
            bytes_per_s=bytes_per_s,
            calls=Callbacks(
                moved=moved, sealed=done, damaged=wrong, missing=wrong, alive=alive, owned=owned
            ),
        )
        with self._lock:
            if self._closed:
                msg = "the run was closed on this host"
                raise SaveAbortedError(msg)
            self._mover = mover
        mover.run(transfers)

    def join(self) -> None:
        timing, moved = self.workers.timing, -1
        watchdog = Watchdog(timing.stuck_s, timing.clock)
        while self._thread is not None and self._thread.is_alive() and not watchdog.is_over():
            if moved != self._moved_bytes:
                moved = self._moved_bytes
                watchdog.moved()
            self._thread.join(timing.poll_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._mover is not None:
                self._mover.cancel()
        if self._thread is not None:
            self._thread.join(self.workers.timing.interrupt_s)

    def _run(self) -> None:
        order = self._order
        assert order is not None
        failure = ""
        try:
            self._copy(order, self)
        except SaveAbortedError as error:
            # A pull can begin again; files of a push that has ended exist in part.
            failure = str(error) if order.token else ""
        except Exception as error:  # noqa: BLE001 - a task's boundary: the next call reports it
            failure = said(error)
        with self._lock:
            self._order = self._mover = None
            self._failure = order.key if failure else (), failure


def _pull(place: HostRoots, order: Order, task: _HostTask) -> None:
    """Copy files of other hosts to the root of this host."""
    own = place.own
    record = read_commit(place, order.record)
    sizes = sizes_below(own, (record.uid, *record.references))
    own.delete([name for name in sizes if _LANDING in name])  # left by a process that died
    lacking = {name for name, size in order.files.items() if sizes.get(name) != size}
    _bring(place, [place, *_others(place, place)], CopySource(place, record), lacking, task)


def _repair(store: Backend, place: HostRoots, order: Order, task: _HostTask) -> None:
    """Replace files of this host that are damaged; log the outcome."""
    try:
        record = read_commit(store, order.record)
        damaged = _damaged(store, place, record, task, order.files)
        if not damaged:
            return
        _bring(place, _others(store, place), CopySource(store, record), damaged, task)
    except PenstockError as error:
        log.warning("damaged files on this host are not replaced: %s", str(error))
    else:
        names = listed([*damaged])
        log.warning("step %d: %s on this host was damaged, and is replaced", record.step, names)


def _damaged(
    store: Backend,
    place: HostRoots,
    record: CommitRecord,
    task: _HostTask,
    names: Collection[str] | None = None,
    *,
    deep: bool = True,
) -> dict[str, str]:
    """See `HostOrders.damaged`."""
    own, source = place.own, CopySource(store, record)
    sizes = sizes_of(own, record)
    held = sizes.keys() if names is None else sizes.keys() & {*names}
    found: dict[str, str] = {}

    def wrong(transfer: BlobTransfer, why: list[ByteRange] | StorageError) -> None:
        name = transfer.blob.name
        if isinstance(why, list):
            msg = f"bytes {why[0].start}-{why[0].stop} of {name} do not match their checksum"
        else:
            msg = str(why)
        found.setdefault(name, msg)

    blobs = source.read(held)
    if deep:
        task.move((BlobTransfer(blob, own, None) for blob in blobs), own, wrong)
    else:
        found |= {
            blob.name: f"{blob.name} has {sizes[blob.name]} bytes, but {blob.length} were written"
            for blob in blobs
            if sizes[blob.name] != blob.length
        }
    for name, data in source.records(held):
        with suppress(BlobNotFoundError):
            if sizes[name] != len(data) or own.read_record(name, limit_bytes=len(data)) != data:
                found[name] = f"{name} does not match its digest"
    name = commit_name(record.step, record.generation)
    if names is None or name in names:
        try:
            read_commit(own, name)
        except DamagedError as error:
            found[name] = str(error)
        except BlobNotFoundError:  # the next job publishes it here
            pass
    return found


def _others(store: Backend, place: HostRoots) -> list[Backend]:
    """Return the places that may have a copy of this host's files, the nearest first."""
    return [tier.backend for tier in copies_of(store) if tier.backend is not place.own]


def _bring(
    place: HostRoots,
    places: Iterable[Backend],
    source: CopySource,
    names: Collection[str],
    task: _HostTask,
) -> None:
    """Copy files to this host, each from the first of these places with a whole copy.

    Raises:
        DamagedError: No copy of a file is whole.
        CheckpointGoneError: The checkpoint was deleted meanwhile.
        StorageError: A store failed.
    """
    own, landing = place.own, _Landing(place.own)
    left = {blob.name: blob for blob in source.read(names)}
    failures: dict[str, list[ByteRange] | StorageError] = {}

    def wrong(transfer: BlobTransfer, why: list[ByteRange] | StorageError) -> None:
        failures[transfer.blob.name] = why

    def sealed(name: str) -> None:
        if name not in failures:
            own.rename(landing.landing(name), name)
            del left[name]

    for there in places:
        if blobs := [*left.values()]:
            failures.clear()
            transfers = (BlobTransfer(blob, there, landing) for blob in blobs)
            task.move(transfers, own, wrong, bytes_per_s=place.copy_bytes_per_s, sealed=sealed)
            own.delete([landing.landing(blob.name) for blob in blobs])  # removes the empty folder
    for name, data in source.records(names):
        own.publish(name, data)
    if (name := commit_name(source.record.step, source.record.generation)) in names:
        own.publish(name, encode_commit(source.record))
    for name in left:
        none = BlobNotFoundError(f"no other place has a copy of {name}")
        raise source.wrong(name, failures.get(name, none))


def _push(place: HostRoots, tier: Tier, order: Order, task: _HostTask) -> None:
    """Copy blobs from the roots of hosts to the next tier, under the lease of rank 0's copy."""
    record = read_commit(place, order.record)
    source, target = CopySource(place, record), tier.backend

    def owned() -> bool:
        return Lease(target, record.uid, task.workers.timing).is_of(order.token)

    def wrong(transfer: BlobTransfer, why: list[ByteRange] | StorageError) -> None:
        raise source.wrong(transfer.blob.name, why)

    def transfers() -> Iterator[BlobTransfer]:
        for blob in source.read(order.files):
            # Before each blob: where `create` replaces, it would empty a blob of the next copy.
            if not owned():
                msg = (
                    f"{target.url} is not the place that rank 0 copies to, or another copy has "
                    "taken over: is it mounted?"
                )
                raise StorageError(msg)
            yield BlobTransfer(blob, place, target)

    task.move(transfers(), target, wrong, bytes_per_s=order.bytes_per_s, owned=owned)


class HostPushes:
    """Lets each host copy its blobs to the next tier, for a copy of rank 0."""

    def __init__(
        self,
        place: HostRoots,
        order: Callable[[str, bytes], bytes],
        bytes_per_s: float | None,
        stuck_s: float,
        timing: Timing,
    ) -> None:
        self._place = place
        self._order = order  # for the root of this host
        self._bytes_per_s = bytes_per_s
        self._stuck_s = stuck_s
        self._timing = timing

    def copy(
        self, record: CommitRecord, blobs: Sequence[CheckedBlob], token: str, calls: HelperCalls
    ) -> set[str]:
        """See `BlobHelper`. If a host fails, others that have its blobs push them."""
        done: set[str] = set()
        failed: set[HostRoot] = set()
        while left := [blob for blob in blobs if blob.name not in done]:
            shares = self._shares(record, left, token, without=failed)
            if not shares:
                break
            self._push(record.step, shares, calls)
            done.update(*(share.done for share in shares))
            failed.update(share.root for share in shares if share.left)
        return done

    def _push(self, step: int, shares: Sequence[_Share], calls: HelperCalls) -> None:
        """Let hosts push their shares to the end; a share with blobs left has failed."""
        pause_s = _FIRST_LOOK_S
        try:
            while shares := [share for share in shares if self._look(step, share, calls)]:
                calls.pause(pause_s)
                pause_s = min(pause_s * _GROWTH, _MOST_LOOK_S)
        finally:
            for share in shares:
                share.end()

    def _look(self, step: int, share: _Share, calls: HelperCalls) -> bool:
        """Look at a share once; return whether the host is still pushing it."""
        before = share.moved_bytes
        try:
            new = share.look()
        except StorageError as error:
            host, why = share.root.host, str(error)
            msg = "step %d: host %s cannot copy its files to the next tier, so others do: %s"
            log.warning(msg, step, host, why)
            calls.discard(share.left)
            return False
        for name in new:
            calls.sealed(name)
        calls.moved(share.moved_bytes - before)
        return bool(share.left)

    def _shares(
        self,
        record: CommitRecord,
        blobs: Sequence[CheckedBlob],
        token: str,
        *,
        without: Collection[HostRoot],
    ) -> list[_Share]:
        """Divide blobs among the hosts that have them; return nothing if there is one host."""
        several = self._place.roots if len(self._place.roots) > 1 else ()
        roots = [root for root in several if root not in without]
        looks = [partial(sizes_of, root.backend, record) for root in roots]
        listed = call_all_with_deadline("hosts", looks, NEVER, TimeoutError)
        held: dict[HostRoot, dict[str, int]] = {}
        for root, sizes in zip(roots, listed, strict=True):
            if not isinstance(sizes, BaseException):
                held[root] = sizes
            elif not isinstance(sizes, StorageError):  # else rank 0 reads what it can
                raise sizes
        files: dict[HostRoot, dict[str, int]] = defaultdict(dict)
        for blob in sorted(blobs, key=lambda blob: -blob.length):
            if holders := [root for root in held if held[root].get(blob.name) == blob.length]:
                least = min(holders, key=lambda root: sum(files[root].values()))
                files[least][blob.name] = blob.length
        used = [root for root in files if files[root]]
        rate = None if self._bytes_per_s is None else self._bytes_per_s / max(len(used), 1)
        name = commit_name(record.step, record.generation)
        return [
            _Share(
                root,
                root.ask or self._order,
                Order(name, files[root], token, rate),
                Watchdog(self._stuck_s, self._timing.clock),
            )
            for root in used
        ]


@dataclass(eq=False, slots=True)
class _Share:
    """The blobs that one host pushes, and its progress."""

    root: HostRoot
    ask: Callable[[str, bytes], bytes]
    order: Order
    watchdog: Watchdog
    moved_bytes: int = 0
    done: set[str] = field(default_factory=set)

    @property
    def left(self) -> set[str]:
        return self.order.files.keys() - self.done

    def look(self) -> set[str]:
        """Ask for progress; return the names of blobs that are durable since the last look.

        Raises:
            StorageError: The host has failed, does not answer, or makes no progress.
        """
        progress = _Progress.decoded(self.ask("push", self.order.encoded()))
        new = self.left & {*progress.sealed}
        self.done |= new
        if progress.moved_bytes > self.moved_bytes or new:
            self.moved_bytes = max(self.moved_bytes, progress.moved_bytes)
            self.watchdog.moved()
        elif self.watchdog.is_over():
            self.end()
            msg = f"it made no progress for {self.watchdog.limit_s:g} s"
            raise StorageError(msg)
        return new

    def end(self) -> None:
        """End the push; a host that does not answer ends it by itself."""
        with suppress(StorageError):
            self.ask("push", Order(self.order.record, {}).encoded())


@dataclass(frozen=True, slots=True)
class _Progress:
    """The progress of an order: the bytes moved, and the names of the durable blobs."""

    moved_bytes: int = 0
    sealed: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        return json.dumps([self.moved_bytes, self.sealed]).encode()

    @classmethod
    def decoded(cls, body: bytes) -> Self:
        try:
            found: Any = json.loads(body)
            return cls(int(found[0]), tuple(str(name) for name in found[1]))
        except (ValueError, TypeError, IndexError, KeyError, RecursionError) as error:
            msg = f"the answer to an order cannot be read: {error}"
            raise StorageError(msg) from error


class _Landing(DelegatingBackend):
    """Creates blobs under names that no reader looks for, until they are whole.

    Each copy has its own names: a process that was stopped may continue, and rename its file, while
    the next job copies the same blob.
    """

    def __init__(self, own: Backend, /) -> None:
        super().__init__(own)
        self._token = secrets.token_hex(8)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        return super().create(self.landing(name), size_hint=size_hint)

    def landing(self, name: str) -> str:
        folder, leaf = name.rsplit("/", 1)
        return f"{folder.rsplit('/', 1)[0]}{_LANDING}{leaf}-{self._token}"

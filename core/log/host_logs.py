"""Copies the log of each rank to other hosts, so that it survives the loss of its host.

Each rank tells the hosts that hold its copies how far its segments are durable. These pull the new
entries, and compare every checksum. No call waits for another host.

Tested in `tests/integration/log/test_host_logs.py`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.core.abc import host_roots
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.copy.mover import Throttle
from penstock.core.errors import BlobNotFoundError, DamagedError, PenstockError, StorageError
from penstock.core.foreign import said
from penstock.core.format.segment import segment_number, uid_of_segment
from penstock.core.log.segments import SegmentWriter, entries_of
from penstock.core.replicas.placement import group_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, HostRoot, HostRoots
    from penstock.core.concurrency.workers import Workers
    from penstock.core.log.segments import StoredEntry

log = logging.getLogger("penstock")

_LANDING = "/pulled-log/"
"""The folder of segments that replace an older copy, instead of `/log/`."""

_LOOK_S = 0.05
_BASES = 3  # at once: a replicated checkpoint, the next one, and the one that is being committed
_TAILS = 6  # open copies of one rank's segments


class HostLogs:
    """Offers this rank's log to other hosts, and copies theirs."""

    def __init__(self, store: Backend, workers: Workers) -> None:
        """Prepare, without I/O."""
        place = host_roots(store).get(0)
        self._place = place if place is not None and place.copies else None
        self._workers = workers
        self._changed = threading.Condition()  # guards everything below
        self._receivers: Sequence[HostRoot] = ()
        self._ends: dict[str, int] = {}  # of this rank's segments
        self._offered = True  # whether other hosts know all of them
        self._wanted: dict[str, tuple[int, int]] = {}  # server and end of other ranks' segments
        self._tails: dict[str, _Tail] = {}  # used by one thread
        self._threads: dict[str, threading.Thread] = {}
        self._busy: set[str] = set()
        self._warned: set[str] = set()
        self._closed = False

    @property
    def are_made(self) -> bool:
        """Whether this run copies its files to other hosts."""
        return self._place is not None

    @property
    def first_number(self) -> int:
        """The lowest number of a new segment: hosts that are away may have all lower ones."""
        return 0 if self._place is None else int(time.time())

    def offer(self, ends: Mapping[str, int]) -> None:
        """Tell other hosts how many bytes of this rank's segments are durable, in the background.

        Args:
            ends: The bytes by name of the segment.
        """
        if self._place is None or len(self._place.roots) == 1:
            return
        with self._changed:
            self._ends.update(ends)
            bases = [*dict.fromkeys(uid_of_segment(name) for name in self._ends)][-_BASES:]
            self._ends = {n: end for n, end in self._ends.items() if uid_of_segment(n) in bases}
            self._offered = False
            self._run_on("log-offer", self._send)

    def execute(self, body: bytes) -> bytes:
        """Begin to copy what another host has offered; return `1` while copies are under way.

        Raises:
            StorageError: The offer is invalid, or this host makes no copies.
        """
        if self._place is None:
            msg = "this host makes no copies: give all ranks one configuration"
            raise StorageError(msg)
        try:
            found: Any = json.loads(body)
            server = int(found["server"])
            ends = {str(name): (server, int(end)) for name, end in found["ends"].items()}
            if any(uid_of_segment(name) is None or segment_number(name) < 0 for name in ends):
                msg = "it names other files"
                raise ValueError(msg)  # noqa: TRY301 - joins the errors of json
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"the offer of a log cannot be read: {error}"
            raise StorageError(msg) from error
        with self._changed:
            self._wanted.update(ends)
            if ends:
                self._run_on("log-copy", self._copy)
            return b"%d" % ("log-copy" in self._busy)

    def settle(self) -> None:
        """Wait until the other hosts have copied what was offered, at most for `interrupt_s`."""
        deadline = Deadline(self._workers.timing.interrupt_s)
        with self._changed:
            self._changed.wait_for(lambda: "log-offer" not in self._busy, deadline.left_s())
        ask = json.dumps({"server": 0, "ends": {}}).encode()
        with suppress(StorageError):
            while any(root.ask and root.ask("log", ask) != b"0" for root in self._receivers):
                if deadline.is_over():
                    break
                time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop, and wait for the threads unless a store is stuck."""
        with self._changed:
            self._closed = True
            threads = [*self._threads.values()]
            self._changed.notify_all()
        for thread in threads:
            thread.join(self._workers.timing.interrupt_s)
        for tail in self._tails.values():
            tail.close()

    # ------------------------------------------------------------------------------------------

    def _run_on(self, name: str, run: Callable[[], None]) -> None:
        self._changed.notify_all()
        if name not in self._busy and not self._closed:
            self._busy.add(name)
            self._threads[name] = self._workers.spawn(name, run)

    def _next(self, name: str) -> dict[str, Any]:
        """Return what the thread `name` has to do; if that is nothing, the thread ends."""
        with self._changed:
            if name == "log-offer":
                found: dict[str, Any] = {} if self._offered else {**self._ends}
                self._offered = True
            else:
                found, self._wanted = self._wanted, {}
            if self._closed or not found:
                self._busy.discard(name)
                self._changed.notify_all()
                return {}
            return found

    def _send(self) -> None:
        assert self._place is not None
        own = self._place.roots[0]
        roots = {f"{root.rank:08}": root for root in self._place.roots}
        groups = group_hosts({key: root.domain for key, root in roots.items()}, self._place.copies)
        self._receivers = [roots[key] for key in groups.receivers({f"{own.rank:08}"})]
        while ends := self._next("log-offer"):
            body = json.dumps({"server": own.rank, "ends": ends}).encode()
            for root in self._receivers:
                assert root.ask is not None  # it is another host's
                try:
                    root.ask("log", body)
                except StorageError as error:  # it gets all ends with the next entry
                    self._warn(f"host {root.host} does not copy the log of this rank: {error}")

    def _copy(self) -> None:
        assert self._place is not None
        throttle = Throttle(self._place.copy_bytes_per_s, self._workers.timing.clock)
        while wanted := self._next("log-copy"):
            for name, (server, end) in sorted(wanted.items()):
                try:
                    self._follow(self._place, name, server, end, throttle)
                except BlobNotFoundError:
                    pass  # the checkpoint was deleted
                except Exception as error:  # noqa: BLE001 - a task's boundary: tried again
                    self._warn(f"a log of another host is not copied: {said(error)}")

    def _follow(
        self, place: HostRoots, name: str, server: int, end: int, throttle: Throttle
    ) -> None:
        """Copy the entries of a segment up to the offset `end`."""
        tail = self._tails.get(name)
        if tail is None:
            size = -1
            with suppress(BlobNotFoundError):
                size = place.own.stat(name).size_bytes
            if size >= end:
                return
            source = {root.rank: root.backend for root in place.roots}[server]
            tail = self._tails[name] = _Tail(source, place.own, name, replaces=size >= 0)
        try:
            for stored_bytes in tail.extend(end):
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, throttle.take(stored_bytes)):
                        return
        except BaseException:
            self._tails.pop(name).close()
            raise
        same = [one for one in self._tails if _rank_of(one) == _rank_of(name)]
        for old in same[:-_TAILS]:
            self._tails.pop(old).close()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s. Training continues", text)


class _Tail:
    """A copy of a segment of another host, which is still being written there."""

    def __init__(self, source: Backend, own: Backend, name: str, *, replaces: bool) -> None:
        self._source = source
        self._own = own
        self._name = name
        # What an earlier process has copied stays until the copy is whole.
        self._landing = name.replace("/log/", _LANDING) if replaces else name
        self._last: StoredEntry | None = None
        self._writer: SegmentWriter | None = None

    def extend(self, end: int) -> Iterator[int]:
        """Copy entries up to the offset `end`, and make them durable; yield the bytes of each.

        Raises:
            DamagedError: An entry does not match its checksum.
            StorageError: A store failed.
        """
        base, rank = str(uid_of_segment(self._name)), _rank_of(self._name)
        for entry in entries_of(self._source, self._name, end, base, rank, after=self._last):
            if self._writer is None:
                self._own.delete([self._landing])
                self._writer = SegmentWriter(
                    self._own,
                    base,
                    rank,
                    entry.header.world_size,
                    previous=entry.header.previous,
                    opened=(self._landing, self._own.create(self._landing)),
                )
            stored_bytes = self._writer.copy(entry, self._source)
            if not stored_bytes:
                msg = f"the log {entry.damage(self._source)}"
                raise DamagedError(msg, [self._name])
            self._last = entry
            yield stored_bytes
        if self._writer is not None:
            self._writer.sync()
        if self._landing != self._name and self._writer is not None:
            # It stays open: the segment may still grow.
            self._own.rename(self._landing, self._name)
            self._landing = self._name

    def close(self) -> None:
        """Seal the copy. Raises nothing: whatever is durable can be read."""
        if self._writer is not None:
            try:
                self._writer.close()
            except PenstockError:
                self._writer.abort()  # keeps what was synced, but not the open file
        with suppress(PenstockError):
            if self._landing != self._name:
                self._own.delete([self._landing])  # it would fill the host


def _rank_of(name: str) -> int:
    return int(name.rpartition("/")[2].partition("-")[0])

"""Copies the log of each rank to other hosts, so that it survives the loss of its host.

Each rank reports to the hosts that hold its copies how far its segments are durable. These hosts
pull the new entries, and compare every checksum.

The loss of a host costs at most one step that all ranks have logged, or `log_sync`: `log` returns
for a step only after the hosts with copies have all entries that were durable before it. A host
that copies too slowly may hold training for 1 s, and for 1 % of the time. Then `log` no longer
waits for it before it has caught up.

Tested in `tests/integration/log/test_host_logs.py`.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
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
    from collections.abc import Callable, Iterator, Mapping

    from penstock.core.abc import Backend, HostRoots
    from penstock.core.concurrency.workers import Workers
    from penstock.core.log.segments import StoredEntry

log = logging.getLogger("penstock")

_LANDING = "/pulled-log/"
"""The folder of segments that replace an older copy, instead of `/log/`."""

_FIRST_LOOK_S, _MOST_LOOK_S, _GROWTH = 0.001, 0.05, 1.5
_PATIENCE_S, _SHARE = 1.0, 0.01  # in which copies may hold training: at once, and of all time
_BASES = 3  # at once: a replicated checkpoint, the next one, and the one that is being committed
_TAILS = 6  # open copies of one rank's segments


@dataclass(slots=True)
class _Offer:
    """A segment of another rank: what this host is to copy of it, and has copied."""

    server: int
    end: int = -1
    copied: int = -1
    failures: int = 0  # since the last success
    skip: int = 0  # entries before the next attempt
    error: str = ""

    @property
    def is_lacking(self) -> bool:
        return self.copied < self.end and not self.error

    def logged(self) -> None:
        """Count an entry in this segment or in another one of its rank."""
        self.skip -= 1
        if self.skip <= 0:
            self.error = ""

    def failed(self, error: str) -> None:
        """Try again after 1, 2, 4, ... entries, because each attempt copies the whole segment."""
        self.skip, self.error = 1 << self.failures, error
        self.failures += 1


class HostLogs:
    """Offers this rank's log to other hosts, and copies theirs."""

    def __init__(self, store: Backend, workers: Workers) -> None:
        """Prepare, without I/O."""
        place = host_roots(store).get(0)
        self._place = place if place is not None and place.copies else None
        self._workers = workers
        self._changed = threading.Condition()  # guards everything below
        self._ends: dict[str, int] = {}  # of this rank's segments
        self._offered = True  # whether they were sent to other hosts
        self._late = False  # whether other hosts have copied too slowly, and have not caught up
        self._credit_s = _PATIENCE_S  # for which `wait` may still wait
        self._waited = Deadline(None)  # since the last wait
        self._offers: dict[str, _Offer] = {}  # of other ranks
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
        """Begin to copy what another host has offered; return `1` while that is under way.

        Raises:
            StorageError: The offer is invalid, this host makes no copies, or the last copy has
                failed.
        """
        if self._place is None:
            msg = "this host makes no copies: give all ranks one configuration"
            raise StorageError(msg)
        try:
            found: Any = json.loads(body)
            server = int(found["server"])
            ends = {str(name): int(end) for name, end in found["ends"].items()}
            if any(uid_of_segment(name) is None or segment_number(name) < 0 for name in ends):
                msg = "it names other files"
                raise ValueError(msg)  # noqa: TRY301 - joins the errors of json
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"the offer of a log cannot be read: {error}"
            raise StorageError(msg) from error
        ranks = {_rank_of(name) for name in ends}
        with self._changed:
            for name in [n for n in self._offers if _rank_of(n) in ranks and n not in ends]:
                del self._offers[name]  # of an older checkpoint
            offers = {name: self._offers.setdefault(name, _Offer(server)) for name in ends}
            if any(ends[name] > offer.end for name, offer in offers.items()):
                for name, offer in offers.items():
                    offer.end = max(offer.end, ends[name])
                    offer.logged()
            if any(offer.is_lacking for offer in offers.values()):
                self._run_on("log-copy", self._copy)
                return b"1"
            for offer in offers.values():
                if offer.error:
                    raise StorageError(offer.error)
            return b"0"

    def wait(self) -> None:
        """Wait until the other hosts have copied what was offered, but not for a late host."""
        with self._changed:
            if self._late:
                return
            self._credit_s += _SHARE * self._waited.taken_s()
            waiting = Deadline(min(self._credit_s, _PATIENCE_S))
            self._late = not self._changed.wait_for(self._is_settled, waiting.limit_s)
            self._credit_s = waiting.left_s()
            self._waited = Deadline(None)
        if self._late:
            self._warn("other hosts copy the log too slowly: a lost host may cost several steps")

    def settle(self) -> None:
        """Wait until the other hosts have copied what was offered, at most for `interrupt_s`."""
        with self._changed:
            self._changed.wait_for(self._is_settled, self._workers.timing.interrupt_s)

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

    def _is_settled(self) -> bool:
        return "log-offer" not in self._busy

    def _send(self) -> None:
        """Offer the segments until all receivers have copied them, or cannot."""
        assert self._place is not None
        own = self._place.roots[0]
        roots = {f"{root.rank:08}": root for root in self._place.roots}
        groups = group_hosts({key: root.domain for key, root in roots.items()}, self._place.copies)
        receivers = [roots[key] for key in groups.receivers({f"{own.rank:08}"})]
        look_s, failed = _FIRST_LOOK_S, False
        while True:
            with self._changed:
                if self._closed or self._offered:
                    self._busy.discard("log-offer")
                    self._late &= failed
                    self._changed.notify_all()
                    return
                body = json.dumps({"server": own.rank, "ends": self._ends}).encode()
                self._offered = True
            is_under_way = failed = False
            for root in receivers:
                assert root.ask is not None  # it is another host's
                try:
                    is_under_way |= root.ask("log", body) != b"0"
                except StorageError as error:  # it gets all ends with the next entry
                    failed = True
                    self._warn(f"host {root.host} does not copy the log of this rank: {error}")
            with self._changed:
                if not is_under_way or self._changed.wait_for(
                    lambda: self._closed or not self._offered, look_s
                ):
                    look_s = _FIRST_LOOK_S
                else:
                    look_s = min(look_s * _GROWTH, _MOST_LOOK_S)
                    self._offered = False  # ask again

    def _copy(self) -> None:
        assert self._place is not None
        throttle = Throttle(self._place.copy_bytes_per_s, self._workers.timing.clock)
        while True:
            with self._changed:
                offers = {name: o for name, o in sorted(self._offers.items()) if o.is_lacking}
                if self._closed or not offers:
                    self._busy.discard("log-copy")
                    return
                ends = {name: offer.end for name, offer in offers.items()}
            for name, end in ends.items():
                error = ""
                try:
                    self._follow(self._place, name, offers[name].server, end, throttle)
                except BlobNotFoundError:
                    pass  # the checkpoint was deleted
                except Exception as failure:  # noqa: BLE001 - a task's boundary: tried again
                    error = said(failure)
                    self._warn(f"a log of another host is not copied: {error}")
                with self._changed:
                    if error:
                        offers[name].failed(error)
                    elif not self._closed:
                        offers[name].copied, offers[name].failures = end, 0

    def _follow(
        self, place: HostRoots, name: str, server: int, end: int, throttle: Throttle
    ) -> None:
        """Copy the entries of a segment up to the offset `end`."""
        tail = self._tails.get(name)
        if tail is None:
            there = _end_of(place.own, name)
            if there >= end:
                return
            source = {root.rank: root.backend for root in place.roots}[server]
            tail = self._tails[name] = _Tail(source, place.own, name, replaces=there >= 0)
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
        # What an earlier process has copied stays until the copy is whole. Each copy has its own
        # name: an earlier process that was stopped may continue, and rename its copy.
        self._landing = f"{_landings(name)}{secrets.token_hex(8)}" if replaces else name
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
                if self._landing != self._name:  # removes what a process has left that died
                    self._own.delete([i.name for i in self._own.list(_landings(self._name))])
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
        if self._landing != self._name and self._last is not None:
            if _end_of(self._own, self._name) > self._last.end:
                msg = f"another process has copied more of {self._name}"
                raise StorageError(msg)
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


def _landings(name: str) -> str:
    return f"{name.replace('/log/', _LANDING)}-"


def _end_of(own: Backend, name: str) -> int:
    """Return where the last entry of a segment ends; -1 if it does not exist.

    The file of a process that was killed may be longer, by the space that was reserved.
    """
    try:
        size = own.stat(name).size_bytes
    except BlobNotFoundError:
        return -1
    entries = entries_of(own, name, size, str(uid_of_segment(name)), _rank_of(name))
    return max((entry.end for entry in entries), default=0)

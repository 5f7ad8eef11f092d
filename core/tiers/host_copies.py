"""Copies committed checkpoints between the hosts of a job, so that it survives the loss of a host.

Rank 0 chooses the checkpoint, and asks hosts to copy the files that have too few copies. Each host
pulls them from the others at its own pace, and compares every checksum. Rank 0 sees in the listings
of all roots when the checkpoint is replicated; training never waits for that.

Tested in `tests/integration/ranks/test_host_copies.py`.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import host_roots
from penstock.core.catalog.survey import (
    borrowed_blobs,
    has_data,
    has_files,
    read_commit,
    sizes_of,
)
from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.errors import (
    BlobNotFoundError,
    PenstockError,
    StorageError,
)
from penstock.core.foreign import said
from penstock.core.format.records import commit_name, data_prefix, parse_commit_name
from penstock.core.ranks.durability import FollowedDrains, ToldDrains
from penstock.core.replicas.holdings import Holdings, RootListing
from penstock.core.replicas.placement import group_hosts
from penstock.core.replicas.replication import Replication
from penstock.core.rounds.posts import DrainedPost
from penstock.core.tiers.host_orders import Order
from penstock.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.core.abc import Backend, HostRoots
    from penstock.core.catalog.catalog import Catalog
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.ranks.group import RankGroup, RanksOfJob
    from penstock.core.replicas.placement import HostGroups
    from penstock.core.replicas.replication import CheckpointKey
    from penstock.core.reporting.reports import SaveReport
    from penstock.core.tiers.host_orders import HostOrders

log = logging.getLogger("penstock")

_FAILURES = 5  # without progress, after which `settle` waits no longer
_MOST_LOOK_S, _GROWTH = 1.0, 1.5
_KIND = "replicas"  # for `ToldDrains`


class HostCopies:
    """The copies between the hosts of a job, in the fastest tier that makes copies."""

    def __init__(
        self,
        store: Backend,
        catalog: Catalog,
        orders: HostOrders,
        ranks: RanksOfJob,
        workers: Workers,
    ) -> None:
        """Prepare; copies nothing before `begin`."""
        self._places = {n: place for n, place in host_roots(store).items() if place.copies}
        self._catalog = catalog
        self._orders = orders
        self._ranks = ranks
        self._workers = workers
        self._lead: _Lead | None = None
        self._follow: FollowedDrains | None = None
        self._has_warned = False

    def begin(self) -> None:
        """Start to copy, after the roots of all hosts are joined."""
        group = self._ranks.of_restore() if self._places else None
        if group is not None and group.place.rank:
            self._follow = FollowedDrains(group.coordination, group.timeout_s, group.timing, _KIND)
        elif group is not None:
            number = min(self._places)
            order = partial(self._orders.execute, number)
            self._lead = _Lead(self._places[number], self._catalog, group, self._workers, order)
            self._lead.begin()

    def replicate(self, report: SaveReport, on_end: Callable[[bool], None]) -> None:
        """Copy a committed checkpoint, and then call `on_end` once, on any thread.

        Passes True if the checkpoint is replicated, and False if a newer one was copied instead, or
        if no copies are made.
        """
        if self._lead is not None:
            self._warn_of_few_hosts()
            self._lead.committed(report, on_end)
        elif self._follow is not None:
            self._follow.follow(report.uid, lambda post: on_end(not post.kind))
        else:
            self._warn_of_few_hosts()
            on_end(False)  # noqa: FBT003 - the result of a future

    @property
    def leads(self) -> bool:
        """Whether this process decides what is copied, and when older checkpoints may go."""
        return self._lead is not None

    def kept(self) -> set[int]:
        """Return the steps that retention must keep until a newer one is replicated."""
        return set() if self._lead is None else self._lead.kept()

    def _warn_of_few_hosts(self) -> None:
        place = self._places[min(self._places)] if self._places else None
        if place is None or self._has_warned or len(place.roots) > place.copies:
            return
        self._has_warned = True
        log.warning(
            "copies = %d, but this job has %s: each file is copied to %s",
            place.copies,
            counted(len(place.roots), "host"),
            counted(len(place.roots) - 1, "other host"),
        )

    def settle(self) -> None:
        """Wait until this job's checkpoints are replicated, or the copies make no progress."""
        if self._lead is not None:
            self._lead.settle()
        if self._follow is not None:
            self._follow.settle()

    def close(self) -> None:
        """Stop copying."""
        for part in (self._lead, self._follow):
            if part is not None:
                part.close()


class _Lead:
    """Chooses on rank 0 what is copied, and finds out when it is replicated."""

    def __init__(
        self,
        place: HostRoots,
        catalog: Catalog,
        group: RankGroup,
        workers: Workers,
        order: Callable[[str, bytes], bytes],
    ) -> None:
        self._place = place
        self._catalog = catalog
        self._told = ToldDrains(group.coordination, group.timeout_s, _KIND)
        self._workers = workers
        self._order = order  # executes an order on this host
        self._watchdog = Watchdog(group.timeout_s, workers.timing.clock)
        self._changed = threading.Condition()  # guards everything below
        self._replication = Replication((), ())
        self._waiting: dict[CheckpointKey, tuple[str, Callable[[bool], None]]] = {}
        self._running = self._closed = False
        self._thread: threading.Thread | None = None
        self._ends: list[threading.Thread] = []
        self._held_bytes = -1
        self._failures = 0  # since the last progress
        self._error = ""  # of the last failure
        self._pause_s = 0.0  # until the next look
        self._warned: set[CheckpointKey] = set()

    def begin(self) -> None:
        """Copy the newest checkpoint, which may have lost copies since the last job."""
        with suppress(PenstockError):  # whoever restores it reports the error
            newest = self._catalog.newest()
            if newest is not None and has_data(self._place, newest):  # else the next tier has it
                key = newest.step, newest.generation
                older = [other for other in self._keys() or () if other < key]
                with self._changed:
                    self._replication = Replication((), [*older, key])
                    self._run_on()

    def committed(self, report: SaveReport, on_end: Callable[[bool], None]) -> None:
        key = report.step, report.generation
        keys = self._keys()
        with self._changed:
            if not self._closed:
                self._end([key])  # of an earlier save that was deleted
                self._waiting[key] = report.uid, on_end
                self._told.begin(report.uid, self._failing)
                if keys is not None:  # without those that were rewound or deleted
                    self._replication.keep_only([*keys, key])
                self._replication.committed(key)
                self._run_on()
                return
        on_end(False)  # noqa: FBT003 - the result of a future

    def kept(self) -> set[int]:
        keys = self._keys()
        with self._changed:
            if keys is None:
                keys = [*self._replication.known]
            else:
                self._replication.keep_only(keys)
            deletable = self._replication.deletable(keys)
        return {step for step, _ in {*keys}.difference(deletable)}

    def settle(self) -> None:
        with self._changed:
            while self._waiting and not self._failing():
                self._changed.wait(_MOST_LOOK_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._workers.timing.interrupt_s)  # its store may be stuck
        with self._changed:
            self._end([*self._waiting])
        for thread in self._ends:  # they delete what was replaced
            if thread is not threading.current_thread():
                thread.join()
        self._told.close()

    def _failing(self) -> str:
        """Return why waiting is useless; empty: the copies make progress."""
        if self._failures >= _FAILURES:
            return self._error
        return "the copies make no progress" if self._watchdog.is_over() else ""

    def _keys(self) -> list[CheckpointKey] | None:
        """Return the checkpoints of the run; None if a host does not answer."""
        try:
            entries = self._catalog.entries()
        except PenstockError:  # then retention, which lists them too, deletes nothing either
            return None
        names = (name for names in entries.values() for name in names)
        return [key for name in names if (key := parse_commit_name(name)) is not None]

    def _run_on(self) -> None:
        if not self._running:
            self._running = True
            self._watchdog.moved()
            self._thread = self._workers.spawn("replicate", self._run)

    def _run(self) -> None:
        while self._look():
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._pause_s)

    def _look(self) -> bool:
        """Copy the target, if there is one; return whether to look again after `_pause_s`."""
        with self._changed:
            key = self._replication.target
            if key is None or self._closed:
                self._running = False
                self._changed.notify_all()
                return False
        held, uid = self._held_bytes, ""
        try:
            uid = self._copy(key)
        except BlobNotFoundError:  # the checkpoint was deleted
            with self._changed:
                self._replication.deleted([key])
                self._end([key])
        except Exception as error:  # noqa: BLE001 - a task's boundary: logged, tried again
            self._failures, self._error = self._failures + 1, said(error)
            self._warn(key, self._error)
        with self._changed:
            # Meanwhile, the step may have been deleted and saved again.
            if uid and self._waiting.get(key, (uid,))[0] == uid:
                self._replication.secured(key)
                waiting = [*self._waiting] if key in self._waiting else [key]
                # In the order of their saves: those before it were skipped.
                self._end(waiting[: waiting.index(key) + 1], replicated=key)
            elif self._watchdog.is_over():
                self._replication.failed(key)
            if self._replication.target != key:
                self._watchdog.moved()
                self._pause_s = 0.0  # the next target was committed some time ago
            elif self._held_bytes != held or not self._pause_s:
                self._pause_s = self._workers.timing.copies_look_first_s
            else:
                self._pause_s = min(self._pause_s * _GROWTH, _MOST_LOOK_S)
        return True

    def _copy(self, key: CheckpointKey) -> str:
        """Ask all hosts that lack a file to copy it; return the uid if none does, else "".

        Raises:
            BlobNotFoundError: The checkpoint does not exist.
            PenstockError: A host does not answer, or its last copy has failed.
        """
        roots = self._place.roots
        name = commit_name(*key)
        record = read_commit(self._place, name)
        holdings, groups = holdings_of(self._place, record)
        sizes = holdings.sizes
        files = files_of(self._place, record, sizes)
        is_whole = has_files(self._place, record, sizes)
        for host in sorted(holdings.counting):
            if name not in holdings.roots[host].files:  # its publish has failed
                self._place.publish_again(name, roots[int(host)])
        held = sum(size for root in holdings.roots.values() for size in root.files.values())
        if held != self._held_bytes:
            self._held_bytes, self._failures = held, 0
            self._watchdog.moved()
        failure: PenstockError | None = None
        for host, missing in holdings.pulls(files, groups).items():
            wanted = {file: files[file] for file in missing if file != name}
            try:
                (roots[int(host)].ask or self._order)("pull", Order(name, wanted).encoded())
            except PenstockError as error:
                failure = error
        if failure is None and not is_whole:
            failure = StorageError("not all of its files are on the hosts of this job")
        if failure is not None:
            raise failure
        return "" if holdings.unsafe(files, groups) else record.uid

    def _end(
        self, keys: Iterable[CheckpointKey], *, replicated: CheckpointKey | None = None
    ) -> None:
        """Report the outcome of these checkpoints: only `replicated` has its copies."""
        for key in keys:
            if key in self._waiting:
                uid, on_end = self._waiting.pop(key)
                done = key == replicated and len(self._place.roots) > 1
                self._told.end(uid, DrainedPost(kind="" if done else "left out"))
                self._ends = [thread for thread in self._ends if thread.is_alive()]
                self._ends.append(self._workers.spawn("replicated", partial(on_end, done)))
        self._changed.notify_all()

    def _warn(self, key: CheckpointKey, why: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(
                "step %d has too few copies on other hosts: %s. Training continues, and the "
                "copies are tried again",
                key[0],
                why,
            )


def files_of(place: Backend, record: CommitRecord, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files of a checkpoint and the blobs that it borrows, with their sizes.

    `sizes` has the size of each file at that place, by name.
    """
    prefix = data_prefix(record.uid)
    kinds = f"{prefix}blobs/", f"{prefix}parts/"
    files = {n: size for n, size in sizes.items() if n.startswith(kinds) or n == record.index.name}
    files |= {blob.name: blob.length for blob in borrowed_blobs(place, record)}
    name = commit_name(record.step, record.generation)
    return {**files, name: place.stat(name).size_bytes}


def holdings_of(place: HostRoots, record: CommitRecord) -> tuple[Holdings, HostGroups]:
    """Return which host has which files of a checkpoint, and the groups that hold copies.

    Hosts are named by their numbers in `place.roots`.

    Raises:
        StorageError: A host does not answer.
    """
    name = commit_name(record.step, record.generation)
    listings = []
    for number, root in enumerate(place.roots):
        sizes = sizes_of(root.backend, record)
        with suppress(BlobNotFoundError):
            sizes[name] = root.backend.stat(name).size_bytes
        listings.append(RootListing(str(number), root.epoch, sizes))
    return Holdings(listings), groups_of(place)


def groups_of(place: HostRoots) -> HostGroups:
    """Return the groups of hosts that hold copies; hosts are named as in `holdings_of`."""
    domains = {str(number): root.domain for number, root in enumerate(place.roots)}
    return group_hosts(domains, place.copies)

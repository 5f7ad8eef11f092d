"""Replaces bad copies of checkpoints in tiers by good ones of other tiers."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import is_whole, read_commit, uids_named
from penstock.core.concurrency.watchdog import Watchdog
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.verify import verify_blobs
from penstock.core.errors import BusyError, CheckpointGoneError, StorageError
from penstock.core.format.records import data_uid, mark_name, parse_commit_name
from penstock.core.tiers.whereabouts import is_marked, mark, marked_replaces, whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.watchdog import Deadline
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.eviction import Rooms

log = logging.getLogger("penstock")


class TierRepairs:
    """All repairs of one run. Thread-safe.

    Args:
        tiers: From the fastest on.
        rooms: Evicts.
        workers: Threads for checksums and for what waits.
        grace_s: As `prune` has it.
        stuck_s: A store that neither moves nor fails for so long is not waited for.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        rooms: Rooms,
        workers: Workers,
        grace_s: float,
        stuck_s: float,
    ) -> None:
        self._tiers = tiers
        self._rooms = rooms
        self._workers = workers
        self._grace_s = grace_s
        self._running: list[threading.Thread] = []
        self._timing = workers.timing
        self._watchdog = Watchdog(stuck_s, self._timing.clock)
        self._ended = threading.Condition()  # guards everything below
        self._withdrawn: set[str] = set()
        self._copies: dict[str, CheckpointCopy] = {}
        self._claimed: set[str] = set()

    def begin(self, damaged: Sequence[tuple[str, str]]) -> None:
        """Bring copies anew, in the background, that turned out to be damaged.

        Args:
            damaged: Blobs and records, each with the name of the tier whose copy is good.
        """
        self._moved(0)
        self._running.append(self._workers.spawn("repair", partial(self._run, dict(damaged))))

    def begin_renewal(
        self, record: CommitRecord, good: int, bad: int, *, failed: Callable[[], None]
    ) -> None:
        """Replace tier `bad`'s copy by that of tier `good`, in the background.

        Args:
            record: Of the checkpoint.
            good: Number of the tier whose copy is verified, and then copied.
            bad: Number of the tier with a damaged copy.
            failed: Called if that was cut short.
        """
        self._moved(0)
        self._running.append(
            self._workers.spawn("repair", partial(self._renew, record, good, bad, failed))
        )

    def bring(
        self,
        record: CommitRecord,
        good: int,
        bad: int,
        *,
        unreadable: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Replace one tier's copy of a checkpoint; it is not listed there meanwhile.

        What is to be copied on from there still is afterwards.

        Args:
            record: Of the checkpoint.
            good: Number of the tier with a good copy, all of which is verified first.
            bad: Number of the tier with the bad one.
            unreadable: Only if the commit record there cannot be read.
            on_progress: Called with bytes that were verified, then with those that were copied.

        Raises:
            DamagedError: The good copy is not good; nothing was deleted.
            BusyError: Another process copies it there.
            StorageError: A tier failed.
        """
        with self._ended:
            if record.uid in self._withdrawn:
                return
            if record.uid in self._claimed:
                msg = f"step {record.step}: a copy of it is brought anew already: wait for it"
                raise BusyError(msg)
            self._claimed.add(record.uid)
        lent: list[Tier] = []
        try:
            # Before it is verified: from then on nobody evicts it for what the bad tier lists. And
            # a crash would leave it there for ever, less durable than it was.
            for tier in self._lenders(record, good, bad):
                mark(tier.backend, record.uid, record.step)
                lent.append(tier)
            moved = on_progress or self._moved
            self._check_good(record, good, on_progress=moved, lent=lent)
            self._replace(record, good, bad, unreadable=unreadable, on_progress=moved)
            _unmark(record, lent)
        finally:
            with self._ended:
                self._claimed.discard(record.uid)

    def withdraw(self, uids: Collection[str]) -> None:
        """Bring these no more; on return none of them is being copied, unless a store is stuck."""
        with self._ended:
            self._withdrawn.update(uids)
            copies = [copy for uid, copy in self._copies.items() if uid in uids]
        for copy in copies:
            copy.cancel()
        with self._ended:
            self._ended.wait_for(
                lambda: not self._copies.keys() & set(uids), self._watchdog.limit_s
            )

    def reinstate(self, uids: Collection[str]) -> None:
        """These may be brought again."""
        with self._ended:
            self._withdrawn.difference_update(uids)

    def is_withdrawn(self, uid: str) -> bool:
        """Whether it is not to be brought any more: it is about to be deleted, or was."""
        with self._ended:
            return uid in self._withdrawn

    def is_stuck(self) -> bool:
        """Whether one is under way in a store that neither answers nor fails."""
        return self._watchdog.is_over() and any(thread.is_alive() for thread in self._running)

    def settle(self, deadline: Deadline) -> None:
        """Wait for those that were begun, until they are over, stuck, or the time has come."""
        for thread in self._running:
            while thread.is_alive() and not self.is_stuck():
                if deadline.is_over():
                    return
                thread.join(min(self._timing.poll_s, deadline.left_s()))

    # ------------------------------------------------------------------------------------------

    def _run(self, damaged: Mapping[str, str]) -> None:
        good = {data_uid(blob): name for blob, name in damaged.items()}
        numbers = {tier.name: number for number, tier in enumerate(self._tiers)}
        try:
            for name, tier in damaged.items():
                if parse_commit_name(name) is not None:
                    self._bring_listed(name, numbers[tier])
            for uid, where in whereabouts(self._tiers).items():
                best = numbers[good[uid]] if uid in good else 0
                for number in where.tiers if best in where.tiers else ():
                    if number < best and number not in where.waiting:
                        self.bring(where.record, best, number)
        except Exception as error:  # noqa: BLE001 - a task's boundary: reading goes on without it
            log.warning("repairing a damaged copy failed: %s", str(error))

    def _renew(self, record: CommitRecord, good: int, bad: int, failed: Callable[[], None]) -> None:
        try:
            self.bring(record, good, bad)
        except Exception as error:  # noqa: BLE001 - a task's boundary: nothing was given up
            name = self._tiers[bad].name
            log.warning(
                "step %d: its copy in tier %s is not replaced: %s", record.step, name, str(error)
            )
            failed()

    def _moved(self, _: int) -> None:
        self._watchdog.moved()

    def _bring_listed(self, name: str, good: int) -> None:
        """Replace what the tiers before `good` have under the name of a commit record, unreadable.

        What waits there to be copied stays: its mark would go with it.
        """
        record = read_commit(self._tiers[good].backend, name)
        for number, tier in enumerate(self._tiers[:good]):
            found = uids_named(tier.backend, [name])
            if found == {name: None} and not is_marked(tier.backend, record.uid):
                self.bring(record, good, number, unreadable=True)

    def _check_good(
        self,
        record: CommitRecord,
        good: int,
        *,
        on_progress: Callable[[int], None],
        lent: Sequence[Tier],
    ) -> None:
        """Verify all of a copy, and that it is still there.

        Unless it is good nothing stays marked that was not.
        """
        source = self._tiers[good].backend
        try:
            # A copy that is damaged elsewhere is better than none, where this one is damaged too.
            verify_blobs(source, record, workers=self._workers, on_progress=on_progress)
            for tier in lent:  # who drains may have taken the bad copy for a good one meanwhile
                mark(tier.backend, record.uid, record.step)
            _check_still_there(source, record)
        except BaseException:
            _unmark(record, lent)
            raise

    def _replace(
        self,
        record: CommitRecord,
        good: int,
        bad: int,
        *,
        unreadable: bool,
        on_progress: Callable[[int], None],
    ) -> None:
        source, target = self._tiers[good], self._tiers[bad]
        copy = CheckpointCopy(
            source.backend,
            target.backend,
            record,
            workers=self._workers,
            grace_s=self._grace_s,
            repair=True,
        )
        with self._ended:
            if record.uid in self._withdrawn:
                return
            self._copies[record.uid] = copy
        try:
            waits = good < bad < len(self._tiers) - 1 and is_marked(target.backend, record.uid)
            replaces = marked_replaces(target.backend, record.uid) if waits else None
            self._rooms.evict(bad, record, unreadable=unreadable)
            if waits:
                mark(target.backend, record.uid, record.step, replaces)
            copy.run(on_progress=on_progress)
        finally:
            with self._ended:
                del self._copies[record.uid]
                self._ended.notify_all()
        self._rooms.note_copied(bad, record)
        log.info("step %d: repaired in tier %s from %s", record.step, target.name, source.name)

    def _lenders(self, record: CommitRecord, good: int, bad: int) -> list[Tier]:
        """Tiers to be marked while a copy behind them is brought: the good one, and the last."""
        having = [n for n in range(good, bad) if is_whole(self._tiers[n].backend, record)]
        numbers = sorted({*having[:1], *having[-1:]})
        return [
            self._tiers[n] for n in numbers if not is_marked(self._tiers[n].backend, record.uid)
        ]


def _check_still_there(source: Backend, record: CommitRecord) -> None:
    """What is open can be read though it is deleted."""
    if not is_whole(source, record):
        msg = f"step {record.step} on {source.url} was deleted while it was verified"
        raise CheckpointGoneError(msg)


def _unmark(record: CommitRecord, tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        with suppress(StorageError):  # then it is looked at once more
            tier.backend.delete([mark_name(record.uid)])

"""Replaces damaged copies of checkpoints in tiers with good copies from other tiers.

Tested in `tests/integration/tiers/test_repair.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.abc import OTHER_HOST, host_roots
from penstock.core.catalog.survey import is_whole, read_borrowed, read_commit, uids_named
from penstock.core.concurrency.watchdog import Watchdog, call_with_deadline
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.confirmation import verify_blobs
from penstock.core.errors import (
    BusyError,
    CheckpointGoneError,
    ConfigError,
    DamagedError,
    PenstockError,
    SaveAbortedError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.format.records import (
    commit_name,
    data_uid,
    mark_name,
    notes_origin,
    parse_commit_name,
)
from penstock.core.reporting.progress import metered
from penstock.core.reporting.reports import Damage, Repair
from penstock.core.tiers.whereabouts import is_marked, mark, marked_replaces, whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.watchdog import Deadline
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.reporting.progress import Meter
    from penstock.core.reporting.reports import CopyFound, Progress, VerifyReport
    from penstock.core.restore.checkpoint import Checkpoint
    from penstock.core.tiers.eviction import Eviction

log = logging.getLogger("penstock")


class TierRepairs:
    """All repairs of one run. Thread-safe.

    Args:
        tiers: The tiers, the fastest first.
        eviction: Evicts damaged copies.
        workers: Threads for checksums and for background tasks.
        grace_s: The grace time of `prune`.
        stuck_s: The longest wait for a store without progress.
        leads: Returns whether this process repairs the damage that its reads find. With several
            ranks, only rank 0 does.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        eviction: Eviction,
        workers: Workers,
        grace_s: float,
        stuck_s: float,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self.leads = leads
        self.workers = workers
        self.stuck_s = stuck_s
        self._tiers = tiers
        self._eviction = eviction
        self._grace_s = grace_s
        self._running: list[threading.Thread] = []
        self._timing = workers.timing
        self._watchdog = Watchdog(stuck_s, self._timing.clock)
        self._ended = threading.Condition()  # guards the three below
        self._withdrawn: set[str] = set()
        self._copies: dict[str, CheckpointCopy] = {}  # in flight, by uid
        self._claimed: set[str] = set()  # uids whose copies are being verified or replaced

    def begin(self, damaged: Sequence[tuple[str, str]]) -> None:
        """Replace copies that a read found damaged, in the background.

        Args:
            damaged: The blobs and records, each with the name of the tier with a good copy.
        """
        in_tiers = {name: tier for name, tier in damaged if tier != OTHER_HOST}
        if not in_tiers or not self.leads():  # hosts replace their own files
            return
        self._moved(0)
        self._running.append(self.workers.spawn("repair", partial(self._replace_read, in_tiers)))

    def begin_replacing(
        self, record: CommitRecord, good: int, bad: int, *, failed: Callable[[], None]
    ) -> None:
        """Call `replace_copy` in the background; if that raises, call `failed`."""
        self._moved(0)

        def task() -> None:
            try:
                self.replace_copy(record, good, bad)
            except Exception as error:  # noqa: BLE001 - a task's boundary: the good copy stays
                log.warning(
                    "step %d: its copy in tier %s is not replaced: %s",
                    record.step,
                    self._tiers[bad].name,
                    str(error),
                )
                failed()

        self._running.append(self.workers.spawn("repair", task))

    def replace_copy(
        self,
        record: CommitRecord,
        good: int,
        bad: int,
        *,
        unreadable: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Replace one tier's copy of a checkpoint; the tier does not list the copy meanwhile.

        If that tier has a mark to copy the checkpoint to the next tier, the mark stays.

        Args:
            record: The commit record.
            good: The number of the tier with a good copy, which is verified first.
            bad: The number of the tier with the damaged copy.
            unreadable: Replace the copy only if its commit record cannot be read.
            on_progress: Called with counts of bytes verified, then of bytes copied.

        Raises:
            DamagedError: The copy in tier `good` is damaged; nothing was deleted.
            ConfigError: The tier `bad` has a root on each host; nothing was deleted.
            BusyError: Another thread of this process replaces a copy of the checkpoint, or another
                process copies it to that tier.
            StorageError: A tier failed.
        """
        if self._is_on_hosts(bad):
            msg = (
                f"tier {self._tiers[bad].name} has a root on each host, which replaces its own "
                "files: restore the step, or run `penstock verify --repair` under torchrun on all "
                "hosts"
            )
            raise ConfigError(msg)
        with self._ended:
            if record.uid in self._withdrawn:
                return
            if record.uid in self._claimed:
                msg = f"step {record.step}: a copy of it is already being replaced: wait for it"
                raise BusyError(msg)
            self._claimed.add(record.uid)
        set_here: list[Tier] = []  # tiers with a mark that this repair has set
        try:
            # Marks before the verification: no process evicts a marked copy, although the bad tier
            # lists the checkpoint. After a crash that leaves no copy in the bad tier, the next
            # process finds the mark and copies the checkpoint there.
            for tier in self._tiers_to_mark(record, good, bad):
                mark(tier.backend, record.uid, record.step)
                set_here.append(tier)
            moved = on_progress or self._moved
            self._check_good(record, good, on_progress=moved, set_here=set_here)
            self._replace(record, good, bad, unreadable=unreadable, on_progress=moved)
            _unmark(record, set_here)
        finally:
            with self._ended:
                self._claimed.discard(record.uid)

    def withdraw(self, uids: Collection[str]) -> None:
        """Cancel the repairs of these checkpoints; wait for their end, unless a store is stuck."""
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
        """Allow repairs of these checkpoints again."""
        with self._ended:
            self._withdrawn.difference_update(uids)

    def is_withdrawn(self, uid: str) -> bool:
        """Return whether a checkpoint was deleted or is about to be deleted."""
        with self._ended:
            return uid in self._withdrawn

    def is_stuck(self) -> bool:
        """Return whether a repair in flight has stopped making progress."""
        return self._watchdog.is_over() and any(thread.is_alive() for thread in self._running)

    def settle(self, deadline: Deadline) -> None:
        """Wait until each background repair has ended or is stuck, or until the deadline."""
        for thread in self._running:
            while thread.is_alive() and not self.is_stuck():
                if deadline.is_over():
                    return
                thread.join(min(self._timing.poll_s, deadline.left_s()))

    # ------------------------------------------------------------------------------------------

    def _replace_read(self, damaged: Mapping[str, str]) -> None:
        """Replace the damaged copies that a read skipped, in all tiers before the good copy."""
        numbers = {tier.name: number for number, tier in enumerate(self._tiers)}
        try:
            for name, tier in damaged.items():
                if parse_commit_name(name) is not None:
                    self._replace_unreadable(name, numbers[tier])
            replaced: set[tuple[int, str]] = set()
            for where in whereabouts(self._tiers).values():
                places = [self._tiers[number].backend for number in where.tiers]
                names = {name for name in damaged if _needs(where.record, name, places)}
                best = max((numbers[damaged[name]] for name in names), default=0)
                for number in where.tiers if best in where.tiers else ():
                    # A blob that several checkpoints need is replaced with the first of them.
                    bad = {(number, name) for name in names} - replaced
                    # Replacing deletes the record, and the copy to the next tier may be in flight.
                    # Hosts keep their copies of other files.
                    is_left = number in where.waiting or self._is_on_hosts(number)
                    if bad and number < best and not is_left:
                        self.replace_copy(where.record, best, number)
                        replaced |= bad
        except Exception as error:  # noqa: BLE001 - a task's boundary: reading continues without it
            log.warning("repairing a damaged copy failed: %s", str(error))

    def _is_on_hosts(self, number: int) -> bool:
        return bool(host_roots(self._tiers[number].backend))

    def _moved(self, _: int) -> None:
        self._watchdog.moved()

    def _replace_unreadable(self, name: str, good: int) -> None:
        """Replace each copy whose commit record `name` is unreadable, in all tiers before `good`.

        Skips a copy with a mark, because the mark would be deleted with the copy.
        """
        record = read_commit(self._tiers[good].backend, name)
        for number, tier in enumerate(self._tiers[:good]):
            uids = uids_named(tier.backend, [name])
            is_left = is_marked(tier.backend, record.uid) or self._is_on_hosts(number)
            if uids == {name: None} and not is_left:
                self.replace_copy(record, good, number, unreadable=True)

    def _check_good(
        self,
        record: CommitRecord,
        good: int,
        *,
        on_progress: Callable[[int], None],
        set_here: Sequence[Tier],
    ) -> None:
        """Verify all of a copy and that it still exists; remove the marks on failure."""
        source = self._tiers[good].backend
        try:
            # Before any deletion: if both copies are damaged, in different blobs, a read can still
            # combine them into a whole checkpoint.
            verify_blobs(source, record, workers=self.workers, on_progress=on_progress)
            # Again: a drain may have seen the bad copy listed meanwhile, and deleted the mark.
            for tier in set_here:
                mark(tier.backend, record.uid, record.step)
            _check_still_there(source, record)
        except BaseException:
            _unmark(record, set_here)
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
            workers=self.workers,
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
            self._eviction.evict(bad, record, unreadable=unreadable)
            if waits:
                mark(target.backend, record.uid, record.step, replaces)
            copy.run(on_progress=on_progress)
        finally:
            with self._ended:
                del self._copies[record.uid]
                self._ended.notify_all()
        self._eviction.note_verified(bad, record)
        log.info("step %d: repaired in tier %s from %s", record.step, target.name, source.name)

    def _tiers_to_mark(self, record: CommitRecord, good: int, bad: int) -> list[Tier]:
        """Return the unmarked tiers to mark while a slower copy is replaced.

        These are the good tier, and the last tier with a copy before the bad tier. The link of the
        latter copies to the bad tier or to a tier on the way there.
        """
        having = [n for n in range(good, bad) if is_whole(self._tiers[n].backend, record)]
        numbers = sorted({*having[:1], *having[-1:]})
        return [
            self._tiers[n] for n in numbers if not is_marked(self._tiers[n].backend, record.uid)
        ]


def _needs(record: CommitRecord, name: str, places: Sequence[Backend]) -> bool:
    """Return whether a file is the checkpoint's own, or a blob that the checkpoint borrows.

    If no place has a good table of borrowed blobs, the checkpoint cannot be replaced anyway.
    """
    if (uid := data_uid(name)) == record.uid:
        return True
    for place in places if uid in record.references else ():
        with suppress(DamagedError):
            return name in {blob.name for blob in read_borrowed(place, record)}
    return False


def _check_still_there(source: Backend, record: CommitRecord) -> None:
    """Check that the record still exists, because open files stay readable after deletion."""
    if not is_whole(source, record):
        msg = f"step {record.step} on {source.url} was deleted while it was verified"
        raise CheckpointGoneError(msg)


def _unmark(record: CommitRecord, tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        with suppress(StorageError):  # then the next process verifies that copy and unmarks it
            tier.backend.delete([mark_name(record.uid)])


def verify_and_repair(
    checkpoint: Checkpoint,
    repairs: TierRepairs | None,
    *,
    deep: bool,
    on_progress: Callable[[Progress], None] | None,
) -> VerifyReport:
    """Verify as `Checkpoint.verify` does; replace every bad copy with a good one, if one exists.

    A tier without the checkpoint has evicted it, and gets no copy. A bad copy is deleted only after
    all of the good copy was read and compared, even without `deep`.

    Args:
        checkpoint: The checkpoint.
        repairs: The repairs of the run; None if the run has only one place.
        deep: As in `Checkpoint.verify`.
        on_progress: Called with the progress of the verification, then of each repair.

    Raises:
        ConfigError: The run has only one place.
        StorageTimeoutError: A store is stuck.
    """
    if repairs is None or not checkpoint.backend.tiers:
        msg = (
            f"{checkpoint.backend.url} is one place: a repair needs another copy. Name the run "
            "with all its tiers, or delete the step there and copy a good one from elsewhere"
        )
        raise ConfigError(msg)
    began = time.monotonic()
    with metered(on_progress, "the verification") as meter:
        copies = checkpoint.verify_copies(meter, deep=deep)
        repair = _CheckpointRepair(checkpoint, repairs, meter, copies, deep=deep)
        done = tuple(repair.of(number) for number in range(len(copies)) if repair.needs(number))
        report = checkpoint.report_of(copies, deep=deep, began=began)
        return replace(
            report,
            ok=not repair.late and all(outcome.error is None for outcome in done),
            damaged=(*report.damaged, *repair.late),
            repairs=done,
        )


class _CheckpointRepair:
    def __init__(
        self,
        checkpoint: Checkpoint,
        repairs: TierRepairs,
        meter: Meter,
        copies: list[CopyFound | None],
        *,
        deep: bool,
    ) -> None:
        self.late: list[Damage] = []
        """Damage that the repair found in copies that the verification had found good."""
        self._checkpoint = checkpoint
        self._record = checkpoint.contents.record
        self._repairs = repairs
        self._meter = meter
        self._copies = copies
        self._deep = deep
        good = [number for number, copy in enumerate(copies) if self._is_good(copy)]
        self._good = sorted(good, key=self.needs)  # copies with damaged notes last

    def needs(self, number: int) -> bool:
        """Return whether one tier has a copy with damage."""
        copy = self._copies[number]
        return copy is not None and bool(copy.damaged)

    def of(self, bad: int) -> Repair:
        """Replace the copy in one tier with the fastest good copy, and return the outcome."""
        tier = self._checkpoint.backend.tiers[bad]
        if not self._is_this_one(bad):
            return Repair(tier.name, None, "its copy is of another save, which no other tier has")
        error = (
            "no other tier has a good copy. If the copies together have all data, `penstock copy "
            "--raw` makes a whole one elsewhere"
        )
        for good in tuple(self._good):
            if good == bad or (bad in self._good and self.needs(good)):
                continue  # only notes are damaged, in both copies
            try:
                self._replace(good, bad)
            except DamagedError as damage:
                self._good.remove(good)
                name, error = self._checkpoint.backend.tiers[good].name, str(damage)
                self.late += [Damage(w, f"in tier {name}: {error}") for w in damage.damaged]
            except StorageTimeoutError:
                raise  # the store is stuck: the next repair would hang in it as well
            except PenstockError as failure:
                return Repair(tier.name, None, str(failure))
            else:
                return Repair(
                    tier.name, self._checkpoint.backend.tiers[good].name, self._damage_left(bad)
                )
        return Repair(tier.name, None, error)

    def _is_good(self, copy: CopyFound | None) -> bool:
        """Return whether all data of a copy is good. Its notes may be damaged."""
        if copy is None or copy.uid != self._record.uid:
            return False
        return all(notes_origin(damage.what) for damage in copy.damaged)

    def _is_this_one(self, number: int) -> bool:
        """Return whether a tier's copy is of the same save; a damaged record counts as yes."""
        copy = self._copies[number]
        assert copy is not None
        name = commit_name(self._record.step, self._record.generation)
        if copy.uid is None:
            return name in {damage.what for damage in copy.damaged}
        return copy.uid == self._record.uid

    def _replace(self, good: int, bad: int) -> None:
        """Replace a copy on a separate thread, because a store may hang.

        Raises:
            StorageTimeoutError: A store is stuck.
            PenstockError: As in `TierRepairs.replace_copy`.
        """
        timing = self._repairs.workers.timing
        watchdog = Watchdog(self._repairs.stuck_s, timing.clock)
        cancelled = threading.Event()
        copy = self._copies[bad]
        self._meter.begin("repair")
        self._meter.expect(2 * self._record.bytes_needed)  # read first, then copied

        def on_progress(size_bytes: int) -> None:
            if cancelled.is_set():
                msg = "given up: the caller was interrupted"
                raise SaveAbortedError(msg)
            watchdog.moved()
            self._meter.advance(size_bytes)

        def stuck() -> StorageTimeoutError:
            return StorageTimeoutError(
                f"no progress for {watchdog.taken_s():.0f} s (io_timeout_s={watchdog.limit_s:g}) "
                "while a copy was being replaced; it may still be replaced later, and the good "
                "copy is unchanged"
            )

        call_with_deadline(
            "repair",
            lambda: self._repairs.replace_copy(
                self._record,
                good,
                bad,
                unreadable=copy is not None and copy.uid is None,
                on_progress=on_progress,
            ),
            watchdog,
            stuck,
            timing=timing,
            cancel=cancelled.set,
        )

    def _damage_left(self, number: int) -> str | None:
        """Verify a replaced copy; return its remaining damage, if any."""
        tier = self._checkpoint.backend.tiers[number]
        copy = self._checkpoint.verify_copy(tier, self._meter, deep=self._deep)
        if copy is None:
            return "the copy no longer exists: it was deleted or evicted meanwhile"
        return next((damage.detail for damage in copy.damaged), None)

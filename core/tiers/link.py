"""One link between two neighboring tiers: copies marked checkpoints to the slower tier.

A copy runs in a separate process, or on threads.

Tested in `tests/core/tiers/test_drains.py`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import carry_notes
from penstock.core.catalog.survey import has, is_whole, missing_borrowed
from penstock.core.concurrency.watchdog import NEVER, Deadline, Watchdog
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.copy.confirmation import confirmed, retract, verify_blobs
from penstock.core.errors import (
    CheckpointGoneError,
    DamagedError,
    LostRaceError,
    PenstockError,
    SaveAbortedError,
    SaveError,
    StepExistsError,
    StorageError,
    StorageTimeoutError,
    WrongPlaceError,
)
from penstock.core.format.records import mark_name
from penstock.core.tiers.process import ProcessCopy, UnsuitableError
from penstock.core.tiers.whereabouts import compacted, marked_replaces, replaceable
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.copy.checkpoint_copy import BlobHelper
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.drains import Drains
    from penstock.core.tiers.process import ProcessSetup

log = logging.getLogger("penstock")

_PERMANENT = (LostRaceError, StepExistsError, DamagedError)
"""Errors that no retry can fix, because it would copy the same bytes to the same target."""

_TRIES = 2  # failures in the process, after which threads copy
WORTH_BYTES = 64 << 20
"""A smaller checkpoint is copied by threads, unless `drain_in` is `process`.

Starting a process would take longer than the copy. Eviction verifies smaller copies at once.
"""


@dataclass(eq=False, slots=True)
class DrainState:
    """The state of one link.

    Attributes:
        source: The name of the tier to copy from.
        target: The name of the tier to copy to.
        step: The step being copied, if any.
        bytes_done: Bytes of this step that were copied.
        bytes_total: Bytes of this step.
        bytes_moved: Bytes that this process has copied in total.
        waiting: The queued steps, in order.
        error: Why the last attempt failed, if it will be retried; else empty.
        lost: Why a step cannot be copied at all, by step.
    """

    source: str
    target: str
    step: int | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    bytes_moved: int = 0
    waiting: tuple[int, ...] = ()
    error: str = ""
    lost: Mapping[int, str] = field(default_factory=dict)

    def unfinished(self) -> list[int]:
        """Return the steps that are not copied yet, in order."""
        return sorted({*self.waiting, *([] if self.step is None else [self.step])})


@dataclass(eq=False, slots=True)
class _Failure:
    """Why the last copy failed.

    Attributes:
        text: The error text; empty without a failure.
        lasting: Expires when copies have failed for so long that no caller should wait.
        next_log: Expires when the same error may be logged again.
    """

    text: str = ""
    lasting: Deadline = NEVER
    next_log: Deadline = field(default_factory=lambda: Deadline(0.0))


class DrainLink:
    """Copies checkpoints from tier `number` to the next, one at a time, lowest step first."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        number: int,
        drains: Drains,
        *,
        workers: Workers,
        grace_s: float,
        stuck_s: float = 600.0,
        process: ProcessSetup | None = None,
        helper: BlobHelper | None = None,
    ) -> None:
        self._number = number
        self._source = tiers[number]
        self._target = tiers[number + 1]
        self._drains = drains
        self._workers = workers
        self._timing = workers.timing
        self._watchdog = Watchdog(stuck_s, self._timing.clock)
        self._copier = TierCopier(
            self._source,
            self._target,
            workers=workers,
            grace_s=grace_s,
            process=process,
            helper=helper,
        )
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[CommitRecord] = deque()
        self._current: CommitRecord | None = None
        self._prepared = ""  # the uid for which `Drains.prepare` was called last
        self._running = False
        self._tidying = False
        self._closed = False
        self._done_bytes = 0
        self._moved_bytes = 0
        self._failure = _Failure()
        self._lost: dict[int, str] = {}
        self._withdrawn: set[str] = set()

    def add(self, record: CommitRecord) -> bool:
        """Queue a checkpoint that is not queued or withdrawn; return whether it was added."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            if (
                self._closed
                or record.uid in self._withdrawn
                or any(r.uid == record.uid for r in (*self._queue, *current))
            ):
                return False
            self._queue.append(record)
            if not self._running:
                self._running = True
                self._workers.spawn("drain", self._run)
            self._changed.notify_all()
            return True

    def withdraw(self, uids: Collection[str]) -> None:
        """Drop the queued copies of these checkpoints, and cancel the one in flight.

        Waits for the end of that one, unless a store is stuck.
        """
        with self._changed:
            self._withdrawn.update(uids)
            dropped = [record for record in self._queue if record.uid in uids]
            self._queue = deque(record for record in self._queue if record.uid not in uids)
            current = self._current
            self._changed.notify_all()
        for record in dropped:  # else `result()` of their saves would wait until `close`
            self._drains.end_gone(self._number + 1, record)
        if current is None or current.uid not in uids:
            return
        self._copier.cancel(uids)
        with self._changed:
            while self._current is current and not self.is_stuck():
                self._changed.wait(self._timing.poll_s)

    def reinstate(self, uids: Collection[str]) -> None:
        """Accept these checkpoints again in `add`."""
        with self._changed:
            self._withdrawn.difference_update(uids)

    def state(self) -> DrainState:
        """Return the state of this link."""
        with self._changed:
            current, limit_s = self._current, self._watchdog.limit_s
            return DrainState(
                self._source.name,
                self._target.name,
                None if current is None else current.step,
                self._done_bytes,
                0 if current is None else current.bytes_needed,
                self._moved_bytes,
                tuple(record.step for record in self._queue),
                self._failure.text or (f"no progress for {limit_s:g} s" if self.is_stuck() else ""),
                dict(self._lost),
            )

    def settle(self, deadline: Deadline) -> bool:
        """Wait until no copy is left or copies are failing; return False after the deadline."""
        with self._changed:
            while not (self._closed or self._idle() or self.is_failing()):
                if deadline.is_over():
                    return False
                self._changed.wait(min(self._timing.poll_s, deadline.left_s()))
            return True

    def close(self) -> None:
        """Cancel the copy in flight and wait for its end, except if a store is stuck."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._copier.cancel()
        with self._changed:
            while (self._running or self._tidying) and not self.is_stuck():
                self._changed.wait(self._timing.poll_s)

    def tidy(self, need_bytes: int = 0) -> None:
        """Evict from the source tier in the background, after verifying the later copies.

        Args:
            need_bytes: The room to make, beyond evicting all checkpoints that exceed `keep_last`.
        """
        with self._changed:
            if self._tidying or self._closed:
                return
            self._tidying = True
            self._watchdog.moved()
        self._workers.spawn("tidy", partial(self._tidy, need_bytes))

    # ------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def is_failing(self) -> bool:
        """Return whether a tier has failed for so long that no caller should wait for it."""
        return self._failure.lasting.is_over() or self.is_stuck()

    def is_stuck(self) -> bool:
        """Return whether a task of this link has made no progress for `stuck_s` seconds."""
        busy = self._current is not None or self._tidying
        return busy and self._watchdog.is_over()

    def _is_over(self, record: CommitRecord) -> bool:
        return self._closed or record.uid in self._withdrawn

    def _idle(self) -> bool:
        return not self._queue and self._current is None

    def _run(self) -> None:
        while (record := self._next()) is not None:
            try:
                self._copy_with_retries(record)
            except BaseException as error:  # noqa: BLE001 - a task's boundary: the next copy begins
                log.error(  # noqa: TRY400 - a kept log record would keep the stack frames
                    "step %d: copying it to tier %s ended with %s; the next process copies it",
                    record.step,
                    self._target.name,
                    repr(error),
                )
                self._drains.end(record, SaveError(f"step {record.step}: {error!r}"))
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _next(self) -> CommitRecord | None:
        with self._changed:
            if not self._queue or self._closed:
                self._running = False
                self._changed.notify_all()
                return None
            record = min(self._queue, key=lambda r: (r.step, r.generation))
            self._queue.remove(record)
            self._current, self._done_bytes = record, 0
            self._watchdog.moved()
            return record

    def _copy_with_retries(self, record: CommitRecord) -> None:
        """Copy one checkpoint; retry temporary errors without limit, with exponential backoff."""
        pause_s = self._timing.drain_retry_first_s
        while not self.is_closed():
            began = time.monotonic()
            try:
                if record.uid in self._withdrawn:
                    self._drains.end_gone(self._number + 1, record)
                    return
                if not self._copy_once(record):
                    if not self._drains.send_again(self._number, record):
                        self._drains.end_gone(self._number + 1, record)
                    return
            except Exception as error:  # noqa: BLE001 - a task's boundary: logged, tried again
                if self.is_closed():
                    return
                if record.uid in self._withdrawn:
                    continue
                self._failed(record, error)
                if isinstance(error, _PERMANENT):
                    self._drains.end(record, error)
                    return
                with self._changed:
                    # Random, so that the hosts of a run do not all return to a store at once.
                    delay_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                    self._changed.wait_for(lambda: self._is_over(record), delay_s)
                pause_s = min(2 * pause_s, self._timing.drain_retry_most_s)
                self._watchdog.moved()
            else:
                self._succeeded(record, time.monotonic() - began)
                return

    def _copy_once(self, record: CommitRecord) -> bool:
        """Copy a checkpoint to the next tier; return False if it is gone from both tiers."""
        source, target = self._source.backend, self._target.backend

        def verify_source() -> None:
            self._verify(source, record)

        if not has(source, record):
            retract(target, record)
            # Another process may have copied it there and then evicted it here.
            return is_whole(target, record)
        self._drains.roots.check(self._number + 1)
        if not confirmed(target, record, first=verify_source):
            try:
                missing = missing_borrowed(target, record, listed_by=source)
                lent = sum(blob.length for blob in missing)
            except DamagedError:  # the copy finds out whether it is damaged or was just deleted
                lent = record.bytes_borrowed
            self._drains.eviction.make_room(
                self._number + 1, record.bytes_stored + lent, verify=self._verify
            )
            # Once per checkpoint: each call of `prepare` counts as a save for `drain_every`.
            if record.uid != self._prepared:
                known = marked_replaces(source, record.uid)
                self._drains.prepare(self._number + 1, record.uid, record.step, known)
                self._prepared = record.uid
            with self._changed:
                self._done_bytes = 0
            try:
                self._copier.copy(
                    record,
                    replace=replaceable(source, target, record) if record.generation else (),
                    may_begin=lambda: not self._is_over(record),
                    on_progress=self._moved,
                )
            except StepExistsError:
                if not compacted(target, record):
                    raise
            if not record.references:  # else the copy may have used blobs that it has not read
                self._drains.eviction.note_verified(self._number + 1, record)
        carry_notes(source, target, record)
        # Again: a file system that was unmounted during the copy took the data with it.
        self._drains.roots.check(self._number + 1)
        source.delete([mark_name(record.uid)])
        return True

    def _moved(self, size_bytes: int) -> None:
        self._watchdog.moved()
        self._done_bytes += size_bytes
        self._moved_bytes += size_bytes

    def _succeeded(self, record: CommitRecord, seconds: float) -> None:
        with self._changed:
            self._failure = _Failure()
            self._prepared = ""  # if the next tier loses it, the next copy must mark it again
        log.info(
            "step %d is now in tier %s: %s in %.2f s",
            record.step,
            self._target.name,
            size_text(record.bytes_stored),
            seconds,
        )
        # One block each: `arrived` is called even if nothing can be evicted.
        large: list[CommitRecord] = []
        with self._failures_logged(record):
            self._drains.eviction.trim(self._number, verify=partial(self._verify_small, large))
        with self._failures_logged(record):
            self._drains.arrived(self._number + 1, record)
        if large:
            self.tidy()

    def _tidy(self, need_bytes: int) -> None:
        eviction = self._drains.eviction
        try:
            if need_bytes:
                eviction.make_room(self._number, need_bytes, verify=self._verify)
            eviction.trim(self._number, verify=self._verify)
        except Exception as error:  # noqa: BLE001 - a task's boundary: eviction stops
            if not self._closed:
                log.warning("eviction from tier %s failed: %s", self._source.name, str(error))
        finally:
            with self._changed:
                self._tidying = False
                self._changed.notify_all()

    def _verify_small(
        self, large: list[CommitRecord], backend: Backend, record: CommitRecord
    ) -> bool:
        """Verify a small copy now; append a large one to `large`.

        Reading a large copy here would delay `arrived`, and thus `result()` of the save.
        """
        if record.bytes_stored < WORTH_BYTES:
            return self._verify(backend, record)
        large.append(record)
        return False

    def _verify(self, backend: Backend, record: CommitRecord) -> bool:
        """Read all of a copy and compare checksums; return True, for `Eviction`."""

        def stop_if_closed() -> None:
            if self._closed:
                msg = "the run was closed"
                raise SaveAbortedError(msg)

        verify_blobs(
            backend,
            record,
            workers=self._workers,
            on_progress=lambda _: self._moved(0),
            on_look=stop_if_closed,
            bytes_per_s=self._source.drain_bytes_per_s,
        )
        return True

    @contextmanager
    def _failures_logged(self, record: CommitRecord) -> Iterator[None]:
        """Log an error raised in the block and continue, because the copy is already whole."""
        try:
            yield
        except PenstockError as error:
            step, name = record.step, self._target.name
            log.warning(
                "step %d was copied to tier %s, but a task after the copy failed: %s",
                step,
                name,
                str(error),
            )

    def _failed(self, record: CommitRecord, error: Exception) -> None:
        text = (
            str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        )
        clock = self._timing.clock
        permanent = isinstance(error, _PERMANENT)
        advice = "" if permanent else " yet; it will be tried again"
        waits = isinstance(error, DamagedError) and self._is_incomplete(record)
        if waits:
            advice = " yet, but by the next job with the hosts that have the rest of it"
        with self._changed:
            failure = self._failure
            repeated = text == failure.text and not failure.next_log.is_over()
            if permanent:
                self._lost[record.step] = text
            else:
                failure.text = text
                if failure.lasting is NEVER:
                    failure.lasting = Deadline(self._timing.drain_failing_s, clock)
                if not repeated:
                    failure.next_log = Deadline(self._timing.repeat_log_s, clock)
            self._changed.notify_all()
        log.log(
            logging.DEBUG if repeated else logging.WARNING if waits else logging.ERROR,
            "step %d cannot be copied from tier %s to %s%s: %s",
            record.step,
            self._source.name,
            self._target.name,
            advice,
            text,
        )

    def _is_incomplete(self, record: CommitRecord) -> bool:
        try:
            return bool(Catalog(self._source.backend).incompleteness(record))
        except StorageError:
            return False


class TierCopier:
    """Runs one copy at a time, on its link's thread; any thread may call `cancel`."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        *,
        workers: Workers,
        grace_s: float,
        process: ProcessSetup | None,
        helper: BlobHelper | None,
    ) -> None:
        self._source = source
        self._target = target
        self._workers = workers
        self._grace_s = grace_s
        self._process = process  # None: threads copy
        self._helper = helper
        self._unsuitable = 0  # copies in a row that no process could make
        self._failed = ("", 0)  # the last uid that failed in the process, and how often
        self._lock = threading.Lock()  # guards `_in_flight`
        self._in_flight: tuple[str, CheckpointCopy | ProcessCopy] | None = None

    def copy(
        self,
        record: CommitRecord,
        *,
        replace: Collection[str],
        may_begin: Callable[[], bool],
        on_progress: Callable[[int], None],
    ) -> None:
        """Copy a checkpoint to the next tier; raise the same errors as `CheckpointCopy.run`.

        Args:
            record: The commit record.
            replace: The uids of checkpoints at that step that may be replaced.
            may_begin: Returns, before each attempt, whether the copy is still wanted: `cancel` has
                no effect between copies.
            on_progress: As in `CheckpointCopy.run`.

        Raises:
            CheckpointGoneError: The source tier no longer has the checkpoint.
        """
        options: dict[str, Any] = {
            "grace_s": self._grace_s,
            "bytes_per_s": self._source.drain_bytes_per_s,
            "replace": list(replace),
        }
        if self._process is not None and self._is_for_process(record):
            try:
                remote = ProcessCopy(self._process, record, workers=self._workers, **options)
                self._run(record, remote, may_begin, on_progress)
                self._check_seen(record)
            # The trainer sees the right place: it has already checked that.
            except (UnsuitableError, WrongPlaceError) as error:
                if not has(self._source.backend, record):
                    msg = f"step {record.step} is no longer in tier {self._source.name}"
                    raise CheckpointGoneError(msg) from error
                self._note_unsuitable(error)
            except StorageTimeoutError:
                raise  # threads would hang in the same store, and cannot be killed
            except PenstockError:
                uid, count = self._failed
                self._failed = record.uid, count + 1 if uid == record.uid else 1
                raise
            else:
                self._unsuitable = 0
                return
        source, target = self._source.backend, self._target.backend
        copy = CheckpointCopy(
            source, target, record, workers=self._workers, helper=self._helper, **options
        )
        self._run(record, copy, may_begin, on_progress)

    def cancel(self, uids: Collection[str] | None = None) -> None:
        """Cancel the copy in flight if its uid is in `uids`, or if `uids` is None."""
        with self._lock:
            if self._in_flight is not None and (uids is None or self._in_flight[0] in uids):
                self._in_flight[1].cancel()

    # ------------------------------------------------------------------------------------------

    def _is_for_process(self, record: CommitRecord) -> bool:
        """Return whether the copy is large enough, and has not failed too often in a process."""
        wanted = self._source.drain_in == "process" or record.bytes_stored >= WORTH_BYTES
        return wanted and self._failed != (record.uid, _TRIES)

    def _note_unsuitable(self, error: Exception) -> None:
        level = logging.DEBUG if self._unsuitable else logging.WARNING
        log.log(level, "threads of the trainer copy to tier %s: %s", self._target.name, str(error))
        self._unsuitable += 1
        if self._unsuitable == _TRIES:  # a temporary lack of memory would be over by now
            self._process = None

    def _check_seen(self, record: CommitRecord) -> None:
        """Verify that the process has copied to a place that this process sees.

        The other process may have its own memory store or mount under the same URL.
        """
        if not is_whole(self._target.backend, record):
            url = self._target.backend.url
            msg = f"this process does not see the other process's copies at {url}"
            raise UnsuitableError(msg)

    def _run(
        self,
        record: CommitRecord,
        copy: CheckpointCopy | ProcessCopy,
        may_begin: Callable[[], bool],
        on_progress: Callable[[int], None],
    ) -> None:
        with self._lock:
            if not may_begin():
                msg = "the run was closed, or the step was deleted"
                raise SaveAbortedError(msg)
            self._in_flight = record.uid, copy
        try:
            copy.run(on_progress=on_progress)
        finally:
            with self._lock:
                self._in_flight = None

"""One link between two neighbouring tiers: what is marked in the first is copied to the second."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.core.catalog.survey import has, is_whole
from penstock.core.concurrency.watchdog import NEVER, Deadline, Watchdog
from penstock.core.copy.verify import confirmed, retract, verify_blobs
from penstock.core.errors import (
    DamagedError,
    LostRaceError,
    PenstockError,
    SaveAbortedError,
    SaveError,
    StepExistsError,
)
from penstock.core.format.records import mark_name
from penstock.core.tiers.copier import WORTH_BYTES, TierCopier
from penstock.core.tiers.whereabouts import marked_replaces, replaceable
from penstock.core.units import size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.eviction import Rooms
    from penstock.core.tiers.process import CopyProcess
    from penstock.core.tiers.roots import TierRoots

log = logging.getLogger("penstock")

_STUCK = "no progress for %g s"
_HOPELESS = (LostRaceError, StepExistsError, DamagedError)


@dataclass(eq=False, slots=True)
class DrainState:
    """What one link is doing.

    Attributes:
        source: Name of the tier that is copied from.
        target: And to.
        step: Which checkpoint is being copied; None: none.
        bytes_done: Of it.
        bytes_total: Of it.
        bytes_moved: Of all that this process has copied.
        waiting: Steps behind it, in order.
        error: Why the last try failed, while it is tried again; empty: it did not.
        lost: Why checkpoints cannot be copied at all, by step.
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
        """Steps that have yet to be copied."""
        return sorted({*self.waiting, *([] if self.step is None else [self.step])})


class LinkReport(Protocol):
    """Whom a link asks and tells: all links of the run together."""

    rooms: Rooms
    roots: TierRoots

    def prepare(self, number: int, uid: str, step: int, replaces: Collection[str] | None) -> bool:
        """Before a checkpoint is committed in tier `number`."""
        ...

    def arrived(self, number: int, record: CommitRecord) -> None:
        """A checkpoint is whole in tier `number`."""
        ...

    def again(self, number: int, record: CommitRecord) -> bool:
        """Tier `number` has lost it; whether a faster one has it, and brings it once more."""
        ...

    def tell(self, record: CommitRecord, error: BaseException | None) -> None:
        """It will get no further, because of `error`."""
        ...


class DrainLink:
    """Copies from tier `number` to the next, one checkpoint at a time, the lowest step first."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        number: int,
        report: LinkReport,
        *,
        workers: Workers,
        grace_s: float,
        stuck_s: float = 600.0,
        process: CopyProcess | None = None,
    ) -> None:
        self._number = number
        self._source = tiers[number]
        self._target = tiers[number + 1]
        self._report = report
        self._workers = workers
        self._timing = workers.timing
        # A store that has not moved for so long is not waited for.
        self._watchdog = Watchdog(stuck_s, self._timing.clock)
        self._copier = TierCopier(
            self._source, self._target, workers=workers, grace_s=grace_s, process=process
        )
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[CommitRecord] = deque()
        self._current: CommitRecord | None = None
        self._prepared = ""  # uid whose mark in the next tier is written, if it needs one
        self._running = False
        self._tidying = False
        self._closed = False
        self._done_bytes = 0
        self._moved_bytes = 0
        self._error = ""
        self._failing = NEVER  # over when a tier has failed for so long that nobody waits for it
        self._quiet = Deadline(0.0)  # over when the same error is logged again
        self._lost: dict[int, str] = {}
        self._withdrawn: set[str] = set()

    def add(self, record: CommitRecord) -> bool:
        """Queue a checkpoint, unless it is."""
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
        """Copy these no more; waits until none of them is being copied."""
        with self._changed:
            self._withdrawn.update(uids)
            gone = [record for record in self._queue if record.uid in uids]
            self._queue = deque(record for record in self._queue if record.uid not in uids)
            current = self._current
            self._changed.notify_all()
        for record in gone:  # else whoever waits for it would wait until the run is closed
            self._report.tell(record, self._copier.gone(record))
        if current is None or current.uid not in uids:
            return
        self._copier.cancel(uids)
        with self._changed:
            while self._current is current and not self.is_stuck():
                self._changed.wait(self._timing.poll_s)

    def reinstate(self, uids: Collection[str]) -> None:
        """Copy these again when they are added."""
        with self._changed:
            self._withdrawn.difference_update(uids)

    def state(self) -> DrainState:
        """What it is doing."""
        with self._changed:
            current = self._current
            return DrainState(
                self._source.name,
                self._target.name,
                None if current is None else current.step,
                self._done_bytes,
                0 if current is None else current.bytes_stored,
                self._moved_bytes,
                tuple(record.step for record in self._queue),
                self._error or (_STUCK % self._watchdog.limit_s if self.is_stuck() else ""),
                dict(self._lost),
            )

    def settle(self, deadline: Deadline) -> bool:
        """Wait until nothing is left, or what is left is failing; False: neither by then."""
        with self._changed:
            while not (self._closed or self._idle() or self.is_failing()):
                if deadline.is_over():
                    return False
                self._changed.wait(min(self._timing.poll_s, deadline.left_s()))
            return True

    def close(self) -> None:
        """Cancel what is under way, and wait for its end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._copier.cancel()
        with self._changed:
            while (self._running or self._tidying) and not self.is_stuck():
                self._changed.wait(self._timing.poll_s)

    def tidy(self, need_bytes: int = 0) -> None:
        """Make room in the source tier, in the background; copies there are read if need be.

        Args:
            need_bytes: Room for these; what is more than the tier is to keep goes in any case.
        """
        with self._changed:
            if self._tidying or self._closed:
                return
            self._tidying = True
            self._watchdog.moved()
        self._workers.spawn("tidy", partial(self._tidy, need_bytes))

    # ------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def is_failing(self) -> bool:
        """Whether a tier has failed for so long that nobody should wait for it."""
        return self._failing.is_over() or self.is_stuck()

    def is_stuck(self) -> bool:
        """Whether a store neither answers nor fails."""
        busy = self._current is not None or self._tidying
        return busy and self._watchdog.is_over()

    def _is_over(self, record: CommitRecord) -> bool:
        return self._closed or record.uid in self._withdrawn

    def _idle(self) -> bool:
        return not self._queue and self._current is None

    def _run(self) -> None:
        while (record := self._next()) is not None:
            try:
                self._carry(record)
            except BaseException as error:  # noqa: BLE001 - the link itself must go on
                log.error(  # noqa: TRY400 - a record with the exception would hold its frames
                    "step %d: copying it to tier %s ended with %s; the next process goes on",
                    record.step,
                    self._target.name,
                    repr(error),
                )
                self._report.tell(record, SaveError(f"step {record.step}: {error!r}"))
            finally:
                with self._changed:
                    self._current = None
                    over = not self._queue or self._closed
                    self._changed.notify_all()
                if over:
                    self._copier.end_process()

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

    def _carry(self, record: CommitRecord) -> None:
        """Copy one checkpoint, however many tries that takes."""
        pause_s = self._timing.drain_retry_first_s
        while not self.is_closed():
            began = time.monotonic()
            try:
                if record.uid in self._withdrawn:
                    self._report.tell(record, self._copier.gone(record))
                    return
                if not self._copy_once(record):
                    if not self._report.again(self._number, record):
                        self._report.tell(record, self._copier.gone(record))
                    return
            except Exception as error:  # noqa: BLE001 - a task's boundary: logged, and told
                if self.is_closed():
                    return
                if record.uid in self._withdrawn:
                    continue
                self._failed(record, error)
                if isinstance(error, _HOPELESS):
                    self._report.tell(record, error)
                    return
                with self._changed:
                    delay_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                    self._changed.wait_for(lambda: self._is_over(record), delay_s)
                pause_s = min(2 * pause_s, self._timing.drain_retry_most_s)
                self._watchdog.moved()
            else:
                self._succeeded(record, time.monotonic() - began)
                return

    def _copy_once(self, record: CommitRecord) -> bool:
        """Make the next tier have it; False: this one has it no more."""
        source, target = self._source.backend, self._target.backend
        if not has(source, record):
            retract(target, record)
            # Another process may have brought it there, and evicted it here since.
            return is_whole(target, record)
        self._report.roots.check(self._number + 1)
        if not confirmed(target, record, first=partial(self._check_source, record)):
            self._report.rooms.make_room(self._number + 1, record.bytes_stored, prove=self._prove)
            if record.uid != self._prepared:
                known = marked_replaces(source, record.uid)
                self._report.prepare(self._number + 1, record.uid, record.step, known)
                self._prepared = record.uid
            with self._changed:
                self._done_bytes = 0
            self._copier.copy(
                record,
                replace=replaceable(source, target, record) if record.generation else (),
                may_begin=lambda: not self._is_over(record),
                on_progress=self._moved,
            )
            self._report.rooms.note_copied(self._number + 1, record)
        self._report.roots.check(self._number + 1)
        source.delete([mark_name(record.uid)])
        return True

    def _check_source(self, record: CommitRecord) -> None:
        verify_blobs(
            self._source.backend,
            record,
            workers=self._workers,
            on_progress=lambda _: self._moved(0),
        )

    def _moved(self, size_bytes: int) -> None:
        self._watchdog.moved()
        self._done_bytes += size_bytes
        self._moved_bytes += size_bytes

    def _succeeded(self, record: CommitRecord, seconds: float) -> None:
        with self._changed:
            self._error, self._failing, self._quiet = "", NEVER, Deadline(0.0)
            self._prepared = ""  # should the next tier lose it, it comes there anew
        log.info(
            "step %d is in tier %s now: %s in %.2f s",
            record.step,
            self._target.name,
            size_text(record.bytes_stored),
            seconds,
        )
        # Each by itself: whoever waits is told though nothing can be evicted.
        late: list[CommitRecord] = []
        with self._noted(record):
            self._report.rooms.trim(self._number, prove=partial(self._prove_small, late))
        with self._noted(record):
            self._report.arrived(self._number + 1, record)
        if late:
            self.tidy()

    def _tidy(self, need_bytes: int) -> None:
        rooms = self._report.rooms
        try:
            if need_bytes:
                rooms.make_room(self._number, need_bytes, prove=self._prove)
            rooms.trim(self._number, prove=self._prove)
        except Exception as error:  # noqa: BLE001 - a task's boundary: nothing is evicted then
            if not self._closed:
                log.warning("tier %s is not tidied: %s", self._source.name, str(error))
        finally:
            with self._changed:
                self._tidying = False
                self._changed.notify_all()

    def _prove_small(
        self, late: list[CommitRecord], backend: Backend, record: CommitRecord
    ) -> bool:
        """Read a copy if that takes no longer than other calls; else it goes to `late`.

        Someone may be waiting to hear that the checkpoint that was copied last is durable.
        """
        if record.bytes_stored < WORTH_BYTES:
            return self._prove(backend, record)
        late.append(record)
        return False

    def _prove(self, backend: Backend, record: CommitRecord) -> bool:
        def look() -> None:
            if self._closed:
                msg = "the run was closed"
                raise SaveAbortedError(msg)

        verify_blobs(
            backend,
            record,
            workers=self._workers,
            on_progress=lambda _: self._moved(0),
            on_look=look,
            bytes_per_s=self._source.drain_bytes_per_s,
        )
        return True

    @contextmanager
    def _noted(self, record: CommitRecord) -> Iterator[None]:
        """What fails once the copy is whole goes to the log, and no further."""
        try:
            yield
        except PenstockError as error:
            step, name = record.step, self._target.name
            log.warning("after step %d came to tier %s: %s", step, name, str(error))

    def _failed(self, record: CommitRecord, error: Exception) -> None:
        text = (
            str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        )
        clock = self._timing.clock
        hopeless = isinstance(error, _HOPELESS)
        with self._changed:
            repeated = text == self._error and not self._quiet.is_over()
            if hopeless:
                self._lost[record.step] = text
            else:
                self._error = text
                if self._failing is NEVER:
                    self._failing = Deadline(self._timing.drain_failing_s, clock)
                if not repeated:
                    self._quiet = Deadline(self._timing.repeat_log_s, clock)
            self._changed.notify_all()
        log.log(
            logging.DEBUG if repeated else logging.ERROR,
            "step %d cannot be copied from tier %s to %s%s: %s",
            record.step,
            self._source.name,
            self._target.name,
            "" if hopeless else " yet; it will be tried again",
            text,
        )

"""One link between two neighbouring tiers: what is marked in the first is copied to the second."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.confirming import confirmed, retract, verify_blobs
from penstock.core.drain_state import DrainState
from penstock.core.errors import (
    DamagedError,
    LostRaceError,
    PenstockError,
    SaveError,
    StepExistsError,
)
from penstock.core.manifest import mark_name
from penstock.core.sizes import size_text
from penstock.core.survey import has, is_whole
from penstock.core.tier_copier import TierCopier
from penstock.core.tiers import REPEAT_LOG_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.core.abc import Tier
    from penstock.core.copy_process import CopyProcess
    from penstock.core.drain_state import LinkReport
    from penstock.core.manifest import CommitRecord
    from penstock.core.workers import Workers

log = logging.getLogger("penstock")

_PAUSE_S = (1.0, 60.0)  # between two tries, doubled from the first to the second
_PATIENCE_S = 30.0  # after so long a tier that fails is not waited for
_STUCK = "no progress for %g s"
_HOPELESS = (LostRaceError, StepExistsError, DamagedError)


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
        self._stuck_s = stuck_s  # a store that has not moved for so long is not waited for
        self._copier = TierCopier(
            self._source, self._target, workers=workers, grace_s=grace_s, process=process
        )
        self._alive_s = time.monotonic()
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[CommitRecord] = deque()
        self._current: CommitRecord | None = None
        self._prepared = ""  # uid whose mark in the next tier is written, if it needs one
        self._running = False
        self._closed = False
        self._done_bytes = 0
        self._moved_bytes = 0
        self._error = ""
        self._failing_since_s: float | None = None
        self._logged_s = float("-inf")
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
                self._changed.wait(1.0)

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
                self._error or (_STUCK % self._stuck_s if self.is_stuck() else ""),
                dict(self._lost),
            )

    def settle(self, end_s: float | None) -> bool:
        """Wait until nothing is left, or what is left is failing; False: neither by then."""
        with self._changed:
            while not (self._closed or self._idle() or self.is_failing()):
                left_s = 1.0 if end_s is None else min(1.0, end_s - time.monotonic())
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def close(self) -> None:
        """Cancel what is under way, and wait for its end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._copier.cancel()
        with self._changed:
            while self._running and not self.is_stuck():
                self._changed.wait(1.0)

    # ------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def is_failing(self) -> bool:
        """Whether a tier has failed for so long that nobody should wait for it."""
        since_s = self._failing_since_s
        failing = since_s is not None and time.monotonic() - since_s > _PATIENCE_S
        return failing or self.is_stuck()

    def is_stuck(self) -> bool:
        """Whether a store neither answers nor fails."""
        busy = self._current is not None
        return busy and time.monotonic() - self._alive_s > self._stuck_s

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
            self._alive_s = time.monotonic()
            return record

    def _carry(self, record: CommitRecord) -> None:
        """Copy one checkpoint, however many tries that takes."""
        pause_s = _PAUSE_S[0]
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
                pause_s = min(2 * pause_s, _PAUSE_S[1])
                self._alive_s = time.monotonic()
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
        if not confirmed(target, record, first=partial(self._check_source, record)):
            self._report.rooms.make_room(self._number + 1, record.bytes_stored)
            if record.uid != self._prepared:
                self._report.prepare(self._number + 1, record.uid, record.step)
                self._prepared = record.uid
            with self._changed:
                self._done_bytes = 0
            self._copier.copy(
                record, may_begin=lambda: not self._is_over(record), on_progress=self._moved
            )
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
        self._alive_s = time.monotonic()
        self._done_bytes += size_bytes
        self._moved_bytes += size_bytes

    def _succeeded(self, record: CommitRecord, seconds: float) -> None:
        with self._changed:
            self._error, self._failing_since_s, self._logged_s = "", None, float("-inf")
            self._prepared = ""  # should the next tier lose it, it comes there anew
        log.info(
            "step %d is in tier %s now: %s in %.2f s",
            record.step,
            self._target.name,
            size_text(record.bytes_stored),
            seconds,
        )
        # Each by itself: whoever waits is told though nothing can be evicted.
        with self._noted(record):
            self._report.rooms.trim(self._number)
        with self._noted(record):
            self._report.arrived(self._number + 1, record)

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
        now_s = time.monotonic()
        hopeless = isinstance(error, _HOPELESS)
        with self._changed:
            repeated = text == self._error and now_s - self._logged_s < REPEAT_LOG_S
            if hopeless:
                self._lost[record.step] = text
            else:
                self._error = text
                self._failing_since_s = self._failing_since_s or now_s
                self._logged_s = self._logged_s if repeated else now_s
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

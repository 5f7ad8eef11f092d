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

from penstock.core.copy_process import UnsuitableError
from penstock.core.copying import CheckpointCopy, confirmed, retract, verify_blobs
from penstock.core.errors import (
    CheckpointGoneError,
    DamagedError,
    LostRaceError,
    PenstockError,
    SaveAbortedError,
    SaveError,
    StepExistsError,
)
from penstock.core.manifest import mark_name
from penstock.core.sizes import size_text
from penstock.core.survey import has, is_whole
from penstock.core.tiers import REPEAT_LOG_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import Tier
    from penstock.core.copy_process import CopyProcess, ProcessCopy
    from penstock.core.manifest import CommitRecord
    from penstock.core.tiers import Rooms
    from penstock.core.workers import Workers

log = logging.getLogger("penstock")

_PAUSE_S = (1.0, 60.0)  # between two tries, doubled from the first to the second
_PATIENCE_S = 30.0  # after so long a tier that fails is not waited for
_WORTH_BYTES = 64 << 20  # below, another process costs more than it saves
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


class LinkReport(Protocol):
    """Whom a link asks and tells: all links of the run together."""

    rooms: Rooms

    def prepare(self, number: int, uid: str, step: int) -> bool:
        """Before a checkpoint is committed in tier `number`."""
        ...

    def arrived(self, number: int, record: CommitRecord) -> None:
        """A checkpoint is whole in tier `number`."""
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
        self._grace_s = grace_s
        self._stuck_s = stuck_s  # a store that has not moved for so long is not waited for
        self._process = process  # None: threads of this one copy
        self._alive_s = time.monotonic()
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[CommitRecord] = deque()
        self._current: CommitRecord | None = None
        self._copy: CheckpointCopy | ProcessCopy | None = None
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
            current, copy = self._current, self._copy
            self._changed.notify_all()
        for record in gone:  # else whoever waits for it would wait until the run is closed
            self._report.tell(record, self._gone(record))
        if current is None or current.uid not in uids:
            return
        if copy is not None:
            copy.cancel()
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
            copy = self._copy
            self._changed.notify_all()
        if copy is not None:
            copy.cancel()
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
                if over and self._process is not None:
                    self._process.close()

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
                if record.uid in self._withdrawn or not self._copy_once(record):
                    self._report.tell(record, self._gone(record))
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

    def _gone(self, record: CommitRecord) -> CheckpointGoneError:
        msg = f"step {record.step} was deleted before it was in tier {self._target.name}"
        return CheckpointGoneError(msg)

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
            self._copy_now(record)
        source.delete([mark_name(record.uid)])
        return True

    def _copy_now(self, record: CommitRecord) -> None:
        if self._process is not None and self._is_worth_it(record):
            try:
                self._run_copy(record, self._by_process(self._process, record))
                if is_whole(self._target.backend, record):
                    return
                msg = f"what another process copies to {self._target.backend.url} is not seen here"
                raise UnsuitableError(msg)  # noqa: TRY301 - as if it had noticed itself
            except UnsuitableError as error:
                if not has(self._source.backend, record):
                    raise self._gone(record) from error
                log.warning("threads of the trainer copy to %s: %s", self._target.name, str(error))
                self._process.close()
                self._process = None
        copy = CheckpointCopy(
            self._source.backend,
            self._target.backend,
            record,
            workers=self._workers,
            grace_s=self._grace_s,
            bytes_per_s=self._source.drain_bytes_per_s,
        )
        self._run_copy(record, copy)

    def _is_worth_it(self, record: CommitRecord) -> bool:
        return self._source.drain_in == "process" or record.bytes_stored >= _WORTH_BYTES

    def _by_process(self, process: CopyProcess, record: CommitRecord) -> ProcessCopy:
        return process.copy(
            record,
            workers=self._workers.count,
            grace_s=self._grace_s,
            bytes_per_s=self._source.drain_bytes_per_s,
        )

    def _run_copy(self, record: CommitRecord, copy: CheckpointCopy | ProcessCopy) -> None:
        with self._changed:
            if self._closed or record.uid in self._withdrawn:
                msg = "the run was closed, or the step deleted"
                raise SaveAbortedError(msg)
            self._copy, self._done_bytes = copy, 0
        try:
            copy.run(on_progress=self._moved)
        finally:
            with self._changed:
                self._copy = None

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

"""Copies one checkpoint from a tier to the next: by threads of this process, or by another one."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import has, is_whole
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import (
    CheckpointGoneError,
    PenstockError,
    SaveAbortedError,
    StorageTimeoutError,
)
from penstock.core.tiers.process import UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.core.abc import Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.process import CopyProcess, ProcessCopy

log = logging.getLogger("penstock")

_TRIES = 2
WORTH_BYTES = 64 << 20
"""Below, another process costs more than it saves."""


class TierCopier:
    """One copy at a time, on one thread; `cancel` from any."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        *,
        workers: Workers,
        grace_s: float,
        process: CopyProcess | None,
    ) -> None:
        self._source = source
        self._target = target
        self._workers = workers
        self._grace_s = grace_s
        self._process = process  # None: threads of this one copy
        self._unsuitable = 0  # times in a row
        self._failed = ("", 0)  # times in the process, of one uid
        self._lock = threading.Lock()  # guards the field below
        self._under_way: tuple[str, CheckpointCopy | ProcessCopy] | None = None

    def copy(
        self,
        record: CommitRecord,
        *,
        replace: Collection[str],
        may_begin: Callable[[], bool],
        on_progress: Callable[[int], None],
    ) -> None:
        """Make the next tier have it; raises what `CheckpointCopy.run` raises.

        Args:
            record: Of the checkpoint.
            replace: Uids of checkpoints at that step that make way for it.
            may_begin: Asked before each try, when `cancel` can reach it.
            on_progress: As `CheckpointCopy.run` has it.

        Raises:
            CheckpointGoneError: The tier has it no more.
        """
        if self._process is not None and self._is_for_process(record):
            try:
                copy = self._by_process(self._process, record, replace)
                self._run(record, copy, may_begin, on_progress)
                self._check_seen(record)
            except UnsuitableError as error:
                if not has(self._source.backend, record):
                    raise self.gone(record) from error
                self._note_unsuitable(self._process, error)
            except StorageTimeoutError:
                raise  # as a thread it could not be killed
            except PenstockError:
                uid, count = self._failed
                self._failed = record.uid, count + 1 if uid == record.uid else 1
                raise
            else:
                self._unsuitable = 0
                return
        self._run(record, self._by_threads(record, replace), may_begin, on_progress)

    def cancel(self, uids: Collection[str] | None = None) -> None:
        """End the copy under way, if it is one of `uids`; None: whichever it is."""
        with self._lock:
            if self._under_way is not None and (uids is None or self._under_way[0] in uids):
                self._under_way[1].cancel()

    def end_process(self) -> None:
        """There is nothing to copy for a while."""
        if self._process is not None:
            self._process.close()

    def gone(self, record: CommitRecord) -> CheckpointGoneError:
        """What to tell of one that was deleted."""
        msg = f"step {record.step} was deleted before it was in tier {self._target.name}"
        return CheckpointGoneError(msg)

    # ------------------------------------------------------------------------------------------

    def _is_for_process(self, record: CommitRecord) -> bool:
        """Whether it is worth it, and was not tried in vain: what fails there may go here."""
        wanted = self._source.drain_in == "process" or record.bytes_stored >= WORTH_BYTES
        return wanted and self._failed != (record.uid, _TRIES)

    def _note_unsuitable(self, process: CopyProcess, error: UnsuitableError) -> None:
        process.close()
        level = logging.DEBUG if self._unsuitable else logging.WARNING
        log.log(level, "threads of the trainer copy to %s: %s", self._target.name, str(error))
        self._unsuitable += 1
        if self._unsuitable == _TRIES:  # it is not for lack of memory, or the like
            self._process = None

    def _by_process(
        self, process: CopyProcess, record: CommitRecord, replace: Collection[str]
    ) -> ProcessCopy:
        return process.copy(
            record,
            workers=self._workers.count,
            grace_s=self._grace_s,
            bytes_per_s=self._source.drain_bytes_per_s,
            replace=replace,
        )

    def _by_threads(self, record: CommitRecord, replace: Collection[str]) -> CheckpointCopy:
        return CheckpointCopy(
            self._source.backend,
            self._target.backend,
            record,
            workers=self._workers,
            grace_s=self._grace_s,
            bytes_per_s=self._source.drain_bytes_per_s,
            replace=replace,
        )

    def _check_seen(self, record: CommitRecord) -> None:
        if not is_whole(self._target.backend, record):
            url = self._target.backend.url
            msg = f"what another process copies to {url} is not seen here"
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
                msg = "the run was closed, or the step deleted"
                raise SaveAbortedError(msg)
            self._under_way = record.uid, copy
        try:
            copy.run(on_progress=on_progress)
        finally:
            with self._lock:
                self._under_way = None

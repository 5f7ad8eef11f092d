"""Copies one checkpoint from a tier to the next: in a process of its own, or on threads."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.survey import has, is_whole
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import (
    CheckpointGoneError,
    PenstockError,
    SaveAbortedError,
    StorageTimeoutError,
    WrongPlaceError,
)
from penstock.core.tiers.process import ProcessCopy, UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.core.abc import Tier
    from penstock.core.concurrency.workers import Workers
    from penstock.core.format.records import CommitRecord
    from penstock.core.tiers.process import ProcessSetup

log = logging.getLogger("penstock")

_TRIES = 2  # failures in the process, after which threads copy
WORTH_BYTES = 64 << 20
"""A checkpoint below this size is copied by threads: starting a process takes longer."""


class TierCopier:
    """Makes one copy at a time, on the thread of its link; any thread may call `cancel`."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        *,
        workers: Workers,
        grace_s: float,
        process: ProcessSetup | None,
    ) -> None:
        self._source = source
        self._target = target
        self._workers = workers
        self._grace_s = grace_s
        self._process = process  # None: threads copy
        self._unsuitable = 0  # how often in a row
        self._failed = ("", 0)  # the uid that failed in the process last, and how often
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
            may_begin: Says before each try whether the copy is still wanted: a cancellation that
                comes while none is in flight reaches no copy.
            on_progress: As for `CheckpointCopy.run`.

        Raises:
            CheckpointGoneError: The tier does not have the checkpoint any more.
        """
        options: dict[str, Any] = {
            "grace_s": self._grace_s,
            "bytes_per_s": self._source.drain_bytes_per_s,
            "replace": list(replace),
        }
        if self._process is not None and self._is_for_process(record):
            try:
                elsewhere = ProcessCopy(
                    self._process, record, workers=self._workers.count, **options
                )
                self._run(record, elsewhere, may_begin, on_progress)
                self._check_seen(record)
            # The trainer sees the right place: it has checked that before.
            except (UnsuitableError, WrongPlaceError) as error:
                if not has(self._source.backend, record):
                    msg = f"step {record.step} is not in tier {self._source.name} any more"
                    raise CheckpointGoneError(msg) from error
                self._note_unsuitable(error)
            except StorageTimeoutError:
                raise  # a thread would hang in the same store, and cannot be killed
            except PenstockError:
                uid, count = self._failed
                self._failed = record.uid, count + 1 if uid == record.uid else 1
                raise
            else:
                self._unsuitable = 0
                return
        source, target = self._source.backend, self._target.backend
        copy = CheckpointCopy(source, target, record, workers=self._workers, **options)
        self._run(record, copy, may_begin, on_progress)

    def cancel(self, uids: Collection[str] | None = None) -> None:
        """Cancel the copy in flight, if it is one of `uids`, or if `uids` is None."""
        with self._lock:
            if self._in_flight is not None and (uids is None or self._in_flight[0] in uids):
                self._in_flight[1].cancel()

    # ------------------------------------------------------------------------------------------

    def _is_for_process(self, record: CommitRecord) -> bool:
        """Return whether the copy is large enough, and has not failed there too often."""
        wanted = self._source.drain_in == "process" or record.bytes_stored >= WORTH_BYTES
        return wanted and self._failed != (record.uid, _TRIES)

    def _note_unsuitable(self, error: Exception) -> None:
        level = logging.DEBUG if self._unsuitable else logging.WARNING
        log.log(level, "threads of the trainer copy to %s: %s", self._target.name, str(error))
        self._unsuitable += 1
        if self._unsuitable == _TRIES:  # no passing reason, such as too little memory
            self._process = None

    def _check_seen(self, record: CommitRecord) -> None:
        """Make sure that the process has copied to the place that this process sees.

        It may have a memory store, or a mount, of its own under the same URL.
        """
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
            self._in_flight = record.uid, copy
        try:
            copy.run(on_progress=on_progress)
        finally:
            with self._lock:
                self._in_flight = None

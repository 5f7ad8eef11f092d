"""The process that copies checkpoints for a trainer; `process` is the trainer's side.

The process ends when its input ends, or its parent: else it would copy beside the next trainer,
after this one was killed.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.survey import read_commit
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import BlobNotFoundError, StorageError, WrongPlaceError
from penstock.core.storage.open import open_backend
from penstock.core.tiers.process import encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord

_NICE = 10  # training has priority
_OOM_SCORE = "500"  # if memory runs out, this process is killed first: a copy can be repeated


class CopyServer:
    """Copies from one tier to the next, one checkpoint at a time, as its input asks for it."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        _redirect_output()
        self._writing = threading.Lock()  # guards the output
        self._backend_spec = hello["backend"]
        self._number = hello["number"]
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._job = 0
        self._lock = threading.Lock()  # guards the two below
        self._copy: CheckpointCopy | None = None
        self._cancelled = 0  # the number of the last cancelled job
        self._leaving = threading.Event()
        self._backend: Backend | None = None
        self._unreported = 0
        self._timing = current_timing()
        self._next_report = Deadline(0.0)  # over when progress is reported again
        _forward_logs(self._send, hello["level"])

    def run(self) -> None:
        """Serve until the process ends."""
        with suppress(OSError):
            os.nice(_NICE)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
        threading.Thread(target=self._listen, daemon=True).start()
        self._send({"ready": os.getpid()})
        while True:
            self._do(self._jobs.get())

    def _do(self, job: dict[str, Any]) -> None:
        self._job = job["job"]
        answer: dict[str, Any]
        try:
            answer = self._copied(job)
        except BaseException as error:  # noqa: BLE001 - a task's boundary: the trainer raises it
            answer = {"error": encoded(error)}
        finally:
            with self._lock:
                self._copy = None
        if self._leaving.is_set():
            os._exit(0)
        self._send({"job": self._job, **answer})

    def _copied(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._backend is None:
            try:
                self._backend = open_backend(self._backend_spec)
            except StorageError:
                raise
            except Exception as error:  # noqa: BLE001 - the trainer has opened it, so threads can copy
                why = f"another process cannot open the tiers: {encoded(error)[1][0]}"
                return {"unsuitable": why}
        source, target = (tier.backend for tier in self._backend.tiers[self._number :][:2])
        try:
            record = read_commit(source, job["name"])
        except BlobNotFoundError:
            record = None
        if record is None or record.uid != job["uid"]:
            return {"unsuitable": f"another process does not see what is on {source.url}"}
        workers = Workers(job["workers"])
        try:
            self._run_copy(source, target, record, workers, job)
        except WrongPlaceError as error:  # the trainer sees the right place: it has checked
            return {"unsuitable": f"another process does not see the same tiers: {error}"}
        finally:
            workers.close()
        return {"done": True}

    def _run_copy(
        self,
        source: Backend,
        target: Backend,
        record: CommitRecord,
        workers: Workers,
        job: dict[str, Any],
    ) -> None:
        copy = CheckpointCopy(
            source,
            target,
            record,
            workers=workers,
            grace_s=job["grace_s"],
            bytes_per_s=job["bytes_per_s"],
            replace=job["replace"],
        )
        with self._lock:
            self._copy = copy
            if self._cancelled == self._job or self._leaving.is_set():
                copy.cancel()
        copy.run(on_progress=self._moved)
        self._report_progress()

    def _moved(self, size_bytes: int) -> None:
        self._unreported += size_bytes
        if self._next_report.is_over():  # each report wakes a thread of the trainer
            self._report_progress()

    def _report_progress(self) -> None:
        moved, self._unreported = self._unreported, 0
        self._next_report = Deadline(self._timing.progress_interval_s)
        self._send({"job": self._job, "moved": moved})

    def _listen(self) -> None:
        while line := sys.stdin.buffer.readline():
            message = json.loads(line)
            if "end" in message:
                break
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self._jobs.put(message)
        self.leave()

    def _cancel(self, job: int) -> None:
        with self._lock:
            self._cancelled = job
            if self._copy is not None and self._job == job:
                self._copy.cancel()

    def leave(self) -> None:
        """End the process; wait a little for the copy to release its lease, for the next one."""
        self._leaving.set()
        self._cancel(self._job)
        deadline = Deadline(self._timing.process_leave_s)
        while self._copy is not None and not deadline.is_over():
            time.sleep(self._timing.progress_interval_s)
        os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._writing, suppress(OSError):  # the trainer has closed its end
            while data:
                data = data[self._out.write(data) or 0 :]


def _redirect_output() -> None:
    """Send to standard error what plugins print: standard output carries messages."""
    if sys.stderr is None:  # the trainer has closed it, so descriptor 2 may be any file
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        os.dup2(2, 1)


class _Forward(logging.Handler):
    """Sends log records to the trainer, which has logged those of opening the tiers itself."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "penstock.core.storage.open":
            self._send({"log": (record.levelno, record.getMessage())})


def _forward_logs(send: Callable[[dict[str, Any]], None], level: int) -> None:
    logger = logging.getLogger("penstock")
    logger.setLevel(level)
    logger.addHandler(_Forward(send))
    logger.propagate = False

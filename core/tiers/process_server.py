"""The other side of `copy_process`: what runs in a process that copies checkpoints.

It ends when its input does, or its parent: a trainer that was killed leaves nobody behind who
still copies what the next trainer copies, too.
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

_NICE = 10  # training comes first
_EXPENDABLE = "500"  # if memory runs out: this is begun again, training is not


def serve(hello: dict[str, Any], leave: list[Callable[[], None]]) -> None:
    """Copy what is asked for, one checkpoint at a time, until the input ends.

    Args:
        hello: What to open, and how.
        leave: Its first item is called when the trainer is gone, although a process that it has
            forked holds the input open.
    """
    server = Server(hello)
    leave[:] = [server.leave]
    server.run()


class Server:
    """Copies from one tier to the next."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        _print_elsewhere()
        self._writing = threading.Lock()  # guards the output
        self._backend_spec = hello["backend"]
        self._number = hello["number"]
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._job = 0
        self._lock = threading.Lock()  # guards the two below
        self._copy: CheckpointCopy | None = None
        self._cancelled = 0  # the last job that was
        self._leaving = threading.Event()
        self._backend: Backend | None = None
        self._unsaid = 0
        self._timing = current_timing()
        self._quiet = Deadline(0.0)  # over when it may be told again how much was copied
        _take_logs(self._say, hello["level"])

    def run(self) -> None:
        """Until the process ends."""
        with suppress(OSError):
            os.nice(_NICE)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE, encoding="ascii")
        threading.Thread(target=self._listen, daemon=True).start()
        self._say({"ready": os.getpid()})
        while True:
            self._do(self._jobs.get())

    def _do(self, job: dict[str, Any]) -> None:
        self._job = job["job"]
        answer: dict[str, Any]
        try:
            answer = self._copied(job)
        except BaseException as error:  # noqa: BLE001 - the other side raises it
            answer = {"error": encoded(error)}
        finally:
            with self._lock:
                self._copy = None
        if self._leaving.is_set():
            os._exit(0)
        self._say({"job": self._job, **answer})

    def _copied(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._backend is None:
            try:
                self._backend = open_backend(self._backend_spec)
            except StorageError:
                raise
            except Exception as error:  # noqa: BLE001 - the trainer has it open
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
        except WrongPlaceError as error:  # the trainer has looked: it sees the right one
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
        self._tell_moved()

    def _moved(self, size_bytes: int) -> None:
        self._unsaid += size_bytes
        if self._quiet.is_over():  # each wakes a thread of the trainer
            self._tell_moved()

    def _tell_moved(self) -> None:
        moved, self._unsaid = self._unsaid, 0
        self._quiet = Deadline(self._timing.progress_interval_s)
        self._say({"job": self._job, "moved": moved})

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
        """End, in order if that does not take long: then the next one need not wait for a lease."""
        self._leaving.set()
        self._cancel(self._job)
        deadline = Deadline(self._timing.process_leave_s)
        while self._copy is not None and not deadline.is_over():
            time.sleep(self._timing.progress_interval_s)
        os._exit(0)

    def _say(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._writing, suppress(OSError):  # nobody listens any more
            while data:
                data = data[self._out.write(data) or 0 :]


def _print_elsewhere() -> None:
    """What plugins print is not for the other side."""
    if sys.stderr is None:  # the trainer has closed its own: 2 is anything by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        os.dup2(2, 1)


class _Forward(logging.Handler):
    """Log records go to the trainer's log, those of opening it aside: it has had them."""

    def __init__(self, say: Any) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "penstock.core.storage.open":
            self._say({"log": (record.levelno, record.getMessage())})


def _take_logs(say: Any, level: int) -> None:
    logger = logging.getLogger("penstock")
    logger.setLevel(level)
    logger.addHandler(_Forward(say))
    logger.propagate = False

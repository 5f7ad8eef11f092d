"""Copies one checkpoint in another process, so that the copy takes only what training leaves over.

A copy on threads of the trainer holds the GIL for moments of each piece, and slows training with
each change of the memory map. The trainer starts `ProcessCopy` and sends it the job on standard
input; `copy_for_trainer` reports on standard output, in lines of JSON. `SIGTERM` cancels the copy.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core import errors
from penstock.core.catalog.survey import read_commit
from penstock.core.concurrency.timing import CountedClock, current_timing
from penstock.core.concurrency.watchdog import NEVER, Deadline
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import (
    BlobNotFoundError,
    SaveAbortedError,
    SaveError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.format.records import commit_name
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.concurrency.timing import Timing
    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")

_KEY = "penstock"  # of messages; tells them from what other code prints
_NICE = 10  # training has priority
_OOM_SCORE = "500"  # if memory runs out, this process is killed first: a copy can be repeated

# The trainer may end while this program still imports, so a thread watches it from the beginning:
# else it would copy beside the next trainer.
_PROGRAM = """
import os, sys
sys.path[:] = [path for path in sys.path if path]  # no modules of the working directory
import json, signal, threading, time
line = sys.stdin.readline()
job = json.loads(line) if line else sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer may ignore or block it
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
def watch():
    while os.getppid() == job["pid"]:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(job["leave_s"])
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
sys.path[:] = job["path"]
from penstock.core.tiers.process import copy_for_trainer
copy_for_trainer(job)
"""


class UnsuitableError(Exception):
    """No process can make the copy: none can be started, or it does not see the same tiers."""


# -- the trainer's side ------------------------------------------------------------------------


def _working_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - relative paths start there
    except OSError:  # it was deleted, so no path can be relative to it
        return None


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What the processes that copy from one tier to the next have in common.

    Attributes:
        backend: The configuration from which the tiers were opened.
        number: The number of the tier to copy from.
        stuck_s: A process is killed if its copy makes no progress for so long.
        timing: Has the times that a process may take to start, and to end.
        folder: The working directory at the time when the tiers were opened; None if it is gone.
    """

    backend: str | dict[str, Any] = field(repr=False)  # it may hold secrets
    number: int
    stuck_s: float
    timing: Timing
    folder: str | None = field(default_factory=_working_folder)


class ProcessCopy:
    """The copy of one checkpoint by another process, with the methods of `CheckpointCopy`."""

    def __init__(
        self, setup: ProcessSetup, record: CommitRecord, *, workers: int, **options: object
    ) -> None:
        """Prepare a copy by `workers` threads; `options` are those of `CheckpointCopy`."""
        self._job = {
            "backend": setup.backend,
            "number": setup.number,
            "name": commit_name(record.step, record.generation),
            "uid": record.uid,
            "workers": workers,
            "options": options,
            "level": log.getEffectiveLevel(),
            "leave_s": setup.timing.process_leave_s,
        }
        self._folder = setup.folder
        self._stuck_s = setup.stuck_s
        self._timing = setup.timing
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()
        self._began = False  # whether the process has imported all that it needs
        self._cancelled = False

    def run(self, *, on_progress: Callable[[int], None]) -> None:
        """Copy the checkpoint; raise the same errors as `CheckpointCopy.run`.

        Raises:
            UnsuitableError: No process can be started, or it does not see the checkpoint.
            StorageTimeoutError: The copy made no progress; the process was killed.
            StorageError: The process ended.
        """
        process = self._process = self._started()
        try:
            self._send_job(process)
            if self._cancelled:  # `cancel` found no process yet
                process.terminate()
            self._follow(process, on_progress)
        finally:
            self._end(process)

    def cancel(self) -> None:
        """Make `run` raise SaveAbortedError soon; any thread may call this."""
        self._cancelled = True
        if self._process is not None:
            self._process.terminate()

    def _started(self) -> subprocess.Popen[bytes]:
        if not sys.executable or getattr(sys, "frozen", False):
            msg = "a process for it cannot be started: where Python is, is not known"
            raise UnsuitableError(msg)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, *_flags(), "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Python 3.13.0 cannot be used in a folder that is gone.
                cwd=self._folder or "/",
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which ends the process
            )
        except (OSError, ValueError) as error:
            msg = f"a process for it cannot be started: {error}"
            raise UnsuitableError(msg) from error
        log.debug("process %d copies", process.pid)
        return process

    def _send_job(self, process: subprocess.Popen[bytes]) -> None:
        # Python ignores entries of `sys.path` that are no text, and JSON cannot take them. "" means
        # the working directory, and where that is gone, the process is in another one.
        entries: list[object] = [*sys.path]
        path = [e for e in entries if isinstance(e, str) and (e or self._folder)]
        job = {**self._job, "path": path, "pid": os.getpid()}
        assert process.stdin is not None
        with suppress(OSError), process.stdin as stdin:  # `_received` reports an early end
            stdin.write(json.dumps(job).encode() + b"\n")

    def _follow(self, process: subprocess.Popen[bytes], on_progress: Callable[[int], None]) -> None:
        """Return when the copy is made; raise the error that ended it."""
        # Counts polls instead of reading the time: a debugger or SIGSTOP that stops this process
        # stops the other one as well, and that time is no silence of the other one.
        clock = CountedClock()
        silent, ending = Deadline(self._timing.process_start_s, clock), NEVER
        while True:
            kind, value = self._received(process)
            if kind == "done":
                return
            if kind == "error":
                raise decoded(*value)
            if kind == "log":
                log.log(value[0], "%s", value[1])
            elif kind == "moved":
                self._began, silent = True, Deadline(self._stuck_s, clock)
                on_progress(value)
            else:
                if self._cancelled and ending is NEVER:
                    ending = Deadline(self._timing.process_end_s, clock)
                clock.advance(self._timing.poll_s)
                if silent.is_over() or ending.is_over():
                    process.kill()
                    why = f"no progress for {silent.limit_s:g} s; the copying process was killed"
                    raise self._failure(why, StorageTimeoutError)

    def _received(self, process: subprocess.Popen[bytes]) -> tuple[str, Any]:
        """Return kind and value of the next message; an empty kind if none comes within `poll_s`.

        Raises:
            StorageError: The process has ended.
        """
        while (line := self._line(process)) is not None:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict) and _KEY in message:
                    kind, value = message[_KEY]
                    return kind, value
            # Other code has printed it, such as `sitecustomize`.
            log.debug("process %d printed: %r", process.pid, bytes(line[:200]))
        return "", None

    def _line(self, process: subprocess.Popen[bytes]) -> bytearray | None:
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while b"\n" not in self._unread:
            # A process that it has forked may hold the other end of the pipe open: then the end of
            # the file never comes.
            is_over = process.poll() is not None
            if poll.poll(0 if is_over else 1000 * self._timing.poll_s):
                data = os.read(process.stdout.fileno(), 1 << 16)
            elif is_over:
                data = b""
            else:
                return None
            if not data:
                code = self._end(process)
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                why = f"the copying process ended with {how}"
                raise self._failure(why)
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failure(self, why: str, kind: type[StorageError] = StorageError) -> Exception:
        if self._cancelled:
            msg = "the copy was given up; copy again to continue from where it ended"
            return SaveAbortedError(msg)
        if not self._began:
            return UnsuitableError(f"a process for it does not start: {why}")
        return kind(f"{why}; what it had sealed is not copied again")

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Make the process end, by force after `process_end_s`; return its exit code."""
        process.terminate()
        assert process.stdout is not None
        process.stdout.close()
        for _ in range(2):
            try:
                return process.wait(self._timing.process_end_s)
            except subprocess.TimeoutExpired:
                process.kill()
        # The kernel holds the process in a call that does not end, as that of a dead mount.
        log.warning("process %d, which copies, cannot be killed: it is left behind", process.pid)
        return -signal.SIGKILL


def _flags() -> list[str]:
    """Return the options by which the other interpreter ignores the same settings as this one."""
    flags = sys.flags
    if flags.isolated:
        return ["-I"]
    wanted = ("-E", flags.ignore_environment), ("-s", flags.no_user_site), ("-S", flags.no_site)
    return [flag for flag, given in wanted if given]


# -- the other process -------------------------------------------------------------------------


def copy_for_trainer(job: dict[str, Any]) -> NoReturn:
    """Make the copy that a trainer wants, report to it, and end the process."""
    reports = _Reports(job["level"])
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    reports.send_progress()
    try:
        _copy(job, reports)
    except BaseException as error:  # noqa: BLE001 - a task's boundary: the trainer raises it
        reports.send("error", encoded(error))
    else:
        reports.send_progress()
        reports.send("done")
    os._exit(0)


def _copy(job: dict[str, Any], reports: _Reports) -> None:
    try:
        backend = open_backend(job["backend"])
    except StorageError:
        raise
    except Exception as error:  # the trainer has opened it, so threads can copy
        msg = f"another process cannot open the tiers: {encoded(error)[1][0]}"
        raise UnsuitableError(msg) from error
    source, target = (tier.backend for tier in backend.tiers[job["number"] :][:2])
    try:
        record = read_commit(source, job["name"])
    except BlobNotFoundError:
        record = None
    if record is None or record.uid != job["uid"]:
        msg = f"another process does not see what is on {source.url}"
        raise UnsuitableError(msg)
    copy = CheckpointCopy(
        source,
        target,
        record,
        workers=Workers(job["workers"]),
        **job["options"],
    )
    terminated = False

    def cancel(*_: object) -> None:
        nonlocal terminated
        terminated = True
        copy.cancel()

    signal.signal(signal.SIGTERM, cancel)
    try:
        copy.run(on_progress=reports.moved)
    except SaveAbortedError:
        if terminated:  # the trainer learns of the signal from the end of this process
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        raise


class _Reports(logging.Handler):
    """Sends progress and log records to the trainer; standard output is for nothing else."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        # What plugins print goes to standard error. If the trainer has closed that, descriptor 2
        # may be any file.
        os.dup2(os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else 2, 1)
        self._writing = threading.Lock()  # guards the output
        self._interval_s = current_timing().progress_interval_s
        self._next = Deadline(0.0)  # over when progress is reported again
        self._moved_bytes = 0  # since the last report
        logger = logging.getLogger("penstock")
        logger.setLevel(level)
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "penstock.core.storage.open":  # the trainer has logged these itself
            self.send("log", (record.levelno, record.getMessage()))

    def moved(self, size_bytes: int) -> None:
        self._moved_bytes += size_bytes
        if self._next.is_over():  # each report wakes a thread of the trainer
            self.send_progress()

    def send_progress(self) -> None:
        moved_bytes, self._moved_bytes = self._moved_bytes, 0
        self._next = Deadline(self._interval_s)
        self.send("moved", moved_bytes)

    def send(self, kind: str, value: object = None) -> None:
        data = json.dumps({_KEY: (kind, value)}).encode() + b"\n"
        with self._writing, suppress(OSError):  # the trainer has closed its end
            while data:
                data = data[self._out.write(data) or 0 :]


def encoded(error: BaseException) -> tuple[str, list[Any]]:
    """Return an error as JSON can hold it: the nearest class of our tree, and its arguments."""
    for cls in type(error).__mro__:
        if cls is UnsuitableError or getattr(errors, cls.__name__, None) is cls:
            return cls.__name__, json.loads(json.dumps(error.args, default=str))
    return SaveError.__name__, [f"{type(error).__name__}: {error}"]


def decoded(name: str, args: list[Any]) -> Exception:
    """Return the error that `encoded` was given, or the nearest one."""
    error: Exception = getattr(errors, name, UnsuitableError)(*args)
    return error

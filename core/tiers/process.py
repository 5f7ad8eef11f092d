"""Copies one checkpoint in another process, which uses only resources that training leaves idle.

A copy on threads of the trainer briefly holds the GIL for each piece, and slows training with each
change of the memory map. The trainer pickles a call of `copy_for_trainer` to the standard input of
the process. Then the trainer reads from a pipe: the numbers of copied bytes, and at the end None or
the error. `SIGTERM` cancels the copy; the kernel sends it when the trainer ends.

Tested in `tests/integration/tiers/test_copy_process.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.catalog.survey import read_listed
from penstock.core.concurrency.timing import CountedClock, current_timing
from penstock.core.concurrency.watchdog import NEVER, Deadline
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import (
    PenstockError,
    SaveAbortedError,
    SaveError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.foreign import said
from penstock.core.format.records import commit_name
from penstock.core.storage.open import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")

_NICE = 10  # training has priority
_OOM_SCORE = "500"  # if memory runs out, this process is killed first: a copy can be repeated
_PR_SET_PDEATHSIG = 1

_PROGRAM = """
import pickle, signal, sys
for number in signal.SIGTERM, signal.SIGALRM:  # the trainer may ignore or block them
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
sys.path[:] = pickle.load(sys.stdin.buffer)
pickle.load(sys.stdin.buffer)()
"""


class UnsuitableError(Exception):
    """Signals that no process can make the copy: none can start, or it would see other tiers."""


# -- the trainer's side ------------------------------------------------------------------------


def _working_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - relative paths start there
    except OSError:  # it was deleted, so no path can be relative to it
        return None


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The settings shared by all processes that copy from one tier to the next.

    Attributes:
        backend: The configuration that opened the tiers.
        number: The number of the tier to copy from.
        stuck_s: A process without progress for this long is killed.
        folder: The working directory when the tiers were opened; None if it is gone.
    """

    backend: str | dict[str, Any] = field(repr=False)  # it may hold secrets
    number: int
    stuck_s: float
    folder: str | None = field(default_factory=_working_folder)


class ProcessCopy:
    """A copy of one checkpoint by another process, with the methods of `CheckpointCopy`."""

    def __init__(
        self, setup: ProcessSetup, record: CommitRecord, *, workers: Workers, **options: object
    ) -> None:
        """Prepare a copy with `workers.count` threads; `options` are as in `CheckpointCopy`."""
        self._setup = setup
        self._timing = workers.timing
        name = commit_name(record.step, record.generation)
        call = partial(copy_for_trainer, setup, name, record.uid, workers=workers.count)
        self._call = partial(call, level=log.getEffectiveLevel(), **options)
        self._process: subprocess.Popen[bytes] | None = None
        self._began = False  # whether the process has imported everything that it needs
        self._cancelled = False

    def run(self, *, on_progress: Callable[[int], None]) -> None:
        """Copy the checkpoint; raise the same errors as `CheckpointCopy.run`.

        Raises:
            UnsuitableError: No process can be started, or it does not see the checkpoint.
            StorageTimeoutError: The copy made no progress; the process was killed.
            StorageError: The process ended before the copy was complete.
        """
        reports, writer = Pipe(duplex=False)
        with reports:
            with writer:
                process = self._process = self._started(writer)
            try:
                if self._cancelled:  # `cancel` found no process yet
                    process.terminate()
                self._follow(process, reports, on_progress)
            finally:
                self._end(process)

    def cancel(self) -> None:
        """Make `run` raise SaveAbortedError soon. Any thread may call this."""
        self._cancelled = True
        if self._process is not None:
            self._process.terminate()

    def _started(self, writer: Connection) -> subprocess.Popen[bytes]:
        if not sys.executable or getattr(sys, "frozen", False):
            msg = "a copying process cannot start: the path of Python is unknown"
            raise UnsuitableError(msg)
        folder = self._setup.folder
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, *_flags(), "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # what plugins print is not the trainer's output
                pass_fds=[writer.fileno()],
                # Python 3.13.0 does not start in a folder that is gone.
                cwd=folder or "/",
                start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the process
            )
        except (OSError, ValueError) as error:
            msg = f"a copying process cannot start: {error}"
            raise UnsuitableError(msg) from error
        log.debug("process %d copies", process.pid)
        # "" means the working directory; if that is gone, the process is in another one.
        entries: list[object] = [*sys.path]  # Python ignores those that are not strings
        path = [entry for entry in entries if isinstance(entry, str) and (entry or folder)]
        call = partial(
            self._call,
            end_s=self._timing.process_end_s,
            trainer=os.getpid(),
            reports=writer.fileno(),
        )
        assert process.stdin is not None
        with suppress(OSError), process.stdin as stdin:  # `_follow` reports an early end
            stdin.write(pickle.dumps(path) + pickle.dumps(call))
        return process

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        reports: Connection,
        on_progress: Callable[[int], None],
    ) -> None:
        """Return when the copy is complete; raise the error that ended it."""
        # Counts polls instead of reading the time: while a debugger or SIGSTOP stops this process,
        # it reads no reports, and that must not count as silence of the other process.
        clock = CountedClock()
        silent, ending = Deadline(self._timing.process_start_s, clock), NEVER
        while True:
            # A fork of the process may hold the other end of the pipe: then there is no EOF.
            is_over = process.poll() is not None
            if reports.poll(0 if is_over else self._timing.poll_s):
                try:
                    report = reports.recv()
                except EOFError:
                    raise self._ended(process) from None
                if report is None:
                    return
                if isinstance(report, Exception):
                    raise report
                self._began, silent = True, Deadline(self._setup.stuck_s, clock)
                on_progress(report)
            elif is_over:
                raise self._ended(process)
            else:
                if self._cancelled and ending is NEVER:
                    ending = Deadline(self._timing.process_end_s, clock)
                clock.advance(self._timing.poll_s)
                if silent.is_over() or ending.is_over():
                    process.kill()
                    why = f"no progress for {silent.limit_s:g} s; the copying process was killed"
                    raise self._failure(why, StorageTimeoutError)

    def _ended(self, process: subprocess.Popen[bytes]) -> Exception:
        code = self._end(process)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._failure(f"the copying process ended with {how}")

    def _failure(self, why: str, kind: type[StorageError] = StorageError) -> Exception:
        if self._cancelled:
            msg = "the copy was given up; copy again to continue it"
            return SaveAbortedError(msg)
        if not self._began:
            return UnsuitableError(f"a copying process did not start: {why}")
        return kind(f"{why}; the blobs that it has sealed will not be copied again")

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End the process, by force after `process_end_s`; return its exit code."""
        process.terminate()
        for _ in range(2):
            try:
                return process.wait(self._timing.process_end_s)
            except subprocess.TimeoutExpired:
                process.kill()
        # The kernel holds the process in a call that does not return, as on a dead mount.
        log.warning("copying process %d cannot be killed, and is abandoned", process.pid)
        return -signal.SIGKILL


def _flags() -> list[str]:
    """Return the options that make the other interpreter ignore the same settings as this one."""
    flags = sys.flags
    if flags.isolated:
        return ["-I"]
    wanted = ("-E", flags.ignore_environment), ("-s", flags.no_user_site), ("-S", flags.no_site)
    # `-P`: no modules of the working directory.
    return ["-P", *[flag for flag, given in wanted if given]]


# -- the other process -------------------------------------------------------------------------


def copy_for_trainer(
    setup: ProcessSetup,
    name: str,
    uid: str,
    *,
    workers: int,
    level: int,
    end_s: float,
    trainer: int,
    reports: int,
    **options: Any,
) -> None:
    """Run a copy for a trainer, report its progress and end, and exit the process.

    Args:
        setup: The tiers.
        name: The name of the commit record.
        uid: The uid of the commit record.
        workers: The number of threads.
        level: The log level of the trainer.
        end_s: The process is killed if a cancelled copy has not ended after this time, in seconds.
        trainer: The process id of the trainer.
        reports: The descriptor of the pipe for reports.
        options: The options of `CheckpointCopy`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != trainer:  # it has already ended: another trainer may be copying now
        os._exit(1)
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    log.setLevel(level)
    logging.getLogger(open_backend.__module__).disabled = True  # the trainer has logged the same
    with Connection(reports, readable=False) as connection, suppress(BrokenPipeError):
        connection.send(0)
        try:
            copy = _opened(setup, name, uid, workers, options)
            _run(copy, connection, end_s)
            connection.send(None)
        except (PenstockError, UnsuitableError) as error:
            connection.send(error)
        except BaseException as error:  # noqa: BLE001 - a task's boundary: the trainer raises it
            connection.send(SaveError(said(error)))
    os._exit(0)


def _opened(
    setup: ProcessSetup, name: str, uid: str, workers: int, options: dict[str, Any]
) -> CheckpointCopy:
    try:
        backend = open_backend(setup.backend)
    except StorageError:
        raise
    except Exception as error:  # the trainer has opened it, so threads can copy
        msg = f"another process cannot open the tiers: {error}"
        raise UnsuitableError(msg) from error
    source, target = (tier.backend for tier in backend.tiers[setup.number :][:2])
    record = read_listed(source, name)
    if record is None or record.uid != uid:
        msg = f"another process does not see the checkpoint on {source.url}"
        raise UnsuitableError(msg)
    return CheckpointCopy(source, target, record, workers=Workers(workers), **options)


def _run(copy: CheckpointCopy, connection: Connection, end_s: float) -> None:
    terminated = False
    unreported = 0
    # Each report wakes a thread of the trainer.
    interval_s = current_timing().progress_interval_s
    quiet = Deadline(interval_s)

    def cancel(*_: object) -> None:
        nonlocal terminated
        terminated = True
        copy.cancel()
        signal.setitimer(signal.ITIMER_REAL, end_s)  # then the kernel ends the process

    def moved(size_bytes: int) -> None:
        nonlocal unreported, quiet
        unreported += size_bytes
        if quiet.is_over():
            connection.send(unreported)
            unreported, quiet = 0, Deadline(interval_s)

    signal.signal(signal.SIGTERM, cancel)
    try:
        copy.run(on_progress=moved)
    except SaveAbortedError:
        if terminated:  # the trainer learns of the signal from the end of this process
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        raise
    connection.send(unreported)

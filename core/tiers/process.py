"""The trainer's side of a process that copies checkpoints; `process_server` is the other side.

A copy on threads of the trainer holds the GIL for moments of each piece, and slows training with
each change of the memory map; a process of low priority takes only what training leaves over. The
process speaks lines of JSON over its standard streams, and ends when these end.
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
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core import errors
from penstock.core.concurrency.timing import CountedClock
from penstock.core.concurrency.watchdog import NEVER, Deadline, Watchdog
from penstock.core.errors import (
    PenstockError,
    SaveAbortedError,
    SaveError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.format.records import commit_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.core.concurrency.timing import Timing
    from penstock.core.format.records import CommitRecord

log = logging.getLogger("penstock")

# The trainer may end while this program still imports, so a thread watches it from the beginning.
_PROGRAM = """
import os, sys
sys.path[:] = [path for path in sys.path if path]  # no modules of the working directory
import json, threading, time
line = sys.stdin.buffer.readline()
hello = json.loads(line) if line else sys.exit()
leave = [lambda: os._exit(0)]
def watch():
    while os.getppid() == hello["pid"]:
        time.sleep(1)
    leave[0]()
threading.Thread(target=watch, daemon=True).start()
sys.path[:] = hello["path"]
from penstock.core.tiers.process_server import CopyServer
server = CopyServer(hello)
leave[0] = server.leave
server.run()
"""


class UnsuitableError(Exception):
    """No process can make the copy: none can be started, or it does not see the same tiers."""


class CopyProcess:
    """Copies from one tier to the next, in a process that starts with the first copy."""

    def __init__(
        self, backend: str | dict[str, Any], number: int, *, stuck_s: float, timing: Timing
    ) -> None:
        """Prepare; no process starts yet.

        Args:
            backend: The configuration from which the tiers were opened.
            number: The number of the tier to copy from.
            stuck_s: The process is killed if its copy makes no progress for so long.
            timing: Has the times that the process may take to start, and to end.
        """
        self._hello = {"backend": backend, "number": number, "level": log.getEffectiveLevel()}
        try:
            self._folder: str | None = os.getcwd()  # noqa: PTH109 - relative paths start there
        except OSError:  # it was deleted, so no path can be relative to it
            self._folder = None
        self._stuck_s = stuck_s
        self._timing = timing
        self._jobs = 0
        self._child: _Child | None = None

    def copy(
        self,
        record: CommitRecord,
        *,
        workers: int,
        grace_s: float,
        bytes_per_s: float | None,
        replace: Collection[str] = (),
    ) -> ProcessCopy:
        """Return the copy of one checkpoint, to be `run`; options are those of `CheckpointCopy`."""
        self._jobs += 1
        job = {
            "job": self._jobs,
            "name": commit_name(record.step, record.generation),
            "uid": record.uid,
            "workers": workers,
            "grace_s": grace_s,
            "bytes_per_s": bytes_per_s,
            "replace": sorted(replace),
        }
        return ProcessCopy(self._started, job, stuck_s=self._stuck_s, timing=self._timing)

    def _started(self, go_on: Callable[[], bool]) -> _Child:
        if self._child is None or not self._child.is_running():
            self.close()
            self._child = _Child(self._hello, self._folder, go_on, self._timing)
        return self._child

    def close(self) -> None:
        """End the process, if it runs; the next copy starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.end(self._timing.process_end_s)


class ProcessCopy:
    """The copy of one checkpoint by another process, with the methods of `CheckpointCopy`."""

    def __init__(
        self,
        start: Callable[[Callable[[], bool]], _Child],
        job: dict[str, Any],
        *,
        stuck_s: float,
        timing: Timing,
    ) -> None:
        self._start = start
        self._child: _Child | None = None
        self._job = job
        self._stuck_s = stuck_s
        self._timing = timing
        self._cancelled = False

    def run(self, *, on_progress: Callable[[int], None]) -> None:
        """Copy the checkpoint; raise the same errors as `CheckpointCopy.run`.

        Raises:
            UnsuitableError: No process can be started, or it does not see the checkpoint.
            StorageTimeoutError: The copy made no progress; the process was killed.
            StorageError: The process ended.
        """
        child = self._child = self._start(lambda: not self._cancelled)
        child.send(self._job)
        if self._cancelled:  # `cancel` found no process yet
            self.cancel()
        # Counts polls instead of reading the time: a debugger or SIGSTOP that stops this process
        # stops the other one as well, and that time is no silence of the other one.
        clock = CountedClock()
        silent, ending = Watchdog(self._stuck_s, clock), NEVER
        while True:
            message = self._received(child)
            if message is None:
                if self._cancelled and ending is NEVER:
                    ending = Deadline(self._timing.process_end_s, clock)
                clock.advance(self._timing.poll_s)
                self._check_deadlines(child, silent, ending)
            elif message.get("job") == self._job["job"]:
                if "moved" not in message:
                    _raise_outcome(message)
                    return
                silent.moved()
                on_progress(message["moved"])

    def cancel(self) -> None:
        """Make `run` raise SaveAbortedError soon; any thread may call this."""
        self._cancelled = True
        if self._child is not None:
            self._child.send({"cancel": self._job["job"]})

    def _received(self, child: _Child) -> dict[str, Any] | None:
        try:
            return child.receive()
        except EOFError as error:
            if self._cancelled:
                raise _given_up() from None
            msg = f"{error}; what it had sealed is not copied again"
            raise StorageError(msg) from None

    def _check_deadlines(self, child: _Child, silent: Watchdog, ending: Deadline) -> None:
        if ending.is_over():
            child.end(0.0)
            raise _given_up()
        if silent.is_over():
            child.end(0.0)
            msg = f"no progress for {self._stuck_s:g} s; the process that copied was killed"
            raise StorageTimeoutError(msg)


class _Child:
    """The process, and the messages to and from it."""

    def __init__(
        self,
        hello: dict[str, Any],
        folder: str | None,
        go_on: Callable[[], bool],
        timing: Timing,
    ) -> None:
        """Start the process, and wait until it is ready, or `go_on` returns False.

        Raises:
            UnsuitableError: The process does not start.
            SaveAbortedError: `go_on` returned False.
        """
        self._timing = timing
        self._sending = threading.Lock()  # guards the standard input of the process
        self._received = bytearray()
        if not sys.executable or getattr(sys, "frozen", False):
            msg = "a process for it cannot be started: where Python is, is not known"
            raise UnsuitableError(msg)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [sys.executable, *_flags(), "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Python 3.13.0 cannot be used in a folder that is gone.
                cwd=folder or "/",
                start_new_session=True,  # Ctrl-C reaches the trainer alone, which ends the process
            )
        except (OSError, ValueError) as error:
            msg = f"a process for it cannot be started: {error}"
            raise UnsuitableError(msg) from error
        try:
            self._greet(hello, folder, go_on)
        except EOFError as error:
            msg = f"a process for it does not start: {error}"
            raise UnsuitableError(msg) from error
        except BaseException:
            self.end(0.0)
            raise
        log.debug("process %d copies", self._process.pid)

    def _greet(self, hello: dict[str, Any], folder: str | None, go_on: Callable[[], bool]) -> None:
        # Python ignores entries of `sys.path` that are no text, and JSON cannot take them. "" means
        # the working directory, and where that is gone, the process is in another one.
        entries: list[object] = [*sys.path]
        path = [entry for entry in entries if isinstance(entry, str) and (entry or folder)]
        self.send({**hello, "path": path, "pid": os.getpid()})
        clock = CountedClock()
        deadline = Deadline(self._timing.process_start_s, clock)
        while self.receive() is None:
            clock.advance(self._timing.poll_s)
            if not go_on():
                raise _given_up()
            if deadline.is_over():
                msg = f"a process for it said nothing for {deadline.limit_s:g} s"
                raise UnsuitableError(msg)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; do nothing if the process has ended, which `receive` reports."""
        assert self._process.stdin is not None
        with self._sending, suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if none comes within `poll_s`; log records are logged.

        Raises:
            EOFError: The process has ended; the message says how.
        """
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                message = _parsed(line)
                if message is None:
                    log.debug("process %d printed: %r", self._process.pid, bytes(line[:200]))
                    continue
                if "log" not in message:
                    return message
                level, text = message["log"]
                log.log(level, "%s", text)
            elif not self._read():
                return None

    def _read(self) -> bool:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(1000 * self._timing.poll_s):
            if self._process.poll() is None:
                return False
            # A process that it has forked may hold the other end of the pipe open: then the end of
            # the file never comes.
            if not poll.poll(0):
                self._raise_ended()
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            self._raise_ended()
        self._received += data
        return True

    def _raise_ended(self) -> NoReturn:
        code = self.end(self._timing.process_end_s)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        msg = f"the process that copied ended with {how}"
        raise EOFError(msg)

    def end(self, patience_s: float) -> int:
        """Make the process end, by force after `patience_s`; return its exit code."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self.send({"end": True})  # a fork of the trainer may hold the pipe open
        with self._sending, suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        for again in (False, True):
            try:
                return process.wait(self._timing.process_end_s if again else patience_s)
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


def _parsed(line: bytes | bytearray) -> dict[str, Any] | None:
    """Return a message, or None if other code has printed the line, such as `sitecustomize`."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def encoded(error: BaseException) -> tuple[str, list[Any]]:
    """Return an error as JSON can hold it: the nearest class of our tree, and its arguments."""
    for cls in type(error).__mro__:
        if issubclass(cls, PenstockError) and getattr(errors, cls.__name__, None) is cls:
            return cls.__name__, json.loads(json.dumps(error.args, default=str))
    return SaveError.__name__, [f"{type(error).__name__}: {error}"]


def _raise_outcome(message: dict[str, Any]) -> None:
    """Raise the error that ended a copy, if any."""
    if "unsuitable" in message:
        raise UnsuitableError(message["unsuitable"])
    if "error" in message:
        name, args = message["error"]
        error: PenstockError = getattr(errors, name)(*args)
        raise error


def _given_up() -> SaveAbortedError:
    return SaveAbortedError("the copy was given up; copy again to go on from where it ended")

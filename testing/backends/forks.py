"""Checks with several processes: some die without closing anything, others publish in a race."""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

import mmap
import os
import signal
import time
import warnings
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NoReturn

from penstock.core.errors import BlobExistsError, BlobNotFoundError
from penstock.core.foreign import said
from penstock.core.types import WriteRequest
from penstock.testing.expectations import (
    NotTriedError,
    declared,
    expect,
    expect_equal,
    expect_names,
    pattern,
    promise,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend
    from penstock.testing.expectations import BackendCheck, OpenRoot

_BLOB, _PART, _COMMIT = "data/u/blobs/0.raw", "data/u/parts/0.json", "commits/1.json"
_PUBLISHERS, _TURNS = 3, 12

_outlives_process = declared(
    lambda capabilities: capabilities.outlives_process,
    "that stored data outlives the process (outlives_process)",
)

_CHILD_S = 60
_WHY_BYTES = 2000  # fits into a pipe: the child must not wait for its parent to read
_BREACH, _UNABLE = 2, 1


@promise
@_outlives_process
def what_was_sealed_or_published_outlives_a_killed_process(open_root: OpenRoot) -> None:
    data = pattern(70_000)
    length = len(data) - 777  # shorter than written, so that a deferred seal shows

    def store_and_die() -> Backend:
        backend = open_root("killed")
        writer = backend.create(_BLOB)
        writer.write([WriteRequest(0, (memoryview(data),))])
        writer.seal(length)
        backend.publish(_PART, b"old")
        backend.publish(_PART, b"part")
        backend.publish(_COMMIT, b"commit", exclusive=True)
        return backend

    ForkedProcess(store_and_die).join("store anything")
    with closing(open_root("killed")) as backend:
        for name, call in ((_BLOB, "seal"), (_PART, "publish"), (_COMMIT, "exclusive publish")):
            _expect_there(backend, name, call)
        expect_names(backend, "", sorted([_BLOB, _PART, _COMMIT]))
        size = backend.stat(_BLOB).size_bytes
        expect(size, length, "size_bytes of a blob that a process sealed before it was killed")
        expect_equal(read_all(backend, _BLOB, length), data[:length])
        expect_equal(backend.read_record(_PART, limit_bytes=99), b"part")
        expect_equal(backend.read_record(_COMMIT, limit_bytes=99), b"commit")


@promise
@_outlives_process
@declared(lambda capabilities: capabilities.appends, "durable appends (appends)")
def synced_bytes_outlive_a_killed_process(open_root: OpenRoot) -> None:
    data = pattern(70_000)

    def sync_and_die() -> Backend:
        backend = open_root("appending")
        writer = backend.create(_BLOB)
        writer.write([WriteRequest(0, (memoryview(data),))])
        writer.sync(len(data))
        # The writer lives on: a killed process finalizes nothing.
        backend.writer_of_test = writer  # type: ignore[attr-defined]
        return backend

    ForkedProcess(sync_and_die).join("sync a blob")
    with closing(open_root("appending")) as backend:
        _expect_there(backend, _BLOB, "sync")
        expect_equal(read_all(backend, _BLOB, len(data)), data)


def _expect_there(backend: Backend, name: str, call: str) -> None:
    try:
        backend.stat(name)
    except BlobNotFoundError as error:
        msg = (
            f"{name} is missing after the process was killed, though {call} had returned: data "
            "kept in memory until `close`, or for a thread, is lost with the process; "
            f"{call} must return only once the store has the data"
        )
        raise AssertionError(msg) from error


@promise
@_outlives_process
@declared(lambda capabilities: capabilities.exclusive_publish, "exclusive publish")
def of_processes_in_a_race_exactly_one_wins(open_root: OpenRoot) -> None:
    with closing(open_root("processes")) as backend:
        backend.publish("here.json", b"{}")  # so that no process creates the root in the race
    race = Race(_PUBLISHERS, _TURNS)
    children = [
        ForkedProcess(lambda number=number: _publish(open_root, race, number))  # type: ignore[misc] # bound at once
        for number in range(_PUBLISHERS)
    ]
    with ExitStack() as joined:  # all, even if one raises
        for child in children:
            joined.callback(child.join, "use the store")
    with closing(open_root("processes")) as backend:
        for turn in range(_TURNS):
            won = race.winners(turn)
            assert len(won) == 1, (
                f"{len(won)} of {_PUBLISHERS} processes won the exclusive publish of one name: a "
                "lock, or a check before the publish, stops no other process; let the store "
                "decide, or declare exclusive_publish=False"
            )
            record = backend.read_record(f"commits/{turn}.json", limit_bytes=9)
            expect_equal(record, b"%d" % won[0])


def _publish(open_root: OpenRoot, race: Race, number: int) -> Backend:
    try:
        backend = open_root("processes")
        backend.list("")  # a client that does not survive a fork fails here, not in the race
        for turn in range(_TURNS):
            race.begin(number, turn)
            race.end(number, turn, _outcome(backend, f"commits/{turn}.json", number))
    finally:
        race.leave(number)
    return backend


def _outcome(backend: Backend, name: str, number: int) -> int:
    try:
        backend.publish(name, b"%d" % number, exclusive=True)
    except BlobExistsError:
        return Race.LOST
    except Exception as error:
        msg = (
            "an exclusive publish in a race with other processes must win or raise "
            f"BlobExistsError, but raised {said(error)}"
        )
        raise AssertionError(msg) from error
    return Race.WON


PROCESS_CHECKS: tuple[BackendCheck, ...] = (
    what_was_sealed_or_published_outlives_a_killed_process,
    synced_bytes_outlive_a_killed_process,
    of_processes_in_a_race_exactly_one_wins,
)


class ForkedProcess:
    """A child process that runs `work`, and then dies as if killed by `kill -9`.

    No `finally`, `atexit` or `close` of the caller runs in the child.
    """

    def __init__(self, work: Callable[[], object], /) -> None:
        """Start the child.

        Args:
            work: Runs in the child. Its result is kept until the child dies: an unreferenced
                backend might close, and write its buffered data.
        """
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of the parent's threads, whose locks the child may find
            # held forever; the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _run_and_vanish(work, writer)
        os.close(writer)
        self._pipe = reader

    def join(self, what: str, /) -> None:
        """Wait until the child is dead.

        Args:
            what: The end of the sentence "a forked process could not".

        Raises:
            AssertionError: The child found a breach of the contract.
            NotTriedError: The child failed in another way, as with a client that a fork breaks.
        """
        with os.fdopen(self._pipe, "rb") as pipe:
            why = pipe.read().decode(errors="replace")
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code == _BREACH:
            raise AssertionError(why)
        if code < 0:
            hung = f" (it hung for {_CHILD_S} s)" if -code == signal.SIGALRM else ""
            why = f"signal {-code} ended it{hung}"
        msg = f"a forked process could not {what}: {why}"
        raise NotTriedError(msg)


def _run_and_vanish(work: Callable[[], object], pipe: int) -> NoReturn:
    status = _UNABLE
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_S)  # a client that does not survive a fork may hang
        kept = work()  # noqa: F841 - held until the process is gone
        status = 0
    except BaseException as error:  # noqa: BLE001 - passed to the parent, which raises it
        breach = isinstance(error, AssertionError)
        status = _BREACH if breach else _UNABLE
        os.write(pipe, (str(error) if breach else said(error)).encode()[:_WHY_BYTES])
    finally:  # no caller code may run in the child, even after an error
        os._exit(status)


class Race:
    """Memory shared by racing processes: the turn of each, and the outcome of each turn.

    Create it before the processes are forked.
    """

    WON, LOST = 1, 2
    _GONE = 255

    def __init__(self, processes: int, turns: int, /) -> None:
        """Allocate the memory, for at most 254 turns."""
        self._processes = processes
        self._turns = turns
        # Bytes, each written by one process only: no write can be torn, so there is no lock that a
        # dying process could leave held.
        self._memory = mmap.mmap(-1, processes * (1 + turns))

    def begin(self, number: int, turn: int, /) -> None:
        """Wait until every live process has reached `turn`."""
        self._memory[number] = turn + 1
        while min(self._memory[: self._processes]) <= turn:
            time.sleep(0)

    def end(self, number: int, turn: int, outcome: int, /) -> None:
        """Store the outcome of `turn` for the process."""
        self._memory[self._place(number, turn)] = outcome

    def leave(self, number: int, /) -> None:
        """Let the other processes continue without this one."""
        self._memory[number] = self._GONE

    def winners(self, turn: int, /) -> list[int]:
        """Return the numbers of the processes that won `turn`."""
        places = [self._place(number, turn) for number in range(self._processes)]
        return [number for number, at in enumerate(places) if self._memory[at] == self.WON]

    def _place(self, number: int, turn: int) -> int:
        return self._processes + number * self._turns + turn

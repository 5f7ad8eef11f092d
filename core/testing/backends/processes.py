"""Checks with several processes: after one was killed, and while several publish at once."""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from penstock.core.errors import BlobExistsError, BlobNotFoundError
from penstock.core.foreign import said
from penstock.core.testing.backends.forks import ForkedProcess, Race
from penstock.core.testing.expectations import (
    declared,
    expect,
    expect_equal,
    expect_names,
    pattern,
    promise,
    read_all,
)
from penstock.core.types import WriteRequest

if TYPE_CHECKING:
    from penstock.core.abc import Backend
    from penstock.core.testing.expectations import BackendCheck, OpenRoot

_BLOB, _PART, _COMMIT = "data/u/blobs/0.raw", "data/u/parts/0.json", "commits/1.json"
_PUBLISHERS, _TURNS = 3, 12

_outlives_process = declared(
    lambda capabilities: capabilities.outlives_process,
    "that what is stored outlives the process (outlives_process)",
)


@promise
@_outlives_process
def what_was_sealed_or_published_outlives_a_killed_process(open_root: OpenRoot) -> None:
    data = pattern(70_000)
    length = len(data) - 777  # shorter than written, so that a seal that was put off shows

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
        found = backend.stat(_BLOB).size_bytes
        expect(found, length, "size_bytes of a blob that a process sealed before it was killed")
        expect_equal(read_all(backend, _BLOB, length), data[:length])
        expect_equal(backend.read_record(_PART, limit_bytes=99), b"part")
        expect_equal(backend.read_record(_COMMIT, limit_bytes=99), b"commit")


def _expect_there(backend: Backend, name: str, call: str) -> None:
    try:
        backend.stat(name)
    except BlobNotFoundError as error:
        msg = (
            f"{name} is not there after the process whose {call} had returned was killed: what is "
            "kept in memory until `close`, or until a thread gets to it, is lost with the process; "
            f"{call} returns once the store has it"
        )
        raise AssertionError(msg) from error


@promise
@_outlives_process
@declared(lambda capabilities: capabilities.exclusive_publish, "exclusive publish")
def of_processes_in_a_race_exactly_one_wins(open_root: OpenRoot) -> None:
    with closing(open_root("processes")) as backend:
        backend.publish("here.json", b"{}")  # so that no process has to create the root in the race
    race = Race(_PUBLISHERS, _TURNS)
    children = [
        ForkedProcess(lambda number=number: _publish(open_root, race, number))  # type: ignore[misc] # bound at once
        for number in range(_PUBLISHERS)
    ]
    with ExitStack() as joined:  # all, also where one of them raises
        for child in children:
            joined.callback(child.join, "use the store")
    with closing(open_root("processes")) as backend:
        for turn in range(_TURNS):
            won = race.winners(turn)
            assert len(won) == 1, (
                f"{len(won)} of {_PUBLISHERS} processes won the exclusive publish of one name: a "
                "lock, or a look before the publish, keeps no other process away; let the store "
                "decide, or say exclusive_publish=False"
            )
            record = backend.read_record(f"commits/{turn}.json", limit_bytes=9)
            expect_equal(record, b"%d" % won[0])


def _publish(open_root: OpenRoot, race: Race, number: int) -> Backend:
    try:
        backend = open_root("processes")
        backend.list("")  # a client that does not survive a fork fails here, and not in the race
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
    of_processes_in_a_race_exactly_one_wins,
)

"""Checks of records and names: publish, list, stat, delete, close."""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import BlobExistsError, BlobNotFoundError, FormatError, StorageError
from penstock.core.testing.expectations import (
    declared,
    expect,
    expect_equal,
    expect_names,
    pattern,
    promise,
    raises,
    read_all,
)
from penstock.core.types import ReadRequest, WriteRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.testing.expectations import BackendCheck, OpenRoot

PUBLISHERS = 8
TURNS, MOST_TURNS, CHANGES = 60, 20_000, 60
_LONG_AGO_S = 1_500_000_000.0  # 2017: before any store that Penstock wrote to
BAD_NAMES = ("", "/abs", "../up", "a/../b", "a//b", "a/", "./a", "a b", "a\x00b", "ä", "a~b", "..")


@promise
def published_records_read_back(open_root: OpenRoot) -> None:
    with closing(open_root("publish")) as backend:
        for name, data in (("a.json", b"{}"), ("x/y/z.bin", pattern(300_000)), ("e", b"")):
            backend.publish(name, data)
            expect_equal(backend.read_record(name, limit_bytes=1 << 20), data)
            expect_equal(read_all(backend, name, len(data)), data)
            backend.publish(name, b"replaced")
            expect_equal(backend.read_record(name, limit_bytes=8), b"replaced")


@promise
def a_record_larger_than_allowed_is_refused(open_root: OpenRoot) -> None:
    with closing(open_root("limit")) as backend:
        backend.publish("big.json", b"x" * 101)
        with raises(FormatError, by="read_record of 101 bytes with limit_bytes=100"):
            backend.read_record("big.json", limit_bytes=100)
        expect_equal(backend.read_record("big.json", limit_bytes=101), b"x" * 101)


@promise
def exclusive_publish_never_replaces(open_root: OpenRoot) -> None:
    with closing(open_root("exclusive")) as backend:
        backend.publish("commits/1.json", b"first", exclusive=True)
        with raises(BlobExistsError, by="an exclusive publish of a name that is taken"):
            backend.publish("commits/1.json", b"second", exclusive=True)
        expect_equal(backend.read_record("commits/1.json", limit_bytes=99), b"first")
        expect_names(backend, "commits/", ["commits/1.json"])
        backend.delete(["commits/1.json"])
        backend.publish("commits/1.json", b"third", exclusive=True)
        expect_equal(backend.read_record("commits/1.json", limit_bytes=99), b"third")


@promise
@declared(lambda capabilities: capabilities.exclusive_publish, "exclusive publish")
def of_publishers_in_a_race_exactly_one_wins(open_root: OpenRoot) -> None:
    with closing(open_root("race")) as one, closing(open_root("race")) as two:
        for turn in range(10):
            start = threading.Barrier(PUBLISHERS)

            def publish(number: int, turn: int = turn, start: threading.Barrier = start) -> bool:
                start.wait()
                backend = one if number % 2 else two
                try:
                    backend.publish(f"commits/{turn}.json", b"%d" % number, exclusive=True)
                except BlobExistsError:
                    return False
                return True

            with ThreadPoolExecutor(PUBLISHERS) as pool:
                won = list(pool.map(publish, range(PUBLISHERS)))
            assert won.count(True) == 1, f"{won.count(True)} publishers won"
            record = one.read_record(f"commits/{turn}.json", limit_bytes=9)
            expect_equal(record, b"%d" % won.index(True))
        expect_names(one, "", [f"commits/{turn}.json" for turn in range(10)])  # no temporary


@promise
def a_reader_never_sees_a_torn_record(open_root: OpenRoot) -> None:
    with closing(open_root("torn")) as backend:
        versions = [bytes([n]) * (1000 + 7000 * n) for n in range(4)]
        backend.publish("r.json", versions[0])
        stop = threading.Event()
        torn: set[int] = set()
        seen = [b""]

        def look() -> None:
            while not stop.is_set():
                record = backend.read_record("r.json", limit_bytes=1 << 20)
                if record != seen[-1]:
                    seen.append(record)
                if record not in versions:
                    torn.add(len(record))

        reader = threading.Thread(target=look)
        interval_s = sys.getswitchinterval()
        # By default a quick store has published everything before the reader gets the GIL again.
        sys.setswitchinterval(1e-6)
        reader.start()
        try:
            for turn in range(MOST_TURNS):
                backend.publish("r.json", versions[turn % 4])
                if turn >= TURNS and (len(seen) > CHANGES or not reader.is_alive()):
                    break
        finally:
            stop.set()
            reader.join()
            sys.setswitchinterval(interval_s)
        assert len(seen) > 1, "a reader got nothing while the record was replaced"
        assert not torn, f"records of {sorted(torn)} bytes were read, which nobody published"


@promise
def list_is_by_prefix_sorted_and_at_any_depth(open_root: OpenRoot) -> None:
    with closing(open_root("list")) as backend:
        expect_names(backend, "", [])
        expect_names(backend, "nothing/here/", [])
        names = ["a.b/c", "a/b/c/d", "a/bb", "a0", "b/x"]
        for size, name in enumerate(reversed(names)):
            backend.publish(name, b"x" * size)
        expect_names(backend, "", names)
        expect_names(backend, "a", names[:-1])
        expect_names(backend, "a/", ["a/b/c/d", "a/bb"])
        expect_names(backend, "a/b", ["a/b/c/d", "a/bb"])
        expect_names(backend, "a/b/", ["a/b/c/d"])
        expect_names(backend, "b/x", ["b/x"])
        expect_names(backend, "c", [])
        for info in backend.list(""):
            size = 4 - names.index(info.name)
            expect(info.size_bytes, size, f"size_bytes that list gives of {info.name}")
            found = backend.stat(info.name)
            assert info == found, (
                f"list and stat disagree about {info.name}: list gives {info!r}, stat {found!r}"
            )


@promise
def stat_tells_size_and_the_time_of_the_store(open_root: OpenRoot) -> None:
    with closing(open_root("stat")) as backend:
        with raises(BlobNotFoundError, by="stat of what is not there"):
            backend.stat("r.json")
        before = backend.store_time_s()
        backend.publish("r.json", b"12345")
        after = backend.store_time_s()
        info = backend.stat("r.json")
        expect((info.name, info.size_bytes), ("r.json", 5), "name and size that stat gives")
        slack = 2.0  # stores with times of whole seconds, or two
        assert before - slack <= info.modified_s <= after + slack, (
            f"stat gives the time {info.modified_s} for a record that was published between "
            f"{before} and {after} by the clock of the store (store_time_s)"
        )
        expect_names(backend, "", ["r.json"])


@promise
def the_clock_of_the_store_goes(open_root: OpenRoot) -> None:
    with closing(open_root("clock")) as backend:
        backend.publish("first.json", b"{}")
        began_s = backend.store_time_s(), backend.stat("first.json").modified_s
        for what, time_s in zip(("store_time_s", "stat"), began_s, strict=True):
            assert time_s > _LONG_AGO_S, (
                f"{what} gives the time {time_s}: it is seconds since 1970, by the store's clock; "
                "prune never takes what such a clock calls young"
            )
        deadline = Deadline(current_timing().store_tick_s)
        while True:
            backend.publish("later.json", b"{}")
            now_s = backend.store_time_s(), backend.stat("later.json").modified_s
            stands = [
                name
                for name, before, after in zip(
                    ("store_time_s", "the time that stat gives"), began_s, now_s, strict=True
                )
                if after <= before
            ]
            if not stands:
                return
            assert not deadline.is_over(), (
                f"{' and '.join(stands)} did not move in {deadline.limit_s} s, while records were "
                "published: by a clock that stands nothing ever gets old enough for prune"
            )
            time.sleep(0.005)


@promise
def delete_removes_what_is_named_and_nothing_else(open_root: OpenRoot) -> None:
    with closing(open_root("delete")) as backend:
        names = ["commits/1.json", "data/u/blobs/0.raw", "data/u/index", "data/v/index", "z"]
        for name in names:
            backend.publish(name, b"x")
        backend.delete([])
        # Missing and repeated names are no errors: a deletion is repeated after a crash.
        backend.delete(["z", "never/was", "data/u/index", "z", "data/u/blobs/0.raw"])
        expect_names(backend, "", ["commits/1.json", "data/v/index"])
        with raises(BlobNotFoundError, by="stat of what was deleted"):
            backend.stat("z")
        with raises(BlobNotFoundError, by="read of what was deleted"):
            backend.read([ReadRequest("data/u/index", 0, memoryview(bytearray(1)))])
        backend.publish("data/u/index", b"again", exclusive=True)
        expect_equal(backend.read_record("data/u/index", limit_bytes=9), b"again")


@promise
def malformed_names_are_refused_everywhere(open_root: OpenRoot) -> None:
    target = memoryview(bytearray(1))
    with closing(open_root("names")) as backend:
        for name in BAD_NAMES:
            calls: dict[str, Callable[[], object]] = {
                "create": lambda n=name: backend.create(n),  # type: ignore[misc]
                "publish": lambda n=name: backend.publish(n, b"x"),  # type: ignore[misc]
                "read": lambda n=name: backend.read([ReadRequest(n, 0, target)]),  # type: ignore[misc]
                "read_record": lambda n=name: backend.read_record(n, limit_bytes=9),  # type: ignore[misc]
                "stat": lambda n=name: backend.stat(n),  # type: ignore[misc]
                "delete": lambda n=name: backend.delete([n]),  # type: ignore[misc]
            }
            for method, call in calls.items():
                with raises(StorageError, by=f"{method} of the malformed name {name!r}"):
                    call()
        for prefix in ("/", "../", "a//", "a b"):
            with raises(StorageError, by=f"list of the malformed prefix {prefix!r}"):
                backend.list(prefix)
        expect_names(backend, "", [])


@promise
def what_was_stored_outlives_the_instance(open_root: OpenRoot) -> None:
    first = open_root("reopen")
    first.publish("r.json", b"record")
    writer = first.create("b.raw")
    writer.write([WriteRequest(0, (memoryview(b"blob"),))])
    writer.seal(4)
    first.close()
    with closing(open_root("reopen")) as second:
        expect_names(second, "", ["b.raw", "r.json"])
        expect_equal(read_all(second, "b.raw", 4), b"blob")
        expect_equal(second.read_record("r.json", limit_bytes=9), b"record")


@promise
def close_may_be_repeated_and_ends_all_use(open_root: OpenRoot) -> None:
    backend = open_root("close")
    backend.publish("r.json", b"x")
    writer = backend.create("b.raw")
    backend.submit_write(writer, [WriteRequest(0, (memoryview(pattern(100_000)),))])
    backend.close()
    backend.close()
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: backend.create("c.raw"),
        "publish": lambda: backend.publish("s.json", b"x"),
        "stat": lambda: backend.stat("r.json"),
        "list": lambda: backend.list(""),
        "delete": lambda: backend.delete(["r.json"]),
        "read": lambda: backend.read([ReadRequest("r.json", 0, memoryview(bytearray(1)))]),
    }
    for method, call in calls.items():
        with raises(StorageError, by=f"{method} after close"):
            call()


RECORD_CHECKS: tuple[BackendCheck, ...] = (
    published_records_read_back,
    a_record_larger_than_allowed_is_refused,
    exclusive_publish_never_replaces,
    of_publishers_in_a_race_exactly_one_wins,
    a_reader_never_sees_a_torn_record,
    list_is_by_prefix_sorted_and_at_any_depth,
    stat_tells_size_and_the_time_of_the_store,
    the_clock_of_the_store_goes,
    delete_removes_what_is_named_and_nothing_else,
    malformed_names_are_refused_everywhere,
    what_was_stored_outlives_the_instance,
    close_may_be_repeated_and_ends_all_use,
)

"""Checks of records, names, an instance's declarations, and the leftovers of a crash."""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import ValidationError

from penstock.core.abc import Backend, PluginConfig
from penstock.core.concurrency.timing import current_timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ConfigError,
    FormatError,
    PenstockError,
    StorageError,
)
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.backends.forks import ForkedProcess
from penstock.testing.expectations import (
    MIB,
    NotTriedError,
    at_phase,
    declared,
    expect,
    expect_equal,
    expect_names,
    expect_own_api_version,
    expect_signatures,
    pattern,
    promise,
    raises,
    read_all,
)
from penstock.testing.faults import WrapperBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import BlobWriter
    from penstock.testing.expectations import BackendCheck, OpenRoot

PUBLISHERS = 8
TURNS, MOST_TURNS, CHANGES = 60, 20_000, 60
_LONG_AGO_S = 1_500_000_000.0  # 2017: before any store that Penstock wrote to
BAD_NAMES = ("", "/abs", "../up", "a/../b", "a//b", "a/", "./a", "a b", "a\x00b", "ä", "a~b", "..")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"(?i)pass(word|wd|phrase)?|secret|token|credential|(access|api|account)_?key")
_HALF = 0.5  # the share of cached pages that shows a cached blob; truncating may cache a last page
_ANY_SCHEME = "fsspec"  # serves every scheme that names no backend
_PROBE_BYTES = 16 * mmap.PAGESIZE


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
        assert len(seen) > 1, "a reader saw no version of a record that was replaced meanwhile"
        assert not torn, f"records of {sorted(torn)} bytes were read, but never published"


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
            expect(info.size_bytes, size, f"list's size_bytes of {info.name}")
            stat = backend.stat(info.name)
            assert info == stat, (
                f"list and stat disagree about {info.name}: list gives {info!r}, stat {stat!r}"
            )


@promise
def stat_tells_size_and_the_time_of_the_store(open_root: OpenRoot) -> None:
    with closing(open_root("stat")) as backend:
        with raises(BlobNotFoundError, by="stat of a missing name"):
            backend.stat("r.json")
        before = backend.store_time_s()
        backend.publish("r.json", b"12345")
        after = backend.store_time_s()
        info = backend.stat("r.json")
        expect((info.name, info.size_bytes), ("r.json", 5), "stat's name and size")
        slack = 2.0  # stores with times of whole seconds, or two
        assert before - slack <= info.modified_s <= after + slack, (
            f"stat gives the time {info.modified_s} for a record published between "
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
                f"{what} gives the time {time_s}: give seconds since 1970, by the store's clock; "
                "prune never deletes data that such a clock calls young"
            )
        deadline = Deadline(current_timing().store_tick_s)
        while True:
            backend.publish("later.json", b"{}")
            now_s = backend.store_time_s(), backend.stat("later.json").modified_s
            stuck = [
                name
                for name, before, after in zip(
                    ("store_time_s", "the time that stat gives"), began_s, now_s, strict=True
                )
                if after <= before
            ]
            if not stuck:
                return
            assert not deadline.is_over(), (
                f"{' and '.join(stuck)} did not advance in {deadline.limit_s} s, while "
                "records were published: with a stopped clock, no data gets old enough for prune"
            )
            time.sleep(0.005)


@promise
def delete_removes_what_is_named_and_nothing_else(open_root: OpenRoot) -> None:
    with closing(open_root("delete")) as backend:
        names = ["commits/1.json", "data/u/blobs/0.raw", "data/u/index", "data/v/index", "z"]
        for name in names:
            backend.publish(name, b"x")
        backend.delete([])
        # Missing and repeated names are no error: a crash may repeat a deletion.
        backend.delete(["z", "never/was", "data/u/index", "z", "data/u/blobs/0.raw"])
        expect_names(backend, "", ["commits/1.json", "data/v/index"])
        with raises(BlobNotFoundError, by="stat of a deleted record"):
            backend.stat("z")
        with raises(BlobNotFoundError, by="read of a deleted record"):
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


@promise
def it_says_which_version_of_the_contract_it_is_for(open_root: OpenRoot) -> None:
    with closing(open_root("version")) as backend:
        expect_own_api_version(backend)


@promise
def its_methods_take_the_arguments_of_the_contract(open_root: OpenRoot) -> None:
    with closing(open_root("signatures")) as backend:
        expect_signatures(backend, Backend)


@promise
def its_url_shows_where_it_is_and_no_credentials(open_root: OpenRoot) -> None:
    with closing(open_root("url")) as backend:
        url: object = backend.url
        assert isinstance(url, str), f"url is a {type(url).__name__}, not a str"
        assert url, "url is empty: it must show users where the blobs are"
        assert url.isprintable(), "url has unprintable characters"
        expect(backend.url, url, "url, read again,")
        # No message shows the password or key: it would end up in a log.
        match = _SCHEME.match(url)
        if match is None:
            return  # not a URL, as of a backend of several places: nothing opens it
        assert not urlsplit(url).password, (
            "url holds a password (between :// and @): users and logs see it; "
            "leave user and password out"
        )
        secret = [key for key, _ in parse_qsl(urlsplit(url).query) if _SECRET.search(key)]
        assert not secret, (
            f"url holds the option {secret[0]}, which may be a credential: users and "
            "logs see it; leave it out"
        )
        here = match[1] == "file" and backend.capabilities.local  # any engine may open it
        served = match[1] == backend.name or backend.name == _ANY_SCHEME or here
        assert served or isinstance(backend, WrapperBackend), (
            f"url begins with {match[1]}://, but Penstock opens this backend by its name: "
            f"{backend.name}://"
        )


@promise
def its_url_means_the_same_store(open_root: OpenRoot) -> None:
    with closing(open_root("again")) as backend:
        made_by_hand = isinstance(backend, WrapperBackend) or backend.Config is PluginConfig
        if made_by_hand or not _SCHEME.match(backend.url):
            return  # such a backend is constructed, never opened by URL
        config = _options_of(backend)
        if not backend.capabilities.local:
            return  # a remote store may need a server or a key that is not in the URL
        backend.publish("here.json", b"{}")
        try:
            again = type(backend).open(config, open_backend=_open_nothing)
        except PenstockError:
            return  # the backend needs an option that the URL does not show
        with closing(again):
            expect(again.url, backend.url, "url of the backend opened by this url")
            expect_names(again, "here", ["here.json"])


def _options_of(backend: Backend) -> PluginConfig:
    cls, (base, _, query) = type(backend), backend.url.partition("?")
    what = f"{cls.__name__}.from_url, called with the backend's own url ({base}),"
    try:
        config: object = cls.from_url(base, dict(parse_qsl(query)))
    except (ValidationError, ConfigError) as error:
        fields = ", ".join(cls.Config.model_fields) or "none"
        msg = (
            f"{what} raises {type(error).__name__}: it must return an instance of Config (fields: "
            f"{fields}). The inherited from_url sets the field `url`: override it if there is none"
        )
        raise AssertionError(msg) from error
    assert isinstance(config, cls.Config), (
        f"{what} returned a {type(config).__name__}, not the backend's Config"
    )
    return config


def _open_nothing(spec: object) -> NoReturn:
    msg = f"the check opens no backend for {type(spec).__name__}"
    raise ConfigError(msg)


@promise
def free_bytes_is_a_number_of_bytes_or_none(open_root: OpenRoot) -> None:
    with closing(open_root("free")) as backend:
        for what in ("free_bytes of an empty store", "free_bytes after a publish"):
            free: object = backend.free_bytes()
            fine = free is None or (type(free) is int and free >= 0)
            assert fine, (
                f"{what} is {free!r} of type {type(free).__name__}: return an int >= 0, or None if "
                "it is unknown"
            )
            backend.publish("r.json", b"{}")


@promise
@declared(lambda capabilities: capabilities.direct_io, "direct I/O")
def direct_io_leaves_the_page_cache_alone(open_root: OpenRoot) -> None:
    with closing(open_root("direct")) as backend:
        data = pattern(MIB) * 2
        writer = backend.create("data/d.raw")
        writer.write([WriteRequest(0, (at_phase(data, 0),))])
        writer.seal(len(data))
        expect_equal(read_all(backend, "data/d.raw", len(data)), data)
        file = file_of_size(backend, len(data))
        if file is None or not goes_past_the_cache(file.parent):
            msg = "found no blob file on a file system where direct writes bypass the page cache"
            raise NotTriedError(msg)
        cached = cached_part(file)
        assert cached is None or cached < _HALF, (
            f"direct_io is declared, but {cached:.0%} of a blob is in the page cache after it was "
            "written and read: open files with O_DIRECT, or declare direct_io=False"
        )


@promise
def sweep_takes_nothing_that_has_a_name_or_is_young(open_root: OpenRoot) -> None:
    with closing(open_root("sweep")) as backend:
        backend.publish("commits/1.json", b"{}")
        sealed = backend.create("data/u/blobs/0.raw")
        sealed.write([WriteRequest(0, (memoryview(b"sealed"),))])
        sealed.seal(6)
        young = backend.create("data/u/blobs/1.raw")
        young.write([WriteRequest(0, (memoryview(b"young"),))])
        now_s = backend.store_time_s()
        for before_s in (0.0, now_s - 3600):
            result: object = backend.sweep(before_s)  # type: ignore[func-returns-value] # plugins may return anything
            expect(result, None, f"the result of sweep({before_s})")
        young.seal(5)
        # All are old by this clock, but `sweep` may delete only files without a name.
        backend.sweep(now_s + 3600)
        names = ["commits/1.json", "data/u/blobs/0.raw", "data/u/blobs/1.raw"]
        expect_names(backend, "", names)
        expect_equal(read_all(backend, "data/u/blobs/0.raw", 6), b"sealed")
        expect_equal(read_all(backend, "data/u/blobs/1.raw", 5), b"young")


@promise
def what_a_crash_leaves_is_listed_and_can_be_deleted(open_root: OpenRoot) -> None:
    name = "data/u/blobs/crashed.raw"
    _crash_while_writing(open_root, name)
    with closing(open_root("crash")) as backend:
        if name not in [info.name for info in backend.list("data/")]:
            # Right if nothing was left, or only files for `sweep`: then the name is free.
            try:
                backend.create(name).abort()
            except BlobExistsError as error:
                msg = (
                    "a crash left an unfinished blob whose name is still taken, but list does not "
                    "show it: list unfinished blobs under their own names, or prune never "
                    "sees them and they fill the store"
                )
                raise AssertionError(msg) from error
        backend.delete([name])
        expect_names(backend, "data/", [])
        writer = backend.create(name)
        writer.write([WriteRequest(0, (memoryview(b"again"),))])
        writer.seal(5)
        expect_equal(read_all(backend, name, 5), b"again")


def _crash_while_writing(open_root: OpenRoot, name: str) -> None:
    def begin() -> tuple[Backend, BlobWriter]:
        backend = open_root("crash")
        writer = backend.create(name)
        writer.write([WriteRequest(0, (memoryview(b"x" * 5000),))])
        return backend, writer

    ForkedProcess(begin).join("begin a blob")


INSTANCE_CHECKS: tuple[BackendCheck, ...] = (
    it_says_which_version_of_the_contract_it_is_for,
    its_methods_take_the_arguments_of_the_contract,
    its_url_shows_where_it_is_and_no_credentials,
    its_url_means_the_same_store,
    free_bytes_is_a_number_of_bytes_or_none,
    direct_io_leaves_the_page_cache_alone,
    sweep_takes_nothing_that_has_a_name_or_is_young,
    what_a_crash_leaves_is_listed_and_can_be_deleted,
)


def file_of_size(backend: Backend, size_bytes: int) -> Path | None:
    """Return a file of exactly that size below the folder of the backend; None if there is none."""
    root = Path(unquote(urlsplit(backend.url).path))
    if not backend.capabilities.local or not root.is_dir():
        return None
    sized = (path for path in root.rglob("*") if path.is_file())
    return next((path for path in sized if path.stat().st_size == size_bytes), None)


def cached_part(file: Path) -> float | None:
    """Return the cached part of a file, 0 to 1; None if the kernel does not report it."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(memory)
        try:
            look = ctypes.CDLL(None, use_errno=True).mincore
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            failed = look(address, ctypes.c_size_t(len(memory)), flags)
        except (AttributeError, OSError):
            return None
        finally:
            del anchor  # a mapping with an exported buffer cannot be closed
        return None if failed else sum(flag & 1 for flag in flags) / pages


def goes_past_the_cache(folder: Path) -> bool:
    """Return whether direct writes in `folder` leave no cached pages; False on a tmpfs."""
    probe = folder / f"~direct-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(probe, flags, 0o600)
        try:
            with mmap.mmap(-1, _PROBE_BYTES) as page:
                os.write(fd, page)
        finally:
            os.close(fd)
        return cached_part(probe) == 0
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink()

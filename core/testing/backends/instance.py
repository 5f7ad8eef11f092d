"""Checks of an instance's declarations, of `sweep`, and of blobs that a crash leaves behind."""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

import ctypes
import mmap
import os
import re
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import ValidationError

from penstock.core.abc import Backend, PluginConfig
from penstock.core.errors import BlobExistsError, ConfigError, PenstockError
from penstock.core.testing.backends.forks import ForkedProcess
from penstock.core.testing.expectations import (
    MIB,
    NotTriedError,
    at_phase,
    declared,
    expect,
    expect_equal,
    expect_names,
    expect_own_api_version,
    pattern,
    promise,
    read_all,
)
from penstock.core.testing.signatures import expect_signatures
from penstock.core.testing.wrapper import WrapperBackend
from penstock.core.types import WriteRequest

if TYPE_CHECKING:
    from penstock.core.abc import BlobWriter
    from penstock.core.testing.expectations import BackendCheck, OpenRoot

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"(?i)pass(word|wd|phrase)?|secret|token|credential|(access|api|account)_?key")
_HALF = 0.5  # of the pages: truncating a file may read its last page into the cache
_ANY_SCHEME = "fsspec"  # serves every scheme that is no backend's name
_PROBE_BYTES = 16 * mmap.PAGESIZE


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
        assert isinstance(url, str), f"url is a {type(url).__name__}, no str"
        assert url, "url is empty: it is to show people where the blobs are"
        assert url.isprintable(), "url has characters that cannot be printed"
        expect(backend.url, url, "url, asked again,")
        # No message shows the password or key that was found: it would end up in a log.
        match = _SCHEME.match(url)
        if match is None:
            return  # not a URL, for instance of a backend of several places: nothing opens it
        assert not urlsplit(url).password, (
            "url holds a password (between :// and @): it is shown to people and stands in logs; "
            "leave user and password out"
        )
        secret = [key for key, _ in parse_qsl(urlsplit(url).query) if _SECRET.search(key)]
        assert not secret, (
            f"url holds the option {secret[0]}, which may be a credential: it is shown to people "
            "and stands in logs; leave it out"
        )
        here = match[1] == "file" and backend.capabilities.local  # whatever engine opens it there
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
            return  # such a backend is constructed by hand, never opened by a URL
        config = _options_of(backend)
        if not backend.capabilities.local:
            return  # a remote store may need a server or a key that is not in the URL
        backend.publish("here.json", b"{}")
        try:
            again = type(backend).open(config, open_backend=_open_nothing)
        except PenstockError:
            return  # the backend needs an option that the URL does not show
        with closing(again):
            expect(again.url, backend.url, "url of what was opened by this url")
            expect_names(again, "here", ["here.json"])


def _options_of(backend: Backend) -> PluginConfig:
    cls, (base, _, query) = type(backend), backend.url.partition("?")
    what = f"from_url of its own url ({base})"
    try:
        config: object = cls.from_url(base, dict(parse_qsl(query)))
    except (ValidationError, ConfigError) as error:
        fields = ", ".join(cls.Config.model_fields) or "none"
        msg = (
            f"{what} raises {type(error).__name__}: it gives an instance of Config (fields: "
            f"{fields}); the default passes the URL as `url`, another Config overrides from_url"
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
                f"{what} is {free!r} of type {type(free).__name__}: it is an int of at least 0, or "
                "None where it is not known"
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
            msg = "no file of a blob is to be seen whose pages a direct write would not cache"
            raise NotTriedError(msg)
        cached = cached_part(file)
        assert cached is None or cached < _HALF, (
            f"direct_io is declared, but {cached:.0%} of a blob is in the page cache once it was "
            "written and read: open files with O_DIRECT, or say direct_io=False"
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
            result: object = backend.sweep(before_s)  # type: ignore[func-returns-value] # whatever a plugin gives
            expect(result, None, f"the result of sweep({before_s})")
        young.seal(5)
        # All are old by this clock, but `sweep` may take only files that no name shows.
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
            # Right if nothing was left, or only what `sweep` finds: then the name is free.
            try:
                backend.create(name).abort()
            except BlobExistsError as error:
                msg = (
                    "a crash left an unfinished blob whose name is still taken, but list does not "
                    "give it: list unfinished blobs under their own names, else prune never "
                    "learns of them and they fill the store"
                )
                raise AssertionError(msg) from error
        backend.delete([name])
        expect_names(backend, "data/", [])
        writer = backend.create(name)
        writer.write([WriteRequest(0, (memoryview(b"again"),))])
        writer.seal(5)
        expect_equal(read_all(backend, name, 5), b"again")


def _crash_while_writing(open_root: OpenRoot, name: str) -> None:
    """Begin a blob in another process, and let that process die."""

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
    """Find a file of exactly that size below the folder that the URL of the backend names."""
    root = Path(unquote(urlsplit(backend.url).path))
    if not backend.capabilities.local or not root.is_dir():
        return None
    sized = (path for path in root.rglob("*") if path.is_file())
    return next((path for path in sized if path.stat().st_size == size_bytes), None)


def cached_part(file: Path) -> float | None:
    """Return the part of a file in the page cache, 0 to 1; None if the kernel does not tell."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(memory)
        try:
            look = ctypes.CDLL(None, use_errno=True).mincore
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            failed = look(address, ctypes.c_size_t(len(memory)), found)
        except (AttributeError, OSError):
            return None
        finally:
            del anchor  # a mapping with an exported buffer cannot be closed
        return None if failed else sum(flags & 1 for flags in found) / pages


def goes_past_the_cache(folder: Path) -> bool:
    """Return whether direct writes leave nothing in the cache: a tmpfs consists of cache."""
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

"""Checks of what an instance says of itself, and of what a crash leaves behind."""

# ruff: noqa: D103 - checks explain themselves by their names

from __future__ import annotations

import os
import re
import signal
import warnings
from contextlib import closing
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from penstock.core.abc import PluginConfig
from penstock.core.blame import said
from penstock.core.errors import BlobExistsError, ConfigError, PenstockError
from penstock.core.testing.expectations import (
    NotTriedError,
    expect,
    expect_equal,
    expect_names,
    expect_own_api_version,
    promise,
    read_all,
)
from penstock.core.testing.wrapper import WrapperBackend
from penstock.core.types import WriteRequest

if TYPE_CHECKING:
    from penstock.core.abc import Backend
    from penstock.core.testing.expectations import BackendCheck, OpenRoot

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(r"(?i)pass(word|wd|phrase)?|secret|token|credential|(access|api|account)_?key")
_ANY_SCHEME = "fsspec"  # serves every scheme that no backend is named after
_CHILD_S = 60
_WHY_BYTES = 2000  # a pipe takes that at once


@promise
def it_says_which_version_of_the_contract_it_is_for(open_root: OpenRoot) -> None:
    with closing(open_root("version")) as backend:
        expect_own_api_version(backend)


@promise
def its_url_shows_where_it_is_and_no_credentials(open_root: OpenRoot) -> None:
    with closing(open_root("url")) as backend:
        url: object = backend.url
        assert isinstance(url, str), f"url is a {type(url).__name__}, no str"
        assert url, "url is empty: it is to show people where the blobs are"
        assert url.isprintable(), "url has characters that cannot be printed"
        expect(backend.url, url, "url, asked again,")
        # No message shows what was found: it would end up in a log.
        match = _SCHEME.match(url)
        if match is None:
            return  # of several places, say: not to be opened by it
        assert not urlsplit(url).password, (
            "url holds a password (between :// and @): it is shown to people and stands in logs; "
            "leave user and password out"
        )
        secret = [key for key, _ in parse_qsl(urlsplit(url).query) if _SECRET.search(key)]
        assert not secret, (
            f"url holds the option {secret[0]}, which may be a credential: it is shown to people "
            "and stands in logs; leave it out"
        )
        served = match[1] == backend.name or backend.name == _ANY_SCHEME
        assert served or isinstance(backend, WrapperBackend), (
            f"url begins with {match[1]}://, but Penstock opens this backend by its name: "
            f"{backend.name}://"
        )


@promise
def its_url_means_the_same_store(open_root: OpenRoot) -> None:
    with closing(open_root("again")) as backend:
        made_by_hand = isinstance(backend, WrapperBackend) or backend.Config is PluginConfig
        if made_by_hand or not _SCHEME.match(backend.url):
            return  # nobody opens it by a URL
        config = _options_of(backend)
        if not backend.capabilities.local:
            return  # what else it takes (a server, a key) is not in the URL
        backend.publish("here.json", b"{}")
        try:
            again = type(backend).open(config, open_backend=_open_nothing)
        except PenstockError:
            return  # needs an option that the URL does not show
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
                "None where nobody knows"
            )
            backend.publish("r.json", b"{}")


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
        # Whatever its age: what has a name is not for `sweep` to take.
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
            # Nothing was left, or `sweep` finds it: then the name is free.
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
    """A process of its own begins a blob, and is gone."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of threads in the parent; the child takes none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _begin_and_vanish(open_root, name, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        why = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return
    if code < 0:
        hung = f" (it hung for {_CHILD_S} s)" if -code == signal.SIGALRM else ""
        why = f"signal {-code} ended it{hung}"
    msg = f"nobody saw what a crash leaves: a forked process could not begin a blob: {why}"
    raise NotTriedError(msg)


def _begin_and_vanish(open_root: OpenRoot, name: str, pipe: int) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_S)  # a client that does not survive a fork may hang
        backend = open_root("crash")  # held: one that nobody has any more may close itself
        writer = backend.create(name)
        writer.write([WriteRequest(0, (memoryview(b"x" * 5000),))])
        status = 0
    except BaseException as error:  # noqa: BLE001 - told to the parent, which says it
        os.write(pipe, said(error).encode()[:_WHY_BYTES])
    finally:  # nothing of the caller's runs in the child, not even on an error
        os._exit(status)


INSTANCE_CHECKS: tuple[BackendCheck, ...] = (
    it_says_which_version_of_the_contract_it_is_for,
    its_url_shows_where_it_is_and_no_credentials,
    its_url_means_the_same_store,
    free_bytes_is_a_number_of_bytes_or_none,
    sweep_takes_nothing_that_has_a_name_or_is_young,
    what_a_crash_leaves_is_listed_and_can_be_deleted,
)

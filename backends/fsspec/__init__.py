"""The backend `fsspec`: S3, and every file system of fsspec.

The backend checks names, owns a store and its writers, and handles forks. The package also contains
the code that both kinds of store share, and the store for fsspec's file systems. The package `s3`
contains the store for S3.
"""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from penstock.backends.fsspec.blob_states import StoreWriter
from penstock.backends.fsspec.config import S3_SCHEMES, FsspecConfig, is_secret_name, shown
from penstock.backends.fsspec.messages import place
from penstock.core.abc import Backend, check_blob_name
from penstock.core.distributions import installed_only
from penstock.core.errors import (
    BlobExistsError,
    ConfigError,
    FormatError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.fsspec.store import Store
    from penstock.core.abc import BlobWriter, PluginConfig
    from penstock.core.types import BlobInfo, Capabilities, ReadRequest, WriteRequest

__all__ = ["FsspecBackend", "FsspecConfig"]


class FsspecBackend(Backend):
    """Keeps blobs and records under any URL that fsspec knows; `s3://` works without fsspec.

    An `S3Store` or a `FileStore` moves the bytes.
    """

    name: ClassVar[str] = "fsspec"
    Config: ClassVar[type[PluginConfig]] = FsspecConfig

    def __init__(self, config: FsspecConfig, /) -> None:
        """Create the store without connecting to it."""
        self._config = config
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards `_closed` and the two fields below
        self._writers: weakref.WeakSet[StoreWriter] = weakref.WeakSet()
        self._opened: Store | None = _open_store(config)

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options for any URL; passes options unknown to the backend to the store.

        Raises:
            ConfigError: The query holds a credential.
        """
        secret = sorted(name for name in options if is_secret_name(name))
        if secret:
            msg = (
                f"{shown(url)}: {', '.join(secret)}: credentials do not belong in a URL, since "
                "shells and logs record URLs; use the environment, or `options` of a "
                "configuration file"
            )
            raise ConfigError(msg)
        own = {k: v for k, v in options.items() if k in FsspecConfig.model_fields}
        rest = {k: v for k, v in options.items() if k not in own}
        own.pop("options", None)
        return cls.Config.model_validate({**own, "url": url, "options": rest})

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return self._config.shown_url

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store; the first call may probe it."""
        return self._store().capabilities

    @property
    def direct_io(self) -> bool:
        """Always False. Unlike `capabilities`, does not probe the store."""
        return False

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        check_blob_name(name)
        store = self._store()
        writer = store.writer(name, size_hint=size_hint)
        with self._lock:
            # The store does not show a blob before its seal, so it cannot refuse a second writer.
            if any(w.name == name and not w.over for w in self._writers):
                msg = f"{place('create', name, self.url)}: it is being written"
                raise BlobExistsError(msg)
            self._writers.add(writer)
        try:
            store.refuse_taken("create", name)
        except BaseException:
            writer.abort()
            raise
        return writer

    def submit_write(self, writer: BlobWriter, requests: Sequence[WriteRequest], /) -> Future[None]:
        """Start a write and return at once; batches reach the store in submission order."""
        if not isinstance(writer, StoreWriter):
            return super().submit_write(writer, requests)
        try:
            return writer.submit(requests)
        except StorageError as error:
            future: Future[None] = Future()
            future.set_exception(error)
            return future

    def submit_read(self, requests: Sequence[ReadRequest], /) -> Future[None]:
        """Start a read and return at once."""
        self._check_requests(requests)
        store = self._store()
        return store.feeds.submit(partial(store.read, requests))

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        self._check_requests(requests)
        self._store().read(requests)

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """Read all bytes of a record with one request, so no concurrent publish mixes versions."""
        check_blob_name(name)
        data = self._store().read_record(name, limit_bytes=limit_bytes)
        if isinstance(data, int):
            msg = f"{name} on {self.url} has {data} bytes, more than the {limit_bytes} allowed"
            raise FormatError(msg, [name])
        return data

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        check_blob_name(name)
        self._store().publish(name, data, exclusive=exclusive)

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """List names with the prefix; skips objects whose names are not valid blob names."""
        check_blob_name(prefix, prefix=True)
        infos = [i for i in self._store().list(prefix) if _is_name(i.name, prefix)]
        return sorted(infos, key=lambda info: info.name)

    def stat(self, name: str, /) -> BlobInfo:
        check_blob_name(name)
        return self._store().stat(name)

    def delete(self, names: Sequence[str], /) -> None:
        for name in names:
            check_blob_name(name)
        self._store().delete(names)

    def sweep(self, before_s: float, /) -> None:
        """Remove uploads and temporary records that were never finished."""
        self._store().sweep(before_s)

    def close(self) -> None:
        """Abort unsealed blobs, and release all threads and connections."""
        if self._pid != os.getpid():
            # After a fork threads, connections and locks belong to the parent.
            self._closed = True
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            store, self._opened = self._opened, None
            writers = list(self._writers)
        for writer in writers:
            writer.abort()
        if store is not None:
            store.close()
        super().close()

    # -- below ----------------------------------------------------------------------------------

    def _store(self) -> Store:
        if self._pid != os.getpid() and not self._closed:
            # A forked child has none of the threads, and shares the connections with its parent. A
            # lock that a thread of the parent held at the fork is never released in the child.
            self._lock = threading.Lock()
            self._writers = weakref.WeakSet()
            self._opened, self._pid = None, os.getpid()
        with self._lock:
            if self._closed:
                msg = f"the backend {self.url} is closed"
                raise StorageError(msg)
            if self._opened is None:
                self._opened = _open_store(self._config)
            return self._opened

    def _check_requests(self, requests: Sequence[ReadRequest]) -> None:
        for request in requests:
            check_blob_name(request.name)
            if request.offset < 0:
                msg = f"{place('read', request.name, self.url)}: offset {request.offset} is below 0"
                raise StorageError(msg)


@installed_only()  # fsspec and botocore import more when a store is opened
def _open_store(config: FsspecConfig) -> Store:
    if config.scheme in S3_SCHEMES:
        from penstock.backends.fsspec.s3.bucket import S3Store  # noqa: PLC0415 - one kind or the other

        return S3Store(config)
    from penstock.backends.fsspec.file_systems import FileStore  # noqa: PLC0415

    return FileStore(config)


def _is_name(name: str, prefix: str) -> bool:
    try:
        check_blob_name(name)
    except StorageError:
        return False
    return name.startswith(prefix)

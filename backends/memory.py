"""The backend `memory`, which keeps blobs in this process, for tests and experiments."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from penstock.core.abc import Backend, BlobWriter, PluginConfig, check_blob_name, copy_bytes
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    FormatError,
    StorageError,
)
from penstock.core.types import BlobInfo, Capabilities, flat_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.types import ReadRequest, WriteRequest


class MemoryConfig(PluginConfig):
    """Options of `memory`.

    Attributes:
        name: The name of the store. Backends with the same name share a store until the process
            ends; a backend without a name has its own store.
    """

    name: str = ""


@dataclass(frozen=True, slots=True)
class _Blob:
    data: bytes | memoryview
    modified_s: float


@dataclass(slots=True)
class _Store:
    blobs: dict[str, _Blob] = field(default_factory=dict)
    unsealed: dict[str, _MemoryWriter] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards both dicts


_stores: dict[str, _Store] = {}
_stores_lock = threading.Lock()  # guards `_stores`


class MemoryBackend(Backend):
    """Keeps blobs and records in this process. Lists an unsealed blob only after a `sync`."""

    name: ClassVar[str] = "memory"
    Config: ClassVar[type[PluginConfig]] = MemoryConfig

    def __init__(self, config: MemoryConfig, /) -> None:
        """Attach to the store of that name, or create it."""
        self._name = config.name
        self._closed = False
        if config.name:
            with _stores_lock:
                self._store = _stores.setdefault(config.name, _Store())
        else:
            self._store = _Store()

    @classmethod
    def from_url(cls, url: str, options: dict[str, str], /) -> PluginConfig:
        """Return the options for `memory://name`."""
        return cls.Config.model_validate({**options, "name": url.partition("://")[2]})

    @property
    def url(self) -> str:
        """The URL, `memory://name`."""
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities: no alignment, exclusive publish, a store that ends with the process."""
        return Capabilities(
            preferred_parallel=1, appends=True, renames=True, local=True, outlives_process=False
        )

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """See `Backend.create`."""
        self._check(name)
        with self._store.lock:
            if name in self._store.blobs or name in self._store.unsealed:
                msg = f"cannot create {name} on {self.url}: the name is taken"
                raise BlobExistsError(msg)
            writer = _MemoryWriter(self._store, name, self.url, size_hint or 0)
            self._store.unsealed[name] = writer
        return writer

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """See `Backend.read`."""
        for request in requests:
            data = self._find("read", request.name).data
            target = flat_view(request.target)
            stop = request.offset + target.nbytes
            if request.offset < 0 or stop > len(data):
                msg = (
                    f"cannot read bytes {request.offset} to {stop} of {request.name} on "
                    f"{self.url}: it ends at {len(data)}"
                )
                raise BlobTruncatedError(msg)
            copy_bytes(target, memoryview(data)[request.offset : stop])

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """See `Backend.read_record`. A concurrent replace cannot mix versions."""
        data = self._find("read", name).data
        if len(data) > limit_bytes:
            msg = f"{name} on {self.url} has {len(data)} bytes, more than {limit_bytes} allowed"
            raise FormatError(msg, [name])
        return bytes(data)

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """See `Backend.publish`."""
        self._check(name)
        with self._store.lock:
            if exclusive and (name in self._store.blobs or name in self._store.unsealed):
                msg = f"cannot publish {name} on {self.url}: the name is taken"
                raise BlobExistsError(msg)
            self._store.blobs[name] = _Blob(bytes(data), time.time())

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """See `Backend.list`."""
        self._check(prefix, prefix=True)
        with self._store.lock:
            blobs = [(n, b) for n, b in self._store.blobs.items() if n.startswith(prefix)]
        return [
            BlobInfo(n, len(b.data), b.modified_s) for n, b in sorted(blobs, key=lambda e: e[0])
        ]

    def stat(self, name: str, /) -> BlobInfo:
        """See `Backend.stat`."""
        blob = self._find("stat", name)
        return BlobInfo(name, len(blob.data), blob.modified_s)

    def delete(self, names: Sequence[str], /) -> None:
        """See `Backend.delete`."""
        for name in names:
            self._check(name)
        with self._store.lock:
            for name in names:
                self._store.blobs.pop(name, None)
                self._store.unsealed.pop(name, None)

    def rename(self, old: str, new: str, /) -> None:
        """See `Backend.rename`."""
        self._check(new)
        blob = self._find("rename", old)
        with self._store.lock:
            self._store.blobs[new] = blob
            self._store.blobs.pop(old, None)
            self._store.unsealed.pop(new, None)
            if writer := self._store.unsealed.pop(old, None):
                writer.name = new
                self._store.unsealed[new] = writer

    def close(self) -> None:
        """See `Backend.close`. A named store outlives its backends."""
        self._closed = True
        super().close()

    def _check(self, name: str, *, prefix: bool = False) -> None:
        if self._closed:
            msg = f"the backend {self.url} is closed"
            raise StorageError(msg)
        check_blob_name(name, prefix=prefix)

    def _find(self, what: str, name: str) -> _Blob:
        self._check(name)
        with self._store.lock:
            blob = self._store.blobs.get(name)
        if blob is None:
            msg = f"cannot {what} {name} on {self.url}: it does not exist"
            raise BlobNotFoundError(msg)
        return blob


class _MemoryWriter(BlobWriter):
    def __init__(self, store: _Store, name: str, url: str, size: int) -> None:
        self._store = store
        self.name = name
        self._url = url
        self._data = _zeros(size)
        self._open = True
        self._lock = threading.Lock()  # guards `_data` and `_open`

    def write(self, requests: Sequence[WriteRequest], /) -> None:
        with self._lock:
            self._check_open("write")
            for request in requests:
                self._grow(request.offset + request.length)
                at = request.offset
                for buffer in request.buffers:
                    source = flat_view(buffer)
                    copy_bytes(self._data[at:], source)
                    at += source.nbytes

    def seal(self, length: int, /) -> None:
        with self._lock:
            self._check_open("seal")
            self._grow(length)
            with self._store.lock:
                self._check_name()
                self._store.blobs[self.name] = _Blob(self._data[:length], time.time())
                del self._store.unsealed[self.name]
            self._open = False

    def sync(self, length: int, /) -> None:
        with self._lock:
            self._check_open("sync")
            self._grow(length)
            with self._store.lock:
                self._check_name()
                self._store.blobs[self.name] = _Blob(self._data[:length], time.time())

    def abort(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._data = _zeros(0)
            with self._store.lock:
                if self._store.unsealed.get(self.name) is self:
                    del self._store.unsealed[self.name]

    def _grow(self, length: int) -> None:
        if len(self._data) < length:
            written, self._data = self._data, _zeros(max(length, 2 * len(self._data)))
            copy_bytes(self._data, written)

    def _check_name(self) -> None:
        """Raise StorageError if the blob was deleted: its name may now belong to another blob."""
        if self._store.unsealed.get(self.name) is not self:
            msg = f"cannot finish {self.name} on {self._url}: it was deleted during the write"
            raise StorageError(msg)

    def _check_open(self, what: str) -> None:
        if not self._open:
            msg = f"cannot {what} {self.name} on {self._url}: it is already sealed or aborted"
            raise StorageError(msg)


def _zeros(size: int) -> memoryview:
    """Return zeros that take no memory until written, unlike those of a bytearray."""
    import numpy as np  # noqa: PLC0415 - as in `copy_bytes`

    return np.zeros(size, np.uint8).data

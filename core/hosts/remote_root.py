"""Serves this host's root to the other hosts of a job, and reaches the roots of other hosts.

Tested in `tests/core/hosts/test_remote_root.py`.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, TypeVar

from penstock.core.abc import Backend, BlobWriter, check_blob_name
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import FormatError, StorageError
from penstock.core.foreign import said
from penstock.core.hosts.blob_http import BlobClient, BlobServer, Credentials
from penstock.core.types import BlobInfo, Capabilities, ReadRequest, flat_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.core.concurrency.timing import Timing
    from penstock.core.hosts.blob_http import BlobRange

T = TypeVar("T")

_RANGE_BYTES = 4 << 20  # the most bytes of one request; the server buffers one request per client
_DELETED_AT_ONCE = 1000


class RootServer(BlobServer):
    """Serves a root to ranks on other hosts, which read, list, publish and delete in it."""

    def __init__(
        self,
        root: Backend,
        address: str,
        *,
        credentials: Callable[[int], Credentials | None],
        order: Callable[[str, bytes], bytes],
        timing: Timing,
    ) -> None:
        """Listen on a free port of `address`; `start` serves requests.

        `order` executes an order of another host, given its kind and body, and returns the answer.

        Raises:
            OSError: This host lacks the address, or no socket is available.
        """
        self._root = root
        self._order = order
        self._interrupt_s = timing.interrupt_s
        super().__init__(
            address,
            credentials=credentials,
            lend=self._read,
            left=lambda _: None,
            answer=self._execute,
            timing=timing,
        )

    def close(self) -> None:
        """Close all connections; wait, at most `interrupt_s`, until no thread uses the root."""
        super().close()
        self.join(Deadline(self._interrupt_s))

    @contextmanager
    def _read(self, client: int, place: BlobRange) -> Iterator[memoryview | None]:
        del client
        if place.length > _RANGE_BYTES:
            msg = f"a request for {place.length} bytes is too long"
            raise StorageError(msg)
        data = memoryview(bytearray(place.length))
        self._root.read([ReadRequest(place.blob, place.offset, data)])
        yield data

    def _execute(self, path: str, body: bytes) -> bytes:
        operation, _, name = path.partition("/")
        root = self._root
        match operation:
            case "list":
                return _encoded(root.list(name))
            case "stat":
                return _encoded([root.stat(name)])
            case "record":
                try:
                    return root.read_record(name, limit_bytes=_RANGE_BYTES)
                except FormatError as error:
                    raise StorageError(str(error)) from error
            case "publish":
                root.publish(name, body)
            case "delete":
                root.delete(body.decode(errors="replace").split("\n"))
            case "sweep":
                root.sweep(float(body))
            case "order":
                return self._order(name, body)
            case _:
                msg = f"there is no operation {operation!r}"
                raise StorageError(msg)
        return b""


class RemoteRoot(Backend):
    """The root of another host. Connects when a call needs it, and cannot create blobs.

    After the connection fails, calls fail at once for `patience_s`. The first call after that
    connects again.
    """

    name: ClassVar[str] = "remote"

    def __init__(
        self,
        host: str,
        address: tuple[str, int],
        clients: Iterator[tuple[int, Credentials]],
        *,
        patience_s: float,
        timing: Timing,
    ) -> None:
        """Prepare; connect at the first call.

        Args:
            host: The name of the host in messages.
            address: The address of its `RootServer`.
            clients: Client numbers with their credentials. Each connection takes the next number,
                because the server accepts a number only once: an overheard token is useless.
            patience_s: The longest wait for a connection, and for more bytes.
            timing: Supplies the clock.
        """
        self._host = host
        self._address = address
        self._clients = clients
        self._patience_s = patience_s
        self._timing = timing
        self._lock = threading.Lock()  # held during a call; guards the attributes below
        self._client: BlobClient | None = None
        self._failure = ""
        self._pause = Deadline(0.0, timing.clock)
        self._closed = False

    @property
    def url(self) -> str:
        """The name and the address of the host."""
        return f"host {self._host} ({self._address[0]}:{self._address[1]})"

    @property
    def capabilities(self) -> Capabilities:
        """No optional capability: it only reads, lists, publishes and deletes."""
        return Capabilities(exclusive_publish=False)

    def create(self, name: str, /, *, size_hint: int | None = None) -> BlobWriter:
        """Raise StorageError, because each host writes only its own blobs."""
        del size_hint
        msg = f"cannot create {name} on {self.url}: only that host can create its blobs"
        raise StorageError(msg)

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """See `Backend.read`."""
        parts = []
        for request in requests:
            check_blob_name(request.name)
            target = flat_view(request.target)
            for at in range(0, target.nbytes, _RANGE_BYTES):
                some = target[at : at + _RANGE_BYTES]
                parts.append(ReadRequest(request.name, request.offset + at, some))
        self._call(lambda client: client.read(parts))

    def read_record(self, name: str, /, *, limit_bytes: int) -> bytes:
        """See `Backend.read_record`; only records of up to 4 MiB may be replaced meanwhile."""
        size = self.stat(name).size_bytes
        if size > min(limit_bytes, _RANGE_BYTES):
            return super().read_record(name, limit_bytes=limit_bytes)
        return self._ask(f"record/{name}")

    def publish(self, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
        """See `Backend.publish`."""
        if exclusive:
            msg = f"cannot publish {name} exclusively on {self.url}"
            raise StorageError(msg)
        check_blob_name(name)
        self._ask(f"publish/{name}", bytes(data))

    def list(self, prefix: str, /) -> Sequence[BlobInfo]:
        """See `Backend.list`."""
        check_blob_name(prefix, prefix=True)
        return _decoded(self._ask(f"list/{prefix}"), self.url)

    def stat(self, name: str, /) -> BlobInfo:
        """See `Backend.stat`."""
        check_blob_name(name)
        return _decoded(self._ask(f"stat/{name}"), self.url)[0]

    def delete(self, names: Sequence[str], /) -> None:
        """See `Backend.delete`."""
        for name in names:
            check_blob_name(name)
        for at in range(0, len(names), _DELETED_AT_ONCE):
            self._ask("delete", "\n".join(names[at : at + _DELETED_AT_ONCE]).encode())

    def sweep(self, before_s: float, /) -> None:
        """See `Backend.sweep`."""
        self._ask("sweep", repr(before_s).encode())

    def order(self, kind: str, body: bytes) -> bytes:
        """Send an order to the host, and return its answer; see `RootServer`."""
        return self._ask(f"order/{kind}", body)

    def close(self) -> None:
        """Close the connection; a call in flight fails."""
        self._closed = True
        client = self._client
        if client is not None:
            client.close("the run was closed")
        with self._lock:
            self._drop()
        super().close()

    def _ask(self, operation: str, body: bytes = b"") -> bytes:
        return self._call(lambda client: client.call(operation, body))

    def _call(self, use: Callable[[BlobClient], T]) -> T:
        with self._lock:
            if self._closed:
                msg = f"{self.url} is closed"
                raise StorageError(msg)
            if self._client is None and not self._pause.is_over():
                raise StorageError(self._failure)
            return self._attempt(use, is_old=self._client is not None)

    def _attempt(self, use: Callable[[BlobClient], T], *, is_old: bool) -> T:
        try:
            if self._client is None:
                self._client = BlobClient(
                    self._address,
                    *next(self._clients),
                    connect_s=self._patience_s,
                    silent_s=self._patience_s,
                )
                self._client.connect()
            return use(self._client)
        except OSError as error:  # out of descriptors
            raise self._lost(said(error)) from error
        except StorageError as error:
            if self._client is not None and not self._client.is_lost:
                msg = f"{self.url}: {error}"
                raise type(error)(msg) from error
            if is_old and not self._closed and isinstance(error.__cause__, ConnectionError):
                self._drop()  # a switch may have forgotten it, though the host is there
                return self._attempt(use, is_old=False)
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> StorageError:
        self._drop()
        self._failure = f"{self.url} does not answer: {why}"
        self._pause = Deadline(self._patience_s, self._timing.clock)
        return StorageError(self._failure)

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.dispose()


def _encoded(infos: Sequence[BlobInfo]) -> bytes:
    return json.dumps([[i.name, i.size_bytes, i.modified_s] for i in infos]).encode()


def _decoded(data: bytes, url: str) -> list[BlobInfo]:
    """Decode a listing from another host.

    Raises:
        StorageError: The data is not a listing, or a name in it is malformed.
    """
    try:
        infos = [
            BlobInfo(str(name), int(size), float(modified_s))
            for name, size, modified_s in json.loads(data)
        ]
    except (ValueError, TypeError, RecursionError) as error:
        msg = f"the listing of {url} cannot be read: {error}"
        raise StorageError(msg) from error
    for info in infos:
        check_blob_name(info.name)
    return infos

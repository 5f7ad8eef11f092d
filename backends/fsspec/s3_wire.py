"""How parts and ranges travel: between the caller's memory and the socket, outside the GIL.

botocore signs a request and parses the answer; in between it asks `Wire` to carry both. Its own
transport reads an answer into memory of its own and copies that under the GIL, returns to Python
for every few hundred KiB, and waits for `100 Continue` before each body.
"""

from __future__ import annotations

import http.client
import io
import ssl
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.backends.fsspec.s3_exchange import CLOSED, Connection, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.fsspec.s3_answer import Answer


class Wire:
    """Connections that are kept and used again. Thread-safe; not to be used across a fork.

    Only for operations that are safe to repeat: a request that meets the end of a kept connection
    is sent once more, on a new one.

    Args:
        verify: Whether TLS certificates are checked; or the file with those to trust.
        connect_s: How long connecting may take.
        timeout_s: How long a store may take to go on.
    """

    def __init__(self, *, verify: bool | str, connect_s: float, timeout_s: float) -> None:
        self._verify = verify
        self._connect_s = connect_s
        self._timeout_s = timeout_s
        self._closed = False
        self._tls: ssl.SSLContext | None = None
        self._kept: list[Connection] = []
        self._lock = threading.Lock()  # guards the three above

    def send(self, request: Any, **_: Any) -> Any:
        """The answer to a signed request, as botocore wants it from a handler of `before-send`.

        None, by which botocore sends it itself, if its body is none of ours.
        """
        from botocore.awsrequest import AWSResponse  # noqa: PLC0415 - an extra

        body = request.body
        if body and not isinstance(body, Views):
            return None
        url = urlsplit(request.url)
        target = f"{url.path}?{url.query}" if url.query else url.path
        # A store that refuses a body says so without being asked, too.
        headers = tuple((k, v) for k, v in request.headers.items() if k.lower() != "expect")
        message = Message(request.method, target, headers, body.views if body else ())
        place = url.scheme, url.netloc.lower()  # as it is signed
        answer = self._exchange(place, message)
        return AWSResponse(request.url, answer.status, answer.headers, answer)

    def keep(self, connection: Connection) -> None:
        """Take a connection back on which nothing is under way."""
        with self._lock:
            if not self._closed:
                self._kept.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is kept, and what comes back later."""
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()

    def _exchange(self, place: tuple[str, str], message: Message) -> Answer:
        kept = self._take(place)
        if kept is not None:
            try:
                return kept.exchange(message)
            except CLOSED:
                pass  # closed by the store just when it was wanted again
        return self._open(place).exchange(message)

    def _take(self, place: tuple[str, str]) -> Connection | None:
        while True:
            with self._lock:
                found = next((c for c in reversed(self._kept) if c.place == place), None)
                if found is None:
                    return None
                self._kept.remove(found)
            if found.usable:
                return found
            found.close()

    def _open(self, place: tuple[str, str]) -> Connection:
        scheme, netloc = place
        if scheme == "https":
            with self._lock:
                self._tls = self._tls or _tls_context(verify=self._verify)
            client: http.client.HTTPConnection = http.client.HTTPSConnection(
                netloc, timeout=self._connect_s, context=self._tls
            )
        else:
            client = http.client.HTTPConnection(netloc, timeout=self._connect_s)
        return Connection(place, client, timeout_s=self._timeout_s, keep=self.keep)


class Views(io.RawIOBase):
    """Memory as the file that botocore takes for a body, without copying it.

    `read` returns more than was asked for: botocore's own transport would otherwise take 16 KiB at
    a time, each with a return to Python.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        super().__init__()
        self.views = views
        self._size = sum(view.nbytes for view in views)
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, _: int | None = -1, /) -> Any:
        skip = self._at
        for view in self.views:
            if skip < view.nbytes:
                self._at += view.nbytes - skip
                return view[skip:]
            skip -= view.nbytes
        return memoryview(b"")

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def _tls_context(*, verify: bool | str) -> ssl.SSLContext:
    from botocore.httpsession import get_cert_path  # noqa: PLC0415 - an extra

    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=get_cert_path(verify))

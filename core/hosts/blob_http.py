"""Serves ranges of blobs to other processes over HTTP, and reads ranges from such servers.

A request is `GET /BLOB` with one `Range`, or `POST` with an operation that the server's owner
defines. `GET /` transfers no blob: it only proves to each end that the other knows a secret, which
is never sent. The bytes are not encrypted or signed, so the reader compares them with the
checkpoint's checksums.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.concurrency.watchdog import Deadline, spawn
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.foreign import said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from http.client import HTTPResponse

    from penstock.core.concurrency.timing import Timing
    from penstock.core.types import ReadRequest

log = logging.getLogger("penstock")

_PROOF = "Penstock-Proof"
_TOKEN = re.compile(r"Bearer (\d{1,9})\.(.*)", re.ASCII)
_LENGTH = re.compile(r"\d{1,12}", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)
_REFUSALS: Mapping[int, type[StorageError]] = {
    HTTPStatus.NOT_FOUND: BlobNotFoundError,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: BlobTruncatedError,
    HTTPStatus.INTERNAL_SERVER_ERROR: StorageError,
}
_MOST_BYTES = 256 << 20  # the largest request or answer, except the bytes of a range
_MOST_SILENT = 64  # connections that have not proved their identity yet
_UNDISTURBED = 1 / 16  # share of the patience in which no newer connection displaces a silent one
# A datagram port that nothing is sent to: connecting shows the local address the kernel would use.
_ANY_PORT = 9
# Not a real machine (RFC 5737): the route to it is the default route.
_ELSEWHERE = "192.0.2.1"


class BlobRange(NamedTuple):
    """A range of a stored blob. The name of the blob is the same on all ranks."""

    blob: str
    offset: int
    length: int


class Credentials(NamedTuple):
    """Credentials that identify one client and one server to each other.

    Attributes:
        token: What the client sends to prove its identity.
        proof: What the server answers to prove its identity.
    """

    token: str
    proof: str

    @classmethod
    def of(cls, secret: bytes, server: int, client: int) -> Credentials:
        """Derive the credentials of a server and a client from the secret of the job's ranks."""
        roles = (f"{role}/{server}/{client}".encode() for role in ("client", "server"))
        return cls(*(hmac.digest(secret, role, "sha256").hex() for role in roles))


class BlobServer(ThreadingTCPServer):
    """Lends ranges of blobs to clients that know their token. Each client has one connection.

    The server refuses a client's second connection, so an overheard token is useless.
    """

    request_queue_size = 256  # all ranks of a job connect at once

    def __init__(
        self,
        address: str,
        *,
        credentials: Callable[[int], Credentials | None],
        lend: Callable[[int, BlobRange], AbstractContextManager[memoryview | None]],
        left: Callable[[int], None],
        answer: Callable[[str, bytes], bytes] | None = None,
        timing: Timing,
    ) -> None:
        """Listen on a free port of `address`; `start` serves requests.

        Args:
            address: An address of this host.
            credentials: Returns the credentials for a client number; None for an unknown number.
            lend: Waits for the requested bytes, and lends them until they are sent. It lends None
                if the client must read the bytes elsewhere.
            left: Called when a client has disconnected.
            answer: Returns the answer to a `POST`, given its path and body. With None, the server
                refuses every `POST`.
            timing: Sets how often to check for late connections (`poll_s`).

        Raises:
            OSError: This host lacks the address, or no socket is available.
        """
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.credentials = credentials
        self.lend = lend
        self.answer = answer
        self.timeout = self._poll_s = timing.poll_s
        self._left = left
        self._clock = timing.clock
        self._patience_s = 0.0
        # Guards the tables, and that no socket in them is closed while it is used.
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, Deadline] = {}
        self._clients: dict[int, socket.socket] = {}
        self._serving: list[threading.Thread] = []
        self._closed = False
        super().__init__((address, 0), _Handler)

    def start(self, patience_s: float) -> None:
        """Serve on threads; a new connection has `patience_s` to prove its identity."""
        self._patience_s = patience_s
        self._serving.append(spawn("relay", self._serve))

    def disconnect(self, client: int) -> None:
        """Close the connection of a client, even in the middle of an answer."""
        with self._lock:
            _shut(self._clients.get(client))

    def close(self) -> None:
        """Stop listening, and close all connections, without waiting for threads. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in (self.socket, *self._silent, *self._clients.values()):
                _shut(connection)
        if not self._serving:
            self.server_close()

    def join(self, deadline: Deadline) -> None:
        """Wait until all threads end or the deadline is over; called after `close`."""
        for thread in self._serving:
            thread.join(deadline.left_s())

    def admit(self, authorization: str, connection: socket.socket) -> tuple[int, str] | None:
        """Return the request's client number and the proof to answer with; None to refuse it."""
        token = _TOKEN.fullmatch(authorization)
        client = -1 if token is None else int(token[1])
        known = self.credentials(client)
        if token is None or known is None:
            return None
        if not hmac.compare_digest(token[2].encode(), known.token.encode()):
            return None
        with self._lock:
            if self._clients.setdefault(client, connection) is not connection:
                return None
            self._silent.pop(connection, None)
        return client, known.proof

    def _serve(self) -> None:
        with self:  # closes the listener
            while not self._closed:
                if self._has_room():
                    self.handle_request()  # waits at most `timeout` for a connection
                else:
                    time.sleep(self._poll_s)

    def _has_room(self) -> bool:
        """Close connections that have not proved their identity in time; return whether one fits.

        Every connection keeps a minimum time to prove its identity, even if there are too many
        connections: a crowd of strangers must not drive out a rank that gets no CPU time.
        """
        with self._lock:
            for connection, deadline in [*self._silent.items()]:
                crowded = len(self._silent) >= _MOST_SILENT
                least_s = self._patience_s * (_UNDISTURBED if crowded else 1)
                if deadline.taken_s() >= least_s:
                    del self._silent[connection]
                    _shut(connection)
            return len(self._silent) < _MOST_SILENT

    # -- hooks of socketserver ---------------------------------------------------------------------

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError:
            if not self._closed:  # out of descriptors: without a pause, this would be a busy loop
                time.sleep(self._poll_s)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection on its own thread."""
        with self._lock:
            self._silent[request] = Deadline(None, self._clock)
            if self._closed:
                _shut(request)
        thread = spawn("relay", partial(self.process_request_thread, request, client_address))
        self._serving = [*filter(threading.Thread.is_alive, self._serving), thread]

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has ended."""
        with self._lock:
            self._silent.pop(request, None)
            clients = [c for c, connection in self._clients.items() if connection is request]
            super().shutdown_request(request)
        for client in clients:
            self._left(client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a connection has ended."""
        del request
        log.debug("the connection from %s is closed", client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "penstock", ""
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Send one range of a blob, or for `/` only the proof of the server's identity."""
        server = self.server
        assert isinstance(server, BlobServer)
        admitted = server.admit(self.headers.get("Authorization", ""), self.connection)
        if admitted is None:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        client, proof = admitted
        ends = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, stop = (int(ends[1]), int(ends[2]) + 1) if ends else (0, 0)
        if self.path == "/":
            self._answer(HTTPStatus.OK, proof)
        elif stop <= start:
            self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, proof)
        else:
            where = BlobRange(self.path[1:], start, stop - start)
            with self._refusing(proof), server.lend(client, where) as data:
                found = HTTPStatus.NOT_FOUND if data is None else HTTPStatus.PARTIAL_CONTENT
                self._answer(found, proof, data or b"", f"bytes {start}-{stop - 1}/*")

    def do_POST(self) -> None:
        """Carry out an operation that the server's owner defines."""
        server = self.server
        assert isinstance(server, BlobServer)
        admitted = server.admit(self.headers.get("Authorization", ""), self.connection)
        length = self.headers.get("Content-Length", "")
        if admitted is None or server.answer is None or not _LENGTH.fullmatch(length):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        _, proof = admitted
        body = self.rfile.read(min(int(length), _MOST_BYTES))
        if len(body) != int(length):
            msg = "the request is too long or was cut off"
            raise ConnectionError(msg)
        with self._refusing(proof):
            self._answer(HTTPStatus.OK, proof, server.answer(self.path[1:], body))

    @contextmanager
    def _refusing(self, proof: str) -> Iterator[None]:
        """If the block raises a StorageError, send it as the answer.

        The block must not have sent anything before it raises.
        """
        try:
            yield
        except StorageError as error:
            status = next(status for status, kind in _REFUSALS.items() if isinstance(error, kind))
            self._answer(HTTPStatus(status), proof, str(error).encode())

    def _answer(
        self, status: HTTPStatus, proof: str, data: bytes | memoryview = b"", where: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header(_PROOF, proof)
        self.send_header("Content-Length", str(len(data)))
        if where and data:
            self.send_header("Content-Range", where)
        self.end_headers()
        self.connection.sendall(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log at level DEBUG instead of writing to stderr."""
        log.debug(format, *args)


class BlobClient:
    """Reads ranges from a `BlobServer` over one connection. Only one thread at a time may use it.

    `close` is the exception: any thread may call it at any time.
    """

    def __init__(
        self,
        address: tuple[str, int],
        client: int,
        credentials: Credentials,
        *,
        connect_s: float,
        silent_s: float | None = None,
    ) -> None:
        """Prepare; `connect` opens the connection.

        Args:
            address: The IP address and the port of the server.
            client: The number of this client.
            credentials: The credentials of the server and this client.
            connect_s: The longest time that connecting may take.
            silent_s: The longest wait for more bytes; None: without a limit, until `close`.

        Raises:
            OSError: No socket is available.
        """
        self._address = address
        self._credentials = credentials
        self._silent_s = silent_s
        self._authorization = f"Bearer {client}.{credentials.token}"
        # Guards `_failure`, and that the socket is not closed while it is used.
        self._lock = threading.Lock()
        self._failure = ""
        self._connection = HTTPConnection(*address)
        self._connection.auto_open = 0  # a lost connection stays lost
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._connection.sock = self._socket = socket.socket(family)
        self._socket.settimeout(connect_s)

    def connect(self) -> None:
        """Connect; both ends prove their identity.

        Raises:
            StorageError: As in `read`.
        """
        with self._failing():
            self._socket.connect(self._address)
            self._socket.settimeout(self._silent_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ask("", {}).close()

    def read(self, requests: Sequence[ReadRequest], /) -> None:
        """Fill every target completely, as `Backend.read` does.

        Raises:
            BlobNotFoundError: The server does not lend a range to this client, or its store lacks
                the blob. The client may ask for other ranges.
            BlobTruncatedError: A range ends after the end of its blob.
            StorageError: The server's store failed, or the connection `is_lost`.
        """
        for request in requests:
            size, last = request.target.nbytes, request.offset + request.target.nbytes - 1
            where = {"Range": f"bytes={request.offset}-{last}"}
            with self._failing(), self._ask(request.name, where) as response:
                if response.status == HTTPStatus.NOT_FOUND and not response.length:
                    msg = f"{self._address} does not lend {request.name}:{request.offset}"
                    raise BlobNotFoundError(msg)
                _raise_refusal(response)
                if response.status != HTTPStatus.PARTIAL_CONTENT or response.length != size:
                    msg = f"it answered {response.status} {response.reason}"
                    raise HTTPException(msg)
                if response.readinto(request.target) != size:
                    msg = "it has closed its connection"
                    raise ConnectionResetError(msg)

    def call(self, path: str, body: bytes = b"") -> bytes:
        """Send `body` in a `POST` to `path`, and return the answer.

        Raises:
            StorageError: As in `read`.
        """
        with self._failing(), self._ask(path, {}, body) as response:
            _raise_refusal(response)
            if response.status != HTTPStatus.OK:
                msg = f"it answered {response.status} {response.reason}"
                raise HTTPException(msg)
            return _whole(response)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has failed or was closed. If so, every call fails."""
        return bool(self._failure)

    def close(self, why: str) -> None:
        """Close the connection, from any thread; a read in flight fails at once with `why`."""
        with self._lock:
            self._failure = self._failure or why
            _shut(self._socket)

    def dispose(self) -> None:
        """Free the socket. Only the thread that uses the client may call this."""
        with self._lock:
            self._connection.close()

    def _ask(
        self, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> HTTPResponse:
        headers = {"Authorization": self._authorization, **headers}
        verb = "GET" if body is None else "POST"
        self._connection.request(verb, f"/{path}", body, headers=headers)
        response = self._connection.getresponse()
        proof = response.headers.get(_PROOF, "")
        if not hmac.compare_digest(proof.encode(), self._credentials.proof.encode()):
            response.close()
            msg = f"it does not prove that it is in this job: {response.status} {response.reason}"
            raise HTTPException(msg)
        return response

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """At the block's first network error, close the connection and raise a StorageError."""
        try:
            if self._failure:
                raise ConnectionAbortedError(self._failure)
            yield
        except (OSError, HTTPException) as error:
            self.close(said(error))
            raise StorageError(self._failure) from error


def _raise_refusal(response: HTTPResponse) -> None:
    kind = _REFUSALS.get(response.status)
    if kind is not None:
        raise kind(_whole(response).decode(errors="replace"))


def _whole(response: HTTPResponse) -> bytes:
    length = response.length
    if length is None or length > _MOST_BYTES:
        msg = f"its answer declares {length} bytes, but must declare at most {_MOST_BYTES}"
        raise HTTPException(msg)
    data = response.read(length) if length else b""
    if len(data) != length:
        msg = "it has closed its connection"
        raise ConnectionResetError(msg)
    return data


def _shut(connection: socket.socket | None) -> None:
    if connection is not None:
        with suppress(OSError):  # not connected, or closed
            connection.shutdown(socket.SHUT_RDWR)


def own_address(host: str | None, network: str | None) -> str:
    """Return the address at which ranks on other hosts reach this host.

    The kernel picks the address for the route to `host` or `network`. The name of this host is not
    looked up, because cluster host names often resolve to another network or to loopback.

    Args:
        host: The host of the job's store, which all ranks reach; None if there is none.
        network: The network to use, such as `10.1.0.0/16`; None: the network that leads to `host`.

    Raises:
        OSError: This host has no address in `network`.
        ValueError: `network` is not a network.
    """
    if network is not None:
        wanted = ipaddress.ip_network(network, strict=False)
        with suppress(OSError):  # no route
            found = _address_towards(str(wanted.network_address + 1))
            if ipaddress.ip_address(found) in wanted:
                return found
        msg = f"this machine has no address in the network {network}: check rank_network"
        raise OSError(msg)
    if host is not None:
        found = _address_towards(host)
        if not ipaddress.ip_address(found).is_loopback or _is_loopback(host):
            return found
    try:  # no `host`, or its name is this machine's own and resolves to loopback
        return _address_towards(_ELSEWHERE)
    except OSError:  # no network at all
        return "127.0.0.1"


def _address_towards(host: str) -> str:
    """Return the address from which the kernel would send to `host`; sends no data."""
    error: OSError | None = None
    for family, kind, protocol, _, there in socket.getaddrinfo(
        host, _ANY_PORT, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as line:
            try:
                line.connect(there)
            except OSError as failed:
                error = failed
                continue
            address: str = line.getsockname()[0]
            return address.partition("%")[0]
    raise error or OSError(f"{host} has no address")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""An HTTP proxy before a store that fails on demand, like networks and busy stores."""

import http.client
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_CODES = {
    "500": (500, "InternalError", "We encountered an internal error."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
    "gone": (404, "NoSuchUpload", "The specified upload does not exist."),
    "conflict": (409, "ConditionalRequestConflict", "A conflicting operation is under way."),
}


class ClosingServer(ThreadingHTTPServer):
    """An HTTP server on loopback that leaves no thread and no connection when it is closed.

    The base class neither joins its daemon threads nor closes the connections that clients keep.
    """

    daemon_threads = False  # so `server_close` joins them

    def __init__(self, handler):
        self._open = set()
        self._lock = threading.Lock()  # guards `_open`: its entries are not closed
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._serving = threading.Thread(target=self.serve_forever, args=(0.02,))

    def __enter__(self):
        self._serving.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._serving.join()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request(self, request, client_address):
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)


@dataclass
class Fault:
    """A failure of some requests.

    Attributes:
        kind: A key of `_CODES`: the proxy sends this answer, and the store never gets the request.
            `reset`: the connection is reset before the store gets the request. `lost`: the store
            carries it out, and the answer is lost. `lost-500`: the store carries it out, and the
            answer says that it failed. `cut`: the answer ends in the middle. `short`: the answer
            has, and announces, one byte less. `half`: the store gets the first half of the body.
            `stall`: no answer comes until the proxy closes.
        method: Only requests with this method fail.
        part: Only requests whose path and query, followed by a `&`, contain this fail.
        times: The number of requests that fail.
        seen: The number of requests that have failed.
    """

    kind: str
    method: str = ""
    part: str = ""
    times: int = 1
    seen: int = 0


@dataclass
class Exchange:
    """A received request, and the bytes of the body in its answer."""

    method: str
    path: str
    headers: dict
    sent_bytes: int = 0
    body_bytes: int = 0


@dataclass
class FaultProxy:
    """The proxy; tests may set and read its attributes.

    Attributes:
        upstream: The URL of the store.
        faults: The failures that `fail` has added.
        exchanges: All received requests.
        ending: Set when the proxy closes.
        lock: Guards the exchanges and the two counts.
        putting: The number of PUT requests in flight.
        most_putting: The most that were in flight at once.
        drop_headers: The headers, in lower case, that the store does not get.
    """

    upstream: str
    faults: list = field(default_factory=list)
    exchanges: list = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    putting: int = 0
    most_putting: int = 0
    drop_headers: tuple = ()

    def __enter__(self):
        proxy = self

        class Handler(_Handler):
            pass

        Handler.proxy = proxy
        self.server = ClosingServer(Handler)
        self.url = self.server.url
        self.server.__enter__()
        return self

    def __exit__(self, *exc):
        self.ending.set()
        self.server.__exit__(*exc)

    def fail(self, kind, **where):
        """Let later requests fail; return the fault, which counts them."""
        fault = Fault(kind, **where)
        self.faults.append(fault)
        return fault

    def heal(self):
        self.faults.clear()

    def requests(self, method, part=""):
        """Return the requests so far."""
        return [e for e in self.exchanges if e.method == method and part in f"{e.path}&"]

    def take(self, method, path):
        with self.lock:
            for fault in self.faults:
                fits = fault.method in ("", method) and fault.part in f"{path}&"
                if fits and fault.seen < fault.times:
                    fault.seen += 1
                    return fault.kind
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, *_):
        pass

    def handle(self):
        with suppress(ConnectionError):
            super().handle()

    def answer(self):
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        exchange = Exchange(self.command, self.path, dict(self.headers), body_bytes=len(body))
        with proxy.lock:
            proxy.exchanges.append(exchange)
            proxy.putting += self.command == "PUT"
            proxy.most_putting = max(proxy.most_putting, proxy.putting)
        try:
            self._answer(proxy.take(self.command, self.path), body, exchange)
        finally:
            with proxy.lock:
                proxy.putting -= self.command == "PUT"

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - http.server's names

    def handle_expect_100(self):
        # The refusal of a request may come before its body does.
        self.send_response_only(100)
        self.end_headers()
        return True

    def _answer(self, fault, body, exchange):
        if fault == "stall":
            self.proxy.ending.wait()
            return self._reset()
        if fault == "reset":
            return self._reset()
        if fault in _CODES:
            status, code, message = _CODES[fault]
            return self._refuse(status, code, message)
        status, headers, data = self._forward(body[: len(body) // 2] if fault == "half" else body)
        if fault == "lost":
            return self._reset()
        if fault == "lost-500":
            return self._refuse(*_CODES["500"])
        length = headers.get("Content-Length", str(len(data)))
        if fault == "short":
            data, length = data[:-1], str(len(data) - 1)
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            return self._reset()
        exchange.sent_bytes = len(data)
        self.wfile.write(data)
        return None

    def _forward(self, body):
        target = urlsplit(self.proxy.upstream)
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=300)
        dropped = {"expect", "connection", *self.proxy.drop_headers}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        if body:
            headers["Content-Length"] = str(len(body))
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def _refuse(self, status, code, message):
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        if self.command == "HEAD":
            text = b""
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _reset(self):
        # Linger of zero seconds: the peer gets a reset, not an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

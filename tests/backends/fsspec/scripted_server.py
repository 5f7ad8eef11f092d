"""A server that runs the script of a test on each connection."""

import socket
import threading
from contextlib import suppress


class ScriptedServer:
    """Runs `scripts` on the connections in order; the last one on all further ones.

    A script gets the server and the connection; it may read a request by `head_of`.
    """

    def __init__(self, *scripts, tls=None, host="127.0.0.1"):
        self.scripts = scripts
        self.connections = 0
        self.heads = []
        self.ending = threading.Event()
        self._tls = tls
        self._threads = []
        self._open = []
        self._lock = threading.Lock()  # guards `_open`, and the order of `ending` and additions
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.netloc = f"{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self):
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        with self._lock:
            self.ending.set()
            for connection in self._open:
                _shut_down(connection)
        _shut_down(self._listener)
        for thread in self._threads:
            thread.join()
        # Only now: a script might still use the number of its socket, which may by then belong to
        # another.
        for connection in [*self._open, self._listener]:
            connection.close()

    @property
    def url(self):
        return f"{'https' if self._tls else 'http'}://{self.netloc}"

    def head_of(self, connection):
        """Return the lines of the next request; its body, if any, stays unread."""
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            if not byte:
                raise ConnectionResetError
            data += byte
        self.heads.append(data.decode().splitlines())
        return self.heads[-1]

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            script = self.scripts[min(self.connections, len(self.scripts) - 1)]
            self.connections += 1
            thread = threading.Thread(target=self._run, args=(script, connection))
            self._threads.append(thread)
            thread.start()

    def _run(self, script, connection):
        with suppress(OSError):
            script(self, self._take(connection))

    def _take(self, connection):
        """Return the connection for the script, which `__exit__` closes in any case."""
        # Wrapping moves the socket into another object, so it locks out `__exit__`, which would
        # miss that object. The handshake waits for the client, so it comes afterwards.
        with self._lock:
            self._open.append(connection)
            if self._tls and not self.ending.is_set():
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                self._open.append(connection)
            if self.ending.is_set():
                raise ConnectionAbortedError
        if self._tls:
            connection.do_handshake()
        return connection


def _shut_down(connection):
    """Wake all threads that wait for the socket; the socket itself stays open."""
    with suppress(OSError):
        # `SSLSocket.shutdown` would drop the TLS session, and a script using it at that moment
        # would fail with an AttributeError instead of an OSError.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def answering(*bodies, status="206 Partial Content", more=""):
    """Return a script that answers one request after the other, then reads nothing more."""

    def script(server, connection):
        for body in bodies:
            server.head_of(connection)
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
            connection.sendall(head.encode() + body)

    return script


def then_closing(script):
    """Return a script that does the same, and ends the connection in order."""

    def closing(server, connection):
        script(server, connection)
        connection.shutdown(socket.SHUT_RDWR)

    return closing

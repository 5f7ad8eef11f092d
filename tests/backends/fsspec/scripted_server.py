"""A server that does on each connection what a test tells it, and nothing else."""

import socket
import threading
from contextlib import suppress


class ScriptedServer:
    """Runs `scripts` on the connections in the order in which they come; the last one for all more.

    A script gets the connection, and may read a request by `head_of`.
    """

    def __init__(self, *scripts, tls=None, host="127.0.0.1"):
        self.scripts = scripts
        self.connections = 0
        self.heads = []
        self._tls = tls
        self._threads = []
        self._open = []
        self._opening = threading.Lock()
        self.ending = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self.netloc = f"{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self):
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._opening:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        for thread in self._threads:
            thread.join()

    @property
    def url(self):
        return f"{'https' if self._tls else 'http'}://{self.netloc}"

    def head_of(self, connection):
        """The lines of the next request; its body, if any, is still to be read."""
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
            if not self._keep(connection):
                return
            self._threads.append(threading.Thread(target=self._run, args=(script, connection)))
            self._threads[-1].start()

    def _run(self, script, connection):
        with suppress(OSError):
            if self._tls:
                # Kept before the handshake: `connection` itself is empty once it is wrapped.
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                if not self._keep(connection):
                    return
                connection.do_handshake()
            script(self, connection)

    def _keep(self, connection):
        """Have `connection` closed at the end; false where the end has come, and it is closed now."""
        with self._opening:
            if self.ending.is_set():
                connection.close()
                return False
            self._open.append(connection)
            return True


def answering(*bodies, status="206 Partial Content", more=""):
    """One answer after the other, then nothing more is read."""

    def script(server, connection):
        for body in bodies:
            server.head_of(connection)
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
            connection.sendall(head.encode() + body)

    return script


def then_closing(script):
    """What `script` does, and an orderly end."""

    def closing(server, connection):
        script(server, connection)
        connection.shutdown(socket.SHUT_RDWR)

    return closing

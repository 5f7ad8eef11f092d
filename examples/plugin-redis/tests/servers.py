"""A real redis-server, and a proxy in front of one that cuts connections."""

import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress

import redis
from penstock.core.types import ReadRequest, WriteRequest

from penstock_redis.backend import RedisBackend
from penstock_redis.config import RedisConfig

BINARY = shutil.which("redis-server")


class RedisServer:
    """A redis-server on a free port of the loopback interface; `kill` is SIGKILL."""

    def __init__(self, folder, *options, password=None):
        self.folder = folder
        self.options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.password = password
        self.process = None

    def start(self):
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--dir", self.folder, *self.options], stdout=log, stderr=log
            )
        for _ in range(600):
            try:
                with self.client() as client:
                    client.ping()
                return self
            except (redis.ConnectionError, redis.TimeoutError):
                assert self.process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)
        raise AssertionError("the server does not answer")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def client(self):
        return redis.Redis(port=self.port, password=self.password)

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def open(self, **options):
        return RedisBackend(RedisConfig(**{"url": self.url, "retry_total_s": 10, **options}))


class Proxy:
    """Forwards to a server; does something else once, at the first request that holds a marker.

    `cut` closes the connection before the request is passed on, `swallow` instead of passing the
    answer on; a function is called before it is passed on.
    """

    def __init__(self, port):
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._marker = self._action = None
        self._swallowing = None
        self.done = 0
        self._threads = []
        self._clients = []
        self._start(self._accept)

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def at(self, marker, action):
        self._action, self._marker = action, marker

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _start(self, target, *arguments):
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            self._start(self._serve, client)

    def _serve(self, client):
        with client:
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except ConnectionRefusedError:
                return
            with server:
                answers = threading.Thread(target=self._answer, args=(server, client))
                answers.start()
                with suppress(OSError):
                    self._pass_on(client, server)
                for end in (client, server):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                answers.join()

    def _pass_on(self, client, server):
        seen = b""
        while data := client.recv(1 << 16):
            seen = seen[-100:] + data
            if self._marker is not None and self._marker in seen:
                action, self._marker = self._action, None
                self.done += 1
                if action == "cut":
                    return
                if action == "swallow":
                    self._swallowing = server
                else:
                    action()
            server.sendall(data)

    def _answer(self, server, client):
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if self._swallowing is server:
                    break
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def write(backend, name, data, *, offset=0, length=None):
    writer = backend.create(name)
    writer.write([WriteRequest(offset, (memoryview(data),))])
    writer.seal(offset + len(data) if length is None else length)


def read(backend, name, length, offset=0):
    target = bytearray(length)
    backend.read([ReadRequest(name, offset, memoryview(target))])
    return bytes(target)

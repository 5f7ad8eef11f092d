"""A redis-server for the tests."""

import shutil
import socket
import subprocess
import time

import pytest
import redis

from penstock_redis.backend import RedisBackend, RedisConfig

SAFE = ("--appendonly", "yes", "--appendfsync", "always")


class RedisServer:
    """A redis-server on a free port of the loopback interface; `kill` is SIGKILL."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options):
        command = ["redis-server", "--port", str(self.port), "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=self.port)
        while True:
            try:
                self.client.ping()
                return self
            except redis.ConnectionError:
                assert self.process.poll() is None, "redis-server did not start"
                time.sleep(0.05)

    def kill(self):
        self.client.close()
        self.process.kill()
        self.process.wait()

    def open(self, **options):
        return RedisBackend(RedisConfig(url=self.url, **options))


@pytest.fixture
def server(tmp_path):
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    server = RedisServer(tmp_path).start(*SAFE)
    yield server
    server.kill()

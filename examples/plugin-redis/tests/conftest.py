"""Servers of their own for the tests."""

import pytest
from servers import BINARY, Proxy, RedisServer


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory):
    if BINARY is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def shared_server(server_folder):
    server = RedisServer(server_folder).start()
    yield server
    server.kill()


@pytest.fixture
def server(shared_server):
    """One server for all tests, empty for each."""
    with shared_server.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    return shared_server


@pytest.fixture
def own_server(server_folder, tmp_path):
    """Starts servers that belong to this test, which may kill them."""
    started = []

    def start(*options, **named):
        server = RedisServer(tmp_path, *options, **named)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def proxied():
    """Starts proxies before servers."""
    started = []

    def start(server):
        started.append(Proxy(server.port))
        return started[-1]

    yield start
    for proxy in started:
        proxy.close()

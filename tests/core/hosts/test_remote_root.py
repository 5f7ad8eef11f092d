"""Another host's root is read, listed and changed over HTTP by the ranks of the job alone."""

import socket
import time
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import count

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.concurrency.timing import Timing
from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.hosts.blob_http import Credentials
from penstock.core.hosts.remote_root import RemoteRoot, RootServer
from penstock.core.types import ReadRequest, WriteRequest

PATIENCE_S = 60.0
TIMING = Timing(poll_s=0.01)
LARGE = bytes(range(256)) * (9 << 12)  # three requests


@pytest.fixture
def root():
    found = MemoryBackend(MemoryConfig())
    writer = found.create("data/a.raw")
    writer.write([WriteRequest(0, (memoryview(LARGE),))])
    writer.seal(len(LARGE))
    found.publish("commits/1", b"one")
    return found


@pytest.fixture
def server(root):
    known = {client: Credentials.of(b"secret", 0, client) for client in (7, 9, 11, 13)}
    found = RootServer(
        root,
        "127.0.0.1",
        credentials=known.get,
        order=lambda kind, body: disconnect(found) if kind == "drop" else kind.encode() + body,
        timing=TIMING,
    )
    found.start(PATIENCE_S)
    yield found
    found.close()


def disconnect(server):
    for client in (7, 9, 11):
        server.disconnect(client)
    return b""


def remote(address, patience_s=PATIENCE_S):
    clients = ((client, Credentials.of(b"secret", 0, client)) for client in count(7, 2))
    return closing(RemoteRoot("b", address, clients, patience_s=patience_s, timing=TIMING))


def test_root_is_read_listed_and_changed_from_another_host(root, server):
    with remote(server.server_address[:2]) as there:
        assert there.list("") == root.list("")
        assert there.stat("commits/1") == root.stat("commits/1")
        data = bytearray(len(LARGE) - 5)
        there.read([ReadRequest("data/a.raw", 5, memoryview(data))])
        assert data == LARGE[5:]
        there.publish("commits/2", b"two")
        assert there.read_record("commits/2", limit_bytes=3) == b"two"
        there.delete(["data/a.raw", "commits/1", "none"])
        assert [info.name for info in root.list("")] == ["commits/2"]
        assert there.order("pull", b" names") == b"pull names"


def test_record_that_is_replaced_meanwhile_is_read_whole(root, server):
    class Replaced(RemoteRoot):
        def stat(self, name):
            found = super().stat(name)
            root.publish(name, b"longer by now")
            return found

    clients = ((7, Credentials.of(b"secret", 0, 7)),)
    address = server.server_address[:2]
    there = Replaced("b", address, iter(clients), patience_s=PATIENCE_S, timing=TIMING)
    with closing(there):
        assert there.read_record("commits/1", limit_bytes=99) == b"longer by now"


def test_error_of_the_other_store_leaves_the_connection(server):
    with remote(server.server_address[:2]) as there:
        for name, error in (("none", BlobNotFoundError), ("commits/1", BlobTruncatedError)):
            with pytest.raises(error, match="host b"):
                there.read([ReadRequest(name, 2, memoryview(bytearray(9)))])
        with pytest.raises(BlobNotFoundError, match="host b"):
            there.stat("none")
        with pytest.raises(StorageError, match="not a blob name"):
            there.stat("../etc")
        assert there.read_record("commits/1", limit_bytes=9) == b"one"


@pytest.mark.parametrize(
    ("client", "secret"), [(7, b"guessed"), (8, b"secret")], ids=["secret", "client"]
)
def test_stranger_changes_nothing(root, server, client, secret):
    token = Credentials.of(secret, 0, client).token
    with closing(HTTPConnection(*server.server_address[:2], timeout=PATIENCE_S)) as line:
        line.request("POST", "/delete", b"commits/1", {"Authorization": f"Bearer {client}.{token}"})
        assert line.getresponse().status == HTTPStatus.FORBIDDEN
    assert root.stat("commits/1")


def test_silent_host_is_given_up_by_name():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,  # accepts, and never answers
        remote(silent.getsockname()[:2], patience_s=2.0) as there,
    ):
        with pytest.raises(StorageError, match=r"host b .* does not answer: TimeoutError"):
            there.list("")
        began_s = time.monotonic()
        with pytest.raises(StorageError, match=r"host b .* does not answer"):
            there.stat("commits/1")  # during the pause, without another wait
        print(f"known after {time.monotonic() - began_s:.3f} s")


def test_root_is_reached_again_after_a_lost_connection(root, server):
    with remote(server.server_address[:2], patience_s=2.0) as there:
        there.list("")
        disconnect(server)
        assert there.list("") == root.list("")  # at once
        with pytest.raises(StorageError, match="does not answer"):
            there.order("drop", b"")  # again on the new connection
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            try:
                assert there.list("") == root.list("")
            except StorageError:
                time.sleep(0.1)
            else:
                return
        pytest.fail("the root stayed lost")

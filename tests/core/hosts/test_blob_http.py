"""A server lends ranges of blobs only to clients with a token."""

import ipaddress
import os
import socket
import threading
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection

import pytest

from penstock.core.concurrency.timing import Timing
from penstock.core.concurrency.watchdog import Deadline
from penstock.core.errors import BlobNotFoundError, StorageError
from penstock.core.hosts.blob_http import BlobClient, BlobServer, Credentials, own_address
from penstock.core.types import ReadRequest

PATIENCE_S = 100.0
DATA = os.urandom(1 << 20)
KNOWN = Credentials.of(b"secret", 0, 7)


@contextmanager
def server():
    """A server that lends one blob to client 7, and nothing to client 8."""
    left = threading.Event()

    @contextmanager
    def lend(client, where):
        assert client == 7
        held = where.blob == "folder/a.raw" and where.offset + where.length <= len(DATA)
        yield memoryview(DATA)[where.offset :][: where.length] if held else None

    found = BlobServer(
        "127.0.0.1",
        credentials={7: KNOWN}.get,
        lend=lend,
        left=lambda _: left.set(),
        timing=Timing(poll_s=0.01),
    )
    found.start(PATIENCE_S)
    found.has_left = left
    try:
        yield found
    finally:
        found.close()
        found.join(Deadline(PATIENCE_S))


def client_of(found, number=7, known=KNOWN):
    return BlobClient(found.server_address[:2], number, known, connect_s=PATIENCE_S)


def read(client, name, start, size):
    target = bytearray(size)
    client.read([ReadRequest(name, start, memoryview(target))])
    return bytes(target)


def test_ranges_share_one_connection():
    with server() as found:
        client = client_of(found)
        client.connect()
        for start, size in ((0, 1), (5, 1000), (0, len(DATA)), (len(DATA) - 1, 1)):
            assert read(client, "folder/a.raw", start, size) == DATA[start : start + size]
        client.dispose()
        assert found.has_left.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("name", "start"), [("b.raw", 0), ("../a.raw", 0), ("folder/a.raw", len(DATA) - 1)]
)
def test_a_range_that_is_not_lent_is_not_found_and_connection_stays(name, start):
    with server() as found:
        client = client_of(found)
        client.connect()
        with pytest.raises(BlobNotFoundError, match=name):
            read(client, name, start, 10)
        assert read(client, "folder/a.raw", 0, 10) == DATA[:10]
        client.dispose()


@pytest.mark.parametrize(
    ("number", "known"),
    [
        (7, Credentials("", KNOWN.proof)),
        (7, Credentials(KNOWN.token[:-1], KNOWN.proof)),
        (7, Credentials("ü", KNOWN.proof)),
        (7, Credentials.of(b"another secret", 0, 7)),
        (7, Credentials.of(b"secret", 1, 7)),
        (8, Credentials.of(b"secret", 0, 8)),
        (8, KNOWN),
        (10**12, KNOWN),
    ],
)
def test_strangers_are_not_admitted(number, known):
    with server() as found:
        client = client_of(found, number, known)
        with pytest.raises(StorageError):
            client.connect()
        with pytest.raises(StorageError):
            read(client, "folder/a.raw", 0, 10)
        client.dispose()


@pytest.mark.parametrize("given", [None, "bytes=5-3", "bytes=-5", "bytes=0-1,4-5", "lines=0-1"])
def test_all_but_single_ranges_are_refused(given):
    with server() as found:
        line = HTTPConnection(*found.server_address, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer 7.{KNOWN.token}"} | ({"Range": given} if given else {})
        line.request("GET", "/folder/a.raw", headers=headers)
        answer = line.getresponse()
        assert answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        assert answer.read() == b""
        line.close()


@contextmanager
def pretender(*answers):
    """A server that sends `answers`, one for each request, and then closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            line, _ = listener.accept()
            with line, suppress(OSError):
                for answer in answers:
                    line.recv(1 << 16)
                    line.sendall(answer)

        thread = threading.Thread(target=pretend)
        thread.start()
        yield listener.getsockname()
        thread.join(PATIENCE_S)


def answer(proof, size, body, status="206 Partial Content"):
    head = f"HTTP/1.1 {status}\r\nPenstock-Proof: {proof}\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + body


HELLO = answer(KNOWN.proof, 0, b"", "200 OK")


@pytest.mark.parametrize(
    "answers",
    [
        [answer("", 0, b"", "200 OK")],
        [answer(Credentials.of(b"another secret", 0, 7).proof, 0, b"", "200 OK")],
        [answer(KNOWN.token, 0, b"", "200 OK")],  # knows only what the client has sent
        [HELLO, answer("", 10, b"x" * 10)],
    ],
)
def test_bytes_of_a_server_without_the_secret_are_rejected(answers):
    with pretender(*answers) as address:
        client = BlobClient(address, 7, KNOWN, connect_s=PATIENCE_S)
        target = bytearray(10)
        with suppress(StorageError):
            client.connect()
        with pytest.raises(StorageError, match="does not prove"):
            client.read([ReadRequest("a", 0, memoryview(target))])
        assert target == bytes(10)
        client.dispose()


@pytest.mark.parametrize(
    "last",
    [
        answer(KNOWN.proof, 10, b"xxx"),
        answer(KNOWN.proof, 11, b"x" * 11),
        answer(KNOWN.proof, 9, b"x" * 9),
        answer(KNOWN.proof, 10, b"x" * 10, "200 OK"),
        b"nothing that one understands\r\n\r\n",
        b"",
    ],
)
def test_a_wrong_answer_ends_the_connection(last):
    with pretender(HELLO, last) as address:
        client = BlobClient(address, 7, KNOWN, connect_s=PATIENCE_S)
        client.connect()
        for _ in range(2):
            with pytest.raises(StorageError):
                read(client, "a", 0, 10)
        client.dispose()


def test_a_read_ends_when_another_thread_closes_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = BlobClient(listener.getsockname(), 7, KNOWN, connect_s=PATIENCE_S)
        closing = threading.Timer(0.1, client.close, ["it was told to"])
        closing.start()
        with pytest.raises(StorageError, match="it was told to"):
            client.connect()
        closing.join()
        client.dispose()


def test_the_server_closes_its_connections():
    with server() as found:
        client = client_of(found)
        client.connect()
        found.close()
        with pytest.raises(StorageError):
            read(client, "folder/a.raw", 0, 10)
        client.dispose()


def test_the_address_is_on_the_route_to_the_job_store():
    for address in ("127.0.0.1", "::1"):
        assert own_address(address, None) == address
    assert ipaddress.ip_address(own_address("localhost", None)).is_loopback
    ipaddress.ip_address(own_address(None, None))


def test_the_address_is_of_the_named_network():
    assert own_address(None, "127.0.0.0/8") == "127.0.0.1"
    assert own_address("203.0.113.1", "127.1.2.3/8") == "127.0.0.1"
    with pytest.raises(OSError, match=r"203\.0\.113\.0/24"):
        own_address("127.0.0.1", "203.0.113.0/24")

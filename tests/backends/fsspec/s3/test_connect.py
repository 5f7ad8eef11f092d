"""The transport: complete answers or an error, kept connections, certificates, proxies."""

import datetime as dt
import ipaddress
import socket
import ssl
from types import SimpleNamespace

import pytest
from tests.backends.fsspec.scripted_server import ScriptedServer, answering

pytest.importorskip("botocore", reason="needs botocore (pip install 'penstock[s3]')")

from botocore.awsrequest import AWSPreparedRequest, HeadersDict
from botocore.exceptions import SSLError

from penstock.backends.fsspec import FsspecConfig
from penstock.backends.fsspec.s3.answers import BrokenAnswerError
from penstock.backends.fsspec.s3.connect import Transport, Views
from penstock.core.errors import BlobNotFoundError, StorageError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import pattern, read_all

DATA = pattern(300_000)
PART = 5 << 20


@pytest.fixture
def transport():
    found = []

    def make(*, verify=True, timeout_s=10, **options):
        config = FsspecConfig(url="s3://bucket/run", timeout_s=timeout_s)
        place = "http://127.0.0.1"
        found.append(Transport(config, endpoint_url=place, verify=verify, **options))
        return found[-1]

    yield make
    for one in found:
        one.close()


def request(server, *, method="GET", body=None, streamed=True, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        headers["Content-Length"] = str(len(body))
    url = f"{server.url}/bucket/key?x=1"
    return AWSPreparedRequest(method, url, HeadersDict(headers), body, streamed)


def body_of(answer, size):
    target = memoryview(bytearray(size))
    at = 0
    while at < size and (count := answer.raw.readinto(target[at:])):
        at += count
    return bytes(target[:at])


def test_request_and_response_are_unchanged(transport):
    with ScriptedServer(answering(DATA, more="ETag: abc\r\n")) as server:
        answer = transport().send(request(server, Range="bytes=0-9"))
        assert (answer.status_code, answer.headers["etag"]) == (206, "abc")
        assert body_of(answer, len(DATA)) == DATA
        assert answer.raw.readinto(memoryview(bytearray(1))) == 0
    head = server.heads[0]
    assert head[0] == "GET /bucket/key?x=1 HTTP/1.1"
    assert f"Host: {server.netloc}" in head
    assert "Range: bytes=0-9" in head


def test_connection_is_reused_after_a_full_response(transport):
    with ScriptedServer(answering(b"one", b"", DATA, b"four")) as server:
        carrier = transport()
        assert body_of(carrier.send(request(server)), 3) == b"one"
        assert carrier.send(request(server)).content == b""
        assert carrier.send(request(server, streamed=False)).content == DATA
        assert carrier.send(request(server)).content == b"four"
    assert server.connections == 1


def test_body_does_not_wait_for_an_ack_of_its_head(transport):
    with ScriptedServer(answering(DATA)) as server:
        answer = transport().send(request(server))
        at_once = answer.raw.connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        answer.raw.close()
    assert at_once


def test_connection_is_not_reused_after_an_abandoned_response(transport):
    def late(server, connection):
        server.head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n" + DATA[:10])
        server.head_of(connection)
        connection.sendall(DATA[10:20])

    with ScriptedServer(late, answering(DATA)) as server:
        carrier = transport()
        first = carrier.send(request(server))
        body_of(first, 10)
        first.raw.close()
        assert carrier.send(request(server)).content == DATA
    assert server.connections == 2


def test_body_is_sent_whole_without_waiting_for_continue(transport):
    views = [memoryview(DATA)[:1], memoryview(DATA)[1:250_000], memoryview(DATA)[250_000:]]
    got = bytearray()

    def script(server, connection):
        server.head_of(connection)
        while len(got) < len(DATA):
            got.extend(connection.recv(1 << 20))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with ScriptedServer(script) as server:
        body = Views(views)
        answer = transport().send(request(server, method="PUT", body=body, Expect="100-continue"))
        assert answer.status_code == 200
        assert answer.content == b""
    assert got == DATA
    assert not any(line.lower().startswith("expect") for line in server.heads[0])


def test_partially_sent_body_is_not_stored(transport):
    def script(server, connection):
        server.head_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.close()

    with ScriptedServer(script) as server:
        body = Views([memoryview(bytes(32 << 20))])
        with pytest.raises(BrokenAnswerError, match="before the body was sent to its end"):
            transport().send(request(server, method="PUT", body=body))


@pytest.mark.parametrize("status", ["403 Forbidden", "503 Slow Down"])
def test_refusal_that_closes_in_mid_body_is_read(transport, status):
    text = b"<Error><Code>Refused</Code></Error>"

    def script(server, connection):
        server.head_of(connection)
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + text)
        connection.close()

    with ScriptedServer(script, answering(b"")) as server:
        carrier = transport()
        body = Views([memoryview(bytes(32 << 20))])
        answer = carrier.send(request(server, method="PUT", body=body))
        assert answer.status_code == int(status[:3])
        assert answer.content == text
        assert carrier.send(request(server)).content == b""
    assert server.connections == 2


# -- certificates -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a key and a self-signed certificate for 127.0.0.1."""
    x509 = pytest.importorskip("cryptography.x509", reason="needs cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return str(path)


@pytest.fixture
def secured(certificate):
    """A server that answers over TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    more = f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}\r\n"
    with ScriptedServer(answering(*[DATA] * 9, more=more), tls=context) as server:
        yield server


def test_certificates_are_checked_by_default(transport, secured):
    with pytest.raises(SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        transport().send(request(secured))
    assert secured.heads == []


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize("trusting", ["file", "nothing checked"])
def test_trusted_file_or_no_check_lets_pass(transport, secured, certificate, trusting):
    carrier = transport(verify=certificate if trusting == "file" else False)
    for _ in range(2):
        answer = carrier.send(request(secured))
        assert body_of(answer, len(DATA)) == DATA
    assert secured.connections == 1


def test_certificate_of_another_host_is_refused(transport, secured, certificate):
    named = SimpleNamespace(url=secured.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(SSLError, match="localhost"):
        transport(verify=certificate).send(request(named))


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize(
    "how", ["nothing", "option", "option off", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"]
)
def test_options_and_environment_set_trust(opened, secured, certificate, monkeypatch, how):
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    options = {"endpoint_url": secured.url, "addressing_style": "path"}
    if how == "option":
        options["verify"] = certificate
    elif how == "option off":
        options["verify"] = False
    elif how != "nothing":
        monkeypatch.setenv(how, certificate)
    backend = opened("s3://bucket/run", options=options, conditional_put="yes", attempts=1)
    target = memoryview(bytearray(len(DATA)))
    if how != "nothing":
        backend.read([ReadRequest("b.raw", 0, target)])
        assert target == DATA
    else:
        with pytest.raises(StorageError, match=r"read b.raw on s3://bucket/run.*CERTIFICATE"):
            backend.read([ReadRequest("b.raw", 0, target)])
        assert secured.heads == []


# -- proxies ------------------------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.parametrize("spared", [False, True])
def test_environment_proxy_gets_all_requests(opened, folder, proxy, monkeypatch, spared):
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1" if spared else "")
    options = {"endpoint_url": proxy.upstream}
    backend = opened(f"s3://{folder}", options=options, part_bytes=PART, conditional_put="yes")
    data = pattern(2 * PART + 99)
    writer = backend.create("b.raw", size_hint=len(data))
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))
    assert read_all(backend, "b.raw", len(data)) == data
    with pytest.raises(BlobNotFoundError):
        backend.read_record("none.json", limit_bytes=9)
    seen = len(proxy.requests("PUT", "partNumber")), len(proxy.requests("GET"))
    assert (seen == (0, 0)) if spared else (seen[0] == 3 and seen[1] >= 2)


@pytest.mark.s3
@pytest.mark.parametrize(
    "environment",
    [
        {"no_proxy": "127.0.0.1"},
        {"NO_PROXY": "other.example"},
        {"no_proxy": "*"},
        {"NO_PROXY": "127.0.0.1", "http_proxy": "http://127.0.0.1:9"},  # no server listens there
        {"no_proxy": "127.0.0.1", "HTTP_PROXY": "http://127.0.0.1:9"},
        {"https_proxy": "http://127.0.0.1:9"},
    ],
)
def test_no_proxy_sends_requests_directly(opened, folder, proxy, monkeypatch, environment):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    data = pattern(2 * PART)
    backend = opened(f"s3://{folder}", options={"endpoint_url": proxy.url}, part_bytes=PART)
    writer = backend.create("b.raw", size_hint=len(data))
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))
    assert len(proxy.requests("PUT", "partNumber")) == 2

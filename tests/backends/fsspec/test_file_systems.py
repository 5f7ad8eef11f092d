"""Other file systems of fsspec: read-only ones, asynchronous ones, ones with odd streams."""

import functools
import http.server
import io
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import known_implementations
from tests.backends.fault_proxy import ClosingServer
from tests.backends.fsspec.scripted_server import ScriptedServer

import penstock
from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.core.errors import (
    BlobNotFoundError,
    BlobTruncatedError,
    CapabilityError,
    ConfigError,
    StorageError,
    StorageFullError,
)
from penstock.core.types import ReadRequest, WriteRequest


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """The standard library's file server, with ranges."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        wanted = self.headers.get("Range")
        path = self.translate_path(self.path)
        if not wanted or path.endswith("/"):
            return super().do_GET()
        try:
            data = Path(path).read_bytes()
        except OSError:
            return self.send_error(404)
        start, _, stop = wanted.removeprefix("bytes=").partition("-")
        part = data[int(start) : int(stop) + 1]
        if not part:
            return self.send_error(416)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None


@pytest.fixture
def web(tmp_path):
    """A web server over `tmp_path`."""
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    with ClosingServer(functools.partial(RangeHandler, directory=str(tmp_path))) as server:
        yield server.url


def http_head(length):
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("record", "200 OK"),
        ("record", "206 Partial Content"),
        ("record", "404 Not Found"),  # a listing does not read its body
        ("range", "200 OK"),
        ("range", "206 Partial Content"),
        ("listing", "200 OK"),
    ],
)
def test_an_endless_http_response_is_abandoned(opened, status, what):
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    most_bytes = 64 << 20 if what == "listing" else 0
    chunk = b"10000\r\n" + b"a" * (1 << 16) + b"\r\n"
    sent = []

    def script(server, connection):
        while server.head_of(connection)[0].startswith("HEAD"):
            connection.sendall(http_head(500))
        connection.sendall(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range((most_bytes >> 16) + (64 << 4)):
            connection.sendall(chunk)
            sent.append(len(chunk))
        connection.sendall(b"0\r\n\r\n")

    with ScriptedServer(script) as server:
        backend = opened(f"{server.url}/run", attempts=3)
        calls = {
            "record": lambda: backend.read_record("commits/1.json", limit_bytes=1000),
            "range": lambda: backend.read([ReadRequest("b", 0, memoryview(bytearray(500)))]),
            "listing": lambda: backend.list("commits/"),
        }
        with pytest.raises(StorageError, match=r"sends more than the [\d,]+ requested bytes"):
            calls[what]()
    assert sum(sent) < most_bytes + (50 << 20)  # bytes in flight when the connection was closed


@pytest.mark.parametrize("headers", [{}, {"X-Api-Key": "hunter3"}])
def test_option_headers_are_not_sent_to_another_origin(opened, headers):
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"

    def answer(server, connection):
        method = server.head_of(connection)[0].split()[0]
        connection.sendall(body + (b"" if method == "HEAD" else b"abc"))

    with ScriptedServer(answer) as other:
        moved = f"HTTP/1.1 307 Moved\r\nLocation: {other.url}/r\r\nContent-Length: 0\r\n\r\n"

        def lead(server, connection):
            while True:
                server.head_of(connection)
                connection.sendall(moved.encode())

        with ScriptedServer(lead) as server:
            backend = opened(f"{server.url}/run", options={"headers": headers} if headers else {})
            if headers:
                with pytest.raises(
                    StorageError, match=r"redirects to 127\.0\.0\.1, which would get"
                ):
                    backend.read_record("r", limit_bytes=10)
            else:
                assert backend.read_record("r", limit_bytes=10) == b"abc"
        assert "hunter3" not in str(other.heads)
        assert bool(other.heads) != bool(headers)


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        ("200 OK", "application/xml", b"<ListBucketResult><Key>commits/1</Key></ListBucketResult>"),
        ("200 OK", "application/json", b'{"error": "sign in"}'),
        ("200 OK", "text/html", b'<form action="/login"><a href="#">Sign in</a></form>'),
        ("200 OK", "text/plain", b"it works"),
        ("204 No Content", "text/html", b""),
    ],
)
def test_a_page_without_a_listing_is_not_an_empty_run(status, kind, body):
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")

    def answer(server, connection):
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        while True:
            method = server.head_of(connection)[0].split()[0]
            connection.sendall(head.encode() + (b"" if method == "HEAD" else body))

    with ScriptedServer(answer) as server, penstock.Checkpointer(f"{server.url}/run") as ckpt:
        for look in (ckpt.steps, ckpt.latest):
            with pytest.raises(StorageError, match="not with a page that lists files"):
                look()


def test_checkpoint_can_be_read_over_http(web, tmp_path):
    state = {"model": {"w": torch.randn(300, 300), "b": torch.randn(300)}, "epoch": 7}
    with penstock.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, step=3, mode="blocking").result()
    with penstock.Checkpointer(f"{web}/run") as checkpointer:
        assert checkpointer.steps() == [3]
        tree = checkpointer.load(step=3)
        assert torch.equal(tree["model"]["w"], state["model"]["w"])
        assert tree["epoch"] == 7
        assert checkpointer.load(step=3, include="model/b")["model"]["b"].shape == (300,)
        assert checkpointer.verify(3, deep=True).ok
        with pytest.raises(penstock.PenstockError, match="http can only be read"):
            checkpointer.save(state, step=4, mode="blocking").result()


def test_missing_and_short_blobs_fail_over_http(web, opened, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "r").write_bytes(b"12345")
    backend = opened(f"{web}/run", attempts=1)
    assert backend.read_record("r", limit_bytes=9) == b"12345"
    with pytest.raises(BlobNotFoundError):
        backend.stat("none")
    with pytest.raises(BlobNotFoundError):
        backend.read([ReadRequest("none", 0, memoryview(bytearray(1)))])
    for start in (3, 8):  # the server has no byte of the second range, and answers 416
        with pytest.raises(BlobTruncatedError):
            backend.read([ReadRequest("r", start, memoryview(bytearray(9)))])


class OddFile(MemoryFile):
    """A stream that takes at most 1,000 bytes at a time, and has no file below."""

    def write(self, data):
        return super().write(bytes(data[:1000]))

    def fileno(self):
        raise io.UnsupportedOperation("fileno")

    def truncate(self, size=None):
        raise io.UnsupportedOperation("truncate")


class OddFileSystem(MemoryFileSystem):
    protocol = "odd"
    store = {}  # noqa: RUF012 - as its parent has it
    pseudo_dirs = [""]  # noqa: RUF012
    fails_with = None

    def _open(self, path, mode="rb", **options):
        if mode == "wb":
            if self.fails_with:
                raise self.fails_with
            self.store[path] = file = OddFile(self, path, options.get("data"))
            return file
        return super()._open(path, mode, **options)


@pytest.fixture
def odd(opened, monkeypatch):
    fsspec.register_implementation("odd", OddFileSystem, clobber=True)
    monkeypatch.setattr(OddFileSystem, "store", {})
    return opened("odd://run")


def test_short_writing_streams_without_fileno_are_written_whole(odd):
    data = bytes(range(256)) * 100
    writer = odd.create("b.raw")
    writer.write([WriteRequest(5000, (memoryview(data), memoryview(b"end")))])
    writer.seal(5000 + len(data) + 3)
    assert odd.read_record("b.raw", limit_bytes=1 << 20) == bytes(5000) + data + b"end"


def test_blob_kept_only_in_part_by_a_file_system_is_not_sealed(odd, monkeypatch):
    info = OddFileSystem.info

    def short(self, path, **options):
        found = info(self, path, **options)
        return {**found, "size": found["size"] - 1}

    monkeypatch.setattr(OddFileSystem, "info", short)
    writer = odd.create("b.raw")
    writer.write([WriteRequest(0, (memoryview(b"123456"),))])
    with pytest.raises(StorageError, match="the store kept 5 bytes instead of 6"):
        writer.seal(6)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(28, "No space left"), StorageFullError, "make room or raise the quota"),
        (PermissionError("nope"), StorageError, "check credentials and permissions"),
        (ConnectionResetError("reset"), StorageError, "check that the store is reachable"),
        (NotImplementedError(), CapabilityError, "this kind of store cannot do that"),
        (RuntimeError("boom"), StorageError, "RuntimeError: boom"),
    ],
)
def test_errors_of_file_systems_are_mapped(odd, monkeypatch, error, kind, text):
    monkeypatch.setattr(OddFileSystem, "fails_with", error)
    writer = odd.create("b.raw")
    with pytest.raises(kind, match=f"b.raw on odd://run.*{text}"):
        writer.write([WriteRequest(0, (memoryview(b"x"),))])
    writer.abort()


def test_reads_are_retried_and_writes_are_not(odd, monkeypatch):
    odd.publish("r.json", b"x")
    seen = []
    info = OddFileSystem.info

    def flaky(self, path, **options):
        seen.append(path)
        if len(seen) < 3:
            raise ConnectionResetError("reset")
        return info(self, path, **options)

    monkeypatch.setattr(OddFileSystem, "info", flaky)
    assert odd.stat("r.json").size_bytes == 1
    assert len(seen) == 3
    tried = []

    def fails(self, path, *rest, **options):
        tried.append(path)
        raise ConnectionResetError("reset")

    for name in ("pipe_file", "_open", "rm_file"):
        monkeypatch.setattr(OddFileSystem, name, fails)
    writer = odd.create("b.raw")
    for change in (
        lambda: odd.publish("s.json", b"y"),
        lambda: writer.write([WriteRequest(0, (memoryview(b"y"),))]),
        lambda: odd.delete(["r.json"]),
    ):
        with pytest.raises(StorageError, match="reset"):
            change()
    assert [path.rpartition("/")[2] for path in tried] == ["s.json", "b.raw", "r.json"]


def test_temporary_records_are_not_listed_and_are_swept(tmp_path, opened):
    backend = opened(f"file://{tmp_path}/run")
    backend.publish("r.json", b"x")
    left = tmp_path / "run" / "s.json~0123456789abcdef"
    left.write_bytes(b"torn")
    assert [info.name for info in backend.list("")] == ["r.json"]
    now = backend.store_time_s()
    backend.sweep(now - 3600)
    assert left.exists()
    backend.sweep(now + 3600)
    assert not left.exists()
    assert [info.name for info in backend.list("")] == ["r.json"]


class DroppingFileSystem(MemoryFileSystem):
    """A file system that loses its connection when a certain folder is listed."""

    protocol = "dropping"
    lost = ""

    def ls(self, path, detail=True, **options):
        if self.lost and path.rstrip("/").endswith(self.lost):
            raise OSError("connection lost")
        return super().ls(path, detail=detail, **options)


@pytest.mark.parametrize("lost", ["/commits", "/data", "/blobs"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(lost, monkeypatch, opened):
    fsspec.register_implementation("dropping", DroppingFileSystem, clobber=True)
    with penstock.Checkpointer(f"dropping://run{lost}") as ckpt:
        ckpt.save({"w": torch.ones(1000)}, step=1).result()
    backend = opened(f"dropping://run{lost}")
    names = [info.name for info in backend.list("")]
    assert len(names) > 3
    monkeypatch.setattr(DroppingFileSystem, "lost", lost)
    with pytest.raises(StorageError, match="connection lost"):
        backend.list("")
    monkeypatch.setattr(DroppingFileSystem, "lost", "")
    assert [info.name for info in backend.list("")] == names


def test_writing_over_http_is_refused(web, opened):
    backend = opened(f"{web}/run")
    for call in (
        lambda: backend.create("b.raw"),
        lambda: backend.publish("r.json", b"x"),
        lambda: backend.delete(["r.json"]),
    ):
        with pytest.raises(CapabilityError, match="http can only be read; save to another store"):
            call()


def test_streams_without_truncate_are_rewritten(odd):
    writer = odd.create("b.raw")
    writer.write([WriteRequest(0, (memoryview(b"123456"),))])
    writer.seal(3)
    assert odd.read_record("b.raw", limit_bytes=9) == b"123"


def test_listings_are_not_cached(tmp_path, opened):
    one, two = opened(f"file://{tmp_path}/run"), opened(f"file://{tmp_path}/run")
    assert one.list("") == []
    two.publish("r.json", b"x")
    assert [info.name for info in one.list("")] == ["r.json"]
    two.delete(["r.json"])
    assert one.list("") == []


def test_missing_file_system_is_reported():
    fsspec.register_implementation(
        "absent", "absent_package.AbsentFileSystem", errtxt="install absent-package", clobber=True
    )
    with pytest.raises(ConfigError, match=r"absent://x: .*absent"):
        FsspecBackend(FsspecConfig(url="absent://x"))


def test_a_package_that_a_scheme_needs_is_named(monkeypatch):
    known = {"class": "absent_package.deep:FileSystem", "err": "Install its package"}
    monkeypatch.setitem(known_implementations, "remote", known)
    message = (
        r"remote://x: .*for remote://: Install its package \(absent_package is not installed\)"
    )
    with pytest.raises(ConfigError, match=message):
        FsspecBackend(FsspecConfig(url="remote://x"))


def test_a_server_without_ranges_is_read_right(tmp_path, web, monkeypatch):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(1000)}, step=1).result()
    monkeypatch.setattr(RangeHandler, "do_GET", http.server.SimpleHTTPRequestHandler.do_GET)
    with (
        penstock.Checkpointer(f"{web}/run") as ckpt,
        pytest.raises(StorageError, match="does not serve byte ranges"),
    ):
        ckpt.verify(step=1)

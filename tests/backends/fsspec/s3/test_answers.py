"""Wrong responses: the backend still reads the right bytes, or raises an error.

The servers here follow a script, so no test depends on the abilities of a real server.
"""

import json
import socket
import sys

import pytest
from tests.backends.fsspec.scripted_server import ScriptedServer, answering, then_closing

pytest.importorskip("botocore", reason="needs botocore (pip install 'penstock[s3]')")

from penstock.core.errors import StorageError, StorageTimeoutError
from penstock.core.types import ReadRequest, WriteRequest

RANGE = "Content-Range: bytes 0-3/4\r\n"
WHOLE = answering(b"abcd", more=RANGE)
OK = "HTTP/1.1 206 Partial Content\r\n"
LENGTH = "Content-Length: 4\r\n"
CHUNKED_CUT = "Transfer-Encoding: chunked\r\n\r\n9\r\nsome"


def saying(text):
    def script(server, connection):
        server.head_of(connection)
        connection.sendall(text.encode())

    return then_closing(script)


def answering_all(answer_to):
    """Return a script that answers each request with the result of `answer_to` for its head."""

    def script(server, connection):
        while True:
            head = server.head_of(connection)
            if any(line.lower().startswith("expect:") for line in head):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            announced = next((h for h in head if h.lower().startswith("content-length:")), ":0")
            left = int(announced.partition(":")[2])
            while left:
                left -= len(connection.recv(left))
            answer = answer_to(head)
            connection.sendall(answer)
            if b"\r\n\r\n" not in answer:
                connection.shutdown(socket.SHUT_RDWR)
                return

    return script


@pytest.fixture
def at(opened):
    """Opens a backend at an endpoint."""

    def open_at(endpoint, *, bucket="bucket", **options):
        given = {"endpoint_url": endpoint, "addressing_style": "path", **options.pop("more", {})}
        return opened(
            f"s3://{bucket}/run",
            options=given,
            **{"conditional_put": "yes", "attempts": 3, **options},
        )

    return open_at


def read(backend):
    target = memoryview(bytearray(4))
    backend.read([ReadRequest("b.raw", 0, target)])
    return bytes(target)


# -- heads --------------------------------------------------------------------------------------

NO_HEADS = {
    "ends in the first line": "HTTP/1.1 206",
    "ends in a name": OK + LENGTH + "Content-Ra",
    "ends in a value": OK + RANGE + "Content-Length: 4",
    "ends between lines": OK + LENGTH + RANGE,
    "line without a colon": OK + "rubbish\r\n" + LENGTH + RANGE + "\r\nabcd",
    "length is a word": OK + "Content-Length: four\r\n" + RANGE + "\r\nabcd",
    "length below zero": OK + "Content-Length: -4\r\n" + RANGE + "\r\nabcd",
    "two lengths": OK + LENGTH + "Content-Length: 2\r\n" + RANGE + "\r\nabcd",
    "compressed": OK + "Transfer-Encoding: gzip, chunked\r\n" + LENGTH + RANGE + "\r\n4\r\nabcd",
    "HTTP/2": "HTTP/2 206\r\n" + LENGTH + RANGE + "\r\nabcd",
    "no head": "abcd",
    "status of two digits": "HTTP/1.1 99 Odd\r\n" + LENGTH + RANGE + "\r\nabcd",
    "provisional": "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + LENGTH + RANGE + "\r\nabcd",
    "endless line": OK + "X: " + "a" * 70_000 + "\r\n" + LENGTH + RANGE + "\r\nabcd",
    "endless head": OK + "X: a\r\n" * 101 + LENGTH + RANGE + "\r\nabcd",
    "no body": "HTTP/1.1 204 No Content\r\n\r\n",
}


def test_response_with_a_malformed_head_is_retried(at):
    for text in NO_HEADS.values():
        with ScriptedServer(saying(text), WHOLE) as server:
            assert read(at(server.url)) == b"abcd"
        assert len(server.heads) == 2


def test_partial_record_is_not_taken_as_whole(at):
    part = answering(b"ab", more="Content-Range: bytes 0-1/4\r\n")
    with ScriptedServer(then_closing(part), answering(b"abcd", status="200 OK")) as server:
        assert at(server.url).read_record("r.json", limit_bytes=9) == b"abcd"


def test_record_with_two_lengths_is_not_truncated(at):
    twice = saying("HTTP/1.1 200 OK\r\n" + LENGTH + "Content-Length: 2\r\n\r\nabcd")
    with ScriptedServer(twice, answering(b"abcd", status="200 OK")) as server:
        assert at(server.url).read_record("r.json", limit_bytes=9) == b"abcd"


# -- answers that end early, or never -----------------------------------------------------------


def half_of(announced, *, closing):
    more = f"Content-Range: bytes 0-{announced - 1}/{announced}\r\n"
    head = f"{OK}Content-Length: {announced}\r\n{more}\r\n"

    def script(server, connection):
        server.head_of(connection)
        connection.sendall(head.encode() + bytes(announced // 2))
        if not closing:
            connection.recv(1)

    return then_closing(script)


def test_range_that_ends_early_is_an_error(at):
    for size in [10, 200_000]:
        requests = [ReadRequest("b.raw", 0, memoryview(bytearray(size)))]
        message = rf"read b\.raw on s3://bucket/run: no complete answer \(.*{size - size // 2} more"
        with (
            ScriptedServer(half_of(size, closing=True)) as server,
            pytest.raises(StorageError, match=message),
        ):
            at(server.url, attempts=1).read(requests)


def test_text_that_ends_early_is_an_error(at):
    for what in ["record", "listing"]:
        for text in [OK + "Content-Length: 9\r\n\r\nsome", OK + CHUNKED_CUT]:
            with ScriptedServer(saying(text)) as server:
                backend = at(server.url, attempts=1)
                with pytest.raises(StorageError, match="answer"):
                    backend.read_record("r", limit_bytes=99) if what == "record" else backend.list(
                        ""
                    )


@pytest.mark.parametrize("size", [10, 200_000])
def test_range_that_stops_in_the_middle_is_a_timeout(at, size):
    requests = [ReadRequest("b.raw", 0, memoryview(bytearray(size)))]
    with (
        ScriptedServer(half_of(size, closing=False)) as server,
        pytest.raises(StorageTimeoutError, match="no answer in time"),
    ):
        at(server.url, attempts=1, timeout_s=0.2).read(requests)  # short: no answer comes


def closes_at_the_second(server, connection):
    answering(b"abcd", more=RANGE)(server, connection)
    server.head_of(connection)
    connection.close()


def test_request_on_a_closed_kept_connection_is_resent(at):
    with ScriptedServer(closes_at_the_second, WHOLE) as server:
        backend = at(server.url)
        assert [read(backend), read(backend)] == [b"abcd", b"abcd"]
    assert (server.connections, len(server.heads)) == (2, 3)


# -- gateways that answer for the store ---------------------------------------------------------


def ok(body="", more=""):
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{more}\r\n{body}".encode()


LISTING = (
    "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/r.json</Key>"
    "<Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents></ListBucketResult>"
)


@pytest.mark.parametrize("page", ["<html><body>log in</body></html>", ""])
def test_login_page_is_no_empty_listing(at, page):
    answers = [ok(page), ok(LISTING)]
    with ScriptedServer(answering_all(lambda _: answers.pop(0))) as server:
        assert [info.name for info in at(server.url).list("")] == ["r.json"]
    assert answers == []


@pytest.mark.parametrize("exclusive", [False, True])
def test_login_page_does_not_confirm_a_record(at, exclusive):
    answers = [ok("<html></html>"), ok(more='ETag: "x"\r\n')]
    with ScriptedServer(answering_all(lambda _: answers.pop(0))) as server:
        at(server.url).publish("r.json", b"x", exclusive=exclusive)
    assert answers == []


def test_unconfirmed_deletions_are_not_assumed(at):
    def deleted(key):
        return ok(f"<DeleteResult><Deleted><Key>run/{key}</Key></Deleted></DeleteResult>")

    answers = [ok("<html></html>"), deleted("a"), deleted("b")]
    with ScriptedServer(answering_all(lambda _: answers.pop(0))) as server:
        at(server.url).delete(["a", "b"])
    assert answers == []


def test_login_page_does_not_confirm_a_deletion(at):
    page = answering_all(lambda _: ok("<html></html>"))
    message = "cannot delete a on .*: no result in the answer"
    with ScriptedServer(page) as server, pytest.raises(StorageError, match=message):
        at(server.url).delete(["a"])


@pytest.mark.parametrize("entry", ["Error", "Deleted"])
def test_an_entry_without_a_name_does_not_confirm_a_deletion(at, entry):
    text = f"<DeleteResult><{entry}><Code>InternalError</Code></{entry}></DeleteResult>"
    message = "cannot delete a on .*: no result in the answer"
    with (
        ScriptedServer(answering_all(lambda _: ok(text))) as server,
        pytest.raises(StorageError, match=message),
    ):
        at(server.url).delete(["a"])


def test_login_page_proves_nothing_of_a_blob(at):
    answers = [ok(), ok(more="Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n")]
    with ScriptedServer(answering_all(lambda _: answers.pop(0))) as server:
        assert at(server.url).stat("r.json").size_bytes == 0
    assert answers == []


@pytest.mark.parametrize(
    "page",
    [ok("<html></html>"), b"HTTP/1.1 200", b'HTTP/1.1 200 OK\r\nETag: "ab'],
    ids=["login page", "cut in the first line", "cut in a line"],
)
def test_a_foreign_response_does_not_confirm_a_part(at, page):
    size, pages, completed = (5 << 20) + 1, [page], []

    def answer(head):
        method, target, _ = head[0].split()
        if method == "HEAD":
            date = "Last-Modified: Mon, 04 May 2026 00:00:00 GMT"
            there = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{date}\r\n\r\n"
            return (there if completed else "HTTP/1.1 404 X\r\n\r\n").encode()
        if method == "PUT":
            return pages.pop() if pages else ok(more='ETag: "x"\r\n')
        if "uploads" not in target:
            completed.append(target)
        return ok("<Result><UploadId>u</UploadId></Result>")

    with ScriptedServer(answering_all(answer)) as server:
        writer = at(server.url, part_bytes=5 << 20).create("b.raw", size_hint=size)
        writer.write([WriteRequest(0, (memoryview(bytes(size)),))])
        writer.seal(size)
    assert (len(completed), pages) == (1, [])
    assert (
        sum(head[0].startswith("PUT") for head in server.heads) == 3
    )  # two parts, one of them twice


def test_a_listing_that_repeats_a_marker_is_an_error(at):
    more = LISTING.replace("false", "true").replace(
        "<IsTruncated>", "<NextContinuationToken>a</NextContinuationToken><IsTruncated>"
    )
    with (
        ScriptedServer(answering_all(lambda _: ok(more))) as server,
        pytest.raises(StorageError, match="twice, so the listing would never end"),
    ):
        at(server.url).list("")
    assert len(server.heads) == 2


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"


def continued(first, piece, last):
    """Return a script with an answer far above the limit."""

    def script(server, connection):
        server.head_of(connection)
        connection.sendall(first)
        for _ in range(32):
            connection.sendall(piece)
        connection.sendall(last)

    return script


@pytest.mark.parametrize("what", ["record", "listing"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((b"HTTP/1.1 404 Not Found\r\n" + CHUNKED, CHUNK, b"0\r\n\r\n"), "has more than"),
        ((b"HTTP/1.1 200 OK\r\n" + CHUNKED, CHUNK, b"0\r\n\r\n"), "has more than|lacks"),
    ],
    ids=["refusal", "answer"],
)
def test_an_endless_response_is_abandoned(at, answer, message, what):
    with ScriptedServer(continued(*answer)) as server:
        backend = at(server.url, attempts=1)
        calls = {
            "record": lambda: backend.read_record("r.json", limit_bytes=1000),
            "listing": lambda: backend.list(""),
        }
        with pytest.raises(StorageError, match=message):
            calls[what]()


# -- refusals -----------------------------------------------------------------------------------


def refusing(status, code="", more=""):
    text = f"<Error><Code>{code}</Code>{more}</Error>" if code else "<html>wait</html>"
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


@pytest.mark.parametrize(
    ("status", "code"),
    [*((status, "") for status in (408, 429, 500, 502, 503, 504)), (503, "SomethingElse")],
)
def test_status_that_asks_to_retry_is_obeyed(at, status, code):
    answers = [refusing(status, code)] * 2
    with ScriptedServer(
        answering_all(lambda _: answers.pop() if answers else ok("abcd", RANGE))
    ) as server:
        assert read(at(server.url)) == b"abcd"
    assert len(server.heads) == 3


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody"])
def test_record_damaged_in_transit_is_resent(at, code):
    answers = [refusing(400, code), ok(more='ETag: "x"\r\n')]
    with ScriptedServer(answering_all(lambda _: answers.pop(0))) as server:
        at(server.url).publish("r.json", b"x")
    assert answers == []


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "RequestTimeTooSkewed", "set the clock"),
        (400, "ExpiredToken", "renew them"),
        (400, "", r"no reason \(HTTP 400\); have the credentials expired"),
        (403, "", "lack the permission"),
    ],
)
def test_permanent_refusal_fails_at_once_with_a_remedy(at, status, code, advice):
    with ScriptedServer(answering_all(lambda _: refusing(status, code))) as server:
        with pytest.raises(StorageError, match=rf"read b\.raw on s3://bucket/run.*{advice}"):
            read(at(server.url))
        assert len(server.heads) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        b"HTTP/1.1 301 X\r\nx-amz-bucket-region: eu-west-3\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 307 X\r\nx-amz-bucket-region: eu-west-3\r\nContent-Length: 0\r\n\r\n",
        refusing(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"),
    ],
    ids=["301", "307", "malformed"],
)
def test_bucket_redirects_to_its_region(at, refusal):
    def answer(head):
        there = any("/eu-west-3/s3/" in line for line in head)
        return ok("abcd", RANGE) if there else refusal

    with ScriptedServer(answering_all(answer)) as server:
        backend = at(server.url, attempts=1)
        assert [read(backend), read(backend)] == [b"abcd", b"abcd"]
    assert len(server.heads) == 3


# -- credentials that expire --------------------------------------------------------------------

AGENT = """
import datetime, json, pathlib, sys
runs = pathlib.Path(sys.argv[1])
number = len(runs.read_text()) + 1 if runs.exists() else 1
runs.write_text("x" * number)
if number == int(sys.argv[2]):
    sys.exit("the agent is busy")
ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=1)
print(json.dumps({"Version": 1, "AccessKeyId": f"AKID{number}X", "SecretAccessKey": "s",
                  "SessionToken": "t", "Expiration": ends.isoformat()}))
"""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Configure a process that prints credentials for a minute: too short for two requests."""

    def configure(*, fails_at=0):
        program, runs = tmp_path / "agent.py", tmp_path / "runs"
        program.write_text(AGENT)
        command = json.dumps(f"{sys.executable} {program} {runs} {fails_at}")[1:-1]
        config = tmp_path / "config"
        config.write_text(f"[profile agent]\ncredential_process = {command}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        return runs

    return configure


def key_ids(server):
    lines = [line for head in server.heads for line in head if line.startswith("Authorization")]
    return [line.partition("Credential=")[2].partition("/")[0] for line in lines]


def test_credentials_are_renewed_between_requests_of_one_backend(at, agent):
    agent()
    with ScriptedServer(answering_all(lambda _: ok("abcd", RANGE))) as server:
        backend = at(server.url, more={"profile": "agent"})
        assert [read(backend), read(backend)] == [b"abcd", b"abcd"]
    first, second = key_ids(server)
    assert first != second


@pytest.mark.parametrize("time", [1, 3])
def test_busy_agent_is_asked_again(at, agent, time):
    runs = agent(fails_at=time)
    with ScriptedServer(answering_all(lambda _: ok("abcd", RANGE))) as server:
        backend = at(server.url, more={"profile": "agent"})
        assert [read(backend), read(backend), read(backend)] == [b"abcd"] * 3
    assert len(runs.read_text()) > 3


@pytest.mark.parametrize("status", [301, 307])
def test_redirect_without_a_region_is_an_error_not_a_loop(at, status):
    redirect = f"HTTP/1.1 {status} X\r\nLocation: /bucket/run\r\nContent-Length: 0\r\n\r\n".encode()
    with ScriptedServer(answering_all(lambda _: redirect)) as server:
        with pytest.raises(StorageError, match=rf"redirects \({status}\), but names no region"):
            read(at(server.url, attempts=1))
        assert len(server.heads) == 2


def test_store_that_starts_no_upload_is_our_error(at):
    def answer(head):
        missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        return missing if head[0].startswith("HEAD") else ok("<html></html>")

    with ScriptedServer(answering_all(answer)) as server:
        writer = at(server.url, attempts=1).create("b.raw", size_hint=64 << 20)
        with pytest.raises(StorageError, match=r"create b\.raw on s3://bucket/run.*lacks UploadId"):
            writer.seal(64 << 20)
        writer.abort()


def test_truncated_listing_without_a_marker_is_an_error(at):
    with (
        ScriptedServer(answering_all(lambda _: ok(LISTING.replace("false", "true")))) as server,
        pytest.raises(StorageError, match=r"list the root on s3://.*NextContinuationToken"),
    ):
        at(server.url).list("")

"""Failing requests of S3: the backend retries those that are safe, and reports all others."""

import time

import pytest

from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import pattern, read_all

pytestmark = pytest.mark.s3

PART = 5 << 20
SIZE = 2 * PART + 12345


def written(backend, name="b.raw", size=SIZE):
    data = pattern(size)
    writer = backend.create(name, size_hint=size)
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(size)
    return data


@pytest.mark.parametrize(
    ("method", "part", "kind"),
    [
        *(("PUT", "partNumber=2", kind) for kind in ("500", "503", "reset", "lost", "lost-500")),
        *(("POST", part, kind) for part in ("uploads", "uploadId=") for kind in ("lost", "500")),
    ],
)
def test_upload_outlives_one_failure_of_each_request(shaky, proxy, kind, method, part):
    fault = proxy.fail(kind, method=method, part=part)
    data = written(shaky)
    assert fault.seen == 1
    assert read_all(shaky, "b.raw", SIZE) == data


def test_upload_gone_after_a_lost_reply_is_done_if_the_blob_is_whole(shaky, proxy):
    proxy.fail("lost", method="POST", part="uploadId=")
    gone = proxy.fail("gone", method="POST", part="uploadId=")
    data = written(shaky)
    assert gone.seen == 1
    assert read_all(shaky, "b.raw", SIZE) == data


def test_blob_kept_only_in_part_by_the_store_is_not_sealed(shaky, proxy):
    half = proxy.fail("half", method="PUT", part="b.raw")
    with pytest.raises(StorageError, match="the store kept 500 bytes instead of 1000"):
        written(shaky, size=1000)
    assert half.seen == 1


def test_ignored_ranges_are_an_error_not_wrong_bytes(opened, folder, proxy):
    options = {"endpoint_url": proxy.url}
    backend = opened(f"s3://{folder}", options=options, conditional_put="no", attempts=2)
    backend.publish("r", b"0123456789")
    proxy.drop_headers = ("range",)
    with pytest.raises(StorageError, match=r"requested bytes 4-7, but the answer holds 10 bytes"):
        backend.read([ReadRequest("r", 4, memoryview(bytearray(4)))])
    assert len(proxy.requests("GET", "/r&")) == 2


@pytest.mark.parametrize(
    "kind",
    [
        *("500", "cut", "short", "stall"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("503", "reset", "lost")),
    ],
)
def test_read_outlives_one_failure(behind_proxy, proxy, kind):
    backend = behind_proxy(timeout_s=4 if kind == "stall" else 60)
    data = written(backend)
    fault = proxy.fail(kind, method="GET", part="b.raw")
    assert read_all(backend, "b.raw", SIZE) == data
    assert fault.seen == 1


def test_attempts_are_bounded(opened, folder, proxy):
    backend = opened(f"s3://{folder}", options={"endpoint_url": proxy.url}, attempts=3)
    fault = proxy.fail("503", times=100)
    with pytest.raises(StorageError, match=r"stat r.json on s3://.*slow down"):
        backend.stat("r.json")
    assert fault.seen == 3


def test_time_is_bounded(opened, folder, proxy):
    backend = opened(f"s3://{folder}", options={"endpoint_url": proxy.url}, retry_total_s=0)
    fault = proxy.fail("503", times=100)
    with pytest.raises(StorageError, match="slow down"):
        backend.stat("r.json")
    assert fault.seen == 1


def test_store_that_never_answers_is_a_timeout(opened, folder, proxy):
    options = {"endpoint_url": proxy.url}
    backend = opened(
        f"s3://{folder}",
        options=options,
        timeout_s=0.2,  # short: no answer comes
        attempts=2,
    )
    proxy.fail("stall", times=100)
    with pytest.raises(StorageTimeoutError, match="no answer in time"):
        backend.stat("r.json")


def test_expired_credentials_fail_without_a_retry(shaky, proxy):
    fault = proxy.fail("expired", method="GET", times=100)
    with pytest.raises(StorageError, match=r"credentials have expired.*renew them"):
        shaky.list("")
    assert fault.seen == 1


def test_permanently_failed_upload_kills_the_writer(shaky, proxy, plain_client, folder):
    proxy.fail("denied", method="PUT", part="partNumber=2", times=100)
    writer = shaky.create("b.raw", size_hint=SIZE)
    data = pattern(SIZE)
    with pytest.raises(StorageError, match=r"upload part 2 of b.raw on s3://"):
        writer.write([WriteRequest(0, (memoryview(data),))])
    with pytest.raises(StorageError, match="dead since an earlier failure"):
        writer.write([WriteRequest(3 * PART, (memoryview(b"x"),))])
    with pytest.raises(StorageError, match="dead since an earlier failure"):
        writer.seal(SIZE)
    writer.abort()
    with pytest.raises(BlobNotFoundError):
        shaky.stat("b.raw")
    bucket, _, prefix = folder.partition("/")
    uploads = plain_client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    assert [u for u in uploads if u["Key"].startswith(prefix)] == []


def test_abort_waits_until_no_buffer_is_in_use(shaky, proxy):
    data = bytearray(pattern(4 * PART))
    writer = shaky.create("b.raw", size_hint=len(data))
    for number in range(1, 5):
        proxy.fail("lost", method="PUT", part=f"partNumber={number}&", times=3)
    write = shaky.submit_write(writer, [WriteRequest(0, (memoryview(data),))])
    writer.abort()
    assert write.done()
    sent = len(proxy.requests("PUT"))
    data[:] = bytes(len(data))
    assert len(proxy.requests("PUT")) == sent


def test_abort_waits_until_no_copied_part_is_in_flight(impatient, proxy):
    stalled = proxy.fail("stall", method="PUT", part="partNumber=1&")
    writer = impatient.create("b.raw", size_hint=SIZE)
    piece = memoryview(pattern(512 << 10))  # so small ones are merged
    writer.write([WriteRequest(at, (piece,)) for at in range(0, PART, piece.nbytes)])
    (part,) = writer._sent.values()
    while not stalled.seen:
        time.sleep(0.01)
    writer.abort()
    assert part.done()


@pytest.mark.parametrize("kind", ["lost", "lost-500"])
def test_lost_reply_to_a_conditional_put_is_no_lost_race(shaky, proxy, kind):
    fault = proxy.fail(kind, method="PUT", part="c.json")
    with pytest.raises(StorageError, match="unknown outcome") as caught:
        shaky.publish("c.json", b"ours", exclusive=True)
    assert not isinstance(caught.value, BlobExistsError)
    assert fault.seen == 1
    assert shaky.read_record("c.json", limit_bytes=9) == b"ours"


def test_conflict_of_conditional_puts_is_retried_and_resolved(shaky, proxy):
    proxy.fail("conflict", method="PUT", part="c.json", times=2)
    shaky.publish("c.json", b"ours", exclusive=True)
    proxy.fail("conflict", method="PUT", part="c.json")
    with pytest.raises(BlobExistsError):
        shaky.publish("c.json", b"ours", exclusive=True)


@pytest.mark.parametrize("kind", ["500", "503", "reset"])
def test_ineffective_conditional_put_is_retried(shaky, proxy, kind):
    fault = proxy.fail(kind, method="PUT", part="c.json")
    shaky.publish("c.json", b"ours", exclusive=True)
    assert fault.seen == 1
    assert shaky.read_record("c.json", limit_bytes=9) == b"ours"


def test_taken_name_is_a_lost_race(shaky, proxy):
    shaky.publish("c.json", b"theirs")
    with pytest.raises(BlobExistsError, match="the name is taken"):
        shaky.publish("c.json", b"ours", exclusive=True)
    assert len(proxy.requests("PUT", "c.json")) == 2


def test_taken_name_after_an_unknown_attempt_stays_unknown(shaky, proxy):
    shaky.publish("c.json", b"theirs")
    proxy.fail("reset", method="PUT", part="c.json")
    with pytest.raises(StorageError, match="unknown outcome"):
        shaky.publish("c.json", b"ours", exclusive=True)
    assert shaky.read_record("c.json", limit_bytes=9) == b"theirs"


def test_missing_conditional_puts_are_detected(opened, folder, proxy):
    proxy.drop_headers = ("if-none-match",)
    backend = opened(f"s3://{folder}", options={"endpoint_url": proxy.url})
    assert not backend.capabilities.exclusive_publish
    assert "ignores the condition of a put" in backend.capabilities.notes[0]
    assert backend.list("") == []
    backend.publish("c.json", b"one", exclusive=True)
    with pytest.raises(BlobExistsError):
        backend.publish("c.json", b"two", exclusive=True)


def test_short_blob_is_truncation_not_a_bad_reply(shaky, proxy):
    shaky.publish("r", b"12345")
    with pytest.raises(BlobTruncatedError, match="it ends at 5"):
        shaky.read([ReadRequest("r", 0, memoryview(bytearray(6)))])
    with pytest.raises(BlobTruncatedError):
        shaky.read([ReadRequest("r", 5, memoryview(bytearray(1)))])
    assert len(proxy.requests("GET", "/r")) == 2

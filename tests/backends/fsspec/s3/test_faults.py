"""Failing requests of S3: the backend retries those that are safe, and reports all others."""

import threading
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


def test_upload_that_is_gone_behind_a_lost_answer_is_done_if_the_blob_is_whole(shaky, proxy):
    proxy.fail("lost", method="POST", part="uploadId=")
    gone = proxy.fail("gone", method="POST", part="uploadId=")
    data = written(shaky)
    assert gone.seen == 1
    assert read_all(shaky, "b.raw", SIZE) == data


def test_upload_that_is_gone_without_a_blob_fails(shaky, proxy):
    proxy.fail("gone", method="POST", part="uploadId=", times=100)
    with pytest.raises(StorageError, match=r"seal b.raw on s3://"):
        written(shaky)
    with pytest.raises(BlobNotFoundError):
        shaky.stat("b.raw")


def test_blob_of_which_the_store_keeps_a_part_only_is_not_sealed(shaky, proxy):
    half = proxy.fail("half", method="PUT", part="b.raw")
    with pytest.raises(StorageError, match="the store holds 500 bytes of 1000"):
        written(shaky, size=1000)
    assert half.seen == 1


def test_store_that_ignores_ranges_is_an_error_and_never_other_bytes(opened, folder, proxy):
    options = {"endpoint_url": proxy.url}
    backend = opened(f"s3://{folder}", options=options, conditional_put="no", attempts=2)
    backend.publish("r", b"0123456789")
    proxy.drop_headers = ("range",)
    with pytest.raises(StorageError, match=r"requested bytes 4-7, but the answer holds 10 bytes"):
        backend.read([ReadRequest("r", 4, memoryview(bytearray(4)))])
    assert len(proxy.requests("GET", "/r&")) == 2


def test_repeated_part_keeps_its_number(shaky, proxy):
    proxy.fail("lost", method="PUT", part="partNumber=1&")
    written(shaky)
    sent = [len(proxy.requests("PUT", f"partNumber={number}&")) for number in range(1, 5)]
    assert sent == [2, 1, 1, 0]


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


@pytest.mark.parametrize("kind", ["500", "503", "reset", "cut"])
def test_record_and_listing_outlive_one_failure(shaky, proxy, kind):
    shaky.publish("r.json", b"record of some length")
    record = proxy.fail(kind, method="GET", part="r.json")
    listing = proxy.fail(kind, method="GET", part="list-type")
    assert shaky.read_record("r.json", limit_bytes=99) == b"record of some length"
    assert [info.name for info in shaky.list("")] == ["r.json"]
    assert (record.seen, listing.seen) == (1, 1)


def test_delete_outlives_failures(shaky, proxy):
    shaky.publish("r.json", b"x")
    fault = proxy.fail("lost", method="POST", part="delete", times=2)
    shaky.delete(["r.json"])
    assert fault.seen == 2
    assert shaky.list("") == []


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


def test_expired_credentials_are_said_and_not_tried_again(shaky, proxy):
    fault = proxy.fail("expired", method="GET", times=100)
    with pytest.raises(StorageError, match=r"credentials have expired.*renew them"):
        shaky.list("")
    assert fault.seen == 1


def test_denied_access_is_said_and_not_tried_again(shaky, proxy):
    fault = proxy.fail("denied", method="PUT", times=100)
    with pytest.raises(StorageError, match=r"publish r.json on s3://.*permission"):
        shaky.publish("r.json", b"x")
    assert fault.seen == 1


def test_missing_bucket_is_said(opened, s3_url):
    backend = opened("s3://no-such-bucket/run", options={"endpoint_url": s3_url})
    with pytest.raises(StorageError, match="create the bucket"):
        backend.list("")


def test_unreachable_store_is_said(opened, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    options = {"endpoint_url": "http://127.0.0.1:9"}
    backend = opened("s3://bucket/run", options=options, attempts=2)
    with pytest.raises(StorageError, match=r"list the root on s3://bucket/run.*reachable"):
        backend.list("")


def test_missing_credentials_are_said(opened, s3_url, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    backend = opened("s3://bucket/run", options={"endpoint_url": s3_url})
    with pytest.raises(StorageError, match="no usable credentials"):
        backend.list("")


def test_upload_that_fails_for_good_leaves_the_writer_dead(shaky, proxy, look, folder):
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
    uploads = look.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    assert [u for u in uploads if u["Key"].startswith(prefix)] == []


def test_failed_copied_part_is_told_by_seal(shaky, proxy):
    proxy.fail("denied", method="PUT", part="partNumber=1&", times=100)
    writer = shaky.create("b.raw", size_hint=SIZE)
    small = 1 << 19  # small pieces are copied, so their batch ends before the part is sent
    view = memoryview(pattern(PART))
    writer.write([WriteRequest(at, (view[at : at + small],)) for at in range(0, PART, small)])
    with pytest.raises(StorageError):
        writer.seal(SIZE)
    writer.abort()


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


def test_abort_waits_until_no_copied_part_is_on_its_way(impatient, proxy):
    stalled = proxy.fail("stall", method="PUT", part="partNumber=1&")
    writer = impatient.create("b.raw", size_hint=SIZE)
    piece = memoryview(pattern(512 << 10))  # so small ones are put together
    writer.write([WriteRequest(at, (piece,)) for at in range(0, PART, piece.nbytes)])
    (part,) = writer._sent.values()
    while not stalled.seen:
        time.sleep(0.01)
    writer.abort()
    assert part.done()


@pytest.mark.parametrize("kind", ["lost", "lost-500"])
def test_lost_answer_to_a_conditional_put_is_no_lost_race(shaky, proxy, kind):
    fault = proxy.fail(kind, method="PUT", part="c.json")
    with pytest.raises(StorageError, match="unknown outcome") as caught:
        shaky.publish("c.json", b"ours", exclusive=True)
    assert not isinstance(caught.value, BlobExistsError)
    assert fault.seen == 1
    assert shaky.read_record("c.json", limit_bytes=9) == b"ours"


def test_conflict_of_conditional_puts_is_repeated_and_leaves_no_doubt(shaky, proxy):
    proxy.fail("conflict", method="PUT", part="c.json", times=2)
    shaky.publish("c.json", b"ours", exclusive=True)
    proxy.fail("conflict", method="PUT", part="c.json")
    with pytest.raises(BlobExistsError):
        shaky.publish("c.json", b"ours", exclusive=True)


@pytest.mark.parametrize("kind", ["500", "503", "reset"])
def test_conditional_put_that_did_nothing_is_repeated(shaky, proxy, kind):
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


def test_store_without_conditional_puts_is_found_out(opened, folder, proxy):
    proxy.drop_headers = ("if-none-match",)
    backend = opened(f"s3://{folder}", options={"endpoint_url": proxy.url})
    assert not backend.capabilities.exclusive_publish
    assert "ignores the condition of a put" in backend.capabilities.notes[0]
    assert backend.list("") == []
    backend.publish("c.json", b"one", exclusive=True)
    with pytest.raises(BlobExistsError):
        backend.publish("c.json", b"two", exclusive=True)


def test_conditional_puts_are_found_out(opened, folder, s3_url):
    backend = opened(f"s3://{folder}", options={"endpoint_url": s3_url})
    assert backend.capabilities.exclusive_publish
    assert backend.list("") == []


def test_short_blob_is_truncation_not_a_broken_answer(shaky, proxy):
    shaky.publish("r", b"12345")
    with pytest.raises(BlobTruncatedError, match="it has 5"):
        shaky.read([ReadRequest("r", 0, memoryview(bytearray(6)))])
    with pytest.raises(BlobTruncatedError):
        shaky.read([ReadRequest("r", 5, memoryview(bytearray(1)))])
    assert len(proxy.requests("GET", "/r")) == 2


def test_reads_stop_at_the_first_failure(shaky, proxy):
    shaky.publish("r", bytes(1 << 20))
    requests = [ReadRequest("none", 0, memoryview(bytearray(9)))]
    requests += [ReadRequest("r", n << 18, memoryview(bytearray(9))) for n in range(4)]
    with pytest.raises(BlobNotFoundError, match="read none on s3://"):
        shaky.read(requests)


def test_threads_of_a_closed_backend_end(opened, folder, s3_url):
    before = {*threading.enumerate()}
    backend = opened(f"s3://{folder}", options={"endpoint_url": s3_url})
    written(backend)
    backend.close()
    left = {*threading.enumerate()} - before
    assert [t for t in left if t.name.startswith("penstock-fsspec")] == []

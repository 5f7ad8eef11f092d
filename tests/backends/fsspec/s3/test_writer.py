"""Blobs become parts by offset, in bounded memory, without needless copies."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.backends.fsspec.s3.upload import Part, PartMemory
from penstock.core.errors import StorageError
from penstock.core.types import PAGE_BYTES, WriteRequest, align_up
from penstock.testing.expectations import pattern, read_all

MIB = 1 << 20
PART = 5 * MIB


def test_memory_in_flight_is_bounded_but_one_part_always_fits():
    memory = PartMemory(100)
    first, second = memory.take(80), memory.take(80)
    memory.send(first)
    waiting = threading.Thread(target=memory.send, args=(second,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    memory.sent(first)
    waiting.join()
    memory.sent(second)
    alone = memory.take(500)
    memory.send(alone)
    memory.sent(alone)


def test_gaps_of_a_part_are_always_zero():
    for owned in [False, True]:
        for lent in [{}, {12}, {3}, {3, 12}]:
            for length in [20, 19, 14, 12, 8, 4, 1, 0]:
                memory = PartMemory(100)
                memory.give(memoryview(bytearray(b"\xff" * 20)))
                part = Part(0, 20)
                for at, data in ((12, b"later"), (3, b"first")):
                    if at in lent:
                        part.lend(at, memoryview(data))
                    else:
                        part.put(at, memoryview(data), memory=memory)
                if owned:
                    part.own(memory=memory)
                expected = b"\0\0\0first\0\0\0\0later\0\0\0"
                assert b"".join(part.views(length)) == expected[:length]
                assert bool(part.lent) == (bool(lent) and not owned)


def request(offset, data):
    return WriteRequest(offset, (memoryview(data),))


@pytest.mark.s3
def test_blob_with_gaps_has_its_writes_and_zeros(store):
    rng = random.Random(5)
    size = 6 * PART + 4321
    expected, requests, at = bytearray(size), [], 0
    while at < size - 3 * MIB:
        data = pattern(rng.choice([100, 70_000, 2 * MIB, 7 * MIB]), at)[: size - at]
        expected[at : at + len(data)] = data
        requests.append(request(at, data))
        at = align_up(at + len(data), PAGE_BYTES) + rng.choice([0, 0, 77, 4096, 900_000])
    writer = store.create("b.raw", size_hint=size)
    for some in range(0, len(requests), 3):
        store.submit_write(writer, requests[some : some + 3])
    writer.seal(size)
    assert read_all(store, "b.raw", size) == bytes(expected)


@pytest.mark.s3
def test_out_of_order_calls_land_at_their_offsets(store):
    size = 12 * PART
    data = pattern(size)
    requests = [request(at, data[at : at + 3 * MIB]) for at in range(0, size, 3 * MIB)]
    writer = store.create("b.raw", size_hint=size)
    # Three in a row touch at most three parts: the number kept open.
    with ThreadPoolExecutor(3) as pool:
        for some in range(0, len(requests), 3):
            group = requests[some : some + 3]
            list(pool.map(lambda r: writer.write([r]), reversed(group)))
    writer.seal(size)
    assert read_all(store, "b.raw", size) == data


@pytest.mark.s3
def test_write_into_a_sent_part_is_refused_not_lost(store):
    writer = store.create("b.raw")
    for number in range(6):
        writer.write([request(number * PART + 100, b"x" * 1000)])
    with pytest.raises(StorageError, match=r"offset 0 comes too late"):
        writer.write([request(0, b"late")])
    with pytest.raises(StorageError, match="dead"):
        writer.seal(6 * PART)
    writer.abort()


@pytest.mark.s3
def test_data_covering_a_part_is_sent_in_place(store):
    taken = []
    memory = store._store().memory
    take = memory.take
    memory.take = lambda size: taken.append(size) or take(size)
    writer = store.create("b.raw", size_hint=4 * PART)
    data = pattern(4 * PART)
    writer.write([request(0, data)])
    assert taken == []
    writer.seal(4 * PART)
    assert read_all(store, "b.raw", 4 * PART) == data


@pytest.mark.s3
def test_copied_parts_in_flight_stay_within_the_budget(opened, folder, proxy):
    backend = opened(
        f"s3://{folder}",
        options={"endpoint_url": proxy.url},
        part_bytes=PART,
        buffer_bytes=2 * PART,
        conditional_put="yes",
    )
    writer = backend.create("b.raw", size_hint=10 * PART)
    data = pattern(10 * PART)
    small = MIB // 2  # copied, since each piece is small
    writer.write([request(at, data[at : at + small]) for at in range(0, len(data), small)])
    writer.seal(len(data))
    assert read_all(backend, "b.raw", len(data)) == data
    assert len(proxy.requests("PUT", "partNumber")) == 10
    assert proxy.most_putting <= 2


@pytest.mark.s3
def test_uploads_in_flight_stay_within_parallel(opened, folder, proxy):
    backend = opened(
        f"s3://{folder}",
        options={"endpoint_url": proxy.url},
        part_bytes=PART,
        parallel=3,
        conditional_put="yes",
    )
    writer = backend.create("b.raw", size_hint=12 * PART)
    data = pattern(PART) * 12
    writer.write([request(0, data)])
    writer.seal(len(data))
    assert 1 <= proxy.most_putting <= 3


@pytest.mark.s3
def test_memory_of_a_batch_is_unused_after_it(store):
    """A part that two batches share is sent after the first one has returned its memory."""
    data = pattern(4 * PART)
    writer = store.create("b.raw", size_hint=len(data))
    at = 0
    while at < len(data):
        lent = bytearray(data[at : at + 3 * MIB])
        writer.write([request(at, lent)])
        lent[:] = bytes(len(lent))
        at += len(lent)
    writer.seal(len(data))
    assert read_all(store, "b.raw", len(data)) == data


@pytest.mark.s3
def test_batch_lasts_until_its_memory_is_sent(impatient, proxy):
    stalled = proxy.fail("stall", method="PUT", part="partNumber=1&")
    data = pattern(PART)
    writer = impatient.create("b.raw", size_hint=2 * PART)
    half = 2 * MIB
    first = impatient.submit_write(writer, [request(0, data[:half])])
    first.result(300)  # its bytes were copied
    second = impatient.submit_write(writer, [request(half, data[half:])])
    while not stalled.seen:
        time.sleep(0.01)
    assert not second.done()
    second.result(300)
    writer.seal(PART)
    assert read_all(impatient, "b.raw", PART) == data


@pytest.mark.s3
def test_seal_truncates_at_a_part_but_not_inside_a_sent_one(store):
    data = pattern(3 * PART)
    whole = store.create("whole.raw")
    whole.write([request(0, data)])
    whole.seal(2 * PART)
    assert store.stat("whole.raw").size_bytes == 2 * PART
    inside = store.create("inside.raw")
    inside.write([request(0, data)])
    with pytest.raises(StorageError, match="cannot be cut to"):
        inside.seal(2 * PART - 1)
    inside.abort()
    with pytest.raises(StorageError):
        inside.seal(PART)


@pytest.mark.s3
def test_sweep_aborts_old_uploads_and_keeps_new_ones(store, plain_client, folder):
    bucket, _, prefix = folder.partition("/")
    outside = plain_client.create_multipart_upload(Bucket=bucket, Key="elsewhere/b.raw")
    young = plain_client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/data/u/b.raw")
    # The server dates every upload to 2010, but dates parts correctly.
    plain_client.upload_part(
        Bucket=bucket,
        Key=f"{prefix}/data/u/b.raw",
        UploadId=young["UploadId"],
        PartNumber=1,
        Body=b"part",
    )
    now = store.store_time_s()

    def ours():
        uploads = plain_client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return sorted(u["Key"] for u in uploads if u["Key"].startswith((prefix, "elsewhere")))

    store.sweep(now - 3600)
    assert ours() == sorted(["elsewhere/b.raw", f"{prefix}/data/u/b.raw"])
    store.sweep(now + 3600 * 24 * 365 * 20)
    assert ours() == ["elsewhere/b.raw"]
    plain_client.abort_multipart_upload(
        Bucket=bucket, Key="elsewhere/b.raw", UploadId=outside["UploadId"]
    )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("short", [0, 1, PAGE_BYTES - 1, PAGE_BYTES])
@pytest.mark.parametrize("step", [1 << 20, pytest.param(PART, marks=pytest.mark.slow)])
def test_a_blob_may_end_anywhere_in_the_last_page_of_a_part(store, parts, short, step):
    length = parts * PART - short
    data = pattern(length)
    writer = store.create("data/last-page")
    for offset in range(0, length, step):
        view = memoryview(data)[offset : offset + step]
        store.submit_write(writer, [WriteRequest(offset, (view,))]).result(300)
    writer.seal(length)
    assert read_all(store, "data/last-page", length) == data

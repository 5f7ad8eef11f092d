"""Connections that break, servers that die."""

import signal
import threading
from contextlib import suppress

import pytest
import redis
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    StorageError,
    StorageTimeoutError,
)
from penstock.core.types import WriteRequest
from servers import read, write

from penstock_redis.scripts import DELETE, PUBLISH

MIB = 1 << 20
UID = "c" * 32


@pytest.fixture
def proxy(server, proxied):
    return proxied(server)


@pytest.mark.parametrize("action", ["cut", "swallow"])
def test_writing_and_reading_go_on_after_a_dropped_connection(server, proxy, action):
    backend = server.open(url=proxy.url, chunk_bytes=MIB, pipeline_bytes=2 * MIB)
    data = bytes(range(256)) * (5 << 12)
    writer = backend.create("data/a.raw")
    proxy.at(b"SETRANGE", action)
    writer.write([WriteRequest(7, (memoryview(data),))])
    proxy.at(b"0.raw", action)
    proxy.at(b"EVAL", action)
    writer.seal(7 + len(data))
    proxy.at(b"GETRANGE", action)
    assert read(backend, "data/a.raw", len(data), offset=7) == data
    for call in (lambda: backend.list(""), lambda: backend.stat("data/a.raw")):
        proxy.at(b"penstock:penstock", action)
        call()
    proxy.at(b"EVAL", action)
    backend.delete(["data/a.raw"])
    assert proxy.done == 6
    assert backend.list("") == []
    backend.close()


@pytest.mark.parametrize("action", ["cut", "swallow"])
def test_exclusive_publish_never_fails_by_meeting_itself(server, proxy, action):
    backend = server.open(url=proxy.url)
    proxy.at(b"first", action)
    backend.publish("commits/1.json", b"first", exclusive=True)
    assert proxy.done == 1
    assert backend.read_record("commits/1.json", limit_bytes=9) == b"first"
    proxy.at(b"second", action)
    with pytest.raises(BlobExistsError):
        backend.publish("commits/1.json", b"second", exclusive=True)
    assert proxy.done == 2
    assert backend.read_record("commits/1.json", limit_bytes=9) == b"first"
    backend.close()


@pytest.mark.parametrize("action", ["cut", "swallow"])
def test_exclusive_publish_without_any_answer_is_of_unknown_outcome(server, proxy, action):
    backend, other = server.open(url=proxy.url, retry_total_s=0), server.open()
    proxy.at(b"mine", action)
    with pytest.raises(StorageError) as caught:
        backend.publish("commits/1.json", b"mine", exclusive=True)
    assert proxy.done == 1
    assert not isinstance(caught.value, BlobExistsError)
    if action == "cut":
        with pytest.raises(BlobNotFoundError):
            other.stat("commits/1.json")
    else:
        assert other.read_record("commits/1.json", limit_bytes=9) == b"mine"
    backend.close()
    other.close()


def test_create_never_fails_by_meeting_itself(server, proxy):
    backend = server.open(url=proxy.url)
    proxy.at(b"EVAL", "swallow")
    write(backend, "data/a.raw", b"12345")
    assert proxy.done == 1
    assert read(backend, "data/a.raw", 5) == b"12345"
    backend.close()


def test_what_arrives_late_changes_nothing_that_came_after_it(server):
    backend = server.open()
    inside = backend._server
    stamp = inside.stamp("begin")
    backend.publish("r", b"newer")
    late = ("r", "r", "0123456789abcdef", "token", stamp, 0, b"older")
    assert inside.answer("publish", PUBLISH, *late)[0] == "ok"
    assert backend.read_record("r", limit_bytes=9) == b"newer"
    inside.answer("delete", DELETE, "r", "r", stamp)
    assert backend.read_record("r", limit_bytes=9) == b"newer"
    backend.delete(["r"])
    assert backend.list("") == []
    backend.close()


@pytest.mark.parametrize("ending", ["abort", "seal"])
def test_abort_and_seal_wait_for_what_is_under_way(server, proxy, ending):
    backend = server.open(url=proxy.url)
    writer = backend.create("data/a.raw")
    reached, go_on = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go_on.wait(60)

    def write_some():
        with suppress(StorageError):  # given up
            writer.write([WriteRequest(7, (memoryview(bytes(5)),))])

    proxy.at(b"SETRANGE", hold)
    writing = threading.Thread(target=write_some)
    writing.start()
    assert reached.wait(60)
    end = writer.abort if ending == "abort" else lambda: writer.seal(12)
    ending_thread = threading.Thread(target=end)
    ending_thread.start()
    ending_thread.join(0.3)  # would be over long since if it did not wait
    assert ending_thread.is_alive()
    go_on.set()
    ending_thread.join()
    assert not writer._under_way
    writing.join()
    assert [info.name for info in backend.list("")] == ([] if ending == "abort" else ["data/a.raw"])
    backend.close()


def test_an_error_among_replies_does_not_reach_the_next_request(server):
    backend = server.open(chunk_bytes=4096)
    write(backend, "data/a.raw", b"a" * 12_000)
    write(backend, "data/b.raw", b"b" * 12_000)
    with server.client() as client:
        broken = next(
            key
            for key in client.scan_iter()
            if b":chunk:" in key and client.getrange(key, 0, 0) == b"a"
        )
        client.delete(broken)
        client.rpush(broken, b"no string")
    for _ in range(3):
        with pytest.raises(StorageError, match="WRONGTYPE"):
            read(backend, "data/a.raw", 12_000)
        assert read(backend, "data/b.raw", 12_000) == b"b" * 12_000
    backend.close()


def test_an_absent_server_is_named_with_what_to_do(own_server):
    server = own_server()
    backend = server.open(retry_total_s=0.2)
    writer = backend.create("data/a.raw")
    server.kill()
    message = (
        rf"a\.raw on redis://127\.0\.0\.1:{server.port}/0/penstock: .*check that a server answers"
    )
    with pytest.raises(StorageError, match=message):
        writer.write([WriteRequest(0, (memoryview(b"12345"),))])
    with pytest.raises(StorageError, match=message):
        backend.publish("a.raw", b"{}", exclusive=True)
    with pytest.raises(StorageError, match=message):
        read(backend, "a.raw", 5)
    writer.abort()
    backend.close()
    with pytest.raises(StorageError, match="check that a server answers"):
        server.open(retry_total_s=0)


def test_a_server_that_hangs_is_not_waited_for_for_ever(own_server):
    server = own_server()
    backend = server.open(timeout_s=4, retry_total_s=0)
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageTimeoutError, match="raise timeout_s"):
        backend.publish("r.json", b"{}", exclusive=True)
    backend.close()


def test_a_save_that_outlives_its_server_is_refused_and_never_half_there(own_server):
    server = own_server("--appendonly", "yes", "--appendfsync", "everysec")
    backend, other_rank = server.open(), server.open()
    record = b'{"uid": "%s"}' % UID.encode()
    backend.publish(f"data/{UID}/intent.json", record)
    write(other_rank, f"data/{UID}/blobs/1.raw", b"12345")
    writer = backend.create(f"data/{UID}/blobs/0.raw")
    writer.write([WriteRequest(0, (memoryview(b"12345"),))])
    server.kill()
    server.start()  # with what it had written to its file by then, or without
    with pytest.raises(StorageError, match="save again"):
        writer.write([WriteRequest(5, (memoryview(b"67890"),))])
    with pytest.raises(StorageError, match="save again"):
        writer.seal(10)
    with pytest.raises(StorageError, match="save again"):
        backend.publish("commits/00000001-0.json", record, exclusive=True)
    assert backend.list("commits/") == []
    backend.close()
    other_rank.close()


def test_with_an_append_only_file_what_was_answered_outlives_the_server(own_server):
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    backend = server.open(require_aof=True, chunk_bytes=MIB)
    write(backend, "data/a.raw", b"x" * (3 * MIB))
    backend.publish("commits/1.json", b"{}", exclusive=True)
    server.kill()
    server.start()
    assert read(backend, "data/a.raw", 3 * MIB) == b"x" * (3 * MIB)
    assert backend.read_record("commits/1.json", limit_bytes=9) == b"{}"
    with pytest.raises(BlobExistsError):
        backend.publish("commits/1.json", b"{}", exclusive=True)
    backend.close()


def test_redis_py_itself_repeats_nothing(server, proxy):
    backend = server.open(url=proxy.url)
    proxy.at(b"INCR", "swallow")
    with pytest.raises(redis.ConnectionError):
        backend._server._redis.incr("n")
    with server.client() as client:
        assert client.get("n") == b"1"
    backend.close()

"""Whole checkpoints expire, and a record never outlives its data."""

import math
import time

import pytest
from penstock.core.errors import BlobNotFoundError, StorageError
from penstock.core.types import WriteRequest
from servers import read, write

UID, OTHER = "a" * 32, "0123456789abcdef" * 2
DATA, COMMIT = f"data/{UID}/blobs/0.raw", "commits/00000001-0.json"
RECORD = b'{"uid": "%s"}' % UID.encode()


def ends(server, part):
    """When the keys with `part` in their names expire, in ms; inf: never."""
    with server.client() as client:
        found = [client.pexpiretime(key) for key in client.scan_iter() if part in key.decode()]
    assert found, part
    return [math.inf if end == -1 else end for end in found]


def shorten(server, part, life_ms):
    with server.client() as client:
        for key in list(client.scan_iter()):
            if part in key.decode():
                client.pexpire(key, life_ms)


def expire(server, part):
    shorten(server, part, 0)


def test_without_ttl_nothing_expires(server):
    backend = server.open()
    write(backend, DATA, b"12345")
    backend.publish(COMMIT, RECORD, exclusive=True)
    assert set(ends(server, "")) == {math.inf}
    backend.close()


def test_commit_expires_before_its_data_however_old_that_is(server):
    backend = server.open(ttl_s=600, chunk_bytes=4096)
    write(backend, DATA, bytes(10_000))
    shorten(server, "", 5000)  # as if it had been written long ago
    backend.publish(COMMIT, RECORD, exclusive=True)
    (commit,) = ends(server, f":group:{COMMIT}")
    (data,) = ends(server, f":group:data/{UID}")
    now_ms = backend.store_time_s() * 1000
    assert commit > now_ms + 500_000
    assert data > commit
    assert len(ends(server, ":chunk:")) == 4
    assert min(ends(server, ":chunk:")) > data
    assert min(ends(server, ":root")) > data
    assert math.inf not in ends(server, "")
    backend.close()


def test_commit_keeps_the_data_of_others_that_it_names(server):
    one, two = server.open(ttl_s=600), server.open(ttl_s=600)
    write(one, f"data/{OTHER}/blobs/0.raw", b"12345")
    one.publish("commits/00000000-0.json", b'{"uid": "%s"}' % OTHER.encode())
    shorten(server, OTHER, 5000)
    two.publish(COMMIT, b'{"uid": "%s", "references": ["%s"]}' % (UID.encode(), OTHER.encode()))
    (commit,) = ends(server, f":group:{COMMIT}")
    assert min(ends(server, OTHER)) > commit
    one.close()
    two.close()


def test_commit_without_ttl_keeps_data_for_ever(server):
    short, plain = server.open(ttl_s=600), server.open()
    write(short, DATA, b"12345")
    plain.publish(COMMIT, RECORD, exclusive=True)
    assert set(ends(server, "")) == {math.inf}
    short.close()
    plain.close()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "begun-again"])
def test_commit_is_refused_where_its_data_has_expired(server, again):
    backend, other_rank = server.open(ttl_s=600), server.open(ttl_s=600)
    backend.publish(f"data/{UID}/intent.json", RECORD)
    write(other_rank, DATA, b"12345")
    expire(server, f":group:data/{UID}")
    if again:
        write(backend, f"data/{UID}/blobs/1.raw", b"12345")
    with pytest.raises(StorageError, match="save again"):
        backend.publish(COMMIT, RECORD, exclusive=True)
    assert backend.list("commits/") == []
    backend.close()
    other_rank.close()


def test_reference_that_expires_during_a_save_is_refused(server):
    one, two = server.open(ttl_s=600), server.open(ttl_s=600)
    write(one, f"data/{OTHER}/blobs/0.raw", b"12345")
    named = b'{"uid": "%s", "references": ["%s"]}' % (UID.encode(), OTHER.encode())
    two.publish(f"data/{UID}/intent.json", named)
    expire(server, f":group:data/{OTHER}")
    with pytest.raises(StorageError, match="save again"):
        two.publish(COMMIT, named, exclusive=True)
    one.close()
    two.close()


def test_words_that_only_look_like_a_uid_do_not_matter(server):
    backend = server.open(ttl_s=600)
    backend.publish(COMMIT, b'{"metadata": "%s"}' % UID.encode(), exclusive=True)
    assert [info.name for info in backend.list("")] == [COMMIT]
    backend.close()


def test_writing_keeps_what_was_written_before(server):
    backend = server.open(ttl_s=600, chunk_bytes=4096)
    writer = backend.create(DATA)
    writer.write([WriteRequest(0, (memoryview(bytes(5000)),))])
    write(backend, f"data/{UID}/blobs/1.raw", bytes(5000))
    shorten(server, "", 5000)
    now_ms = backend.store_time_s() * 1000
    writer.write([WriteRequest(5000, (memoryview(bytes(9000)),))])
    assert min(ends(server, "")) > now_ms + 500_000
    assert math.inf not in ends(server, "")
    backend.close()


def test_what_was_kept_for_ever_is_not_shortened(server):
    plain, short = server.open(), server.open(ttl_s=600)
    write(plain, DATA, b"12345")
    plain.publish(COMMIT, RECORD, exclusive=True)
    short.publish("commits/00000002-0.json", RECORD, exclusive=True)
    assert set(ends(server, UID)) == {math.inf}
    assert set(ends(server, COMMIT)) == {math.inf}
    plain.close()
    short.close()


def test_all_that_a_killed_save_leaves_goes_by_itself(server):
    backend = server.open(ttl_s=600, chunk_bytes=4096)
    writer = backend.create(DATA)
    writer.write([WriteRequest(9, (memoryview(bytes(10_000)),))])
    aborted = backend.create(f"data/{UID}/blobs/1.raw")
    aborted.write([WriteRequest(0, (memoryview(bytes(10_000)),))])
    aborted.abort()
    write(backend, f"data/{UID}/blobs/2.raw", b"end", offset=20_000)
    backend.publish(f"data/{UID}/index", b"")
    assert math.inf not in ends(server, "")
    backend.close()


def test_what_has_expired_is_neither_listed_nor_found(server):
    backend = server.open(ttl_s=3)
    write(backend, DATA, b"12345")
    backend.publish(COMMIT, RECORD, exclusive=True)
    assert read(backend, DATA, 5) == b"12345"
    while any(info.name == COMMIT for info in backend.list("")):
        time.sleep(0.02)
    with pytest.raises(BlobNotFoundError):
        backend.read_record(COMMIT, limit_bytes=100)
    # The data goes later; here at once.
    expire(server, UID)
    assert backend.list("") == []
    backend.sweep(backend.store_time_s())
    with server.client() as client:
        assert client.hkeys("penstock:penstock:root") == [b"~seq"]
    backend.close()

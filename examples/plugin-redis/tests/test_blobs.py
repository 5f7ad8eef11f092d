"""The contents of the server, and leftovers there."""

import multiprocessing
import tracemalloc

import pytest
from penstock.core.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobTruncatedError,
    FormatError,
    StorageError,
)
from penstock.core.types import WriteRequest
from servers import read, write

MIB = 1 << 20


def keys(server):
    with server.client() as client:
        return {key.decode() for key in client.scan_iter()}


def chunks(server):
    return {key for key in keys(server) if ":chunk:" in key}


def test_chunks_are_bounded_and_as_large_as_what_they_hold(server):
    backend = server.open(chunk_bytes=MIB)
    write(backend, "data/a.raw", bytes(3 * MIB + 5))
    with server.client() as client:
        sizes = sorted(client.strlen(key) for key in chunks(server))
    assert sizes == [5, MIB, MIB, MIB]
    backend.close()


def test_memory_is_bounded_by_what_is_under_way(server):
    backend = server.open(chunk_bytes=MIB, pipeline_bytes=2 * MIB)
    size = 24 * MIB
    data, target = memoryview(bytearray(b"x") * size), bytearray(size)
    tracemalloc.start()
    try:
        write(backend, "data/large.raw", data[100:], offset=100)
        target[:] = read(backend, "data/large.raw", 1) + target[1:]
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        write(backend, "data/other.raw", data[100:], offset=100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    backend.close()
    assert peak - before < 6 * MIB


def test_a_hole_larger_than_a_chunk_costs_no_memory_and_reads_as_zeros(server):
    backend = server.open(chunk_bytes=MIB)
    write(backend, "data/a.raw", b"end", offset=5 * MIB + 7)
    with server.client() as client:
        assert sum(client.strlen(key) for key in chunks(server)) == 10
    assert read(backend, "data/a.raw", 5 * MIB + 10) == bytes(5 * MIB + 7) + b"end"
    assert backend.read_record("data/a.raw", limit_bytes=9 * MIB)[-4:] == b"\0end"
    backend.close()


def test_a_chunk_that_is_gone_is_damage_and_not_zeros(server):
    backend = server.open(chunk_bytes=MIB)
    write(backend, "data/a.raw", b"x" * (3 * MIB))
    with server.client() as client:
        client.delete(next(key for key in chunks(server) if key.endswith(":1")))
    assert read(backend, "data/a.raw", MIB) == b"x" * MIB
    with pytest.raises(BlobTruncatedError, match=r"data/a\.raw .*lacks a part"):
        read(backend, "data/a.raw", 3 * MIB)
    with pytest.raises(FormatError, match="lacks a part"):
        backend.read_record("data/a.raw", limit_bytes=9 * MIB)
    backend.close()


def test_nobody_reads_a_blob_before_its_seal(server):
    backend, other = server.open(), server.open()
    writer = backend.create("data/u/a.raw")
    writer.write([WriteRequest(0, (memoryview(b"12345"),))])
    with pytest.raises(BlobNotFoundError):
        read(other, "data/u/a.raw", 5)
    with pytest.raises(BlobNotFoundError):
        other.stat("data/u/a.raw")
    with pytest.raises(BlobExistsError):
        other.create("data/u/a.raw")
    assert [(i.name, i.size_bytes) for i in other.list("data/")] == [("data/u/a.raw", 5)]
    writer.seal(5)
    assert read(other, "data/u/a.raw", 5) == b"12345"
    backend.close()
    other.close()


def test_abort_and_delete_leave_nothing_behind(server):
    backend = server.open(chunk_bytes=MIB)
    writer = backend.create("data/u/aborted.raw")
    writer.write([WriteRequest(0, (memoryview(bytes(2 * MIB)),))])
    writer.abort()
    write(backend, "data/u/sealed.raw", bytes(3 * MIB), length=MIB + 1)
    unfinished = backend.create("data/u/unfinished.raw")
    unfinished.write([WriteRequest(0, (memoryview(bytes(2 * MIB)),))])
    backend.publish("data/u/index", b"x")
    backend.publish("data/u/index", b"y")
    assert len(chunks(server)) == 2 + 2 + 1
    backend.delete(["data/u/index", "data/u/sealed.raw", "data/u/unfinished.raw"])
    assert backend.list("") == []
    assert keys(server) == {"penstock:penstock:root", "penstock:penstock:dead"}
    with pytest.raises(StorageError, match=r"unfinished\.raw.*deleted"):
        unfinished.seal(5)
    backend.close()


def test_sweep_removes_what_arrived_after_its_blob_was_given_up(server):
    backend = server.open(chunk_bytes=MIB)
    writer = backend.create("data/u/a.raw")
    writer.write([WriteRequest(0, (memoryview(bytes(2 * MIB)),))])
    late = sorted(chunks(server))
    writer.abort()
    with server.client() as client:
        client.set(late[1], b"the answer was lost, and the abort overtook it")
    backend.sweep(backend.store_time_s() - 3600)
    assert chunks(server) == {late[1]}
    backend.sweep(backend.store_time_s())
    assert chunks(server) == set()
    backend.close()


def test_roots_on_one_server_do_not_see_each_other(server):
    one, two = server.open(prefix="run"), server.open(prefix="run/2")
    for number, backend in enumerate((one, two)):
        write(backend, "data/a.raw", b"%d" % number)
        backend.publish("2/x", b"record")
    one.delete(["2/x"])
    assert [info.name for info in one.list("")] == ["data/a.raw"]
    assert [info.name for info in two.list("")] == ["2/x", "data/a.raw"]
    assert (read(one, "data/a.raw", 1), read(two, "data/a.raw", 1)) == (b"0", b"1")
    one.close()
    two.close()


def test_nothing_looks_through_all_keys_of_the_server(server):
    with server.client() as client:
        client.config_resetstat()
    backend = server.open(ttl_s=600, max_bytes=MIB)
    write(backend, "data/u/a.raw", b"12345")
    backend.publish("commits/1.json", b"{}", exclusive=True)
    backend.list("")
    backend.sweep(backend.store_time_s())
    backend.delete(["commits/1.json", "data/u/a.raw"])
    with server.client() as client:
        stats = client.info("commandstats")
    assert "cmdstat_eval" in stats
    assert not {"cmdstat_keys", "cmdstat_scan", "cmdstat_randomkey"} & set(stats)
    backend.close()


def child(backend, name):
    write(backend, name, name.encode() * 1000)
    assert read(backend, name, 3) == name.encode()[:3]


def test_a_forked_child_may_use_what_its_parent_opened(server):
    backend = server.open()
    write(backend, "data/parent.raw", b"parent")
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=child, args=(backend, f"data/{n}.raw")) for n in range(3)]
    for process in children:
        process.start()
    for turn in range(50):
        assert read(backend, "data/parent.raw", 6) == b"parent", turn
    for process in children:
        process.join()
    assert [process.exitcode for process in children] == [0, 0, 0]
    for n in range(3):
        assert read(backend, f"data/{n}.raw", 11) == f"data/{n}.rawd".encode()
    backend.close()

"""Limits of this root and of the server."""

import pytest
from penstock.core.errors import CapabilityError, StorageError, StorageFullError
from penstock.core.types import WriteRequest
from servers import read, write

MIB = 1 << 20


def test_max_bytes_refuses_before_anything_is_sent(server):
    backend = server.open(max_bytes=3 * MIB, chunk_bytes=MIB)
    write(backend, "data/a.raw", bytes(2 * MIB))
    assert backend.free_bytes() == MIB
    writer = backend.create("data/b.raw")
    with pytest.raises(StorageFullError, match=r"data/b\.raw.*2097152 of max_bytes 3145728"):
        writer.write([WriteRequest(0, (memoryview(bytes(MIB + 1)),))])
    writer.abort()
    with pytest.raises(StorageFullError, match="max_bytes"):
        backend.publish("r.json", bytes(MIB + 1))
    backend.publish("r.json", bytes(MIB - 1))
    backend.publish("r.json", bytes(MIB))  # in the place of the former
    assert backend.free_bytes() == 0
    backend.delete(["data/a.raw"])
    write(backend, "data/b.raw", bytes(2 * MIB))
    backend.close()


def test_a_full_server_is_told_and_deleting_helps(server):
    backend = server.open(chunk_bytes=MIB)
    write(backend, "data/a.raw", b"x" * (8 * MIB))
    assert backend.free_bytes() is None
    writer = backend.create("data/b.raw")
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2 * MIB)
    assert 0 < backend.free_bytes() < 3 * MIB
    with pytest.raises(StorageFullError, match="raise the server's maxmemory"):
        for number in range(16):
            writer.write([WriteRequest(number * MIB, (memoryview(bytes(MIB)),))])
    with server.client() as client:
        client.config_set("maxmemory", 1)
    assert backend.free_bytes() == 0
    with pytest.raises(StorageFullError):
        backend.publish("r.json", b"{}")
    assert read(backend, "data/a.raw", 8 * MIB) == b"x" * (8 * MIB)
    writer.abort()
    backend.delete(["data/a.raw"])
    assert backend.list("") == []
    with server.client() as client:
        assert not [key for key in client.scan_iter() if b":chunk:" in key]
        client.config_set("maxmemory", 0)
    write(backend, "data/b.raw", bytes(MIB))
    assert [info.name for info in backend.list("")] == ["data/b.raw"]
    backend.close()


@pytest.mark.parametrize(
    ("policy", "ttl_s", "refused"),
    [
        ("noeviction", 60, False),
        ("allkeys-lru", None, True),
        ("volatile-ttl", None, False),
        ("volatile-ttl", 60, True),
    ],
)
def test_a_server_that_drops_parts_of_checkpoints_is_refused(server, policy, ttl_s, refused):
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
        try:
            if refused:
                with pytest.raises(CapabilityError, match=f"{policy}.*set noeviction"):
                    server.open(ttl_s=ttl_s)
            else:
                server.open(ttl_s=ttl_s).close()
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_require_aof_refuses_what_answers_before_it_has_written(own_server):
    server = own_server()
    with pytest.raises(CapabilityError, match="appendfsync always"):
        server.open(require_aof=True)
    with server.client() as client:
        client.config_set("appendonly", "yes")
        with pytest.raises(CapabilityError, match="appendfsync always"):
            server.open(require_aof=True)
        client.config_set("appendfsync", "always")
        server.open(require_aof=True).close()
        client.config_set("no-appendfsync-on-rewrite", "yes")
        with pytest.raises(CapabilityError, match="no-appendfsync-on-rewrite no"):
            server.open(require_aof=True)


def test_a_replica_says_that_it_is_one(server):
    backend = server.open()
    with server.client() as client:
        client.replicaof("127.0.0.1", "1")
        try:
            with pytest.raises(StorageError, match=r"replica.*URL of the primary"):
                backend.publish("r.json", b"{}")
        finally:
            client.replicaof("NO", "ONE")
    backend.close()

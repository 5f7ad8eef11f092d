"""Promises of this backend that the suite cannot know."""

import signal

import penstock
import pytest
import torch
from conftest import SAFE
from penstock.core.errors import CapabilityError, StorageFullError, StorageTimeoutError
from penstock.core.types import WriteRequest
from pydantic import ValidationError

from penstock_redis.backend import RedisConfig


def write(writer, data):
    writer.write([WriteRequest(0, (memoryview(data),))])


def test_checkpoint_survives_kill_of_the_server_and_deletion_leaves_no_key(server):
    with penstock.Checkpointer(server.open()) as ckpt:
        ckpt.save({"w": torch.arange(9.0)}, step=1).result()
    server.kill()
    server.start(*SAFE)
    with penstock.Checkpointer(server.open()) as ckpt:
        ckpt.save({"w": torch.ones(3_000_000)}, step=2).result()
        assert torch.equal(ckpt.load(1)["w"], torch.arange(9.0))
        assert torch.equal(ckpt.load(2)["w"], torch.ones(3_000_000))
        for step in (1, 2):
            ckpt.delete(step)
        ckpt.prune()
    assert server.client.keys("*:chunk:*") == []


def test_sweep_removes_chunks_without_an_entry(server):
    backend = server.open()
    write(backend.create("data/a.raw"), b"12345")
    server.client.set("penstock:penstock:chunk:late:0", "a request that came after the abort")
    backend.sweep(backend.store_time_s() - 3600)
    assert server.client.exists("penstock:penstock:chunk:late:0")
    backend.sweep(backend.store_time_s() + 1)
    assert not server.client.exists("penstock:penstock:chunk:late:0")
    assert len(server.client.keys("*:chunk:*")) == 1


@pytest.mark.parametrize("changed", ["appendonly no", "maxmemory-policy allkeys-lru"])
def test_server_that_could_lose_data_is_refused(server, changed):
    server.client.config_set(*changed.split())
    with pytest.raises(CapabilityError, match=f"set {changed.split()[0]}"):
        server.open()


def test_full_server_is_reported_as_full(server):
    backend = server.open()
    server.client.config_set("maxmemory", "1")
    with pytest.raises(StorageFullError, match=r"a\.json.*maxmemory"):
        backend.publish("a.json", b"{}")


def test_server_that_hangs_is_given_up(server):
    backend = server.open(timeout_s=0.2)
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageTimeoutError, match="raise timeout_s"):
        backend.publish("a.json", b"{}", exclusive=True)


def test_password_comes_from_the_environment_and_is_not_shown(server, monkeypatch):
    server.client.config_set("requirepass", "hunter2")
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    backend = server.open()
    assert "hunter2" not in repr(vars(backend))
    with pytest.raises(ValidationError, match="url") as caught:
        RedisConfig(url="redis://:hunter2@localhost:6379/0")
    assert "hunter2" not in str(caught.value)

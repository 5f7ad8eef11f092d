"""A server as one of several tiers: lost, begun again, hung, or dropping keys."""

import json
import re
import subprocess
import sys

import penstock
import pytest
import torch
from penstock.core.errors import CapabilityError, DamagedError, NotDrainedError, StorageError
from penstock.core.types import WriteRequest
from servers import read, write

MIB = 1 << 20
UID = "d" * 32
AOF = ("--appendonly", "yes", "--appendfsync", "always")


def state(seed, size=300_000):
    return {"w": torch.full((size,), float(seed)), "step": seed}


def tiers(server, tmp_path, order=("redis", "folder"), **options):
    places = {
        "redis": {"type": "redis", "url": server.url, "prefix": "run", "retry_total_s": 0.0},
        "folder": str(tmp_path / "folder"),
    }
    return {"type": "tiered", "fast": places[order[0]], "durable": places[order[1]], **options}


def command(backend, tmp_path, *arguments):
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"backend": backend}))
    name, *options = arguments
    return subprocess.run(
        [sys.executable, "-m", "penstock", name, config, *options],
        capture_output=True,
        text=True,
        check=False,
    )


def chunks_of_blobs(server):
    """Keys of chunks by size, the largest last: those of blobs, not of records."""
    with server.client() as client:
        return sorted(client.keys("*:chunk:*"), key=client.strlen)


def test_a_server_that_is_gone_keeps_nobody_from_the_durable_tier(own_server, tmp_path):
    server = own_server()
    backend = tiers(server, tmp_path)
    with penstock.Checkpointer(backend) as ckpt:
        ckpt.save(state(1), step=1).result()
    server.kill()
    done = command(backend, tmp_path, "ls")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +1 .* durable$", done.stdout, re.MULTILINE)
    assert "tier fast does not answer: cannot open the root on redis://" in done.stderr
    done = command(backend, tmp_path, "doctor", "--no-probe")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("cannot open the root on redis://") == 1
    with penstock.Checkpointer(backend) as ckpt:  # a trainer begins all the same
        assert ckpt.save(state(2), step=2).result().tiers == ("durable",)
        with pytest.raises(StorageError, match="tier fast of the run does not answer"):
            ckpt.latest()
    with penstock.Checkpointer(backend["durable"]) as ckpt:
        assert ckpt.steps() == [1, 2]


@pytest.mark.parametrize("options", [(), AOF], ids=["empty", "as-it-was"])
def test_who_begins_an_attempt_anew_after_a_restart_can_end_it(own_server, options):
    """As a copy does that is tried again: under the same uid, by the same instance."""
    server = own_server(*options)
    backend = server.open(chunk_bytes=MIB, retry_total_s=0.0)
    record = f'{{"uid": "{UID}"}}'.encode()
    backend.publish(f"data/{UID}/intent.json", b"{}")
    writer = backend.create(f"data/{UID}/blobs/0.raw")
    writer.write([WriteRequest(0, (memoryview(b"x" * 1000),))])
    server.kill()
    server.start()
    with pytest.raises(StorageError, match=r"lost|restarted"):
        writer.write([WriteRequest(1000, (memoryview(b"x" * 1000),))])
    writer.abort()
    for refused in (True, False):
        try:
            backend.publish(f"data/{UID}/intent.json", b"{}")
            backend.delete([f"data/{UID}/blobs/0.raw"])
            write(backend, f"data/{UID}/blobs/0.raw", b"y" * 2000)
            backend.publish("commits/1.json", record, exclusive=True)
        except StorageError:
            assert refused
        else:
            break
    assert read(backend, f"data/{UID}/blobs/0.raw", 2000) == b"y" * 2000
    assert backend.read_record("commits/1.json", limit_bytes=100) == record
    backend.close()


def test_what_was_there_before_a_restart_is_still_no_part_of_a_save(own_server):
    server = own_server(*AOF)
    backend = server.open()
    write(backend, f"data/{UID}/blobs/0.raw", b"x" * 1000)
    server.kill()
    server.start()
    another = server.open()
    write(another, f"data/{UID}/blobs/1.raw", b"x" * 1000)  # who knows of nothing begins anew
    with pytest.raises(StorageError, match=r"expired|restarted"):
        server_record(backend)
    server_record(another)
    for one in (backend, another):
        one.close()


def test_what_was_sealed_and_lost_is_missed_by_who_just_goes_on(own_server):
    server = own_server()
    backend = server.open(retry_total_s=0.0)
    backend.publish(f"data/{UID}/intent.json", b"{}")
    with server.client() as client:
        client.save()
    write(backend, f"data/{UID}/blobs/0.raw", b"x" * 1000)  # the server forgets it, and no more
    server.kill()
    server.start()
    with pytest.raises(StorageError, match="restarted"):
        backend.publish(f"data/{UID}/intent.json", b"{}")
    backend.publish(f"data/{UID}/intent.json", b"{}")
    with pytest.raises(StorageError, match="the server has lost what this record names"):
        server_record(backend)
    assert backend.list("commits/") == []
    backend.close()


def server_record(backend):
    backend.publish("commits/1.json", f'{{"uid": "{UID}"}}'.encode(), exclusive=True)


def cut_short(server, ckpt):
    """Save, and end the server in the middle of the copy; returns the handle of the save."""
    handle = ckpt.save(state(1, MIB), step=1)
    handle.committed.result()
    while not chunks_of_blobs(server):
        pass
    server.kill()
    server.start()
    return handle


def test_a_copy_that_the_end_of_the_server_cut_short_is_made_in_the_end(own_server, tmp_path):
    server = own_server(*AOF)
    backend = tiers(server, tmp_path, ("folder", "redis"), drain_bytes_per_s=4 * MIB)
    with penstock.Checkpointer(backend) as ckpt:
        assert cut_short(server, ckpt).result(60).tiers == ("fast", "durable")
    with penstock.Checkpointer(f"{server.url}/run") as ckpt:
        assert ckpt.verify().ok


def test_a_durable_server_that_comes_back_empty_is_another_place_until_it_is_accepted(
    own_server, tmp_path
):
    server = own_server()
    backend = tiers(server, tmp_path, ("folder", "redis"), drain_bytes_per_s=4 * MIB)
    with penstock.Checkpointer(backend) as ckpt:
        handle = cut_short(server, ckpt)
    with pytest.raises(NotDrainedError):
        handle.result(60)
    with penstock.Checkpointer({**backend, "roots": "accept"}) as ckpt:
        ckpt.save(state(2), step=2).result(60)
    with penstock.Checkpointer(f"{server.url}/run") as ckpt:
        assert ckpt.steps() == [1, 2]
        assert ckpt.verify(1).ok


def test_a_chunk_that_was_dropped_is_damage_which_is_found_and_mended(server, tmp_path):
    backend = tiers(server, tmp_path)
    with penstock.Checkpointer(backend) as ckpt:
        ckpt.save(state(1), step=1).result()
        with server.client() as client:
            client.delete(chunks_of_blobs(server)[-1])
        assert {d.what for d in ckpt.verify().damaged} == {"w", "step"}
        template = state(0)
        report = ckpt.restore(template)
        assert torch.equal(template["w"], state(1)["w"])
        assert [tier for _, tier in report.rescued] == ["durable"]
    # By the same process that saved it: what it knew of is gone, as it knows.
    with penstock.Checkpointer(backend) as ckpt:
        assert ckpt.verify(repair=True).ok
    with penstock.Checkpointer(f"{server.url}/run") as ckpt:
        assert ckpt.verify().ok


def test_who_saved_a_checkpoint_can_bring_it_anew(server, tmp_path):
    with penstock.Checkpointer(tiers(server, tmp_path)) as ckpt:
        ckpt.save(state(1), step=1).result()
        with server.client() as client:
            client.delete(chunks_of_blobs(server)[-1])
        report = ckpt.verify(repair=True)
        assert [(repair.source, repair.error) for repair in report.repairs] == [("durable", None)]
        assert ckpt.verify().ok


def test_what_lost_a_chunk_before_it_was_copied_is_given_up(server, tmp_path):
    with penstock.Checkpointer(f"{server.url}/run") as ckpt:
        ckpt.save(state(1), step=1).result()
        uid = ckpt.info(1).uid
    with penstock.Checkpointer(tiers(server, tmp_path, durable_means="fast")) as ckpt:
        backend = ckpt._backend.tiers[0].backend
        backend.publish(f"data/{uid}/drain.json", json.dumps({"uid": uid, "step": 1}).encode())
        with server.client() as client:
            client.delete(chunks_of_blobs(server)[-1])
    done = command(tiers(server, tmp_path), tmp_path, "drain")
    assert done.returncode == 1
    assert re.search(r"step 1 cannot be copied to durable: .* lacks a part", done.stdout)
    assert done.stderr == ""


def test_a_record_that_was_dropped_is_damage_and_hides_no_other(server, tmp_path):
    with penstock.Checkpointer(tiers(server, tmp_path)) as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step=step).result()
        with server.client() as client:
            entry = client.hget(
                "penstock:run:group:commits/00000002-0.json", "commits/00000002-0.json"
            )
            client.delete(b"penstock:run:chunk:%b:0" % entry.split()[1])
        with penstock.Checkpointer(f"{server.url}/run") as alone, pytest.raises(DamagedError):
            alone.info(2)
        assert (ckpt.steps(), ckpt.latest()) == ([1, 2], 2)
        assert ckpt.restore(state(0)).step == 2


def test_one_that_begins_to_drop_keys_is_saved_past(server, tmp_path):
    backend = server.open()
    with penstock.Checkpointer(tiers(server, tmp_path)) as ckpt:
        assert ckpt.save(state(1), step=1).result().tiers == ("fast", "durable")
        with server.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            try:
                assert ckpt.save(state(2), step=2).result().tiers == ("durable",)
                for call in (lambda: backend.publish("r.json", b"{}"), backend.free_bytes):
                    with pytest.raises(CapabilityError, match=r"allkeys-lru.*set noeviction"):
                        call()
            finally:
                client.config_set("maxmemory-policy", "noeviction")
    backend.close()


def test_what_was_queued_behind_a_call_that_was_given_up_does_not_wait(own_server, monkeypatch):
    monkeypatch.setattr("penstock_redis.server._DOWN_S", 3600.0)
    server = own_server()
    backend = server.open(retry_total_s=0.0)
    server.kill()
    with pytest.raises(StorageError, match=r"cannot list 'a'.*refused"):
        backend.list("a")
    server.start()
    with pytest.raises(StorageError, match=r"cannot list 'b'.*refused"):  # nobody was asked
        backend.list("b")
    backend.close()
    another = server.open(retry_total_s=0.0)
    assert another.list("b") == []
    another.close()

"""Checkpoints in a server: saved, restored, pruned, drained, and cut short."""

import penstock
import pytest
import torch

MIB = 1 << 20


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(600_000, generator=generator),
        "b": torch.full((3,), seed),
        "step": seed,
    }


def assert_holds(ckpt, seed):
    tree, expected = ckpt.load(step=seed), state(seed)
    assert torch.equal(tree["w"], expected["w"])
    assert torch.equal(tree["b"], expected["b"])
    assert tree["step"] == seed


def test_checkpoints_are_saved_restored_verified_and_deleted(server):
    url = f"{server.url}/run?ttl_s=3600&chunk_bytes=1MiB"
    with penstock.Checkpointer(url, retention={"keep_last": 2}) as ckpt:
        for step in (1, 2, 3):
            report = ckpt.save(state(step), step=step).result()
        assert report.exclusive
    with penstock.Checkpointer(url) as ckpt:
        assert ckpt.steps() == [2, 3]
        template = state(0)
        ckpt.restore(template, step=2)
        assert torch.equal(template["w"], state(2)["w"])
        assert ckpt.verify(step=3).ok
        ckpt.delete(2)
        ckpt.delete(3)
        ckpt.prune()
    with server.client() as client:
        assert client.hkeys("penstock:run:root") == [b"~seq"]
        assert [key for key in client.scan_iter() if b":chunk:" in key] == []


def test_it_is_the_fast_tier_of_tiered(server, tmp_path):
    options = {
        "type": "tiered",
        "fast": {"type": "redis", "url": server.url, "prefix": "run", "ttl_s": 3600},
        "durable": str(tmp_path / "run"),
    }
    with penstock.Checkpointer.from_config({"backend": options}) as ckpt:
        ckpt.save(state(1), step=1).result()
        assert_holds(ckpt, 1)
    with penstock.Checkpointer(f"{server.url}/run") as ckpt:
        assert_holds(ckpt, 1)
    with server.client() as client:
        client.flushall()  # the server's end
    with penstock.Checkpointer.from_config({"backend": options}) as ckpt:
        assert_holds(ckpt, 1)


def test_a_full_server_fails_the_save_and_spares_what_is_there(server):
    url = f"{server.url}/run?max_bytes=4MiB"
    with penstock.Checkpointer(url) as ckpt:
        ckpt.save(state(1), step=1).result()
        with pytest.raises(penstock.PenstockError) as caught:
            ckpt.save(state(2), step=2).result()
        assert "max_bytes" in str(caught.value) + str(caught.value.__cause__)
        assert ckpt.steps() == [1]
        assert_holds(ckpt, 1)


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "append-only-file"])
def test_a_server_killed_in_mid_save_fails_that_save_alone(own_server, proxied, durable):
    options = ("--appendonly", "yes", "--appendfsync", "always") if durable else ()
    server = own_server(*options)
    proxy = proxied(server)

    def kill():
        server.kill()
        server.start()

    url = f"{proxy.url}/run?require_aof={durable}&retry_total_s=20"
    with penstock.Checkpointer(url) as ckpt:
        ckpt.save(state(1), step=1).result()
        proxy.at(b"SETRANGE", kill)
        with pytest.raises(penstock.PenstockError):
            ckpt.save(state(2), step=2).result()
        assert proxy.done == 1
        assert ckpt.steps() == ([1] if durable else [])
        ckpt.save(state(3), step=3).result()
        assert_holds(ckpt, 3)
        if durable:
            assert_holds(ckpt, 1)
        assert ckpt.verify(step=3).ok


def test_connections_dropped_in_mid_save_fail_nothing(server, proxied):
    proxy = proxied(server)
    with penstock.Checkpointer(f"{proxy.url}/run?chunk_bytes=256KiB") as ckpt:
        for step, (marker, action) in enumerate(
            [(b"SETRANGE", "cut"), (b"SETRANGE", "swallow"), (b"commits/", "swallow")], start=1
        ):
            proxy.at(marker, action)
            ckpt.save(state(step), step=step).result()
            assert proxy.done == step
        assert ckpt.steps() == [1, 2, 3]
        proxy.at(b"GETRANGE", "swallow")
        assert_holds(ckpt, 2)
        assert proxy.done == 4

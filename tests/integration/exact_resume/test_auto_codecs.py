"""Rules with `codecs = "auto"`: their choice is reported, stored as reported, and restored."""

import os

import pytest
import torch
from tests.core.cli.command import caller
from tests.integration.support import memory

import penstock
from penstock.codecs.zstd import ZstdCodec
from penstock.core.errors import CodecError, StorageError
from penstock.core.plugins.registry import Registry
from penstock.testing.faults import FaultyBackend, LatencyBackend

AUTO = {"match": "**", "codecs": "auto"}
MIB = 1 << 20


def slow(inner=None):
    """A store slower than any codec; the first 4 MiB show it in 0.2 s."""
    return LatencyBackend(inner or memory(), bytes_per_s=20e6)


def checkpointer(store, **options):
    return penstock.Checkpointer(
        store, **{"rules": [AUTO], "chunk_bytes": MIB, "block_bytes": 1 << 16, **options}
    )


def squeezable(elements=3 * MIB):
    """12 MiB of floats that every codec shrinks."""
    return {"w": torch.arange(elements, dtype=torch.float32) // 4096, "epoch": 7}


def noise():
    """Bytes that no codec shrinks."""
    return {"w": torch.frombuffer(bytearray(os.urandom(12 * MIB)), dtype=torch.uint8)}


def by_class(report):
    return {choice.objects: choice for choice in report.codecs}


def is_same(tree, state):
    return torch.equal(tree["w"], state["w"]) and tree.get("epoch") == state.get("epoch")


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_slow_store_gets_encoded_bytes_from_the_first_save_on(mode):
    state = squeezable()
    with checkpointer(slow(), mode=mode) as ckpt:
        first, second = (ckpt.save(state, step=step).result() for step in (1, 2))
        assert is_same(ckpt.load(1), state)
        assert is_same(ckpt.load(2), state)
        assert ckpt.verify(1, deep=True).ok
        assert ckpt.verify(2, deep=True).ok
        recorded = ckpt.info(2).codecs
    for report in (first, second):
        choice = by_class(report)["other float32"]
        assert choice.codec in {"floatsplit", "lz4", "zstd"}
        assert choice.why.startswith(f"{choice.codec}: ")
        assert "the store takes 0.0" in choice.why
        assert choice.bytes_raw == 12 * MIB
        assert choice.bytes_stored < choice.bytes_raw
        assert choice.store_bytes_per_s < 25e6
    assert by_class(first)["other float32"].bytes_stored > 4 * MIB, "the store was measured"
    assert {choice.codec for choice in second.codecs} == set(recorded)
    assert (first.blobs, second.blobs) == (2, 1), "few bytes go where all others are"


def test_incompressible_data_is_stored_as_without_rules():
    state = noise()
    with checkpointer(slow()) as ckpt, checkpointer(memory(), rules=[]) as plain:
        report = ckpt.save(state, step=1, mode="blocking").result()
        assert report.bytes_stored == plain.save(state, step=1).result().bytes_stored
        assert is_same(ckpt.load(1), state)
        assert ckpt.info(1).codecs == {}
    choice = by_class(report)["other uint8"]
    assert choice.codec is None
    assert choice.why.startswith("raw: no codec makes it smaller; the store takes 0.0")


def test_a_class_that_differs_from_its_sample_is_resampled():
    with checkpointer(slow()) as ckpt:
        ckpt.save({"w": torch.zeros(12 * MIB, dtype=torch.uint8)}, step=1, mode="blocking")
        kept, new = (
            ckpt.save(noise(), step=step, mode="blocking").result().codecs for step in (2, 3)
        )
    assert kept[0].codec is not None
    assert new[0].codec is None


def test_a_small_state_is_raw():
    with checkpointer(memory()) as ckpt:
        report = ckpt.save({"w": torch.zeros(1000)}, step=1, mode="blocking").result()
    assert [choice.codec for choice in report.codecs] == [None]
    assert report.codecs[0].why == "raw: too few bytes to gain anything"


def test_each_class_gets_its_own_choice():
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    state = {"model": model.bfloat16(), "optimizer": optimizer, "noise": noise()["w"]}
    with checkpointer(slow()) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        found = by_class(ckpt.save(state, step=2, mode="lazy").result())
        moment = optimizer.state[next(model.parameters())]["exp_avg"]
        expected = moment.clone()
        moment.zero_()
        ckpt.restore(state, 2)
    assert {"parameter bfloat16", "optimizer float32", "other uint8"} <= set(found)
    assert found["optimizer float32"].codec is not None
    assert found["other uint8"].codec is None
    assert torch.equal(moment, expected)


class Refusing(ZstdCodec):
    """Refuses every chunk."""

    api_version = 1

    def encode(self, chunk, out, /, *, context):
        message = "not today"
        raise CodecError(message)


def test_a_codec_that_refuses_samples_is_never_chosen():
    registry = Registry()
    registry.register(Refusing, replace=True)
    state = squeezable()
    with checkpointer(slow(), registry=registry) as ckpt:
        for step in (1, 2):
            report = ckpt.save(state, step=step, mode="blocking").result()
            assert by_class(report)["other float32"].codec in {"floatsplit", "lz4"}
        assert is_same(ckpt.load(2), state)


@pytest.mark.parametrize("blob", [".raw", ".enc"])
def test_a_failed_save_returns_all_memory(blob):
    store = FaultyBackend(memory())
    state = squeezable()
    with checkpointer(slow(store), staging_bytes=4 * MIB) as ckpt:
        store.fail("write", match=blob)
        with pytest.raises(StorageError):
            ckpt.save(state, step=1).result()
        assert ckpt._saver.job.finished(60)
        assert ckpt._saver.memory.staging._used == 0
        store.clear()
        assert by_class(ckpt.save(state, step=2).result())["other float32"].codec is not None
        assert is_same(ckpt.load(2), state)


def test_the_reason_comes_with_the_codecs(tmp_path, capsys, monkeypatch):
    run, call = tmp_path / "run", caller(capsys, monkeypatch)
    state = {**squeezable(), "still": torch.arange(MIB)}
    rules = [{"match": "still", "codecs": ["zstd"]}, AUTO]
    with checkpointer(slow(penstock_posix(run)), share=True, rules=rules) as ckpt:
        ckpt.save(state, step=1, mode="blocking")
        report = ckpt.save(state, step=2, mode="blocking").result()
        ckpt.delete(1)
    chosen = {one.objects: one.why for one in report.codecs}

    def reasons(url):
        return {c["objects"]: c["why"] for c in call("show", url, "--json").json["choices"]}

    assert call("copy", run, tmp_path / "whole").code == 0
    assert call("copy", run, tmp_path / "part", "--include", "w").code == 0
    assert reasons(tmp_path / "whole") == chosen
    assert reasons(tmp_path / "part") == {"other float32": chosen["other float32"]}
    with penstock.Checkpointer(run) as ckpt:
        assert [one.step for one in ckpt.compact().steps] == [2]
    assert reasons(run) == chosen


def penstock_posix(path):
    from penstock.core.storage.open import open_backend

    return open_backend(f"posix://{path}")

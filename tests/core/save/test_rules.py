"""The codec chains that rules name."""

import sys

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.codecs.lz4 import Lz4Codec
from penstock.codecs.zstd import ZstdCodec
from penstock.core.config.model import load_config
from penstock.core.plugins.registry import Registry
from penstock.core.save.rules import ChainTable


class Rounding(Lz4Codec):
    api_version = 1
    lossless = False


class Comparing(ZstdCodec):
    api_version = 1
    needs_base = True


def test_auto_chooses_lossless_codecs_without_a_base():
    config = load_config({"backend": "x", "rules": [{"match": "**", "codecs": "auto"}]})
    assert list(ChainTable(config, Registry()).auto.candidates) == ["floatsplit", "lz4", "zstd"]
    registry = Registry()
    registry.register(Rounding, replace=True)
    registry.register(Comparing, replace=True)
    table = ChainTable(config, registry)
    (number,) = table.auto.candidates.values()
    assert [codec.name for codec in table.chains[number].codecs] == ["floatsplit"]


@pytest.mark.parametrize(
    ("codecs", "most", "mode"), [(["delta", "floatsplit"], 1, "async"), ("auto", 6, "lazy")]
)
def test_codecs_add_almost_nothing_to_the_training_pause(mode, codecs, most):
    layers = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(100)]
    optimizer = torch.optim.AdamW(layers)
    for parameter in layers:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": dict(zip(map(str, range(100)), layers, strict=True)), "opt": optimizer}

    def calls_of(codecs):
        rules = [{"match": "**", "codecs": codecs}]
        calls = 0

        def count(frame, event, arg):
            nonlocal calls
            calls += event in {"call", "c_call"}

        store = MemoryBackend(MemoryConfig())
        with penstock.Checkpointer(store, mode=mode, rules=rules) as ckpt:
            for step in range(3):  # the first save imports, and has no base
                calls = 0
                sys.setprofile(count)  # of this thread only
                try:
                    handle = ckpt.save(state, step=step)
                finally:
                    sys.setprofile(None)
                handle.result()
        return calls

    assert calls_of(codecs) - calls_of([]) <= most * 400


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        ([], True),
        ([{"match": "**", "codecs": ["floatsplit"]}], True),
        ([{"match": "**", "codecs": "auto"}], True),
        ([{"match": "w", "codecs": ["delta", "floatsplit"]}], False),
    ],
)
def test_delta_options_without_a_delta_rule_cause_a_warning(rules, warned, caplog):
    with penstock.Checkpointer("memory://", rules=rules, deltas={"every": 4}):
        assert ("the option deltas has no effect" in caplog.text) == warned
        assert ('as in ["delta", "floatsplit"]' in caplog.text) == warned
    caplog.clear()
    with penstock.Checkpointer("memory://", rules=rules):
        assert not caplog.text


def test_deltas_that_no_codec_shrinks_cause_a_warning(caplog):
    for codecs, count in ((["delta"], 1), (["delta", "floatsplit"], 0), (["floatsplit"], 0)):
        caplog.clear()
        with penstock.Checkpointer("memory://", rules=[{"match": "**", "codecs": codecs}]):
            found = [r.getMessage() for r in caplog.records]
        assert len(found) == count, codecs
        assert all("rules[0]: no codec follows delta" in text for text in found)

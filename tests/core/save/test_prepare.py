"""Metadata of a user: what becomes of it, and what is refused; the codecs of rules."""

import sys

import numpy as np
import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.codecs.lz4 import Lz4Codec
from penstock.codecs.zstd import ZstdCodec
from penstock.core.config.model import load_config
from penstock.core.errors import ConfigError
from penstock.core.plugins.registry import Registry
from penstock.core.save.prepare import ChainTable, check_metadata


def test_metadata_is_checked_as_it_will_be_read_back():
    assert check_metadata({"a": (1, 2), "3": None}) == {"a": [1, 2], "3": None}
    nan = check_metadata({"loss": float("nan")})["loss"]
    assert nan != nan  # noqa: PLR0124


SCALARS = {
    "float32": (np.float32(0.5), 0.5),
    "float64": (np.float64(0.1), 0.1),
    "longdouble": (np.longdouble(0.5), 0.5),
    "int64": (np.int64(-(2**40)), -(2**40)),
    "bool": (np.bool_(False), False),
    "str": (np.str_("x"), "x"),
    "array": (np.array(3), 3),
    "tensor": (torch.tensor(2.5, requires_grad=True), 2.5),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "tensor of int": (torch.tensor(2**62), 2**62),
    "tensor of bool": (torch.tensor(True), True),
}


def test_scalars_of_numpy_and_torch_become_plain_ones():
    for scalar, plain in SCALARS.values():
        found = check_metadata({"a": scalar, "b": [{"c": scalar}]})
        assert found == {"a": plain, "b": [{"c": plain}]}
        assert type(found["a"]) is type(plain)


@pytest.mark.parametrize("bad", [{1: "a", "1": "b"}, {"a": [{"b": {None: 1}}]}, {"a": {1.5: 2}}])
def test_keys_of_metadata_are_text(bad):
    with pytest.raises(ConfigError, match=r"has the key .* keys of metadata are text, so pass str"):
        check_metadata(bad)


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": b"x"}, {(1, 2): 3}])
def test_metadata_that_is_not_json_is_refused(bad):
    with pytest.raises(ConfigError, match="metadata"):
        check_metadata(bad)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ([1], "metadata is a list: pass a dict"),
        ({"a": np.complex64(2)}, "metadata['a'] is a numpy.complex64: metadata is stored as JSON"),
        ({"a": torch.ones((), device="meta")}, "metadata['a'] is a torch.Tensor: metadata is"),
        ({"a": [0, {"b": np.ones(2)}]}, "metadata['a'][1]['b'] is a numpy.ndarray of several"),
        ({"a": {"b": {7: 1}}}, "metadata['a']['b'] has the key 7: keys of metadata are text"),
        ({"a": b"x"}, "metadata['a'] is a bytes: metadata is stored as JSON"),
    ],
)
def test_what_is_not_json_in_metadata_is_named(bad, complaint):
    with pytest.raises(ConfigError) as caught:
        check_metadata(bad)
    assert str(caught.value).startswith(complaint)


def test_huge_metadata_is_refused():
    with pytest.raises(ConfigError, match="at most"):
        check_metadata({"a": "x" * (17 << 20)})


class Rounding(Lz4Codec):
    api_version = 1
    lossless = False


class Comparing(ZstdCodec):
    api_version = 1
    needs_base = True


def test_auto_chooses_among_lossless_codecs_that_need_no_base():
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
def test_codecs_add_next_to_nothing_to_what_training_waits_for(mode, codecs, most):
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
                sys.setprofile(count)  # of this thread alone
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
def test_options_of_deltas_without_a_rule_that_makes_any_are_warned_of(rules, warned, caplog):
    with penstock.Checkpointer("memory://", rules=rules, deltas={"every": 4}):
        assert ("the option deltas has no effect" in caplog.text) == warned
        assert ('as in ["delta", "floatsplit"]' in caplog.text) == warned
    caplog.clear()
    with penstock.Checkpointer("memory://", rules=rules):
        assert not caplog.text


def test_differences_that_no_codec_makes_smaller_are_warned_of(caplog):
    for codecs, count in ((["delta"], 1), (["delta", "floatsplit"], 0), (["floatsplit"], 0)):
        caplog.clear()
        with penstock.Checkpointer("memory://", rules=[{"match": "**", "codecs": codecs}]):
            found = [r.getMessage() for r in caplog.records]
        assert len(found) == count, codecs
        assert all("rules[0]: no codec follows delta" in text for text in found)

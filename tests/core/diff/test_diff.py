"""Exactly the differences are found, by checksums or by reading."""

import itertools
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from tests.effort import examples
from tests.integration.exact_resume.test_round_trips import (
    objects,
    save_to,
    settings_of_a_save,
    states,
)
from tests.integration.support import bits, checkpointer, memory

from penstock.core.concurrency.workers import Workers
from penstock.core.diff.checkpoints import diff_checkpoints
from penstock.core.pipeline.loader import Loader
from penstock.core.restore.checkpoint import Checkpoint
from penstock.core.tree.paths import show_path
from penstock.core.tree.select import Selection


@pytest.fixture(scope="module")
def workers():
    with closing(Workers(2)) as threads:
        yield threads


def diff(workers, one, other, *, norms=False, **which):
    a, b = (Checkpoint.open(x, 1, loader=Loader(x, workers)) for x in (one, other))
    return diff_checkpoints(a, b, norms=norms, selection=Selection(**which))


def stored(state, **options):
    backend = memory()
    metadata = options.pop("metadata", None)
    with checkpointer(backend, **options) as ckpt:
        ckpt.save(state, step=1, mode="blocking", metadata=metadata)
    return backend


def found(result):
    return {change.path: change.what for change in result.changes}


def state(**changes):
    made = torch.Generator().manual_seed(1)
    base = {
        "large": torch.randn(30_000, generator=made),
        "small": [torch.randn(50, generator=made) for _ in range(4)],
        "number": 3,
        "text": "abc",
    }
    return {**base, **changes}


ENCODINGS = {
    "raw": {},
    "other blocks": {"block_bytes": 8192},
    "other chunks": {"chunk_bytes": 32768},
    "zstd": {"rules": [{"match": "**", "codecs": ["zstd"]}]},
    "lz4": {"rules": [{"match": "**", "codecs": ["lz4"]}]},
}


def encoded(tree):
    return {name: stored(tree, **options) for name, options in ENCODINGS.items()}


def test_encoding_affects_only_the_bytes_that_are_read(workers):
    stores = encoded(state())  # the same memory: raw frames have its offset within a page
    for one, other in itertools.product(stores, stores):
        result = diff(workers, stores[one], stores[other])
        assert result.same, (one, other)
        assert result.compared == 7
        if one == other or {one, other} == {"zstd", "lz4"}:
            assert result.bytes_read == 0, (one, other)


def test_one_bit_is_found_under_any_encoding(workers):
    changed = state()
    changed["large"].view(torch.int32)[17_123] ^= 1
    changed["small"][2].view(torch.int32)[49] ^= 1
    stores, others = encoded(state()), encoded(changed)
    for one, other in itertools.product(stores, others):
        result = diff(workers, stores[one], others[other])
        assert found(result) == {"large": "bytes", "small/2": "bytes"}, (one, other)


def test_checksums_compare_equal_encodings(workers):
    tree = {"one": torch.zeros(30_000), "other": torch.zeros(30_000)}
    before = stored(tree)
    tree["one"][20_000] = 1  # in place, so that its frames begin at the same offset
    result = diff(workers, before, stored(tree))
    assert found(result) == {"one": "bytes"}
    assert result.bytes_read == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"large": torch.zeros(30_001)}, {"large": "type"}),
        ({"large": torch.zeros(30_000, dtype=torch.float64)}, {"large": "type"}),
        ({"large": np.zeros(30_000, np.float32)}, {"large": "type"}),
        ({"large": 5}, {"large": "type"}),
        ({"number": 4}, {"number": "value"}),
        ({"number": 3.0}, {"number": "value"}),
        ({"text": "abcd"}, {"text": "value"}),
        ({"more": 1}, {"more": "only_b"}),
        ({"empty": {}}, {"empty": "only_b"}),
    ],
    ids=str,
)
def test_differences_are_named(workers, changed, expected):
    one, other = stored(state()), stored(state(**changed))
    assert found(diff(workers, one, other)) == expected
    mirrored = {path: what.replace("only_b", "only_a") for path, what in expected.items()}
    assert found(diff(workers, other, one)) == mirrored


@given(one=states, other=states, first=settings_of_a_save, second=settings_of_a_save)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trees_differ_if_their_objects_do(workers, one, other, first, second):
    a, b = memory(), memory()
    mixed = {**other, **dict(list(one.items())[:2])}
    assume(len({str(key) for key in mixed}) == len(mixed))  # `None` and "None" are written alike
    save_to(a, one, first)
    save_to(b, mixed, second)
    assert diff(workers, a, a).same
    result = diff(workers, a, b)
    p, q = ({show_path(path): leaf for path, leaf in objects(tree)} for tree in (one, mixed))
    changes = {c.path: c.what for c in result.changes if c.what != "container"}
    for path in {*p, *q}:
        if path not in q or path not in p:
            assert changes.pop(path) == ("only_a" if path in p else "only_b")
        elif changes.pop(path, None) is None:
            x, y = p[path], q[path]
            assert type(x) is type(y) or isinstance(x, torch.Tensor)
            if isinstance(x, torch.Tensor):
                assert bits(x) == bits(y)
            elif isinstance(x, np.ndarray):
                assert x.tobytes() == y.tobytes()
        elif isinstance(p[path], torch.Tensor) and isinstance(q[path], torch.Tensor):
            x, y = p[path], q[path]
            assert x.dtype != y.dtype or x.shape != y.shape or bits(x) != bits(y)
    assert changes == {}

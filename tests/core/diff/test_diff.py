"""What differs is found, by checksums or by reading, and nothing else is."""

import itertools
import math
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
from penstock.core.diff.checkpoints import NormSum, diff_checkpoints
from penstock.core.errors import SelectionError
from penstock.core.pipeline.reader import Loader
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


def test_encoding_makes_no_difference_but_to_what_is_read(workers):
    stores = encoded(state())  # the same memory: raw frames begin where that does within a page
    for one, other in itertools.product(stores, stores):
        result = diff(workers, stores[one], stores[other])
        assert result.same, (one, other)
        assert result.compared == 7
        if one == other or {one, other} == {"zstd", "lz4"}:
            assert result.bytes_read == 0, (one, other)


def test_one_bit_is_found_however_it_is_encoded(workers):
    changed = state()
    changed["large"].view(torch.int32)[17_123] ^= 1
    changed["small"][2].view(torch.int32)[49] ^= 1
    stores, others = encoded(state()), encoded(changed)
    for one, other in itertools.product(stores, others):
        result = diff(workers, stores[one], others[other])
        assert found(result) == {"large": "bytes", "small/2": "bytes"}, (one, other)


def test_checksums_tell_of_what_is_stored_alike(workers):
    tree = {"one": torch.zeros(30_000), "other": torch.zeros(30_000)}
    before = stored(tree)
    tree["one"][20_000] = 1  # where it is, so that its frames begin where they began
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
def test_what_differs_is_named(workers, changed, expected):
    one, other = stored(state()), stored(state(**changed))
    assert found(diff(workers, one, other)) == expected
    mirrored = {path: what.replace("only_b", "only_a") for path, what in expected.items()}
    assert found(diff(workers, other, one)) == mirrored


def test_kinds_of_containers_are_compared(workers):
    made = [torch.ones(2), torch.zeros(2)]
    one, other = stored({"x": list(made)}), stored({"x": tuple(made)})
    assert found(diff(workers, one, other)) == {"x": "container"}
    assert found(diff(workers, stored({"x": made}), stored({"x": {0: made[0], 1: made[1]}}))) == {
        "x": "container"
    }


def test_ties_are_compared(workers):
    tensor = torch.ones(5000)
    one, other = stored({"a": tensor, "b": tensor}), stored({"a": tensor, "b": tensor.clone()})
    assert found(diff(workers, one, other)) == {"b": "tie"}
    changed = tensor + 1
    three = stored({"a": changed, "b": changed})
    assert found(diff(workers, one, three)) == {"a": "bytes"}
    assert found(diff(workers, one, three, include="b")) == {"b": "bytes"}


def test_metadata_is_compared_where_all_is(workers):
    one = stored(state(), metadata={"loss": 1.0, "same": [1], "gone": 0})
    other = stored(state(), metadata={"loss": 2.0, "same": [1], "new": "x" * 500})
    result = diff(workers, one, other)
    assert {c.path: (c.what, c.a, c.b) for c in result.changes if c.path != "new"} == {
        "loss": ("metadata", "1.0", "2.0"),
        "gone": ("metadata", "0", None),
    }
    assert all(len(c.b or "") < 100 for c in result.changes)
    assert diff(workers, one, other, include="**").same


def test_long_values_are_shown_where_they_differ(workers):
    one, other = (
        stored(state(text="a" * 300 + "1" + "b" * 300)),
        stored(state(text="a" * 300 + "2" + "b" * 300)),
    )
    (change,) = diff(workers, one, other).changes
    assert "aa1bb" in change.a
    assert "aa2bb" in change.b
    assert max(len(change.a), len(change.b)) < 80


def test_pattern_that_matches_nothing_in_either_is_an_error(workers):
    with pytest.raises(SelectionError, match="nearest"):
        diff(workers, stored(state()), stored(state()), include="lagre")
    assert found(diff(workers, stored(state()), stored(state(more=1)), include="more"))


@given(one=states, other=states, first=settings_of_a_save, second=settings_of_a_save)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trees_differ_where_their_objects_do(workers, one, other, first, second):
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


# -- norms ----------------------------------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.complex128, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def summed(one, other, cut):
    name = str(one.dtype).removeprefix("torch.")
    total = NormSum(name, one.itemsize)
    views = [memoryview(bits(x)) for x in (one, other)]
    cut *= one.itemsize
    for part in (slice(None, cut), slice(cut, None)):
        total.add(views[0][part], views[1][part])
    return total.result()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_what_torch_says(dtype):
    made = torch.Generator().manual_seed(3)
    x, y = (torch.randn(1000, generator=made) * 30 for _ in range(2))
    if dtype.is_complex:
        x, y = torch.complex(x, y), torch.complex(y, x + 1)
    if dtype is torch.bool:
        x, y = x > 0, y > 0
    x, y = x.to(dtype), y.to(dtype)
    y[500:] = x[500:]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    apart = (x.to(wide) - y.to(wide)).abs()
    reference = float(x.to(wide).abs().square().sum().sqrt())
    for cut in (0, 7, 1000):
        got = summed(x, y, cut)
        assert (got.elements, got.nan, got.inf) == (1000, 0, 0)
        assert got.differing == int((apart != 0).sum())
        assert got.max_abs == pytest.approx(float(apart.max()), rel=1e-12)
        assert got.l2 == pytest.approx(float(apart.square().sum().sqrt()), rel=1e-9)
        assert got.relative_l2 == pytest.approx(got.l2 / reference, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_and_infinity_are_counted_and_left_out(dtype):
    nan, inf = math.nan, math.inf
    x = torch.tensor([1.0, nan, nan, 2.0, inf, inf, -inf, 0.0, 5.0], dtype=dtype)
    y = torch.tensor([1.5, nan, 1.0, nan, inf, -inf, 4.0, -0.0, 5.0], dtype=dtype)
    got = summed(x, y, 4)
    assert (got.nan, got.inf, got.differing) == (3, 2, 5)
    assert (got.max_abs, got.l2) == (0.5, 0.5)
    assert got.relative_l2 == pytest.approx(0.5 / math.sqrt(1 + 4 + 25))


def test_integers_are_subtracted_exactly():
    x, y = torch.tensor([2**63 - 1, 5]), torch.tensor([-(2**63), 4])
    assert summed(x, y, 1).max_abs == 2**64 - 1
    assert summed(y, x, 1).max_abs == 2**64 - 1
    x, y = torch.tensor([2**60 + 1]), torch.tensor([2**60])
    assert summed(x, y, 0).max_abs == 1
    assert summed(x, y, 0).differing == 1


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf]], ids=str)
def test_where_nothing_is_finite_there_are_no_figures(values):
    x, y = torch.tensor(values), torch.tensor([-1.0] * len(values))
    got = summed(x, y, 0)
    assert (got.max_abs, got.l2, got.relative_l2) == (None, None, None)
    assert got.differing == len(values)


@pytest.mark.parametrize(
    ("dtype", "numbers"), [(">f4", True), ("M8[s]", False), ("S5", False), ("U3", False)]
)
def test_arrays_that_are_no_numbers_have_no_norms(dtype, numbers):
    array = np.zeros(3, dtype)
    total = NormSum(dtype, array.itemsize)
    total.add(memoryview(array.tobytes()), memoryview(np.ones(3).astype(dtype).tobytes()))
    result = total.result()
    assert result.elements == 3
    assert (result.differing == 3, result.max_abs == 1.0) == (numbers, numbers)


def test_norms_of_a_large_tensor_are_added_up_piece_by_piece(workers):
    x = torch.zeros(5_000_003)
    y = x.clone()
    y[::1000] = 2
    with_norms = diff(workers, stored({"x": x}), stored({"x": y}), norms=True)
    (change,) = with_norms.changes
    assert (change.norms.elements, change.norms.differing) == (5_000_003, 5001)
    assert change.norms.l2 == pytest.approx(2 * math.sqrt(5001))
    assert change.norms.relative_l2 is None

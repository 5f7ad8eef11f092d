"""Any state tree round-trips bit by bit, for any cuts and any reader."""

from __future__ import annotations

import datetime as dt
import math
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.effort import examples
from tests.integration.support import memory, same

from penstock import Checkpointer
from penstock.core.tree.paths import show_path

ODD_KEYS = [
    "a/b", "a%2Fb", "..", ".", "", "%", "%00", "%25", "/", "a.b", "a", "*", "**", "[a]", "?", "\\",
    "\\*", "~", " ", "\n", "\x00", "é", "日本語", "🦀", "x" * 3000, "-", "0", "None", "True", "$",
]  # fmt: skip
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (3, 4), (2, 3, 5), (1, 1, 1), (45, 41), (5000,)]
ARRAYS = ["f4", "f8", "f2", "i1", "i8", "u2", "?", "c8", "c16", ">f4", "M8[s]", "S5", "U3"]


def random_bits(count, seed):
    return bytearray(np.random.default_rng(seed).bytes(count))


def make_tensor(dtype, shape, layout, seed):
    wide = (2 * shape[0] + 1, *shape[1:]) if layout == "strided" and shape else shape
    count = math.prod(wide)
    tensor = torch.empty(wide, dtype=dtype)
    if count:
        raw = torch.frombuffer(random_bits(count * dtype.itemsize, seed), dtype=torch.uint8)
        tensor.view(-1).view(torch.uint8).copy_(raw & 1 if dtype is torch.bool else raw)
    match layout:
        case "strided" if shape:
            return tensor[1::2]
        case "transposed" if len(shape) > 1:
            return tensor.transpose(0, -1)
        case "expanded" if shape:
            return tensor.narrow(0, 0, min(1, shape[0])).expand(shape)
        case "conjugate" if dtype.is_complex:
            return tensor.conj()
        case "negative" if dtype.is_complex:
            return tensor.conj().imag
        case "parameter" if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.nn.Parameter(tensor)
    return tensor


tensors = st.builds(
    make_tensor,
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from(
        ["flat", "flat", "strided", "transposed", "expanded", "conjugate", "negative", "parameter"]
    ),
    st.integers(0, 1000),
)


def make_array(dtype, shape, seed):
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if kind.kind in "?bSUM":
        return np.random.default_rng(seed).integers(0, 2, shape).astype(kind)
    return np.frombuffer(random_bits(count * kind.itemsize, seed), kind).reshape(shape).copy()


arrays = st.builds(
    make_array, st.sampled_from(ARRAYS), st.sampled_from(SHAPES), st.integers(0, 1000)
)
keys = st.one_of(
    st.sampled_from(ODD_KEYS), st.text(max_size=6), st.integers(), st.booleans(), st.none()
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.binary(max_size=20), st.complex_numbers(allow_nan=False),
    st.sampled_from([10**400, -0.0, math.inf, dt.datetime(2024, 2, 29, 1), torch.bfloat16]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=5,
)


def unambiguous(tree):
    """Without keys that are written alike, like `1` and `"1"`."""
    kept = {}
    for key, value in tree.items():
        kept.setdefault(key if isinstance(key, str) else repr(key), (key, value))
    return dict(kept.values())


def dicts(inner, **sizes):
    return st.dictionaries(keys, inner, **sizes).map(unambiguous)


trees = st.recursive(
    st.one_of(tensors, tensors, arrays, values),
    lambda inner: st.one_of(
        dicts(inner, max_size=4),
        dicts(inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)
states = dicts(trees, min_size=1, max_size=5)


@dataclass(frozen=True)
class Setting:
    mode: str
    options: dict[str, Any]


CHAINS = [[], ["zstd"], ["lz4"], ["lz4", "zstd"], [{"type": "zstd", "level": 1}]]
settings_of_a_save = st.builds(
    lambda mode, chunk, block, chain, match, staging, workers: Setting(
        mode,
        {
            "chunk_bytes": 4096 * chunk,
            "block_bytes": 4096 * block,
            "rules": [{"match": match, "codecs": chain}],
            "staging_bytes": staging,
            "workers": workers,
            "defer": ["**"],
        },
    ),
    st.sampled_from(["blocking", "async", "lazy"]),
    st.sampled_from([1, 2, 3, 16, 4096]),
    st.sampled_from([1, 2, 5, 1024]),
    st.sampled_from(CHAINS),
    st.sampled_from(["**", "*", "a", "[a-m]*/**"]),
    st.sampled_from([None, 0, 50_000]),
    st.sampled_from([1, 3]),
)


def holds_tensor(tree):
    if isinstance(tree, torch.Tensor | np.ndarray):
        return True
    children = tree.values() if isinstance(tree, dict) else tree
    return isinstance(tree, dict | list | tuple) and any(map(holds_tensor, children))


def objects(tree, path=()):
    """`(path, tensor or value)` of every object, by the rules of the design."""
    if path and (isinstance(tree, torch.Tensor | np.ndarray) or not holds_tensor(tree)):
        yield path, tree
        return
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in pairs:
        yield from objects(child, (*path, key if isinstance(key, str) else repr(key)))


def template(tree, *, fixed=False):
    """The same tree with other contents; values in tuples cannot be assigned, so they stay."""
    if isinstance(tree, torch.nn.Parameter):
        return torch.nn.Parameter(template(tree.detach()))
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=torch.uint8).to(tree.dtype)
    if isinstance(tree, np.ndarray):
        return np.zeros_like(tree)
    if not holds_tensor(tree):
        return tree if fixed else "replaced"
    if isinstance(tree, dict):
        return type(tree)((key, template(value)) for key, value in tree.items())
    made = [template(child, fixed=isinstance(tree, tuple)) for child in tree]
    return made if isinstance(tree, list) else tuple(made)


def root_template(state):
    return {key: template(value) for key, value in state.items()}


def plain(tree):
    """The loaded tree: parameters as tensors."""
    if isinstance(tree, torch.nn.Parameter):
        return tree.detach()
    if isinstance(tree, dict):
        return type(tree)((key, plain(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(map(plain, tree))
    return tree


def at(tree, path):
    """The value at `path`; partially loaded lists became dicts.

    Raises:
        KeyError: Nothing.
    """
    for segment in path:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        by_segment = {key if isinstance(key, str) else repr(key): value for key, value in pairs}
        tree = by_segment[segment]
    return tree


def save_to(store, state, setting, step=1):
    with Checkpointer(store, **setting.options) as ckpt:
        ckpt.save(state, step, mode=setting.mode).result(300)


@given(state=states, setting=settings_of_a_save)
def test_any_tree_saved_in_any_way_is_loaded_and_restored_bit_by_bit(state, setting):
    store = memory()
    save_to(store, state, setting)
    with Checkpointer(store) as ckpt:
        assert same(ckpt.load(), plain(state))
        target = root_template(state)
        leaves = dict(objects(target))
        report = ckpt.restore(target)
        assert same(plain(target), plain(state))
        for path, leaf in objects(target):
            if isinstance(leaf, torch.Tensor):
                assert leaf is leaves[path], "not in place"
        shown = [show_path(path) for path, _ in objects(state)]
        assert ckpt.open().keys() == shown
        assert list(report.restored) == shown
        assert report.missing == report.unexpected == ()
        assert ckpt.verify().ok


@given(state=states, one=settings_of_a_save, other=settings_of_a_save)
def test_chunk_and_block_sizes_and_rules_change_nothing_about_what_is_read(state, one, other):
    store = memory()
    save_to(store, state, one, 1)
    save_to(store, state, other, 2)
    with (
        Checkpointer(store, **one.options) as first,
        Checkpointer(store, **other.options) as second,
    ):
        for ckpt in (first, second):
            for step in (1, 2):
                assert same(ckpt.load(step), plain(state))
        assert first.open(1).keys() == second.open(2).keys()
        assert first.info(1).bytes_raw == first.info(2).bytes_raw


@given(state=states, setting=settings_of_a_save, data=st.data())
def test_a_part_of_any_tree_is_that_part_and_touches_nothing_else(state, setting, data):
    store = memory()
    save_to(store, state, setting)
    everything = dict(objects(plain(state)))
    chosen = data.draw(st.sets(st.sampled_from(sorted(everything)), min_size=1))

    def selected(path):
        """By the design: the subtree, and names that continue after a dot."""
        for wish in chosen:
            above, last = wish[:-1], wish[-1]
            if path[: len(wish)] == wish:
                return True
            if path[: len(above)] == above and last and path[len(above)].startswith(last + "."):
                return True
        return False

    include = [escaped(path) for path in chosen]
    with Checkpointer(store) as ckpt:
        loaded = ckpt.load(include=include)
        target = root_template(state)
        before = dict(objects(root_template(state)))
        report = ckpt.restore(target, include=include)
        for path, value in everything.items():
            if selected(path):
                assert same(at(loaded, path), value)
                assert same(plain(at(target, path)), value)
                assert same(ckpt.open()[show_path(path)], value)
            else:
                with pytest.raises((KeyError, AttributeError)):
                    at(loaded, path)
                assert same(plain(at(target, path)), plain(before[path]))
        assert set(report.restored) == {show_path(p) for p in everything if selected(p)}


def escaped(path):
    """The pattern that matches exactly this path."""
    return "".join("\\" + char if char in "*?[]\\" else char for char in show_path(path))


@given(state=states, data=st.data())
@settings(max_examples=examples(25))
def test_a_region_of_any_tensor_is_what_slicing_it_gives(state, data):
    store = memory()
    state = {**state, "tensor": data.draw(tensors.filter(lambda t: t.ndim))}
    save_to(store, state, Setting("blocking", {"chunk_bytes": 8192, "block_bytes": 4096}))
    with Checkpointer(store) as ckpt:
        for path, leaf in objects(plain(state)):
            if isinstance(leaf, torch.Tensor | np.ndarray):
                bounds = [
                    sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in leaf.shape
                ]
                slices = tuple(slice(*pair) for pair in bounds)
                got = ckpt.open().read(show_path(path), slices)
                part = leaf[slices] if slices else leaf
                assert same(got, part if isinstance(part, torch.Tensor) else np.asarray(part))


@given(state=states, writer=settings_of_a_save)
@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_engine_reads_what_another_wrote(state, writer, tmp_path):
    root = tmp_path / uuid.uuid4().hex
    with Checkpointer(f"posix://{root}", **writer.options) as ckpt:
        ckpt.save(state, 1, mode=writer.mode)
    with Checkpointer(root) as ckpt:  # io_uring if available
        assert same(ckpt.load(), plain(state))
        ckpt.save(state, 2, mode="lazy")
    with Checkpointer(f"posix://{root}?direct_io=off") as ckpt:
        target = root_template(state)
        ckpt.restore(target, 2)
        assert same(plain(target), plain(state))
        assert ckpt.verify(1).ok


def test_keys_that_look_like_paths_stay_apart():
    tensors = {
        "a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "a%2Fb": torch.tensor(3),
        "": {"": torch.tensor(4)}, "%00": torch.tensor(5), "..": {"..": torch.tensor(6)},
    }  # fmt: skip
    with Checkpointer(memory()) as ckpt:
        ckpt.save(tensors, 1, mode="blocking")
        assert same(ckpt.load(), tensors)
        assert len(set(ckpt.open().keys())) == 6


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_memory_can_be_resized_and_freed_after_save_restore_or_load(tmp_path, mode):
    saved = {"large": torch.ones(1 << 18), "small": torch.ones(3)}
    target = {"large": torch.zeros(1 << 18), "small": torch.zeros(3)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(saved, step=1, mode=mode).result()
        checkpointer.restore(target)
        loaded = checkpointer.load()
    assert torch.equal(target["large"], saved["large"])
    for tensors in (saved, target, loaded):
        for tensor in tensors.values():
            tensor.untyped_storage().resize_(0)


def test_memory_captured_in_the_background_is_not_freed_meanwhile(tmp_path):
    deferred, now = torch.ones(1 << 19), torch.ones(1 << 19)
    with Checkpointer(tmp_path, mode="lazy", defer="deferred") as checkpointer:
        checkpointer.save({"deferred": deferred, "now": now}, step=1).result()
    with pytest.raises(RuntimeError, match="not resizable"):  # or a segmentation fault
        deferred.untyped_storage().resize_(0)
    now.untyped_storage().resize_(0)

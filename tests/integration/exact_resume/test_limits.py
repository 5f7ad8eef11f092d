"""`load` returns what `save` accepts: every bit, at the limits of every kind of state."""

import datetime as dt
import enum
import json
import math
import pathlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.support import bits, memory

from penstock import Checkpointer, ConfigError, DamagedError, PenstockError, UnsupportedStateError
from penstock.core import limits
from penstock.core.errors import TornSnapshotError
from penstock.providers.tensor.sources import TensorSink, TensorSource

REFUSALS = (UnsupportedStateError, ConfigError)


class Color(enum.Enum):
    RED = 1


def same(one, other):
    """Equal in type, order and every bit, recursively."""
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            alike = one.dtype == other.dtype and one.shape == other.shape
            return alike and bits(one) == bits(other)
        case np.ndarray() | np.generic():
            alike = one.dtype == other.dtype and one.shape == other.shape
            return alike and one.tobytes() == other.tobytes() and str(one) == str(other)
        case dict():
            alike = getattr(one, "default_factory", 0) is getattr(other, "default_factory", 0)
            pairs = zip(one.items(), other.items(), strict=False)
            return alike and len(one) == len(other) and all(same(a, b) for a, b in pairs)
        case list() | tuple() | deque():
            alike = getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
            return alike and len(one) == len(other) and all(map(same, one, other))
        case set() | frozenset():
            found = [any(same(a, b) for b in other) for a in one]  # some have no repr for sorting
            return len(one) == len(other) and all(found)
        case float() | complex():
            parts = [struct.pack("<dd", v.real, v.imag) for v in (one, other)]
            return parts[0] == parts[1]
        case dt.datetime() | dt.time():
            return one == other and repr(one) == repr(other) and one.fold == other.fold
    return one == other


class Holder:
    """Saved by its `state_dict`."""

    def __init__(self, state):
        self._state = state

    def state_dict(self):
        return self._state

    def load_state_dict(self, state):
        self._state = state


class Module(torch.nn.Module):
    """With a tensor, and anything else as its extra state."""

    def __init__(self, tensor, extra):
        super().__init__()
        self.register_buffer("tensor", tensor)
        self._extra = extra

    def get_extra_state(self):
        return self._extra


def optimizer(value):
    made = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    made.param_groups[0]["note"] = value
    return made


def nested(depth, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def shrunk(count, kept_bytes):
    tensor = torch.arange(count, dtype=torch.float32)
    tensor.untyped_storage().resize_(kept_bytes)
    return tensor


PAYLOAD_NAN = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]
HUGE = 10**5000

huge = st.sampled_from([1, -1]).map(lambda sign: sign * 10**5000)  # without a repr in Python
texts = st.one_of(
    st.text(st.characters(codec=None), max_size=6),
    st.sampled_from(["", "\0", "a\0", "\ud83d\ude00", "$", "a/b", "%00"]),
)
floats = st.one_of(st.floats(), st.sampled_from([PAYLOAD_NAN, -0.0, 5e-324, math.inf]))
integers = st.one_of(
    st.integers(), st.sampled_from([2**62, 2**63 - 1, 2**63, -(2**63), 2**64]), huge
)
numpy_scalars = st.one_of(
    st.binary(max_size=4).map(np.bytes_),
    st.sampled_from([b"a\0", b"\0\0", b""]).map(np.bytes_),
    texts.map(np.str_),
    st.sampled_from(
        [
            np.float16(-0.0), np.float64(PAYLOAD_NAN), np.longdouble(1) / 3, np.complex64(1j),
            np.bool_(True), np.uint64(2**64 - 1), np.int8(-128), np.void(b"abc"),
            np.datetime64("NaT", "s"), np.datetime64("2024-01-01T00:00", "25m"),
            np.timedelta64(-(2**63) + 1, "as"), np.array([(1, 2.0)], "i4,f8")[0],
        ]
    ),
)  # fmt: skip
others = st.sampled_from(
    [
        None, True, b"\0", bytearray(b"x\0"), complex(-0.0, PAYLOAD_NAN), dt.timedelta.min,
        dt.date.min, dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
        dt.time(23, 59, 59, 999999, dt.UTC, fold=1),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(-dt.timedelta(hours=23, microseconds=1), "")),
        pathlib.PurePosixPath("/a\0\udcff"), pathlib.PureWindowsPath("c:x"), torch.Size([0, 2**62]),
        torch.float8_e4m3fn, torch.device("meta"), Color.RED,
    ]
)  # fmt: skip
leaves = st.one_of(texts, floats, integers, numpy_scalars, others)
keys = st.one_of(
    texts, floats, st.booleans(), st.none(), huge, st.sampled_from([10**4299, np.int64(1)]),
    st.tuples(integers, floats), numpy_scalars.filter(lambda key: key.dtype.kind != "V"),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 3)),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=2).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=2).map(lambda pairs: defaultdict(int, pairs)),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.dictionaries(keys, integers, max_size=3).map(Counter),
        st.builds(nested, st.integers(90, 110), st.just(lambda v: [v]), inner),
        st.builds(nested, st.integers(90, 110), st.just(lambda v: {1: v}), inner),
    ),
    max_leaves=6,
)
shapes = st.one_of(
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from([[1] * 64, [1] * 65, [0, 2**62 - 1], [0, 2**62], [2**61, 0]]),
)
tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    shapes,
    st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint64]),
)
odd_tensors = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3).t(), torch.ones(1).expand(3),
        torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, dtype=torch.cfloat).conj().imag,
    ]
)  # fmt: skip
arrays = st.builds(
    np.zeros,
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [
            "f4", ">f8", "?", "c16", "M8[25m]", ">m8[as]", "S1", "S0", "U0", "U3", ">U3", "V3",
            "V0", "U262144", "U262145", "S1048576", "S1048577", "V1048577", "i4,f8", "2i4", "g",
        ]
    ),
)  # fmt: skip
objects = st.one_of(tensors, tensors, odd_tensors, arrays, st.just(np.zeros([1] * 64)))
trees = st.recursive(
    st.one_of(objects, values),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, objects),
        st.builds(nested, st.integers(120, 130), st.just(lambda v: [v]), inner),
        st.builds(nested, st.integers(120, 130), st.just(lambda v: {"a": v}), inner),
        st.builds(nested, st.sampled_from([300, 600]), st.just(lambda v: (v,)), inner),
    ),
    max_leaves=5,
)
metadata = st.dictionaries(
    st.one_of(texts, texts, texts, floats, st.booleans(), st.none(), huge),
    st.recursive(
        st.one_of(texts, st.floats(allow_nan=False), integers, st.none()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3),
            st.builds(nested, st.sampled_from([95, 99, 900]), st.just(lambda v: [v]), inner),
        ),
        max_leaves=4,
    ),
    max_size=3,
)
steps = st.one_of(
    st.just(7),
    st.just(7),
    st.integers(0, 2**63),
    st.sampled_from([2**62 - 1, 2**62, 10**18, -1]),
    huge,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, value=values, tensor=st.one_of(tensors, odd_tensors))
def test_composites_accepted_by_save_load_bit_by_bit(tree, value, tensor):
    with Checkpointer(memory(), workers=1, mode="blocking") as ckpt:
        state = {"h": Holder({"x": tree}), "m": Module(tensor, value), "o": optimizer(value)}
        try:
            ckpt.save(state, 1)
        except REFUSALS:
            assert ckpt.steps() == []
            return
        loaded = ckpt.load()
    assert same(loaded["h"], {"x": tree})
    assert same(loaded["m"]["tensor"], tensor)
    assert same(loaded["m"]["_extra_state"], value)
    assert same(loaded["o"]["param_groups"][0]["note"], value)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, step=steps, user_metadata=st.one_of(st.just({}), metadata))
def test_everything_save_accepts_loads_bit_by_bit(tree, step, user_metadata):
    store = memory()
    with Checkpointer(store, workers=1, mode="blocking") as ckpt:
        try:
            ckpt.save({"a": tree}, step, metadata=user_metadata)
        except REFUSALS:
            assert ckpt.steps() == []
            return
        assert ckpt.latest() == step
        assert same(ckpt.load()["a"], tree)
        assert ckpt.verify().ok
        assert ckpt.info().metadata == json.loads(json.dumps(user_metadata, ensure_ascii=False))


@pytest.mark.parametrize(
    ("state", "path", "complaint"),
    [
        ({"cfg": {"x": np.array("x" * 300_000)}}, "cfg/x", "1200000 bytes"),
        ({"cfg": np.array(b"x" * 2_000_000)}, "cfg", "2000000 bytes"),
        ({"w": torch.ones([1] * 65)}, "w", "65 dimensions"),
        ({"w": torch.empty(0, 2**62)}, "w", "dimension of 4611686018427387904"),
        ({"w": nested(490, lambda v: [v], torch.ones(1))}, "w/0/0", "levels deep"),
        ({"k" * (17 << 20): torch.ones(1)}, "kkk", "characters"),
        ({"w": {HUGE: torch.ones(1)}}, "w", "4300 digits"),
        ({"w": {PAYLOAD_NAN: torch.ones(1)}}, "w", "NaN of unusual bits"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_save_refuses_unreadable_objects_with_their_path(state, path, complaint):
    store = memory()
    with Checkpointer(store, retention={"keep_last": 1}, mode="blocking") as ckpt:
        ckpt.save({"a": 1}, 1)
        with pytest.raises(UnsupportedStateError, match=rf"^{path}.*{complaint}") as caught:
            ckpt.save(state, 2)
        assert len(str(caught.value)) < 500
        assert ckpt.load() == {"a": 1}
    assert [blob.name for blob in store.list("commits/")] == ["commits/00000001-0.json"]


@pytest.mark.parametrize(("mode", "kept_bytes"), [("blocking", 0), ("lazy", 40)])
def test_a_tensor_whose_storage_was_freed_or_shrunk_is_refused(mode, kept_bytes):
    with Checkpointer(memory(), mode=mode, defer="**") as ckpt:
        ckpt.save({"a": 1}, 1).result(300)
        message = rf"m/w has a storage of {kept_bytes} bytes, too few for its shape \[100\]"
        with pytest.raises(UnsupportedStateError, match=message):
            ckpt.save({"m": {"w": shrunk(100, kept_bytes)}}, 2)
        assert ckpt.steps() == [1]


def test_a_storage_freed_before_its_capture_is_not_read():
    held = torch.arange(100, dtype=torch.float32)
    flat, strided = TensorSource(held), TensorSource(held[::2])
    held.untyped_storage().resize_(40)
    for source in (flat, strided):
        with pytest.raises(TornSnapshotError, match="freed or shrunk"):
            source.view()
        with pytest.raises(TornSnapshotError, match="freed or shrunk"):
            source.copy_out(0, memoryview(bytearray(200)))


def test_nothing_is_written_to_a_tensor_with_freed_storage():
    with Checkpointer(memory(), mode="blocking") as ckpt:
        ckpt.save({"w": torch.ones(100)}, 1)
        with pytest.raises(UnsupportedStateError, match="w has a storage of 0 bytes"):
            ckpt.restore({"w": shrunk(100, 0)})


def test_nothing_is_written_beyond_a_tensor():
    whole = torch.zeros(100)
    sink, piece = TensorSink(whole[10:20]), memoryview(bytearray(b"\1" * 8))
    for start in (-4, 36):
        with pytest.raises(RuntimeError, match="do not fit into the 40 bytes"):
            sink.copy_in(start, piece)
    whole.untyped_storage().resize_(40)
    with pytest.raises(RuntimeError, match="freed or shrunk"):
        sink.copy_in(0, piece)
    assert not whole[:10].any()


def test_save_refuses_metadata_that_would_not_load():
    with Checkpointer(memory(), mode="blocking") as ckpt:
        for metadata, complaint in (
            (nested(900, lambda v: {"a": v}, 1), "nested more than 100 levels"),
            ({1: "a", "1": "b"}, "metadata has the key 1: keys of metadata are text"),
            ({"a": [{None: 1, "null": 2}]}, r"metadata\['a'\]\[0\] has the key None"),
            ({HUGE: 1}, "4300 digits"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                ckpt.save({"a": 1}, 1, metadata=metadata)
        assert ckpt.steps() == []


def test_an_unreadable_manifest_is_not_committed_and_is_no_damage(monkeypatch):
    monkeypatch.setattr("penstock.core.format.compressed.max_decompressed", lambda stored: 300)
    store = memory()
    with Checkpointer(store, workers=1) as ckpt:
        handle = ckpt.save({"a": {str(number): torch.ones(1) for number in range(50)}}, 1)
        error = handle.durable.exception(300)
        assert "nothing was committed" in str(error)
        assert not isinstance(error, DamagedError)
        assert isinstance(error, PenstockError)
        assert ckpt.steps() == []
        handle.error_seen = True
    assert list(store.list("")) == []


def test_the_deepest_nesting_that_save_accepts_restores():
    depth = limits.MAX_SAVED_SEGMENTS - 1
    state = {"a": nested(depth, lambda v: [v], torch.ones(2))}
    target = {"a": nested(depth, lambda v: [v], torch.zeros(2))}
    assert sys.getrecursionlimit() == 1000
    with Checkpointer(memory(), mode="blocking") as ckpt:
        ckpt.save(state, 1)
        ckpt.restore(target)
    assert same(target, state)


def test_a_view_of_a_shrunk_storage_is_stored():
    tensor = torch.arange(100, dtype=torch.float32)
    kept, gone = tensor[:10], tensor[5:11]
    tensor.untyped_storage().resize_(40)
    with Checkpointer(memory(), mode="blocking") as ckpt:
        ckpt.save({"w": kept, "none": tensor[:0]}, 1)
        assert same(ckpt.load()["w"], torch.arange(10, dtype=torch.float32))
        with pytest.raises(UnsupportedStateError, match="w has a storage"):
            ckpt.save({"w": gone}, 2)


def test_options_making_unreadable_saves_are_refused_on_open():
    for option, complaint in (
        ({"block_bytes": "2 GiB"}, "block_bytes"),
        ({"chunk_bytes": 2 << 30}, "chunk_bytes"),
        ({"rules": [{"match": "**", "codecs": ["zstd"] * 17}]}, r"rules\[0\].codecs"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            Checkpointer(memory(), **option)

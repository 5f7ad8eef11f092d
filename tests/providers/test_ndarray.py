import numpy as np
import pytest

from penstock.core.errors import RestoreError, UnsupportedStateError
from penstock.providers.ndarray import ArraySource
from penstock.testing.providers import check_provider, check_source

ARRAYS = {
    "float32": lambda: np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "0-dim": lambda: np.array(3.5),
    "empty": lambda: np.zeros((0, 3)),
    "fortran": lambda: np.asfortranarray(np.arange(24).reshape(4, 6)),
    "strided": lambda: np.arange(100).reshape(10, 10)[::3, 1::2],
    "reversed": lambda: np.arange(10)[::-1],
    "bool": lambda: np.array([True, False]),
    "big endian": lambda: np.arange(5, dtype=">f8"),
    "datetime": lambda: np.array(["2024-01-02", "NaT"], "datetime64[ms]"),
    "timedelta": lambda: np.array([1, 2], "timedelta64[3s]"),
    "text": lambda: np.array(["é", "abc"]),
    "bytes": lambda: np.array([b"a", b"bc\x00d"]),
    "void": lambda: np.array([b"ab", b"cd"], "V2"),
    "complex": lambda: np.array([1j, np.nan]),
    "longdouble": lambda: np.arange(3, dtype=np.longdouble)[::2],
    "uint64": lambda: np.array([2**64 - 1], np.uint64),
}


def equal(one, other):
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == np.longdouble:  # its padding is arbitrary
        return np.array_equal(one, other)
    return one.tobytes() == other.tobytes()


def wipe(array):
    array[...] = np.zeros(array.shape, f"V{array.itemsize}").view(array.dtype)


@pytest.mark.parametrize("kind", ["float32", "strided", "text"])
def test_arrays_keep_the_contract(providers, kind):
    check_provider(ARRAYS[kind], wipe, equal, providers=providers)


def test_arrays_restore_equal_and_in_place(save):
    for kind, make in ARRAYS.items():
        stored = save({"a": make()})
        assert equal(stored.load()["a"], make()), kind
        target = make()
        wipe(target)
        state = {"a": target}
        stored.restore(state)
        assert state["a"] is target
        assert equal(target, make()), kind
        check_source(ArraySource(make()), target.itemsize)


def test_read_only_arrays_are_replaced(save):
    stored = save({"a": np.arange(4), "t": (np.arange(3), 1)})
    frozen = np.zeros(4, int)
    frozen.flags.writeable = False
    state = {"a": frozen, "t": (np.zeros(3, int), 1)}
    stored.restore(state)
    assert state["a"].tolist() == [0, 1, 2, 3]
    assert not frozen.any()
    assert state["t"][0].tolist() == [0, 1, 2]


def test_broadcast_arrays_restore_if_their_values_agree(save):
    row = np.arange(4.0)
    stored = save({"a": np.broadcast_to(row, (3, 4)), "b": np.arange(12.0).reshape(3, 4)})
    memory = np.zeros(4)
    target = np.lib.stride_tricks.as_strided(memory, (3, 4), (0, 8))
    stored.restore({"a": target}, include="a")
    assert memory.tolist() == row.tolist()
    with pytest.raises(RestoreError, match="b is a broadcast or overlapping array"):
        stored.restore({"b": target}, include="b")


class Sub(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: np.array([1, "a"], object), "Python objects"),
        (lambda: np.zeros(2, [("a", int)]), "dict of its fields"),
        (lambda: np.zeros(2).view(Sub), "array subclass"),
        (lambda: np.ma.masked_array([1, 2], [0, 1]), "array subclass"),
    ],
)
def test_arrays_beyond_plain_bytes_are_refused_with_path(save, make, reason):
    with pytest.raises(UnsupportedStateError, match=f"^x/a is a.*{reason}"):
        save({"x": {"a": make()}})


def test_memory_maps_are_arrays(save, tmp_path):
    np.arange(5).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", dtype=int, mode="r+", shape=5)
    stored = save({"a": mapped})
    assert type(stored.load()["a"]) is np.ndarray
    mapped[:] = 0
    stored.restore({"a": mapped})
    assert mapped.tolist() == [0, 1, 2, 3, 4]


def test_differences_are_problems(save):
    stored = save({"a": np.arange(4), "b": np.arange(3.0)})
    placement = stored.plan({"a": np.arange(5), "b": np.arange(3, dtype=np.float32)})
    assert placement.problems == [
        "a: shape [4] is stored, but the template has [5]",
        "b: dtype float64 is stored, but the template has float32",
    ]

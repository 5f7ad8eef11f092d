"""Checkpoints of several ranks, read in one process: any shards, any regions, whole or in part."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.forging import forge
from tests.core.plan.test_chunk_uses import splits, wanted
from tests.core.stored_ranks import STEP, cut, store_ranks
from tests.effort import examples
from tests.integration.support import checkpointer, memory

from penstock import DamagedError
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import ManyParts, commit_name
from penstock.core.types import Region

DTYPES = ("uint8", "int16", "float32", "float64", "complex128")


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    scale = draw(st.sampled_from([1, 1, 40]))  # some larger than a block
    shape = (shape[0] * scale, *shape[1:]) if shape else ()
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = math.prod(shape)
    seed = draw(st.integers(0, 2**32 - 1))
    data = np.random.default_rng(seed).integers(0, 250, count * dtype.itemsize, np.uint8)
    return data.view(dtype).reshape(shape)


@st.composite
def jobs(draw):
    """A state, and each rank's share of it."""
    count = draw(st.integers(2, 4) | st.just(20))
    state = {("a", f"w{n}"): array for n, array in enumerate(draw(st.lists(arrays(), max_size=4)))}
    state["b",] = np.arange(3, dtype=np.int64)
    ranks = [[] for _ in range(count)]
    for path, array in state.items():
        held = {rank: [] for rank in range(count)}
        for region in draw(splits(Region.whole(array.shape))):
            writers = st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True)
            for rank in draw(writers):
                held[rank].append(region)
        for rank, regions in held.items():
            # A rank without a share may describe an object, or leave it out.
            if regions or draw(st.booleans()):
                ranks[rank].append((path, array, regions))
    return state, ranks


def equal(tree, state):
    found = {(*path, key): leaf for path, node in walk(tree) for key, leaf in node.items()}
    assert found.keys() == state.keys()
    for path, array in state.items():
        assert found[path].dtype == array.dtype
        assert found[path].tobytes() == array.tobytes()


def walk(tree):
    yield (), {k: v for k, v in tree.items() if not isinstance(v, dict)}
    for key, child in tree.items():
        if isinstance(child, dict):
            yield (key,), child


@settings(deadline=None, max_examples=examples(40))
@given(jobs(), st.data())
def test_data_of_ranks_is_restored_whole_and_in_part(job, data):
    state, ranks = job
    store = memory()
    store_ranks(store, ranks, per_section=data.draw(st.integers(1, 3)))
    with checkpointer(store) as ckpt:
        assert ckpt.verify().ok
        equal(ckpt.load(), state)
        target = {"a": {}, "b": np.zeros(3, np.int64)}
        for path, array in state.items():
            if len(path) == 2:
                target["a"][path[1]] = np.zeros_like(array)
        ckpt.restore(target if target["a"] else {"b": target["b"]})
        equal(target if target["a"] else {"b": target["b"]}, state)
        view = ckpt.open()
        assert sorted(view.keys()) == sorted("/".join(path) for path in state)
        for path, array in state.items():
            region = data.draw(wanted(array.shape))
            assert view.read("/".join(path), region).tobytes() == cut(array, region).tobytes()
            assert view["/".join(path)].tobytes() == array.tobytes()


def columns(rank, of=4):
    return Region((0, 8 * rank), (64, 8)) if of else None


ARRAY = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def by_columns():
    return [[(("w",), ARRAY, [columns(rank)])] for rank in range(4)]


def test_shards_that_omit_elements_are_damage_naming_the_object():
    store = memory()
    store_ranks(store, by_columns()[:3])
    with checkpointer(store) as ckpt:
        with pytest.raises(DamagedError, match=r"w from .*: no shard has elements"):
            ckpt.load()
        assert ckpt.open().read("w", (slice(0, 64), slice(0, 24))).tobytes() == (
            np.ascontiguousarray(ARRAY[:, :24]).tobytes()
        )
        assert not ckpt.verify().ok


def test_elements_missing_in_the_only_part_are_always_damage():
    store = memory()
    store_ranks(store, [*by_columns()[:1], []])
    with checkpointer(store) as ckpt:
        with pytest.raises(DamagedError, match=r"w from .*: no shard has elements"):
            ckpt.load()
        (damage,) = ckpt.verify().damaged
        assert (damage.what, damage.detail) == ("w", "no shard has elements [0:64, 8:32]")
        assert ckpt.verify(deep=False).damaged == (damage,)


def test_section_with_more_shards_than_its_table_is_reported_as_damage():
    def change(level, value):
        if level == "section":
            shards = value["objects"]["shards"][0]
            shards.append(shards[0])
        return value

    store = memory()
    halves = [Region((0, 0), (64, 16)), Region((0, 16), (64, 16))]
    record = store_ranks(store, [[(("w",), ARRAY, halves)], []])
    files = {name: bytes(blob.data) for name, blob in store._store.blobs.items()}
    for name, data in forge(files, change).items():
        store.publish(name, bytes(len(data)) if "/blobs/" in name else data)
    with checkpointer(store) as ckpt:
        table, *blocks = ckpt.verify().damaged
    assert table.what == record.parts[0].name
    assert "its table does not list the shards that are in its sections" in table.detail
    assert {damage.what for damage in blocks} == {"w"}


def test_inconsistent_descriptions_of_ranks_are_refused_by_name():
    store = memory()
    ranks = by_columns()
    ranks[2] = [(("w",), ARRAY.view(np.int32), [columns(2)])]
    store_ranks(store, ranks)
    with checkpointer(store) as ckpt:
        with pytest.raises(
            DamagedError, match="w: the ranks that saved it describe it differently"
        ):
            ckpt.load()
        assert not ckpt.verify().ok


def test_a_region_reads_only_the_parts_that_hold_it():
    store = memory()
    ranks = [[(("w",), ARRAY, [Region((16 * rank, 0), (16, 32))])] for rank in range(4)]
    ranks[0].append((("v",), ARRAY, [Region.whole(ARRAY.shape)]))
    record = store_ranks(store, ranks)
    store.delete([record.parts[1].name, record.parts[3].name])
    with checkpointer(store) as ckpt:
        view = ckpt.open()
        assert view.read("w", (slice(32, 48),)).tobytes() == ARRAY[32:48].tobytes()
        assert view["v"].tobytes() == ARRAY.tobytes()
        with pytest.raises(DamagedError, match=record.parts[1].name):
            view.read("w", (slice(0, 17),))
        assert STEP in ckpt.steps()


def test_an_index_that_lists_other_parts_is_damage():
    store = memory()
    ranks = [[(("w",), ARRAY, [Region((2 * rank, 0), (2, 32))])] for rank in range(32)]
    record = store_ranks(store, ranks)
    assert (record.parts, record.many_parts.count) == ((), 32)
    with checkpointer(store) as ckpt:
        assert ckpt.load()["w"].tobytes() == ARRAY.tobytes()
    for many in (ManyParts(31, record.many_parts.length), ManyParts(32, 9)):
        store.delete([commit_name(STEP, 0)])
        store.publish(commit_name(STEP, 0), encode_commit(replace(record, many_parts=many)))
        with checkpointer(store) as ckpt:
            with pytest.raises(DamagedError, match="does not list the parts"):
                ckpt.load()
            assert record.index.name in {d.what for d in ckpt.verify().damaged}


@pytest.mark.parametrize("ranks", [1, 2])
def test_objects_below_an_object_are_damage(ranks):
    one, other = ((path, ARRAY, [Region.whole(ARRAY.shape)]) for path in (("x",), ("x", "a")))
    store = memory()
    store_ranks(store, [[one], [other]] if ranks == 2 else [[one, other]])
    with checkpointer(store) as ckpt:
        found = [(one.what, one.detail) for one in ckpt.verify(STEP).damaged]
    assert found == [("x", "is stored as one object, but other objects are below it")]

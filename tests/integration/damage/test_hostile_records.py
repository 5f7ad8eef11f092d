"""Records with right digests whose claims, or content, would exhaust a reader."""

import importlib.util
import random
import sys
import types
from collections import Counter

import numpy as np
import pytest
import torch
from tests.core.forging import forge
from tests.integration.support import checkpointer, memory

from penstock import DamagedError, RestoreError, UnsupportedStateError
from penstock.core.errors import FormatError
from penstock.core.restore.manifest_reader import ManifestReader
from penstock.core.tree.containers import make_tuple
from penstock.core.types import collide, loaded_class
from penstock.providers.tensor.parts import decode_context
from penstock.providers.values.decode import decode_value
from penstock.testing.faults import FaultyBackend

PRIME = (1 << 61) - 1  # Python hashes integers modulo this


def forged(state, change):
    """A store with one checkpoint of `state`, changed by `change`."""
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save(state, 1, mode="blocking")
    files = {name: bytes(blob.data) for name, blob in store._store.blobs.items()}
    for name, data in forge(files, change, number=0).items():
        store.publish(name, data)
    return store


def test_an_object_in_too_many_tiny_chunks_is_refused():
    def change(level, value):
        if level == "section":
            value["objects"]["shards"][0] = [[[0, 0, 1] * 40_000]]
            value["objects"]["shape"][0] = [40_000]
        return value

    store = forged({"w": torch.zeros(40_000, dtype=torch.uint8)}, change)
    with checkpointer(store) as ckpt:
        with pytest.raises(FormatError, match="40000 chunks for 40000 bytes"):
            ckpt.load()
        assert not ckpt.verify().ok


def test_pieces_of_a_part_have_a_total_expansion_limit():
    def change(level, value):
        if level == "head":
            value["shards"][2] = value["sections"][0][2] = 9 << 20  # each alone may have this much
        return value

    complaint = f"{18 << 20} bytes of content, too many"
    with (
        checkpointer(forged({"w": 1}, change)) as ckpt,
        pytest.raises(FormatError, match=complaint),
    ):
        ckpt.load()


@pytest.mark.parametrize(
    ("field", "number", "complaint"),
    [
        ("index", 3 << 30, "head_length is not an integer"),
        ("objects", 1 << 40, "objects is not an integer"),
        ("head_length", 3 << 30, "head_length is not an integer"),
        ("section", 3 << 30, "length is not an integer"),
        ("raw_section", 3 << 30, "raw_length is not an integer"),
    ],
)
def test_an_impossible_length_is_refused_before_allocation(field, number, complaint):
    def change(level, value):
        if level == "body" and field == "index":
            value["index"].update(length=4 << 30, head_length=number)
        if level == "body" and field == "objects":
            value["objects"] = number
        if level == "body" and field == "head_length":
            value["parts"][0].update(length=4 << 30, head_length=number)
        if level == "head" and field == "section":
            value["sections"][0][1] = number
        if level == "head" and field == "raw_section":
            value["sections"][0][2] = number
        return value

    with (
        checkpointer(forged({"w": 1}, change)) as ckpt,
        pytest.raises(FormatError, match=complaint),
    ):
        ckpt.load()


def test_too_little_memory_for_a_record_is_no_damage():
    for match in ["/parts/", "/index", "commits/"]:
        store = FaultyBackend(memory())
        with checkpointer(store) as ckpt:
            ckpt.save({"w": 1}, 1, mode="blocking")
            store.fail("read", MemoryError, match=match, times=None)
            store.fail("read_record", MemoryError, match=match, times=None)
            with pytest.raises(RestoreError, match="more memory than this process can get"):
                ckpt.verify()


def test_a_section_listed_a_thousand_times_is_searched_once(monkeypatch):
    def change(level, value):
        if level == "index":
            return b"".join(value[n : n + 1] * 1000 for n in range(17))
        return value

    store = forged({"w": 1}, change)
    seen = Counter()
    section = ManifestReader.section

    def counted(manifest, *place):
        seen[place] += 1
        return section(manifest, *place)

    monkeypatch.setattr(ManifestReader, "section", counted)
    with checkpointer(store) as ckpt:
        assert "w" in ckpt.open()
    assert max(seen.values()) == 1


def lack_a_path(level, value):
    if level == "index":
        return b"".join(value[3 * n : 3 * n + 2] for n in range(17))
    return value


def test_an_index_without_a_path_is_damage_named_by_verify():
    store = forged({"a": 1, "b": torch.ones(2), "c": torch.ones(3)}, lack_a_path)
    with checkpointer(store) as ckpt:
        report = ckpt.verify()
        (damage,) = report.damaged
        assert damage.what == ckpt.open().contents.record.index.name
        assert "does not list exactly the shards" in damage.detail


def test_verify_names_a_table_of_other_paths_as_damage():
    def change(level, value):
        if level == "section":
            value["objects"]["path"][0] = ["z"]
        return value

    with checkpointer(forged({"a": 1}, change)) as ckpt:
        assert "its table does not list the shards" in str(ckpt.verify().damaged)


def test_all_objects_are_readable_if_the_index_lacks_one():
    store = forged({"a": 1, "b": torch.ones(2), "c": torch.ones(3)}, lack_a_path)
    with checkpointer(store) as ckpt:
        view = ckpt.open()
        assert sorted(view.keys()) == ["a", "b", "c"]
        for path in view.keys():  # noqa: SIM118 - a view of a checkpoint is no dict
            view.read(path)


TAGS = ["set", "frozenset", "dict", "Counter", "OrderedDict", "defaultdict"]


def test_values_with_colliding_hashes_are_refused_before_building_a_set():
    for tag in TAGS:
        pairs = tag not in {"set", "frozenset"}
        for numbers in (range(300), range(0, 300 * PRIME, PRIME)):
            members = ",".join(
                f'[{{"$":"int","v":"{n:#x}"}},1]' if pairs else f'{{"$":"int","v":"{n:#x}"}}'
                for n in numbers
            )
            data = f'{{"$":"{tag}","factory":null,"v":[{members}]}}'.encode()
            if numbers.step == 1:
                assert len(decode_value(data, ("v",))) == 300
            else:
                with pytest.raises(FormatError, match=r"v holds .*hashes that collide"):
                    decode_value(data, ("v",))


def test_save_refuses_keys_with_equal_hashes():
    many = range(0, 300 * PRIME, PRIME)
    with checkpointer(memory()) as ckpt:
        for state in (
            {"v": {"x": set(many)}},
            {"v": {"x": dict.fromkeys(many)}},
            {"v": {"x": {key: torch.ones(1) for key in many}}},
        ):
            with pytest.raises(UnsupportedStateError, match=r"v/x has .*hashes collide"):
                ckpt.save(state, 1)
        assert ckpt.steps() == []


def test_colliding_container_keys_are_refused():
    def change(level, value):
        if level == "section":
            for number, path in enumerate(value["objects"]["path"]):
                path[1] = str(number * PRIME)
        return value

    store = forged({"d": {n: torch.ones(1) for n in range(300)}}, change)
    with (
        checkpointer(store) as ckpt,
        pytest.raises(DamagedError, match="d has keys whose hashes collide"),
    ):
        ckpt.load()


def test_an_optimizer_of_more_parameters_than_memory_is_refused():
    def change(level, value):
        if level == "section":
            value["nodes"][0][3]["groups"] = [10**12]
        return value

    optimizer = torch.optim.SGD([torch.zeros(2)])
    store = forged({"optimizer": optimizer}, change)
    with (
        checkpointer(store) as ckpt,
        pytest.raises(FormatError, match="optimizer is not a valid stored optimizer"),
    ):
        ckpt.load()


def walking(size, walkers):
    """Return numbers of distinct hashes; the last ones walk over half of a dict's table."""
    arc, numbers = [12345 % size], []
    while len(arc) < size // 2:
        arc.append((5 * arc[-1] + 1) % size)
    early = {slot: number for number, slot in enumerate(arc)}
    draw = random.Random(1)
    while len(numbers) < walkers:
        number = rest = draw.getrandbits(30)
        at = number % size
        while at in early and rest:
            rest >>= 5
            at = (5 * at + rest + 1) % size
        if early.get(at, size) < size // 8:
            numbers.append(number)
    return arc + numbers


def test_numbers_probing_the_whole_table_are_refused():
    numbers = walking(1 << 11, 300)
    assert len(set(map(hash, numbers))) == len(set(numbers))
    assert collide(numbers)
    context = {"form": "dict", "items": [[{"form": "value", "value": n}] * 2 for n in numbers]}
    with pytest.raises(FormatError, match="c has a context with keys whose hashes collide"):
        decode_context(context, ("c",))


def test_numbers_at_equal_distances_do_not_collide():
    for step in [1, -3, 1 << 7, 1 << 30, 1 << 47, 1 << 56, 0.5**11, 0.1, 1j, (1 << 61) + 5]:
        assert not collide([step * n for n in range(2000)])


@pytest.mark.slow
def test_very_many_numbers_at_equal_distances_do_not_collide():
    assert not collide([n << 27 for n in range(700_000)])


def test_numbers_of_any_size_and_pairs_of_them_do_not_collide():
    draw = random.Random(1)
    assert not collide([draw.getrandbits(40) for _ in range(2000)])
    assert not collide([(-i, j) for i in range(50) for j in range(50)])


class Proxy:
    """A proxy that runs code at any access."""

    @property
    def __class__(self):
        pytest.fail("code of a proxy ran")

    def __getattribute__(self, name):
        pytest.fail(f"code of a proxy ran for {name}")


def test_no_code_runs_because_a_checkpoint_names_a_lazy_module(tmp_path, monkeypatch):
    file = tmp_path / "penstock_lazy.py"
    file.write_text("raise AssertionError('executed')\n")
    spec = importlib.util.spec_from_file_location("penstock_lazy", file)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    plain = types.ModuleType("penstock_plain")
    plain.proxy = Proxy()
    for name, module in {"lazy": lazy, "plain": plain, "proxy": Proxy(), "number": 3}.items():
        monkeypatch.setitem(sys.modules, f"penstock_{name}", module)
    names = ("lazy:Point", "plain:proxy", "plain:proxy.Point", "proxy:Point", "number:real")
    for name in names:
        assert loaded_class(f"penstock_{name}") is None
        with pytest.raises(UnsupportedStateError, match="not loaded"):
            make_tuple([1], f"penstock_{name}", ("t",))
    assert loaded_class("collections:OrderedDict.fromkeys") is None
    assert loaded_class("numpy:ndarray") is np.ndarray

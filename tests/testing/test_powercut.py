"""The store that loses power keeps only what the contract promises."""

import itertools
import random

import pytest

from penstock.core.types import WriteRequest
from penstock.testing.backends import check_backend
from penstock.testing.expectations import pattern
from penstock.testing.faults import SimulatedCrashError
from penstock.testing.powercut import SECTOR_BYTES, Disk, PowerCut

MANY = 300
TWO_SECTORS = pattern(2 * SECTOR_BYTES)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def store(disk):
    return PowerCut(disk)


def request(data, offset=0):
    return WriteRequest(offset, (memoryview(data),))


def seal(store, name, data):
    writer = store.create(name)
    writer.write([request(data)])
    writer.seal(len(data))


def stored(disk):
    store = PowerCut(disk)
    return {i.name: store.read_record(i.name, limit_bytes=1 << 20) for i in store.list("")}


def outcomes(disk, tries=MANY):
    """The outcomes of this many cuts, each once."""
    left = (stored(disk.cut(random.Random(seed))) for seed in range(tries))
    return {frozenset(found.items()) for found in left}


def contents_of(name, disk, tries=MANY):
    return {dict(found).get(name) for found in outcomes(disk, tries)}


@pytest.mark.slow
def test_it_conforms():
    disks = {}
    check_backend(lambda root: PowerCut(disks.setdefault(root, Disk())))


def test_completed_calls_survive_every_cut(disk, store):
    seal(store, "blob", TWO_SECTORS)
    store.publish("record", b"old")
    store.publish("record", b"new")
    store.publish("gone", b"x")
    store.delete(["gone"])
    assert outcomes(disk) == {frozenset({("blob", TWO_SECTORS), ("record", b"new")})}


def test_any_sectors_of_an_unsealed_blob_survive(disk, store):
    store.create("blob").write([request(TWO_SECTORS)])
    assert stored(disk) == {"blob": TWO_SECTORS}, "a process that dies has handed it over"
    found = contents_of("blob", disk)
    assert {None, b"", TWO_SECTORS} <= found
    halves = TWO_SECTORS[:SECTOR_BYTES], TWO_SECTORS[SECTOR_BYTES:]
    whole = {data for data in found if data is not None and len(data) == len(TWO_SECTORS)}
    for first, second in itertools.product((False, True), repeat=2):
        assert any(
            (d[:SECTOR_BYTES] == halves[0], d[SECTOR_BYTES:] == halves[1]) == (first, second)
            for d in whole
        )
    assert bytes(len(TWO_SECTORS)) in whole
    assert any(0 < len(data) < len(TWO_SECTORS) for data in found if data is not None)


def test_synced_bytes_survive_and_later_ones_are_as_unsealed(disk, store):
    writer = store.create("blob")
    writer.write([request(TWO_SECTORS)])
    writer.sync(len(TWO_SECTORS))
    assert contents_of("blob", disk.copy()) == {TWO_SECTORS}
    writer.write([request(TWO_SECTORS[::-1], len(TWO_SECTORS))])
    found = contents_of("blob", disk)
    assert {TWO_SECTORS, TWO_SECTORS + TWO_SECTORS[::-1]} <= found
    assert TWO_SECTORS + bytes(len(TWO_SECTORS)) in found
    assert all(data.startswith(TWO_SECTORS) for data in found)


@pytest.mark.parametrize("operation", ["sync", "seal"])
def test_synced_bytes_survive_a_cut_during_the_next_call(operation):
    disk = Disk(cut_at=5)
    writer = PowerCut(disk).create("blob")
    writer.write([request(TWO_SECTORS)])
    writer.sync(len(TWO_SECTORS))
    writer.write([request(TWO_SECTORS, len(TWO_SECTORS))])
    with pytest.raises(SimulatedCrashError):
        getattr(writer, operation)(2 * len(TWO_SECTORS))
    found = contents_of("blob", disk)
    assert {TWO_SECTORS, TWO_SECTORS * 2} <= found
    assert all(data.startswith(TWO_SECTORS) for data in found)


def test_a_publish_in_flight_is_whole_or_absent():
    disk = Disk(cut_at=2)
    store = PowerCut(disk)
    store.publish("record", b"a" * 2000)
    with pytest.raises(SimulatedCrashError):
        store.publish("record", b"b" * 3000)
    assert contents_of("record", disk) == {b"a" * 2000, b"b" * 3000}


def test_a_delete_in_flight_removes_any_names():
    disk = Disk(cut_at=3)
    store = PowerCut(disk)
    store.publish("a", b"a")
    store.publish("b", b"b")
    with pytest.raises(SimulatedCrashError):
        store.delete(["a", "b"])
    assert {frozenset(dict(found)) for found in outcomes(disk)} == {
        frozenset(names) for names in ("", "a", "b", "ab")
    }


# -- its purpose -----------------------------------------------------------------------------------


def in_order(*steps):
    return lambda engine, number: [getattr(engine, step)(number) for step in steps]


class Engine:
    """A tiny saver: two blobs, a part, a record that names them; then the older one goes."""

    def __init__(self, store):
        self.store = store

    def blobs(self, number):
        for kind in ("raw", "enc"):
            seal(self.store, f"data/{number}/{kind}", pattern(2000, number))

    def part(self, number):
        self.store.publish(f"data/{number}/part", pattern(500, number))

    def record(self, number):
        self.store.publish(f"commits/{number}", b"%d" % number, exclusive=True)

    def drop_record(self, number):
        self.store.delete([f"commits/{number}"])

    def drop_data(self, number):
        self.store.delete([f"data/{number}/{kind}" for kind in ("raw", "enc", "part")])

    save = in_order("blobs", "part", "record")
    drop = in_order("drop_record", "drop_data")


def seal_nothing(engine, number):
    for kind in ("raw", "enc"):
        data = pattern(2000, number)
        engine.store.create(f"data/{number}/{kind}").write([request(data)])


def drop_all_at_once(engine, number):
    names = [f"data/{number}/{kind}" for kind in ("raw", "enc", "part")]
    engine.store.delete([f"commits/{number}", *names])


def drop_too_early(engine, number):
    engine.drop(number - 1)
    Engine.save(engine, number)


BROKEN = {
    "commits before blobs": {"save": in_order("part", "record", "blobs")},
    "commits before the part": {"save": in_order("blobs", "record", "part")},
    "seals nothing": {"blobs": seal_nothing},
    "drops data first": {"drop": in_order("drop_data", "drop_record")},
    "drops all at once": {"drop": drop_all_at_once},
    "drops too early": {"save": drop_too_early},
}


def torn_or_lost(engine_type):
    """The count of outcomes of cuts with a record without its data, or without a record."""
    bad = 0
    for cut_at in itertools.count(1):
        disk = Disk(cut_at=cut_at)
        engine = engine_type(PowerCut(disk))
        committed = False
        try:
            engine.save(1)
            committed = True
            engine.save(2)
            engine.drop(1)
        except SimulatedCrashError:
            pass
        over = not disk.dead
        for survived in disk.cuts(random.Random(cut_at), most=8):
            left = stored(survived)
            numbers = [int(data) for name, data in left.items() if name.startswith("commits/")]
            whole = all(
                left.get(f"data/{n}/{kind}") == pattern(size, n)
                for n in numbers
                for kind, size in (("raw", 2000), ("enc", 2000), ("part", 500))
            )
            bad += not whole or (committed and not numbers)
        if over:
            return bad
    raise AssertionError


def test_an_engine_in_the_right_order_loses_nothing_at_any_cut():
    assert torn_or_lost(Engine) == 0


def test_an_engine_in_another_order_is_caught():
    for name, methods in BROKEN.items():
        assert torn_or_lost(type(name, (Engine,), methods)) > 0, name

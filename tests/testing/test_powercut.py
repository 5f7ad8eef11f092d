"""The store that loses power keeps what the contract promises, and nothing else for certain."""

import itertools
import random

import pytest

from penstock.core.errors import BlobExistsError, BlobNotFoundError, StorageError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.backends import check_backend
from penstock.testing.expectations import pattern
from penstock.testing.faults import EFFECTS, OPERATIONS, SimulatedCrashError
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
    """What is left after so many cuts, each different outcome once."""
    left = (stored(disk.cut(random.Random(seed))) for seed in range(tries))
    return {frozenset(found.items()) for found in left}


def contents_of(name, disk, tries=MANY):
    return {dict(found).get(name) for found in outcomes(disk, tries)}


@pytest.mark.slow
def test_it_conforms():
    disks = {}
    check_backend(lambda root: PowerCut(disks.setdefault(root, Disk())))


def test_what_has_returned_survives_every_cut(disk, store):
    seal(store, "blob", TWO_SECTORS)
    store.publish("record", b"old")
    store.publish("record", b"new")
    store.publish("gone", b"x")
    store.delete(["gone"])
    assert outcomes(disk) == {frozenset({("blob", TWO_SECTORS), ("record", b"new")})}


def test_of_an_unsealed_blob_any_sectors_survive(disk, store):
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


def test_an_aborted_blob_may_be_back(disk, store):
    writer = store.create("blob")
    writer.write([request(TWO_SECTORS)])
    writer.abort()
    assert stored(disk) == {}
    assert {None, TWO_SECTORS} <= contents_of("blob", disk.copy())
    store.delete(["blob"])
    assert contents_of("blob", disk) == {None}


def test_a_publish_under_way_is_whole_or_has_not_been():
    disk = Disk(cut_at=2)
    store = PowerCut(disk)
    store.publish("record", b"a" * 2000)
    with pytest.raises(SimulatedCrashError):
        store.publish("record", b"b" * 3000)
    assert contents_of("record", disk) == {b"a" * 2000, b"b" * 3000}


def test_a_publish_that_was_refused_leaves_the_first():
    disk = Disk(cut_at=2)
    store = PowerCut(disk)
    store.publish("record", b"a", exclusive=True)
    with pytest.raises(SimulatedCrashError):
        store.publish("record", b"b", exclusive=True)
    assert contents_of("record", disk) == {b"a"}


def test_of_a_delete_under_way_any_names_are_gone():
    disk = Disk(cut_at=3)
    store = PowerCut(disk)
    store.publish("a", b"a")
    store.publish("b", b"b")
    with pytest.raises(SimulatedCrashError):
        store.delete(["a", "b"])
    assert {frozenset(dict(found)) for found in outcomes(disk)} == {
        frozenset(names) for names in ("", "a", "b", "ab")
    }


def test_a_seal_under_way_may_have_cut_the_blob_to_length():
    disk = Disk(cut_at=3)
    writer = PowerCut(disk).create("blob")
    writer.write([request(TWO_SECTORS)])
    with pytest.raises(SimulatedCrashError):
        writer.seal(SECTOR_BYTES)
    found = contents_of("blob", disk)
    assert {None, b"", TWO_SECTORS, TWO_SECTORS[:SECTOR_BYTES]} <= found


def test_every_combination_is_tried_where_there_are_few():
    disk = Disk(cut_at=4)
    store = PowerCut(disk)
    for name in "abc":
        store.publish(name, b"x")
    with pytest.raises(SimulatedCrashError):
        store.delete(["a", "b", "c"])
    chance = random.Random(0)
    left = [frozenset(stored(survived)) for survived in disk.cuts(chance, most=8)]
    assert len(left) == len(set(left)) == 8
    assert len(disk.cuts(chance, most=7)) == 7


def test_what_survived_is_there_to_stay(disk, store):
    store.create("blob").write([request(TWO_SECTORS)])
    for seed in range(20):
        survived = disk.cut(random.Random(seed))
        found = frozenset(stored(survived).items())
        assert outcomes(survived, 20) == {found}


def test_the_same_choice_leaves_the_same(disk, store):
    store.create("blob").write([request(pattern(9000))])
    assert stored(disk.cut(random.Random(3))) == stored(disk.cut(random.Random(3)))


def test_without_power_nothing_works(disk, store):
    store.publish("record", b"x")
    writer, doomed = store.create("writing"), store.create("doomed")
    disk.cut(random.Random(0))
    target = memoryview(bytearray(1))
    calls = {
        "create": lambda: store.create("new"),
        "write": lambda: writer.write([request(b"x")]),
        "seal": lambda: writer.seal(0),
        "abort": doomed.abort,
        "read": lambda: store.read([ReadRequest("record", 0, target)]),
        "publish": lambda: store.publish("other", b"x"),
        "list": lambda: store.list(""),
        "stat": lambda: store.stat("record"),
        "delete": lambda: store.delete(["record"]),
    }
    assert set(calls) == set(OPERATIONS)
    for call in calls.values():
        with pytest.raises(SimulatedCrashError):
            call()


def test_effects_are_counted_and_reads_are_not(disk, store):
    seal(store, "blob", b"x")
    store.create("other").abort()
    store.publish("record", b"x")
    store.delete(["record"])
    assert disk.effects == 7
    store.list("")
    store.stat("blob")
    store.read_record("blob", limit_bytes=1)
    assert disk.effects == 7
    assert len(EFFECTS) == 6
    disk.cut_in(2)
    store.publish("record", b"x")
    with pytest.raises(SimulatedCrashError):
        store.publish("record", b"y")
    assert disk.dead


def test_a_copy_is_as_certain_and_lives_on(disk, store):
    seal(store, "sealed", b"x")
    store.create("blob").write([request(TWO_SECTORS)])
    store.create("aborted").abort()
    copy = disk.copy()
    disk.cut(random.Random(0))
    assert stored(copy) == {"sealed": b"x", "blob": TWO_SECTORS}
    assert {dict(found).get("aborted") for found in outcomes(copy)} == {None, b""}
    assert None in contents_of("blob", copy)


def test_writing_to_a_copy_leaves_the_original_alone(disk, store):
    writer = store.create("blob")
    writer.write([request(b"one")])
    copy = disk.copy()
    writer.write([request(b"two")])
    assert stored(copy) == {"blob": b"one"}
    PowerCut(copy).publish("blob", b"three")
    assert stored(disk) == {"blob": b"two"}


def test_the_clock_goes_ahead_and_stays_so(disk, store):
    store.publish("early", b"")
    disk.advance(1000.0)
    store.publish("late", b"")
    assert store.stat("late").modified_s - store.stat("early").modified_s >= 1000.0
    late_s = store.stat("late").modified_s
    assert PowerCut(disk.copy()).store_time_s() >= late_s
    assert PowerCut(disk.cut(random.Random(0))).store_time_s() >= late_s


def test_a_blob_deleted_while_it_is_written_does_not_come_back(disk, store):
    writer = store.create("blob")
    store.delete(["blob"])
    writer.write([request(b"x")])
    writer.seal(1)
    assert outcomes(disk, 20) == {frozenset()}


def test_names_are_guarded_like_anywhere(store):
    seal(store, "blob", b"x")
    with pytest.raises(BlobExistsError):
        store.create("blob")
    with pytest.raises(BlobNotFoundError):
        store.stat("other")
    with pytest.raises(StorageError):
        store.publish("../up", b"")


# -- what it is there for --------------------------------------------------------------------------


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

    def save(self, number):
        for step in (self.blobs, self.part, self.record):
            step(number)

    def drop(self, number):
        self.drop_record(number)
        self.drop_data(number)


class CommitsBeforeBlobs(Engine):
    def save(self, number):
        for step in (self.part, self.record, self.blobs):
            step(number)


class CommitsBeforePart(Engine):
    def save(self, number):
        for step in (self.blobs, self.record, self.part):
            step(number)


class SealsNothing(Engine):
    def blobs(self, number):
        for kind in ("raw", "enc"):
            data = pattern(2000, number)
            self.store.create(f"data/{number}/{kind}").write([request(data)])


class DropsDataFirst(Engine):
    def drop(self, number):
        self.drop_data(number)
        self.drop_record(number)


class DropsAllAtOnce(Engine):
    def drop(self, number):
        kinds = ("raw", "enc", "part")
        names = [f"data/{number}/{kind}" for kind in kinds]
        self.store.delete([f"commits/{number}", *names])


class DropsTooEarly(Engine):
    def save(self, number):
        self.drop(number - 1)
        super().save(number)


def torn_or_lost(engine_type):
    """How many outcomes of cuts at any effect hold a record without its data, or none at all."""
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


def test_an_engine_in_another_order_is_found_out():
    for broken in [
        CommitsBeforeBlobs,
        CommitsBeforePart,
        SealsNothing,
        DropsDataFirst,
        DropsAllAtOnce,
        DropsTooEarly,
    ]:
        assert torn_or_lost(broken) > 0

"""Which checkpoints exist, and their deletion: no data still needed is ever deleted."""

import secrets
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)
from tests.core import manifests
from tests.effort import examples
from tests.integration.support import checkpointer, make_state, memory

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import (
    has,
    has_data,
    missing_borrowed,
    survey_records,
    uids_named,
)
from penstock.core.config.model import Retention
from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    FormatError,
)
from penstock.core.format.commit_record import (
    decode_commit,
    decode_intent,
    encode_commit,
    encode_intent,
)
from penstock.core.format.records import (
    BlobRecord,
    IndexEntry,
    IntentRecord,
    ManyParts,
    PartEntry,
    blob_name,
    commit_name,
    data_uid,
    index_name,
    intent_name,
    lease_name,
    notes_prefix,
    parse_commit_name,
    part_name,
)
from penstock.core.limits import MAX_NOTES
from penstock.core.types import BlobInfo
from penstock.testing.faults import CrashAt, FaultyBackend, SimulatedCrashError, WrapperBackend

HOUR = 3600.0
DAY = 24 * HOUR
TIME = "2026-11-21T03:36:10Z"


class Store(WrapperBackend):
    """Memory with a clock that the test sets, and deletes that take one step per name."""

    def __init__(self):
        super().__init__(MemoryBackend(MemoryConfig()))
        self.now_s = 1e9
        self.times = {}

    def publish(self, name, data, /, *, exclusive=False):
        super().publish(name, data, exclusive=exclusive)
        self.times[name] = self.now_s

    def list(self, prefix, /):
        return [BlobInfo(b.name, b.size_bytes, self.times[b.name]) for b in super().list(prefix)]

    def store_time_s(self):
        return self.now_s

    def names(self, prefix=""):
        return {b.name for b in self.list(prefix)}


class OneByOne(WrapperBackend):
    def delete(self, names, /):
        for name in names:
            self.inner.delete([name])

    def store_time_s(self):
        return self.inner.inner.store_time_s()


def uid_of(number):
    return f"{number:032x}"


def data_names(uid):
    return {blob_name(uid, 0, 0, "raw"), part_name(uid, 0), index_name(uid)}


def blobs_named(uid):
    return {blob_name(uid, 0, 0, "raw")}


def write_data(store, uid, references=(), *, step=1):
    intent = IntentRecord(uid, step, tuple(sorted(references)), "host", 1, TIME, TIME)
    store.publish(intent_name(uid), encode_intent(intent))
    for name in data_names(uid):
        store.publish(name, b"x" * (16 if name == index_name(uid) else 10))


def blobs_of(uids):
    return tuple(BlobRecord(blob_name(uid, 0, 0, "raw"), 10) for uid in sorted(uids))


def commit(store, step, uid=None, *, generation=0, references=()):
    uid = uid or secrets.token_hex(16)
    write_data(store, uid, references)
    record = manifests.commit_record(
        uid=uid,
        step=step,
        generation=generation,
        index=IndexEntry(index_name(uid), 16, 16, "ab" * 32),
        parts=(PartEntry(part_name(uid, 0), 10, 10, "ab" * 32),),
        bytes_stored=10,
        borrowed=blobs_of(references),
    )
    store.publish(commit_name(step, generation), encode_commit(record), exclusive=True)
    return uid


def needed_data(store):
    """Uids that any record names or references, overwritten generations included."""
    found = set()
    for name in store.names("commits/"):
        record = decode_commit(store.read_record(name, limit_bytes=99_999), name)
        found |= {record.uid, *record.references}
    return found


def damage(store, name):
    store.publish(name, b"{}\n")


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def catalog(store):
    return Catalog(store)


# -- looking ------------------------------------------------------------------------------------


def test_steps_sort_by_number_beyond_eight_digits(store, catalog):
    for step in (1_000_000_000, 7, 99_999_999, 0):
        commit(store, step)
    assert catalog.steps() == [0, 7, 99_999_999, 1_000_000_000]
    assert catalog.latest() == catalog.require_latest() == 1_000_000_000


def test_the_highest_generation_of_a_step_counts(store, catalog):
    uids = [commit(store, 5, generation=g) for g in (0, 2, 10)]
    assert catalog.steps() == [5]
    assert catalog.record(5).uid == uids[-1]
    assert catalog.next_generation(5) == 12
    assert catalog.next_generation(6) == 0


def test_a_missing_step_is_an_error_that_lists_existing_steps(store, catalog):
    for step in (10, 20):
        commit(store, step)
    with pytest.raises(CheckpointNotFoundError, match="steps there: 10, 20"):
        catalog.record(15)
    for step in range(100, 150):
        commit(store, step)
    with pytest.raises(CheckpointNotFoundError, match="the last 20 of 52"):
        catalog.record(15)


def test_a_damaged_newest_record_is_an_error_and_never_a_silent_fallback(store, catalog):
    commit(store, 10)
    commit(store, 20)
    damage(store, commit_name(20, 0))
    assert catalog.steps() == [10, 20]
    with pytest.raises(DamagedError):
        catalog.latest()
    with pytest.raises(FormatError):
        catalog.record(20)
    (_, whole), (step, damaged) = catalog.records()
    assert (whole.step, step, type(damaged)) == (10, 20, FormatError)


def test_a_damaged_generation_hides_the_one_it_replaced(store, catalog):
    commit(store, 10)
    commit(store, 10, generation=1)
    damage(store, commit_name(10, 1))
    with pytest.raises(FormatError):
        catalog.record(10)
    assert [type(found) for _, found in catalog.records()] == [FormatError]


def test_a_record_deleted_between_listing_and_reading_is_not_found(store):
    commit(store, 10)
    commit(store, 20)
    faulty = FaultyBackend(store)

    class Deleting(WrapperBackend):
        def read_record(self, name, /, *, limit_bytes):
            if name == commit_name(20, 0):
                store.delete([name])
            return self.inner.read_record(name, limit_bytes=limit_bytes)

    assert Catalog(Deleting(faulty)).latest() == 10


def test_a_record_deleted_while_others_are_read_is_left_out(store, catalog):
    for step in (10, 20, 30):
        commit(store, step)
    records = catalog.records()
    assert next(records)[0] == 10
    catalog.delete(20)
    assert [step for step, _ in records] == [30]


def test_a_listed_record_that_cannot_be_found_is_damage_and_stops_prune(store):
    commit(store, 10)
    write_data(store, uid_of(1))
    store.now_s += 2 * DAY

    class Dangling(WrapperBackend):
        def read_record(self, name, /, *, limit_bytes):
            if name == commit_name(10, 0):
                raise BlobNotFoundError(name)
            return self.inner.read_record(name, limit_bytes=limit_bytes)

    catalog = Catalog(Dangling(store))
    for look in (lambda: catalog.record(10), catalog.latest):
        with pytest.raises(FormatError, match="is listed"):
            look()
    assert "is listed" in catalog.prune().refused[0]


def test_a_record_deleted_and_republished_during_a_read_stops_nothing(store):
    commit(store, 10)
    write_data(store, uid_of(1))
    store.now_s += 2 * DAY
    name = commit_name(10, 0)
    reads = []

    class Replaced(WrapperBackend):
        def read_record(self, wanted, /, *, limit_bytes):
            if wanted == name:
                reads.append(wanted)
                if len(reads) % 2:  # deleted since the listing, and published again after this
                    raise BlobNotFoundError(name)
            return self.inner.read_record(wanted, limit_bytes=limit_bytes)

    replaced = Replaced(store)
    report = Catalog(replaced).prune()
    assert (report.refused, report.uids) == ((), (uid_of(1),))
    assert has_record(replaced, store)
    assert uids_named(replaced, [name])[name] is not None


def has_record(backend, store):
    return has(backend, survey_records(store).records[commit_name(10, 0)])


def test_a_reader_reports_gone_when_the_record_is_gone(store, catalog):
    error = BlobNotFoundError("blob x")
    uid = commit(store, 10)
    assert isinstance(catalog.gone_or_damaged(10, uid, error), DamagedError)
    damage(store, commit_name(10, 0))
    assert isinstance(catalog.gone_or_damaged(10, uid, error), DamagedError)
    commit(store, 10, generation=1)
    assert isinstance(catalog.gone_or_damaged(10, uid, error), CheckpointGoneError)
    catalog.delete(10)
    gone = catalog.gone_or_damaged(10, uid, DamagedError("x", ["a"]))
    assert isinstance(gone, CheckpointGoneError)


# -- deleting -----------------------------------------------------------------------------------


def test_delete_removes_records_and_data_of_that_step_only(store, catalog):
    commit(store, 10)
    keep = commit(store, 20)
    commit(store, 10, generation=1)
    catalog.delete(10)
    assert store.names() == {commit_name(20, 0), intent_name(keep), *data_names(keep)}


def test_records_go_lowest_generation_first_and_all_before_any_data(store):
    for generation in range(3):
        commit(store, 10, generation=generation)
    calls = FaultyBackend(store)
    Catalog(calls).delete(10)
    deleted = [name for operation, names in calls.calls if operation == "delete" for name in names]
    assert deleted[:3] == [commit_name(10, generation) for generation in range(3)]
    assert all(data_uid(name) for name in deleted[3:])


def test_data_referenced_by_another_checkpoint_stays(store, catalog):
    old = commit(store, 10)
    commit(store, 20, references=[old])
    catalog.delete(10)
    assert catalog.steps() == [20]
    assert store.names(f"data/{old}/") == blobs_named(old)


def test_data_referenced_by_a_save_in_flight_stays(store, catalog):
    old = commit(store, 10)
    write_data(store, uid_of(1), references=[old])
    catalog.delete(10)
    assert store.names(f"data/{old}/") == blobs_named(old)


@pytest.mark.parametrize("how", ["delete", "rewind", "retention", "overwrite", "prune"])
def test_borrowed_blobs_go_with_the_last_checkpoint_that_borrows_them(store, catalog, how):
    base = commit(store, 10)
    delta = commit(store, 20, references=[base])
    commit(store, 30, references=[base, delta])
    newest = commit(store, 40)
    catalog.delete(10)
    catalog.delete(20)
    assert store.names("data/") >= {*blobs_named(base), *blobs_named(delta)}
    assert not store.names("data/") & {intent_name(base), intent_name(delta)}
    match how:
        case "delete":
            catalog.delete(30)
        case "rewind":
            commit(store, 5)
            catalog.rewind(5)
        case "retention":
            assert catalog.apply_retention(Retention(keep_last=1)) == [30]
        case "overwrite":
            commit(store, 30, generation=1)
            catalog.delete_older_generations(30, 1)
        case "prune":
            commit(store, 30, generation=1)
            assert catalog.prune().superseded == (commit_name(30, 0),)
    assert not store.names(f"data/{base}/") | store.names(f"data/{delta}/")
    assert data_names(newest) <= store.names() or how == "rewind"


def test_overwrite_keeps_blobs_borrowed_from_the_replaced_generation(store, catalog):
    old = commit(store, 10)
    commit(store, 10, generation=1, references=[old])
    catalog.delete_older_generations(10, 1)
    assert store.names("commits/") == {commit_name(10, 1)}
    assert store.names(f"data/{old}/") == blobs_named(old)


def test_a_uid_that_another_record_names_keeps_its_manifest(store, catalog):
    uid = commit(store, 10)
    commit(store, 20, uid, references=[uid_of(9)])
    catalog.delete(20)
    assert {intent_name(uid), *data_names(uid)} <= store.names()


def test_lent_data_with_a_possible_copy_in_flight_is_left_to_prune(store, catalog):
    commit(store, 10)
    write_data(store, uid_of(1))
    commit(store, 20, references=[uid_of(1)])
    catalog.delete(20)
    assert {intent_name(uid_of(1)), *data_names(uid_of(1))} <= store.names()
    store.now_s += 2 * DAY
    assert catalog.prune().uids == (uid_of(1),)


def test_a_lease_outlives_the_manifest_beside_it_and_goes_before_the_blobs(store, catalog):
    base = commit(store, 10)
    commit(store, 20, references=[base])
    store.publish(lease_name(base), b"{}")
    catalog.delete(10)
    assert store.names(f"data/{base}/") == {lease_name(base), *blobs_named(base)}
    calls = FaultyBackend(store)
    Catalog(calls).delete(20)
    deleted = [name for operation, names in calls.calls if operation == "delete" for name in names]
    at = [deleted.index(name) for name in (lease_name(base), *blobs_named(base))]
    assert at == sorted(at)


@pytest.mark.parametrize("there", ["whole", "missing", "cut off"])
def test_a_checkpoint_without_its_borrowed_blobs_lacks_data(store, there):
    base = commit(store, 10)
    commit(store, 20, references=[base])
    (blob,) = blobs_named(base)
    if there == "missing":
        store.delete([blob])
    if there == "cut off":
        store.publish(blob, bytes(9))
    record = Catalog(store).record(20)
    assert has_data(store, record) == (there == "whole")
    missing = [blob.name for blob in missing_borrowed(store, record)]
    assert missing == ([] if there == "whole" else [blob])


def test_a_checkpoint_of_many_ranks_has_its_data_only_with_all_parts(store, catalog):
    uid = commit(store, 10)
    record = replace(catalog.record(10), parts=(), many_parts=ManyParts(2, 20))
    assert not has_data(store, record)
    store.publish(part_name(uid, 1), b"x" * 10)
    assert has_data(store, record)


@pytest.mark.parametrize("victim", ["record", "intent", "stray"])
def test_no_data_is_deleted_while_a_record_is_unreadable(store, catalog, victim):
    uid = commit(store, 10)
    commit(store, 20)
    write_data(store, uid_of(1))
    name = {
        "record": commit_name(20, 0),
        "intent": intent_name(uid_of(1)),
        "stray": "commits/00000030-0.json.v2",
    }[victim]
    damage(store, name)
    catalog.delete(10)
    assert 10 not in catalog.steps()
    assert data_names(uid) <= store.names()
    store.now_s += 10 * DAY
    report = catalog.prune()
    assert report.uids == ()
    assert any(name in reason for reason in report.refused)
    if victim == "stray":
        assert "not a commit record's name" in report.refused[0]
    assert data_names(uid) <= store.names()


def test_a_damaged_checkpoint_can_be_deleted_and_its_data_pruned_later(store, catalog):
    uid = commit(store, 10)
    damage(store, commit_name(10, 0))
    catalog.delete(10)
    assert catalog.steps() == []
    assert data_names(uid) <= store.names()
    store.now_s += 2 * DAY
    assert catalog.prune(everything=True).uids == (uid,)
    assert store.names() == set()


def test_rewind_deletes_later_steps_newest_first(store):
    for step in (10, 20, 30, 40):
        commit(store, step)
    damage(store, commit_name(30, 0))
    calls = FaultyBackend(store)
    assert Catalog(calls).rewind(20) == [30, 40]
    assert Catalog(store).steps() == [10, 20]
    deleted = [n for operation, names in calls.calls if operation == "delete" for n in names]
    records = [n for n in deleted if parse_commit_name(n)]
    assert records == [commit_name(40, 0), commit_name(30, 0)]


@pytest.mark.parametrize("forget", [Catalog.delete, Catalog.rewind])
def test_a_missing_step_is_neither_deleted_nor_rewound_to(store, catalog, forget):
    commit(store, 10)
    with pytest.raises(CheckpointNotFoundError, match="steps there: 10"):
        forget(catalog, 5)
    assert catalog.steps() == [10]


@pytest.mark.parametrize("what", ["blob", "part", "index"])
def test_older_generations_stay_while_the_newest_has_lost_data(what, store, catalog):
    commit(store, 10)
    newest = commit(store, 10, generation=1)
    names = {
        "blob": blob_name(newest, 0, 0, "raw"),
        "part": part_name(newest, 0),
        "index": index_name(newest),
    }
    store.publish(names[what], b"cut off"[:5])
    catalog.delete_older_generations(10, 1)
    assert catalog.prune().superseded == ()
    assert catalog.entries() == {10: [commit_name(10, 0), commit_name(10, 1)]}


def test_older_generations_stay_while_the_newest_cannot_be_read(store, catalog):
    old = commit(store, 10)
    commit(store, 10, generation=1)
    damage(store, commit_name(10, 1))
    with pytest.raises(FormatError):
        catalog.delete_older_generations(10, 1)
    assert {commit_name(10, 0), *data_names(old)} <= store.names()


@pytest.mark.parametrize("operation", ["delete", "rewind", "overwrite", "retention", "prune"])
def test_a_crash_at_any_moment_leaves_no_record_without_its_data(operation):
    finished = False
    crash_at = 0
    while not finished:
        crash_at += 1
        store = Store()
        for step in (10, 20, 30):
            commit(store, step)
        newest = commit(store, 20, generation=1)
        store.now_s += 2 * DAY
        write_data(store, uid_of(1))
        store.now_s += 2 * DAY
        crashing = CrashAt(store, crash_at, operations=["delete"])
        catalog = Catalog(OneByOne(crashing))
        try:
            {
                "delete": lambda c: c.delete(20),
                "rewind": lambda c: c.rewind(10),
                "overwrite": lambda c: c.delete_older_generations(20, 1),
                "retention": lambda c: c.apply_retention(Retention(keep_last=1)),
                "prune": lambda c: c.prune(),
            }[operation](catalog)
            finished = True
        except SimulatedCrashError:
            pass
        after = Catalog(store)
        for step in after.steps():
            assert data_names(after.record(step).uid) <= store.names()
        if 20 in after.steps():
            assert after.record(20).uid == newest
        if operation == "prune" and intent_name(uid_of(1)) in store.names():
            assert data_names(uid_of(1)) <= store.names()
        steps = after.steps()
        store.now_s += 2 * DAY
        after.prune()
        assert after.steps() == steps
        assert all(len(names) == 1 for names in after.entries().values())
        assert {data_uid(name) for name in store.names("data/")} == needed_data(store)
    assert crash_at > 2


# -- retention ----------------------------------------------------------------------------------


def retained(catalog, steps, *, protect=(), **rules):
    deleted = catalog.apply_retention(Retention(**rules), protect=protect)
    assert sorted({*deleted, *catalog.steps()}) == steps
    return catalog.steps()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 2}, [20, 30]),
        ({"keep_last": 1, "keep_every": 20}, [0, 20, 30]),
        ({"keep_every": 15}, [0, 15, 30]),
        ({"keep_every": 20}, [0, 20, 30]),  # the newest always stays
        ({"keep_last": 9}, [0, 10, 15, 20, 30]),
        ({"keep_last": 1, "protect": {10, 77}}, [10, 30]),
    ],
)
def test_retention_keeps(store, catalog, options, kept):
    steps = [0, 10, 15, 20, 30]
    for step in steps:
        commit(store, step)
    assert retained(catalog, steps, **options) == kept


def test_retention_neither_counts_nor_deletes_damaged_checkpoints(store, catalog):
    steps = [10, 20, 30, 40]
    for step in steps:
        commit(store, step)
    damage(store, commit_name(40, 0))
    damage(store, commit_name(20, 0))
    assert retained(catalog, steps, keep_last=1) == [20, 30, 40]


def test_retention_counts_only_checkpoints_that_have_their_data(store, catalog):
    uids = {step: commit(store, step) for step in range(1, 8)}
    for step in (2, 5, 6):
        store.delete([part_name(uids[step], 0)])
    assert catalog.apply_retention(Retention(keep_last=2)) == [1, 2, 3]
    assert catalog.steps() == [4, 5, 6, 7]
    for step in (4, 7):
        store.delete([blob_name(uids[step], 0, 0, "raw")])
    commit(store, 8)
    assert catalog.apply_retention(Retention(keep_last=2)) == []


def test_retention_drops_a_step_whose_blobs_a_kept_one_borrows(store, catalog):
    base = commit(store, 10)
    commit(store, 20)
    commit(store, 30, references=[base])
    assert retained(catalog, [10, 20, 30], keep_last=1) == [30]
    assert store.names(f"data/{base}/") == blobs_named(base)


def test_retention_does_not_count_a_step_that_lacks_a_borrowed_blob(store, catalog):
    commit(store, 10)
    base = commit(store, 20)
    commit(store, 30, references=[base])
    store.delete(blobs_named(base))
    assert retained(catalog, [10, 20, 30], keep_last=1) == [10, 20, 30]


# -- prune --------------------------------------------------------------------------------------


def test_prune_deletes_old_unreferenced_data(store, catalog):
    keep = commit(store, 10)
    write_data(store, uid_of(1))
    store.now_s += 2 * DAY
    report = catalog.prune(dry_run=True)
    assert (report.uids, report.names, report.dry_run) == ((uid_of(1),), 4, True)
    assert data_names(uid_of(1)) <= store.names()
    assert catalog.prune().uids == (uid_of(1),)
    assert store.names("data/") == {intent_name(keep), *data_names(keep)}


def test_prune_finishes_an_interrupted_overwrite(store, catalog):
    commit(store, 10)
    commit(store, 20, generation=0)
    commit(store, 20, generation=2)
    newest = commit(store, 20, generation=10)
    older = (commit_name(20, 0), commit_name(20, 2))
    report = catalog.prune(dry_run=True)
    assert report.superseded == older
    assert set(older) <= store.names()
    assert catalog.prune().superseded == older
    assert not set(older) & store.names()
    assert catalog.steps() == [10, 20]
    assert catalog.record(20).uid == newest
    assert {data_uid(name) for name in store.names("data/")} == needed_data(store)


@pytest.mark.parametrize("dry_run", [True, False])
def test_prune_deletes_data_of_only_a_dead_attempt_and_an_old_generation(store, catalog, dry_run):
    base = commit(store, 10)
    older = commit(store, 20, references=[base])
    catalog.delete(10)
    write_data(store, uid_of(1), references=[older, base])
    newest = commit(store, 20, generation=1)
    store.now_s += 2 * DAY
    report = catalog.prune(dry_run=dry_run)
    assert report.superseded == (commit_name(20, 0),)
    assert {base, uid_of(1)} <= {*report.uids} <= {base, older, uid_of(1)}
    if not dry_run:
        assert store.names("data/") == {intent_name(newest), *data_names(newest)}
        assert catalog.prune().uids == ()


def two_tiers(fast, durable):
    config = TieredConfig(fast="memory://", durable="memory://")
    return Catalog(TieredBackend(config, fast=fast, durable=durable))


def test_a_whole_checkpoint_has_record_and_data_in_one_tier():
    fast, durable = Store(), Store()
    uid = commit(durable, 10)
    write_data(fast, uid)
    assert two_tiers(fast, durable).has_whole([10])
    durable.delete(blobs_named(uid))
    assert not two_tiers(fast, durable).has_whole([10])


@pytest.mark.parametrize("lost", [False, True])
def test_prune_deletes_what_another_tier_needs_only_if_present(lost):
    """The attempt had kept the base in the fast tier when its borrowers were evicted there."""
    fast, durable = Store(), Store()
    base = commit(durable, 10)
    commit(durable, 20, references=[base])
    for place in (fast, durable):
        commit(place, 30, uid_of(3))
    (blob,) = blobs_named(base)
    fast.publish(blob, bytes(10))
    write_data(fast, uid_of(1), references=[base])
    for place in (fast, durable):
        place.now_s += 2 * DAY
    if lost:
        durable.delete([blob])
    two_tiers(fast, durable).prune()
    assert intent_name(uid_of(1)) not in fast.names()
    assert (blob in fast.names()) == lost
    assert {intent_name(base), index_name(base)} <= durable.names()


def test_prune_deletes_nothing_in_any_tier_while_a_record_is_unreadable():
    fast, durable = Store(), Store()
    commit(durable, 10)
    damage(durable, commit_name(10, 0))
    commit(fast, 20)
    write_data(fast, uid_of(1))
    fast.now_s += 2 * DAY
    report = two_tiers(fast, durable).prune()
    assert (len(report.refused), report.uids) == (1, ())
    assert intent_name(uid_of(1)) in fast.names()


def test_prune_deletes_old_data_of_an_empty_tier_if_another_tier_has_some():
    fast, durable = Store(), Store()
    commit(durable, 10)
    write_data(fast, uid_of(1))
    fast.now_s += 2 * DAY
    assert two_tiers(fast, durable).prune().uids == (uid_of(1),)
    assert not fast.names()


def test_prune_finishes_an_overwrite_then_stops_at_an_unreadable_record():
    class Damaging(Store):
        def delete(self, names, /):
            super().delete(names)
            if commit_name(10, 0) in names:
                damage(self, commit_name(20, 0))

    store = Damaging()
    commit(store, 10)
    commit(store, 10, generation=1)
    commit(store, 20)
    write_data(store, uid_of(1))
    store.now_s += 2 * DAY
    report = Catalog(store).prune()
    assert report.superseded == (commit_name(10, 0),)
    assert len(report.refused) == 1
    assert intent_name(uid_of(1)) in store.names()


def test_prune_finishes_no_overwrite_with_an_unreadable_newest_record(store, catalog):
    commit(store, 20)
    commit(store, 20, generation=1)
    store.publish(commit_name(20, 1), b"rubbish")
    report = catalog.prune()
    assert report.refused
    assert commit_name(20, 0) in store.names()


def test_prune_deletes_nothing_of_a_run_without_records_unless_asked(store, catalog):
    """Its data was copied first, or its records were moved away."""
    write_data(store, uid_of(1))
    store.publish(blob_name(uid_of(2), 0, 0, "raw"), b"x")
    store.now_s += 2 * DAY
    before = store.names()
    for dry_run in (True, False):
        report = catalog.prune(dry_run=dry_run)
        assert (report.uids, report.unrecorded) == ((), (uid_of(1), uid_of(2)))
        assert "data of 2 attempts to save, but no commit record" in report.refused[0]
    assert store.names() == before
    assert catalog.prune(everything=True).uids == (uid_of(1), uid_of(2))
    assert store.names() == set()


def test_prune_keeps_data_lacking_only_its_record_until_a_later_one(store, catalog):
    commit(store, 10)
    for number, step in enumerate((9, 11)):
        write_data(store, uid_of(number), step=step)
    write_data(store, uid_of(3), step=12)
    store.delete([index_name(uid_of(3))])
    store.now_s += 2 * DAY
    report = catalog.prune()
    assert (report.uids, report.unrecorded) == ((uid_of(0), uid_of(3)), (uid_of(1),))
    assert data_names(uid_of(1)) <= store.names()
    commit(store, 11)
    report = catalog.prune()
    assert (report.uids, report.unrecorded) == ((uid_of(1),), ())


def test_prune_keeps_young_data_by_the_stores_clock(store, catalog):
    commit(store, 10)
    write_data(store, uid_of(1))
    store.now_s += DAY - 1
    assert catalog.prune().uids == ()
    assert catalog.prune(grace_s=DAY / 2).uids == (uid_of(1),)


def test_prune_spares_a_save_that_refreshes_its_intent(store, catalog):
    write_data(store, uid_of(1))
    for _ in range(5):
        store.now_s += DAY / 2
        intent = IntentRecord(uid_of(1), 1, (), "host", 1, TIME, TIME)
        store.publish(intent_name(uid_of(1)), encode_intent(intent))
        assert catalog.prune().uids == ()
    assert data_names(uid_of(1)) <= store.names()


def test_prune_keeps_referenced_and_own_data(store, catalog):
    commit(store, 10, references=[uid_of(1)])
    write_data(store, uid_of(1))
    write_data(store, uid_of(2), references=[uid_of(3)])
    write_data(store, uid_of(3))
    write_data(store, uid_of(4))
    store.now_s += 2 * DAY
    catalog.prune(own_uids=[uid_of(2), uid_of(4)])
    assert data_names(uid_of(2)) | data_names(uid_of(4)) <= store.names()
    assert blobs_named(uid_of(1)) | blobs_named(uid_of(3)) <= store.names()
    # The intent of 2 protects the blobs of 3 for as long as it is there.
    for dry_run in (True, False):
        assert catalog.prune(dry_run=dry_run).uids == (uid_of(2), uid_of(3), uid_of(4))
    assert {n for n in store.names() if data_uid(n) == uid_of(1)} == blobs_named(uid_of(1))


def test_prune_finishes_a_deletion_killed_after_its_record(store, catalog):
    """The deleted one's borrowed blobs are no longer needed; its own still are."""
    commit(store, 10, references=[uid_of(1)])
    write_data(store, uid_of(1), references=[uid_of(2)])
    write_data(store, uid_of(2))
    store.now_s += 2 * DAY
    planned = catalog.prune(dry_run=True)
    assert planned.uids == (uid_of(1), uid_of(2))
    assert catalog.prune() == replace(planned, dry_run=False)
    assert {n for n in store.names() if data_uid(n) == uid_of(1)} == blobs_named(uid_of(1))
    assert not {n for n in store.names() if data_uid(n) == uid_of(2)}
    assert catalog.prune().uids == ()


def test_prune_keeps_the_intent_of_a_young_lender(store, catalog):
    commit(store, 10, references=[uid_of(1)])
    write_data(store, uid_of(1), references=[uid_of(2)])
    write_data(store, uid_of(2))
    store.now_s += DAY - 1
    assert catalog.prune().uids == ()
    assert data_names(uid_of(1)) | data_names(uid_of(2)) <= store.names()


def test_prune_ignores_foreign_names(store, catalog):
    commit(store, 10)
    foreign = {"data/readme.txt", "notes/readme.txt"}
    for name in foreign:
        store.publish(name, b"x")
    store.now_s += 10 * DAY
    assert catalog.prune().uids == ()
    assert foreign <= store.names()


def test_prune_deletes_the_intent_first(store):
    commit(store, 10)
    write_data(store, uid_of(1))
    store.now_s += 2 * DAY
    calls = FaultyBackend(store)
    calls.store_time_s = store.store_time_s
    Catalog(calls).prune()
    deleted = [n for operation, names in calls.calls if operation == "delete" for n in names]
    assert deleted[0] == intent_name(uid_of(1))
    assert set(deleted) == {intent_name(uid_of(1)), *data_names(uid_of(1))}


def test_prune_spares_a_saver_that_wakes_during_the_scan(store):
    commit(store, 10)
    write_data(store, uid_of(1))
    store.now_s += 2 * DAY

    class Waking(WrapperBackend):
        def store_time_s(self):
            store.publish(
                intent_name(uid_of(1)), store.read_record(intent_name(uid_of(1)), limit_bytes=9999)
            )
            return store.now_s

    assert Catalog(Waking(store)).prune().uids == ()


def test_intents_are_read_after_records(store):
    """The order that makes references safe (see `survey`)."""
    commit(store, 10)
    write_data(store, uid_of(1))
    calls = FaultyBackend(store)
    calls.store_time_s = store.store_time_s
    Catalog(calls).prune()
    seen = [names[0] for operation, names in calls.calls if operation in {"list", "read"}]
    last_record = max(n for n, name in enumerate(seen) if name.startswith("commits/"))
    first_data = min(n for n, name in enumerate(seen) if name.startswith("data/"))
    assert last_record < first_data


# -- everything together ------------------------------------------------------------------------


class Run(RuleBasedStateMachine):
    """Savers, references, deletions, crashes and time, against plain dicts."""

    saves = Bundle("saves")

    def __init__(self):
        super().__init__()
        self.store = Store()
        self.catalog = Catalog(self.store)
        self.count = 0
        self.open = {}  # uid -> (references, when refreshed)

    def committed(self):
        return {step: self.catalog.record(step) for step in self.catalog.steps()}

    @rule(target=saves, data=st.data())
    def begin(self, data):
        self.count += 1
        uid = uid_of(self.count)
        records = self.committed().values()
        known = sorted({u for r in records for u in (r.uid, *r.references)})
        chosen = data.draw(
            st.lists(st.sampled_from(known), max_size=2, unique=True) if known else st.just([])
        )
        write_data(self.store, uid, chosen)
        self.open[uid] = (chosen, self.store.now_s)
        return uid

    @rule(uid=saves)
    def refresh(self, uid):
        references, _ = self.open[uid]
        intent = IntentRecord(uid, 1, tuple(sorted(references)), "host", 1, TIME, TIME)
        if intent_name(uid) in self.store.names():
            self.store.publish(intent_name(uid), encode_intent(intent))
            self.open[uid] = (references, self.store.now_s)

    @rule(uid=consumes(saves), data=st.data())
    def publish(self, uid, data):
        references, refreshed = self.open.pop(uid)
        if self.store.now_s - refreshed > DAY / 2 or intent_name(uid) not in self.store.names():
            return  # a saver that slept, or lost its intent, never publishes
        steps = self.catalog.steps()
        step = data.draw(
            st.sampled_from(steps)
            if steps and data.draw(st.booleans())
            else st.just(self.count * 10)
        )
        record = manifests.commit_record(
            uid=uid,
            step=step,
            generation=self.catalog.next_generation(step),
            index=IndexEntry(index_name(uid), 16, 16, "ab" * 32),
            parts=(PartEntry(part_name(uid, 0), 10, 10, "ab" * 32),),
            bytes_stored=10,
            borrowed=blobs_of(references),
        )
        name = commit_name(step, record.generation)
        self.store.publish(name, encode_commit(record), exclusive=True)

    @rule(hours=st.sampled_from([1, 11, 13, 30]))
    def wait(self, hours):
        self.store.now_s += hours * HOUR

    @rule(data=st.data(), crash_at=st.integers(1, 12))
    def clean_up(self, data, crash_at):
        before = self.committed()
        catalog = Catalog(OneByOne(CrashAt(self.store, crash_at, operations=["delete"])))
        steps = list(before)
        allowed = set()
        kind = data.draw(st.sampled_from(["prune", "delete", "rewind", "retention", "overwrite"]))
        try:
            if kind == "prune":
                catalog.prune()
            elif kind == "retention":
                allowed = set(steps[:-1])
                catalog.apply_retention(Retention(keep_last=1))
            elif steps:
                step = data.draw(st.sampled_from(steps))
                if kind == "delete":
                    allowed = {step}
                    catalog.delete(step)
                elif kind == "rewind":
                    allowed = {s for s in steps if s > step}
                    assert catalog.rewind(step) == sorted(allowed)
                else:
                    catalog.delete_older_generations(step, before[step].generation)
        except SimulatedCrashError:
            pass
        after = self.committed()
        assert before.keys() - after.keys() <= allowed
        for step, record in after.items():
            assert record == before[step]

    @invariant()
    def every_checkpoint_and_save_has_all_its_data(self):
        names = self.store.names()
        for record in self.committed().values():
            assert data_names(record.uid) <= names
        for uid in needed_data(self.store):
            assert blobs_named(uid) <= names
        for uid, (references, refreshed) in self.open.items():
            if self.store.now_s - refreshed <= DAY / 2:
                assert data_names(uid) <= names
                for needed in references:
                    assert blobs_named(needed) <= names

    def teardown(self):
        newest = {step: names[-1] for step, names in self.catalog.entries().items()}
        self.store.now_s += 3 * DAY
        for _ in range(len(self.store.names("data/")) + 1):
            self.catalog.prune(everything=True)
        assert self.catalog.entries() == {step: [name] for step, name in newest.items()}
        needed = needed_data(self.store)
        # A crashed attempt keeps its intent while others use its data, and so the data that the
        # intent references.
        names = self.store.names("data/")
        left = {data_uid(n) for n in names}
        for uid in [uid for uid in left if intent_name(uid) in names]:
            data = self.store.read_record(intent_name(uid), limit_bytes=99_999)
            needed |= set(decode_intent(data, intent_name(uid)).references)
        assert left == needed


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=examples(80), stateful_step_count=40)


def test_only_confirmed_steps_are_deleted():
    """Another process may save the step again during the prompt."""
    backend = memory()
    with checkpointer(backend) as ckpt:
        ckpt.save(make_state(1), 1).result()
        named = uids_named(backend, Catalog(backend).entries()[1])
        ckpt.delete(1)
        ckpt.save(make_state(2), 1).result()
        Catalog(backend).delete(1, named)
        assert ckpt.load(1)["epoch"] == 2
        Catalog(backend).delete(1, uids_named(backend, named))
        assert ckpt.steps() == []


def test_notes_per_checkpoint_are_limited(store, catalog):
    uid = commit(store, 10)
    for number in range(MAX_NOTES):
        store.publish(f"{notes_prefix(uid)}{number}", b"")
    with pytest.raises(ConfigError, match="already has 1000 notes"):
        catalog.annotate(10, {"n": 1}, {})


@pytest.mark.parametrize("tag", ["", "a b", "x" * 65, "é", None, 7])
def test_invalid_tags_are_refused(tag):
    with checkpointer(memory()) as ckpt:
        ckpt.save(make_state(1), 1).result()
        for call in (ckpt.pin, ckpt.unpin):
            with pytest.raises(ConfigError, match="is not a tag"):
                call(1, tag)
        assert ckpt.info(1).tags == ()


def test_a_note_replaced_by_a_link_is_damage(tmp_path):
    with checkpointer(f"posix://{tmp_path}/run") as ckpt:
        ckpt.save(make_state(1), 1, mode="blocking")
        ckpt.annotate(1, {"loss": 1.0})
        (note,) = (path for path in (tmp_path / "run" / "notes").rglob("*") if path.is_file())
        note.rename(tmp_path / "elsewhere")
        note.symlink_to(tmp_path / "elsewhere")
        assert [note.name in found.what for found in ckpt.verify(1).damaged] == [True]

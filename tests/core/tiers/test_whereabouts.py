"""Marks and notes beside the data of a tier, which record copies between tiers."""

import pytest
from tests.core.manifests import commit_record
from tests.integration.support import memory

from penstock.core.abc import Tier
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import (
    IndexEntry,
    PartEntry,
    commit_name,
    index_name,
    mark_name,
    part_name,
    staying_name,
)
from penstock.core.tiers.whereabouts import (
    at_step,
    compacted,
    in_the_way,
    is_marked,
    mark,
    marked_replaces,
    note_staying,
    pending,
    replaceable,
    stays,
    whereabouts,
)


def uid(number):
    return f"{number:032x}"


def put(backend, number, *, step=1, generation=0, **changes):
    """Publish the commit record of a save with this number; it has no data."""
    record = commit_record(
        uid=uid(number),
        step=step,
        generation=generation,
        index=IndexEntry(index_name(uid(number)), 16, 16, "ab" * 32),
        parts=(PartEntry(part_name(uid(number), 0), 16, 16, "ab" * 32),),
        **changes,
    )
    backend.publish(commit_name(step, generation), encode_commit(record))
    return record


@pytest.fixture
def fast():
    return memory()


@pytest.fixture
def durable():
    return memory()


def test_mark_names_replaced_saves(fast):
    mark(fast, uid(1), 7, [uid(3), uid(2)])
    assert is_marked(fast, uid(1))
    assert marked_replaces(fast, uid(1)) == {uid(2), uid(3)}
    mark(fast, uid(1), 7)
    assert marked_replaces(fast, uid(1)) is None
    assert marked_replaces(fast, uid(2)) is None
    assert not is_marked(fast, uid(2))
    fast.publish(mark_name(uid(2)), b"damaged")
    assert marked_replaces(fast, uid(2)) is None


def test_a_retention_note_applies_to_the_roots_it_names(fast):
    assert not stays(fast, uid(1), ["a"])
    note_staying(fast, uid(1), 7, ["a", "b"])
    assert stays(fast, uid(1), ["a"])
    assert not stays(fast, uid(1), ["a", "c"])
    note_staying(fast, uid(1), 7)
    assert stays(fast, uid(1), ["a", "c"])
    fast.publish(staying_name(uid(2)), b"damaged")
    assert stays(fast, uid(2), ["a"])


def test_only_undamaged_records_of_the_step_are_listed(fast):
    put(fast, 1, step=10)
    records = [put(fast, 3, generation=2), put(fast, 2)]
    fast.publish(commit_name(1, 1), b"damaged")
    assert at_step(fast, 1) == records[::-1]


def test_overwrite_replaces_marked_saves(fast, durable):
    record = put(fast, 4, generation=3)
    put(durable, 1)
    put(durable, 2, generation=1)
    mark(fast, record.uid, 1, [uid(1)])
    assert replaceable(fast, durable, record) == {uid(1)}


def test_overwrite_with_an_empty_mark_spares_newer_saves(fast, durable):
    record = put(fast, 4, generation=3, created="2026-11-21T03:36:10Z")
    put(durable, 1, created="2026-11-21T03:36:09Z")
    put(durable, 2, generation=1, created="2026-11-21T03:36:11Z")
    mark(fast, record.uid, 1)
    assert replaceable(fast, durable, record) == {uid(1)}


def test_other_save_of_the_step_conflicts_unless_replaceable(fast, durable):
    record = put(fast, 4, generation=2)
    assert in_the_way(fast, durable, record) is None
    known = put(durable, 1)
    mark(fast, record.uid, 1, [known.uid])
    assert in_the_way(fast, durable, record) is None
    other = put(durable, 2, generation=1)
    assert in_the_way(fast, durable, record) == other
    mark(fast, record.uid, 1, [known.uid, other.uid])
    assert in_the_way(fast, durable, record) is None
    higher = put(durable, 3, generation=2)
    assert in_the_way(fast, durable, record) == higher


def test_compaction_counts_as_its_original_save(fast, durable):
    record = put(fast, 1)
    assert not compacted(durable, record)
    put(durable, 2, generation=1, compacts=record.uid)
    assert compacted(durable, record)
    assert in_the_way(fast, durable, record) is None


def test_whereabouts_are_the_tiers_with_a_save_and_those_yet_to_copy_it(fast, durable):
    first, second = put(fast, 2, step=2), put(fast, 1, step=1)
    put(durable, 2, step=2)
    for record in (first, second):
        mark(fast, record.uid, record.step)
    found = whereabouts([Tier("fast", fast), Tier("durable", durable)])
    assert {key: (one.tiers, one.waiting) for key, one in found.items()} == {
        first.uid: ((0, 1), (0,)),
        second.uid: ((0,), (0,)),
    }
    assert pending(fast) == [second, first]
    assert pending(durable) == []

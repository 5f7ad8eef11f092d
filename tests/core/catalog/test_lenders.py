"""What commit records tell of chains of deltas."""

from tests.core.manifests import commit_record

from penstock.core.catalog.lenders import borrowers_of_deleted_saves, find_lenders
from penstock.core.format.records import BaseEntry, BlobRecord, IndexEntry, blob_name, index_name
from penstock.core.reporting.reports import LendingSave


def uid(number):
    return f"{number:032x}"


def blob(number, length=10, *, kind="enc"):
    return BlobRecord(blob_name(uid(number), 0, 0, kind), length)


def record(number, *borrowed, base=None, step=None):
    """A record whose uid and step are that number."""
    return commit_record(
        uid=uid(number),
        step=number if step is None else step,
        index=IndexEntry(index_name(uid(number)), 16, 16, "ab" * 32),
        parts=(),
        borrowed=tuple(sorted(borrowed, key=lambda blob: blob.name)),
        base=None if base is None else BaseEntry(uid(base), base, 1),
    )


def test_a_save_whose_step_is_there_with_another_uid_was_replaced():
    records = [record(4, blob(3), base=3), record(9, step=3)]
    assert find_lenders(records, [uid(3)]) == {uid(3): LendingSave(uid(3), 3, "replaced")}


def test_deleted_lenders_are_those_that_no_record_names():
    one, two, three = record(1), record(2, blob(1), blob(7)), record(3, blob(7))
    assert borrowers_of_deleted_saves([one, two, three]) == {uid(7): [two, three]}

"""What commit records show of delta chains."""

from tests.core.manifests import commit_record
from tests.integration.support import memory

from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.lender_report import (
    borrowers_of_deleted_saves,
    broken_chain,
    find_lenders,
)
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import (
    BaseEntry,
    BlobRecord,
    IndexEntry,
    PartEntry,
    blob_name,
    commit_name,
    index_name,
    part_name,
)
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
        parts=(PartEntry(part_name(uid(number), 0), 10, 10, "cd" * 32),),
        borrowed=tuple(sorted(borrowed, key=lambda blob: blob.name)),
        base=None if base is None else BaseEntry(uid(base), base, 1),
    )


def test_a_save_whose_step_has_another_uid_was_replaced():
    records = [record(4, blob(3), base=3), record(9, step=3)]
    assert find_lenders(records, [uid(3)]) == {uid(3): LendingSave(uid(3), 3, "replaced")}


def test_lenders_without_a_record_are_deleted_lenders():
    one, two, three = record(1), record(2, blob(1), blob(7)), record(3, blob(7))
    assert borrowers_of_deleted_saves([one, two, three]) == {uid(7): [two, three]}


def test_broken_chain_names_newest_older_step_without_the_damaged_save():
    store, chain = memory(), record(4, blob(3), base=3)
    for one in (record(3), chain):
        store.publish(commit_name(one.step, 0), encode_commit(one))
    text = broken_chain(Catalog(store), chain, [uid(3)])
    assert text.endswith("its chain is step 4, step 3. Every older step needs it too.")
    for number in (1, 2):
        store.publish(commit_name(number, 0), encode_commit(record(number)))
    assert "Restore step 2," in broken_chain(Catalog(store), chain, [uid(3)])

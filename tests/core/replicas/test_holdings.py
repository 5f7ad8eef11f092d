"""What counts on several hosts, and what a host copies."""

from penstock.core.format.records import blob_name, commit_name, part_name
from penstock.core.replicas.holdings import Holdings, RootListing
from penstock.core.replicas.placement import group_hosts

UID = "ab" * 16
RECORD, BLOB, PART = commit_name(7, 0), blob_name(UID, 0, 0, "raw"), part_name(UID, 1)
FILES = {RECORD: 100, BLOB: 4096, PART: 30}
PAIR = group_hosts({"a": "a", "b": "b"}, 1)


def root(host, files, epoch=2):
    return RootListing(host, epoch, files)


def test_each_file_goes_to_the_host_that_lacks_it():
    holdings = Holdings([root("a", {RECORD: 100, BLOB: 4096}), root("b", {PART: 30})])
    assert holdings.unsafe(FILES, PAIR) == [RECORD, BLOB, PART]
    assert holdings.pulls(FILES, PAIR) == {"b": [RECORD, BLOB], "a": [PART]}


def test_a_shorter_file_is_copied_again():
    holdings = Holdings([root("a", {**FILES, BLOB: 4095}), root("b", FILES)])
    assert holdings.pulls(FILES, PAIR) == {"a": [BLOB]}
    assert holdings.unsafe(FILES, PAIR) == [BLOB]


def test_records_of_an_earlier_epoch_do_not_count_but_its_blobs_do():
    holdings = Holdings([root("a", {RECORD: 100}), root("b", FILES, 1)])
    assert holdings.holders(RECORD, 100) == {"a"}
    assert holdings.unsafe(FILES, PAIR) == [RECORD, BLOB, PART]
    assert holdings.pulls(FILES, PAIR) == {"a": [BLOB, PART]}  # "b" first joins the epoch

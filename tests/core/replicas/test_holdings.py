"""What counts on several hosts, what a host copies, and what it does to join an epoch."""

from penstock.core.format.records import blob_name, commit_name, part_name
from penstock.core.replicas.epochs import propose_epoch
from penstock.core.replicas.holdings import Epoch, Holdings, RootListing
from penstock.core.replicas.placement import group_hosts

UID = "ab" * 16
RECORD, BLOB, PART = commit_name(7, 0), blob_name(UID, 0, 0, "raw"), part_name(UID, 1)
FILES = {RECORD: 100, BLOB: 4096, PART: 30}
NEW, OLD = Epoch(2, "b"), Epoch(1, "a")
PAIR = group_hosts({"a": "a", "b": "b"}, 1)


def root(host, files, epoch=NEW, members=("a", "b")):
    return RootListing(host, epoch, frozenset(members), files)


def test_a_checkpoint_is_whole_in_the_union_of_hosts():
    holdings = Holdings([root("a", {RECORD: 100, BLOB: 4096}), root("b", {PART: 30})])
    assert holdings.missing(FILES) == []
    assert holdings.records() == [RECORD]
    assert holdings.unsafe(FILES, PAIR) == [RECORD, BLOB, PART]
    assert holdings.pulls(FILES, PAIR) == {"b": [RECORD, BLOB], "a": [PART]}


def test_a_shorter_file_is_missing_and_is_copied_again():
    holdings = Holdings([root("a", {**FILES, BLOB: 4095}), root("b", FILES)])
    assert holdings.missing({BLOB: 4096}) == []
    assert holdings.pulls(FILES, PAIR) == {"a": [BLOB]}
    assert Holdings([root("a", {BLOB: 4095})]).missing(FILES) == [RECORD, BLOB, PART]


def test_records_of_an_earlier_epoch_do_not_count_but_its_blobs_do():
    holdings = Holdings([root("a", {RECORD: 100}), root("b", FILES, OLD)])
    assert holdings.holders(RECORD, 100) == holdings.counting == {"a"}
    assert holdings.missing(FILES) == []
    assert holdings.pulls(FILES, PAIR) == {"a": [BLOB, PART]}  # "b" first joins the epoch
    holdings = Holdings([root("a", {}), root("b", FILES, OLD)])
    assert holdings.records() == []
    assert holdings.missing(FILES) == [RECORD]


def test_members_that_do_not_answer_are_known():
    assert Holdings([root("a", {}, members="abc"), root("b", {}, OLD, "bd")]).absent == {"c"}
    assert Holdings([]).absent == Holdings([root("a", {}, members="a")]).absent == set()


def test_two_jobs_never_propose_the_same_epoch():
    holdings = Holdings([root("a", {}, OLD)])
    proposed = [propose_epoch(holdings, job=job, now_s=0.001).epoch for job in ("x", "y")]
    assert proposed == [Epoch(2, "x"), Epoch(2, "y")]
    assert propose_epoch(holdings, job="x", now_s=1.5).epoch == Epoch(1500, "x")


def test_a_host_joins_with_exactly_the_records_that_count():
    other = commit_name(9, 0)
    hosts = {
        "a": root("a", {RECORD: 100, other: 100, BLOB: 1}),
        "b": root("b", {RECORD: 100, other: 100, BLOB: 1}, OLD),
        "c": root("c", {}, NEW),
    }
    proposal = propose_epoch(Holdings(hosts.values()), job="x", now_s=0.0, without=[other])
    assert proposal.members == {"a", "b", "c"}
    assert (proposal.records, proposal.before) == ((RECORD,), NEW)
    resets = {host: proposal.resets(r) for host, r in hosts.items()}
    assert resets == {"a": NEW, "b": Epoch(OLD.number), "c": NEW}
    assert Epoch() < resets["b"] < OLD
    assert {h: (proposal.copied(r), proposal.deleted(r)) for h, r in hosts.items()} == {
        "a": ([], [other]),
        "b": ([RECORD], [other]),  # its record of that name may be of another checkpoint
        "c": ([RECORD], []),
    }


def test_a_host_that_is_late_joins_no_epoch_before_its_own():
    proposal = propose_epoch(Holdings([root("a", {})]), job="x", now_s=0.0)
    assert not proposal.is_late(root("a", {}))
    assert proposal.is_late(root("a", {}, proposal.epoch))
    assert proposal.is_late(root("a", {}, Epoch(proposal.epoch.number + 1, "")))

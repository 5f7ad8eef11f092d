"""Publishing: what a lost or partial response of the store means."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.core import manifests
from tests.integration.support import holding

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.commit_table import Commit, Event, State
from penstock.core.catalog.publisher import Publisher
from penstock.core.errors import (
    CommitUnknownError,
    LostRaceError,
    SaveAbortedError,
    SaveError,
    StorageError,
    StorageTimeoutError,
    UnsyncedError,
)
from penstock.core.format.commit_record import decode_intent
from penstock.core.format.records import (
    BlobRecord,
    IndexEntry,
    PartEntry,
    blob_name,
    index_name,
    intent_name,
    part_name,
)
from penstock.testing.faults import FaultyBackend
from penstock.testing.hasty import FAST, ShiftedClock


@pytest.fixture
def store():
    backend = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield backend
    backend.close()


def test_a_lost_reply_is_success_if_the_record_is_ours(store):
    store.add(_fault(StorageError("connection reset"), late=True))
    with penstock.Checkpointer(store) as ckpt:
        assert ckpt.save({"w": torch.ones(3)}, 1).result().step == 1


def test_a_record_that_may_not_survive_a_power_cut_is_not_called_durable(store):
    store.add(_fault(UnsyncedError("fsync of commits/ failed"), late=True))
    with penstock.Checkpointer(store) as ckpt:
        handle = ckpt.save({"w": torch.ones(3)}, 1)
        with pytest.raises(CommitUnknownError, match="perhaps not durably"):
            handle.result()
        assert ckpt.steps() == [1]
        assert ckpt.verify(1).ok  # and nothing of it was deleted


def test_without_reply_or_record_the_outcome_is_unknown_and_data_stays(store):
    store.add(_fault(StorageError("connection reset"), late=False))
    with penstock.Checkpointer(store) as ckpt:
        handle = ckpt.save({"w": torch.ones(3)}, 1)
        with pytest.raises(CommitUnknownError, match="unknown"):
            handle.result()
        assert ckpt.steps() == []
        assert any("/blobs/" in blob.name for blob in store.list("data/"))


FOREIGN = [StorageError("gone"), MemoryError(), ZeroDivisionError("in a plugin"), SystemExit(3)]


@pytest.mark.parametrize("error", FOREIGN, ids=lambda e: type(e).__name__)
def test_a_failed_look_up_after_the_commit_does_not_fail_it(store, error, caplog):
    with penstock.Checkpointer(store) as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).result()
        looks = sum("intent" in names[0] for call, names in store.calls if call == "stat")
        fault = store.fail("stat", error, nth=looks, match="intent")
        assert ckpt.save({"w": torch.ones(3)}, 2).result().step == 2
        assert fault.reached.is_set()
        assert ckpt.steps() == [1, 2]
    assert "checking its data failed" in caplog.text


@pytest.mark.parametrize("error", FOREIGN, ids=lambda e: type(e).__name__)
def test_an_unresolvable_lost_reply_leaves_the_outcome_open(store, error):
    store.add(_fault(StorageError("connection reset"), late=True))
    store.fail("read", error, match="commits/")
    with penstock.Checkpointer(store) as ckpt:
        handle = ckpt.save({"w": torch.ones(3)}, 1)
        with pytest.raises(CommitUnknownError, match="unknown"):
            handle.result()
        assert ckpt.steps() == [1]
        assert ckpt.verify(1).ok


def test_a_pruned_intent_is_not_republished(store):
    uid = "a" * 32
    clock = ShiftedClock()
    publisher = Publisher(store, Commit(), uid=uid, step=1, grace_s=100, clock=clock)
    publisher.publish_intent()
    store.delete([intent_name(uid)])
    clock.ahead_s = 20  # a fifth of the grace time has passed: time to refresh it
    with pytest.raises(SaveAbortedError, match="its intent is gone"):
        publisher.refresh_intent()
    assert store.list("data/") == []


def test_an_intent_lasts_half_the_grace_time(store):
    clock = ShiftedClock()
    publisher = Publisher(store, Commit(), uid="a" * 32, step=1, grace_s=100, clock=clock)
    publisher.publish_intent()
    clock.ahead_s = 49
    publisher.refresh_intent()
    clock.ahead_s = 49 + 51
    with pytest.raises(SaveAbortedError, match="not refreshed for 51 s"):
        publisher.refresh_intent()


def sealed(store, letter):
    """A publisher whose save has sealed, its state, and its commit record."""
    uid = letter * 32
    record = manifests.commit_record(
        uid=uid,
        index=IndexEntry(index_name(uid), 64, 64, "ab" * 32),
        parts=(PartEntry(part_name(uid, 0), 999, 99, "cd" * 32),),
    )
    publisher = Publisher(store, commit := Commit(), uid=uid, step=100, grace_s=100)
    publisher.publish_intent()
    commit.feed(Event.SEALED)
    return publisher, commit, record


def test_a_commit_record_of_another_saver_is_not_replaced(store):
    def save(letter):
        publisher, commit, record = sealed(store, letter)
        publisher.publish_commit(record, begin=lambda: commit.feed(Event.PUBLISH_STARTED))

    save("a")
    with pytest.raises(LostRaceError):
        save("b")
    assert Catalog(store).record(100).uid == "a" * 32


def test_a_commit_record_that_no_reader_accepts_is_not_published(store):
    publisher, commit, record = sealed(store, "a")
    begin = partial(commit.feed, Event.PUBLISH_STARTED)
    with pytest.raises(SaveError, match="no reader would accept"):
        publisher.publish_commit(replace(record, world_size=0), begin=begin)
    assert commit.state is State.SEALED  # so it counts as failed, not as unknown
    assert Catalog(store).steps() == []


def test_a_refreshed_intent_keeps_its_references(store):
    uid, base, older = "a" * 32, "b" * 32, "c" * 32
    clock = ShiftedClock()
    publisher = Publisher(store, Commit(), uid=uid, step=1, grace_s=100, clock=clock)
    publisher.publish_intent(references=[older, base])
    before = store.read_record(intent_name(uid), limit_bytes=9999)
    clock.ahead_s = 20
    publisher.refresh_intent()
    after = store.read_record(intent_name(uid), limit_bytes=9999)
    assert after != before
    assert decode_intent(after, intent_name(uid)).references == (base, older)


@pytest.mark.parametrize("there", ["missing", "shorter", "whole"])
def test_a_commit_with_missing_borrowed_blobs_is_withdrawn(store, there):
    uid, base = "a" * 32, "b" * 32
    blob = BlobRecord(blob_name(base, 0, 0, "enc"), 7)
    if there != "missing":
        store.publish(blob.name, bytes(7 if there == "whole" else 6))
    record = manifests.commit_record(
        uid=uid,
        index=IndexEntry(index_name(uid), 64, 64, "ab" * 32),
        parts=(PartEntry(part_name(uid, 0), 999, 99, "cd" * 32),),
        borrowed=(blob,),
    )
    publisher = Publisher(store, commit := Commit(), uid=uid, step=100, grace_s=100)
    publisher.publish_intent(references=record.references)
    commit.feed(Event.SEALED)
    if there == "whole":
        publisher.publish_commit(record, begin=lambda: commit.feed(Event.PUBLISH_STARTED))
        assert Catalog(store).steps() == [100]
        return
    with pytest.raises(CommitUnknownError, match=r"borrowed from other saves \(data/b+/blobs/"):
        publisher.publish_commit(record, begin=lambda: commit.feed(Event.PUBLISH_STARTED))
    assert Catalog(store).steps() == []
    assert intent_name(uid) in {info.name for info in store.list("data/")}


def test_a_save_abandoned_after_its_last_blob_is_not_committed(store, waits):
    clock = ShiftedClock()
    waits(FAST, clock=clock)
    with (
        penstock.Checkpointer(store, io_timeout_s=1000) as ckpt,
        holding(store, "publish", match="/index") as held,
    ):
        handle = ckpt.save({"w": torch.ones(3)}, 1)
        assert held.reached.wait(30)
        clock.ahead_s = 1001
        assert isinstance(handle.durable.exception(30), StorageTimeoutError)
        held.until.set()
        assert ckpt._saver.job.released.wait(30)
        assert ckpt.steps() == []


def test_close_returns_once_the_save_in_flight_ends(store):
    with holding(store, "publish", match="commits/") as held:
        ckpt = penstock.Checkpointer(store)
        handle = ckpt.save({"w": torch.ones(3)}, 1)
        assert held.reached.wait(30)
        threading.Timer(0.3, held.until.set).start()
        ckpt.close()
        assert handle.durable.done()
    assert handle.result().step == 1


def _fault(error, *, late):
    from penstock.testing.faults import Fault

    return Fault("publish", match="commits/", error=error, late=late)

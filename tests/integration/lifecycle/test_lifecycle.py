"""Steps come, are replaced, forgotten and collected; what the user still needs stays."""

from __future__ import annotations

import logging
import os
import shutil
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.integration.support import Run, checkpointer, holding, memory, place_of, same

from penstock import (
    Checkpointer,
    CheckpointGoneError,
    CheckpointNotFoundError,
    DamagedError,
    PenstockError,
    SaveAbortedError,
    StepExistsError,
    StorageError,
)
from penstock.core.catalog.commit_table import Commit
from penstock.core.catalog.publisher import Publisher
from penstock.core.concurrency.timing import SYSTEM_CLOCK
from penstock.core.format.commit_record import encode_intent
from penstock.core.format.records import IntentRecord, intent_name
from penstock.testing.faults import FaultyBackend, WrapperBackend
from penstock.testing.hasty import ShiftedClock

OLD = time.time() - 30 * 24 * 3600
GRACE_S = 24 * 3600


def tree(number):
    return {"w": torch.full((3000,), float(number)), "b": torch.tensor(number), "number": number}


def save(ckpt, *steps, **options):
    for step in steps:
        ckpt.save(tree(step), step, mode="blocking", **options)
        ckpt.wait()  # retention runs behind `durable`


def names(backend, prefix=""):
    return [info.name for info in backend.list(prefix)]


def uids(backend):
    return {name.split("/")[1] for name in names(backend, "data/")}


@pytest.fixture
def store():
    return memory()


@pytest.fixture
def ckpt(store):
    with checkpointer(store) as ckpt:
        yield ckpt


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "root")


# -- steps that exist ------------------------------------------------------------------------------


def test_a_step_up_to_the_latest_is_refused_at_the_call(ckpt, store):
    save(ckpt, 1, 3)
    before = names(store)
    for step in (1, 2, 3):
        advice = r"rewind\(1\)" if step > 1 else "delete"
        with pytest.raises(StepExistsError, match=f"overwrite=True.*{advice}"):
            ckpt.save(tree(100), step)
    ckpt.wait()
    assert names(store) == before
    assert same(ckpt.load(1), tree(1))
    assert same(ckpt.load(3), tree(3))


def test_overwrite_replaces_all_of_a_step_by_the_next_generation(ckpt, store):
    save(ckpt, 1, 2)
    first = ckpt.info(1).uid
    for number in (10, 11):
        report = ckpt.save(tree(number), 1, mode="blocking", overwrite=True).result()
        ckpt.wait()
        assert report.generation == 2 * (number - 9)
        assert same(ckpt.load(1), tree(number))
        assert ckpt.steps() == [1, 2]
        assert names(store, "commits/") == [
            f"commits/00000001-{2 * (number - 9)}.json",
            "commits/00000002-0.json",
        ]
    assert uids(store) == {ckpt.info(1).uid, ckpt.info(2).uid}
    assert first not in uids(store)
    assert same(ckpt.load(2), tree(2))


def test_overwrite_may_fill_a_step_that_was_left_out(ckpt):
    save(ckpt, 1, 5)
    save(ckpt, 3, overwrite=True)
    assert ckpt.steps() == [1, 3, 5]
    assert same(ckpt.load("latest"), tree(5))


def test_the_highest_generation_counts_while_the_older_is_not_deleted_yet(store, caplog):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        save(ckpt, 1)
        faulty.fail("delete", match="commits/", times=None)
        ckpt.save(tree(9), 1, mode="blocking", overwrite=True)
        with caplog.at_level(logging.WARNING, logger="penstock"):
            ckpt.wait()
        assert any("cleaning up" in record.getMessage() for record in caplog.records)
        assert len(names(store, "commits/")) == 2
        assert same(ckpt.load(1), tree(9))
        assert ckpt.info(1).generation == 2
        faulty.clear()
        ckpt.save(tree(8), 1, mode="blocking", overwrite=True)
        ckpt.wait()
        assert names(store, "commits/") == ["commits/00000001-4.json"]


@pytest.mark.parametrize("operation", ["write", "publish"])
def test_an_overwrite_that_fails_leaves_the_old_generation(operation, store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        save(ckpt, 1)
        before = names(store)
        faulty.fail(operation)
        with pytest.raises(StorageError):
            ckpt.save(tree(9), 1, mode="blocking", overwrite=True)
        faulty.clear()
        ckpt._job.finished(None)
        assert names(store) == before
        assert same(ckpt.load(), tree(1))
        save(ckpt, 2)


def test_the_commit_record_comes_last_after_everything_else_is_durable(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty, rules=[{"match": "b", "codecs": ["zstd"]}]) as ckpt:
        save(ckpt, 1)
    calls = [(call, name[0]) for call, name in faulty.calls]
    for kind in (".raw", ".enc"):
        of_blob = [call for call, name in calls if name.endswith(kind)]
        assert of_blob == ["create", *["write"] * (len(of_blob) - 2), "seal"]
    sealed = [number for number, (call, _) in enumerate(calls) if call == "seal"]
    published = [name.rpartition("/")[2] for call, name in calls if call == "publish"]
    assert published == ["intent.json", "00000.json.zst", "index", "00000001-0.json"]
    publishes = [number for number, (call, _) in enumerate(calls) if call == "publish"]
    assert publishes[0] < sealed[0] < sealed[1] < publishes[1]


# -- rewind and delete -----------------------------------------------------------------------------


def test_rewind_forgets_every_later_step_and_the_run_goes_on_from_there(ckpt, store):
    save(ckpt, 1, 2, 3, 4)
    assert ckpt.rewind(2) == [3, 4]
    assert ckpt.steps() == [1, 2]
    assert uids(store) == {ckpt.info(1).uid, ckpt.info(2).uid}
    ckpt.save(tree(30), 3, mode="blocking")
    assert ckpt.latest() == 3
    assert same(ckpt.load(), tree(30))
    assert same(ckpt.load(2), tree(2))


def test_rewind_to_a_step_that_is_not_there_forgets_nothing(ckpt):
    save(ckpt, 1, 3)
    with pytest.raises(CheckpointNotFoundError, match="1, 3"):
        ckpt.rewind(2)
    assert ckpt.steps() == [1, 3]


def test_a_rewind_cut_short_leaves_no_hole(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        faulty.fail("delete", match="commits/", nth=2, times=None)
        with pytest.raises(StorageError):
            ckpt.rewind(1)
        assert ckpt.steps() == [1, 2, 3]
        assert same(ckpt.load(), tree(3))


def test_rewind_also_forgets_a_damaged_newest_record(run):
    with run.open() as ckpt:
        save(ckpt, 1, 2, 3)
        run.flip(run.commit(3), 100)
        assert ckpt.rewind(1) == [2, 3]
        assert ckpt.latest() == 1
        save(ckpt, 2)


def test_delete_takes_record_and_data_of_that_step_only(ckpt, store):
    save(ckpt, 1, 2, 3)
    ckpt.delete(2)
    assert ckpt.steps() == [1, 3]
    assert uids(store) == {ckpt.info(1).uid, ckpt.info(3).uid}
    with pytest.raises(CheckpointNotFoundError, match="1, 3"):
        ckpt.load(2)
    with pytest.raises(CheckpointNotFoundError, match="1, 3"):
        ckpt.delete(2)
    assert same(ckpt.load(1), tree(1))
    assert same(ckpt.load(3), tree(3))


def test_records_go_before_the_first_byte_of_data_lowest_generation_first(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        save(ckpt, 1)
        faulty.fail("delete", match="commits/", times=None)
        ckpt.save(tree(9), 1, mode="blocking", overwrite=True)
        ckpt.wait()
        faulty.clear()
        begun = len(faulty.calls)
        ckpt.delete(1)
    deleted = [n for call, batch in faulty.calls[begun:] if call == "delete" for n in batch]
    assert deleted[:2] == ["commits/00000001-0.json", "commits/00000001-2.json"]
    assert len(deleted) > 2
    assert all(name.startswith("data/") for name in deleted[2:])
    assert not names(store)


def test_a_delete_cut_short_behind_the_record_leaves_no_checkpoint(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        save(ckpt, 1, 2)
        faulty.fail("delete", match="data/", times=None)
        with pytest.raises(StorageError):
            ckpt.delete(2)
        assert ckpt.steps() == [1]
        assert ckpt.latest() == 1
        assert len(uids(store)) == 2  # for prune


# -- a damaged newest record -----------------------------------------------------------------------


@pytest.fixture
def damaged(run):
    """Steps 1, 2 and 3, the newest record damaged."""
    with run.open() as ckpt:
        save(ckpt, 1, 2, 3)
    run.flip(run.commit(3), 150)
    return run


def test_a_damaged_newest_record_is_not_passed_over_in_silence(damaged):
    with damaged.open() as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        for ask in (ckpt.latest, ckpt.info, ckpt.load, lambda: ckpt.restore(tree(0))):
            with pytest.raises(DamagedError, match=damaged.commit(3)):
                ask()
        target = tree(0)
        report = ckpt.restore(target, on_damage="fallback")
        assert (report.step, report.fell_back_from) == (2, (3,))
        assert same(target, tree(2))


def test_the_run_goes_on_behind_a_damaged_newest_record(damaged):
    with damaged.open() as ckpt:
        with pytest.raises(StepExistsError):
            ckpt.save(tree(3), 3)
        save(ckpt, 4)
        assert ckpt.steps() == [1, 2, 3, 4]
        assert same(ckpt.load(), tree(4))


def test_a_damaged_step_can_be_overwritten(damaged):
    with damaged.open() as ckpt:
        ckpt.save(tree(33), 3, mode="blocking", overwrite=True)
        ckpt.wait()
        assert ckpt.latest() == 3
        assert same(ckpt.load(), tree(33))
        assert same(ckpt.load(2), tree(2))


def test_retention_neither_counts_nor_deletes_a_damaged_checkpoint(damaged):
    with damaged.open(retention={"keep_last": 2}) as ckpt:
        save(ckpt, 4)
        assert ckpt.steps() == [2, 3, 4]
        save(ckpt, 5)
        assert ckpt.steps() == [3, 4, 5]
        assert same(ckpt.load(4), tree(4))


def test_prune_collects_nothing_while_a_record_is_unreadable_and_says_why(damaged):
    with damaged.open() as ckpt:
        leftover(damaged, A)
        before = damaged.names("**/*")
        report = ckpt.prune()
        assert not report.uids
        assert len(report.refused) == 1
        assert damaged.commit(3) in report.refused[0]
        assert damaged.names("**/*") == before
        ckpt.delete(3)
        assert ckpt.prune().uids == (A,)  # the data of step 3 is too young


# -- retention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"keep_last": 1}, [5]),
        ({"keep_every": 2}, [2, 4, 5]),
        ({"keep_last": 2, "keep_every": 3}, [3, 4, 5]),
        (None, [1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_retention_keeps_the_last_and_every_nth(keep, left, store):
    with checkpointer(store, retention=keep) as ckpt:
        save(ckpt, *range(1, 6))
        assert ckpt.steps() == left
        for step in left:
            assert same(ckpt.load(step), tree(step))
        assert uids(store) == {ckpt.info(step).uid for step in left}


def test_what_was_restored_from_stays_whatever_retention_says(store):
    with checkpointer(store) as ckpt:
        save(ckpt, 1, 2, 3)
    with checkpointer(store, retention={"keep_last": 1}) as ckpt:
        target = tree(0)
        ckpt.restore(target, 2)
        save(ckpt, 4, 5, 6)
        assert ckpt.steps() == [2, 6]
        assert same(ckpt.load(2), tree(2))


def test_retention_after_a_fallback_keeps_what_it_fell_back_to(run):
    with run.open() as ckpt:
        save(ckpt, 1, 2, 3)
        for step in (2, 3):
            place = place_of(ckpt.open(step), "w")
            run.flip(place.blob, place.offset + 1)
    with run.open(retention={"keep_last": 1}) as ckpt:
        target = tree(0)
        report = ckpt.restore(target, on_damage="fallback")
        assert (report.step, report.fell_back_from) == (1, (3, 2))
        save(ckpt, 4)
        assert ckpt.steps() == [1, 4]
        assert same(ckpt.load(1), tree(1))
        assert same(ckpt.load(4), tree(4))


@pytest.mark.parametrize("what", ["blobs", "index", "part"])
def test_retention_deletes_nothing_for_steps_that_have_lost_data(what, run):
    """As a process that begins sees them: it has nothing to go by but what is stored."""
    with run.open() as ckpt:
        save(ckpt, 1, 2, 3, 4)
        for step in (3, 4):
            place = run.root / "data" / ckpt.info(step).uid
            if what == "part":
                part = next(place.glob("parts/*"))
                part.write_bytes(bytes(part.stat().st_size))
            elif what == "index":
                (place / what).unlink()
            else:
                shutil.rmtree(place / what)
    with run.open(retention={"keep_last": 3}) as ckpt:
        save(ckpt, 5)
        assert ckpt.steps() == [1, 2, 3, 4, 5]
        assert [step for step in ckpt.steps() if is_whole(ckpt, step)] == [1, 2, 5]
        save(ckpt, 6)
        assert ckpt.steps() == [2, 3, 4, 5, 6]
        save(ckpt, 7)
        assert ckpt.steps() == [5, 6, 7]


def is_whole(ckpt, step):
    try:
        return ckpt.verify(step).ok
    except PenstockError:
        return False


def test_what_was_just_committed_stays_even_below_newer_steps(store):
    with checkpointer(store) as ckpt:
        save(ckpt, 1, 5, 6, 7)
    with checkpointer(store, retention={"keep_last": 1}) as ckpt:
        ckpt.save(tree(2), 2, mode="blocking", overwrite=True)
        ckpt.wait()
        assert ckpt.steps() == [2, 7]
        assert same(ckpt.load(2), tree(2))


def test_a_failure_of_retention_is_logged_and_never_the_saves(store, caplog):
    faulty = FaultyBackend(store)
    with checkpointer(faulty, retention={"keep_last": 1}) as ckpt:
        save(ckpt, 1)
        faulty.fail("delete", match="commits/", times=None)
        with caplog.at_level(logging.WARNING, logger="penstock"):
            report = ckpt.save(tree(2), 2).result()
            ckpt.wait()
        assert report.step == 2
        assert ckpt.steps() == [1, 2]
        assert any("cleaning up after step 2" in r.getMessage() for r in caplog.records)
        faulty.clear()
        save(ckpt, 3)
        assert ckpt.steps() == [3]


def test_a_save_that_fails_deletes_nothing_by_retention(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty, retention={"keep_last": 1}) as ckpt:
        save(ckpt, 1)
        faulty.fail("publish", match="commits/", times=None)
        with pytest.raises(PenstockError):
            ckpt.save(tree(2), 2, mode="blocking")
        faulty.clear()
        ckpt._job.finished(None)
        assert ckpt.steps() == [1]
        assert same(ckpt.load(), tree(1))


# -- prune -----------------------------------------------------------------------------------------


def age(run, uid, seconds=OLD):
    for path in sorted((run.root / "data" / uid).rglob("*")):
        os.utime(path, (seconds, seconds))


def leftover(run, uid, *, references=(), intent=True):
    """Data of an attempt that died long ago, made from that of step 1."""
    with run.open() as ckpt:
        shutil.copytree(run.root / "data" / ckpt.info(1).uid, run.root / "data" / uid)
    (run.root / intent_name(uid)).unlink(missing_ok=True)
    if intent:
        now = SYSTEM_CLOCK.now_iso()
        record = IntentRecord(uid, 1, references=references, started=now, refreshed=now)
        (run.root / intent_name(uid)).write_bytes(encode_intent(record))
    age(run, uid)


A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture
def old_run(run):
    with run.open() as ckpt:
        save(ckpt, 1, 2)
    return run


@pytest.mark.parametrize("intent", [True, False])
def test_prune_takes_old_data_that_nobody_needs(intent, old_run):
    leftover(old_run, A, intent=intent)
    with old_run.open() as ckpt:
        dry = ckpt.prune(dry_run=True)
        assert (dry.uids, dry.dry_run) == ((A,), True)
        assert (old_run.root / "data" / A).exists()
        report = ckpt.prune()
        assert report.uids == (A,)
        assert (report.names, report.size_bytes) == (dry.names, dry.size_bytes)
        assert report.names >= 3
        assert not (old_run.root / "data" / A).exists()
        assert same(ckpt.load(1), tree(1))
        assert same(ckpt.load(2), tree(2))
        assert ckpt.verify(1).ok


def test_prune_leaves_committed_data_however_old(old_run):
    with old_run.open() as ckpt:
        for step in (1, 2):
            age(old_run, ckpt.info(step).uid)
        assert ckpt.prune().uids == ()
        assert same(ckpt.load(1), tree(1))


def test_prune_leaves_an_attempt_of_which_anything_is_younger_than_the_grace_time(old_run):
    leftover(old_run, A)
    with old_run.open() as ckpt:
        for pattern in ("intent.json", "blobs/*", "parts/*"):
            young = next((old_run.root / "data" / A).glob(pattern))
            os.utime(young)
            assert ckpt.prune().uids == ()
            os.utime(young, (OLD, OLD))
        assert ckpt.prune().uids == (A,)


def test_prune_goes_by_the_grace_time_that_was_configured(old_run):
    leftover(old_run, A)
    age(old_run, A, time.time() - 3600)
    with old_run.open(grace_s=7200) as ckpt:
        assert ckpt.prune().uids == ()
    with old_run.open(grace_s=1800) as ckpt:
        assert ckpt.prune().uids == (A,)


def test_prune_leaves_what_an_intent_refers_to(old_run):
    leftover(old_run, A)
    leftover(old_run, B, references=(A,))
    os.utime(old_run.root / intent_name(B))  # B is under way
    blobs = sorted((old_run.root / "data" / A / "blobs").iterdir())
    with old_run.open() as ckpt:
        assert ckpt.prune().uids == (A,)  # all but the blobs, which B may borrow
        assert blobs
        assert sorted(p for p in (old_run.root / "data" / A).rglob("*") if p.is_file()) == blobs
        age(old_run, B)
        assert ckpt.prune().uids == (A, B)


def test_prune_refuses_while_an_intent_is_unreadable(old_run):
    leftover(old_run, A)
    leftover(old_run, B)
    old_run.flip(intent_name(B), 120)
    age(old_run, B)
    with old_run.open() as ckpt:
        report = ckpt.prune()
        assert report.uids == ()
        assert intent_name(B) in report.refused[0]
        assert (old_run.root / "data" / A).exists()


def test_prune_deletes_the_intent_first(old_run):
    leftover(old_run, A)
    with old_run.open() as plain:
        faulty = FaultyBackend(plain._backend)
        with checkpointer(faulty) as ckpt:
            faulty.fail("delete", match="blobs/")
            with pytest.raises(StorageError):
                ckpt.prune()
            deleted = [n for call, batch in faulty.calls if call == "delete" for n in batch]
            deleted = [name for name in deleted if not name.startswith("clock/")]
            assert deleted[0] == intent_name(A)
            assert not (old_run.root / intent_name(A)).exists()
            assert (old_run.root / "data" / A / "blobs").exists()
            assert ckpt.prune().uids == (A,)  # as old as before


def test_a_saver_whose_intent_was_pruned_never_publishes(old_run):
    """It slept for days, another process pruned meanwhile, and it wakes up again."""
    with old_run.open() as plain:
        faulty = FaultyBackend(plain._backend)
        with (
            checkpointer(faulty) as sleeper,
            old_run.open() as other,
            holding(faulty, "publish", match="index") as asleep,
        ):
            handle = sleeper.save(tree(3), 3)
            assert asleep.reached.wait(300)
            age(old_run, sleeper._job.uid)
            assert sleeper.prune().uids == ()  # it is its own
            assert other.prune().uids == (sleeper._job.uid,)
            asleep.until.set()
            with pytest.raises(SaveAbortedError, match="intent is gone"):
                handle.result(300)
            assert other.steps() == [1, 2]
            faulty.clear()
            save(sleeper, 4)
            assert same(other.load(), tree(4))


def test_prune_leaves_a_save_under_way_because_of_its_fresh_intent(old_run):
    with old_run.open() as plain:
        faulty = FaultyBackend(plain._backend)
        with (
            checkpointer(faulty) as saver,
            old_run.open() as other,
            holding(faulty, "publish", match="index") as asleep,
        ):
            handle = saver.save(tree(3), 3)
            assert asleep.reached.wait(300)
            age(old_run, saver._job.uid)
            os.utime(old_run.root / intent_name(saver._job.uid))
            assert other.prune().uids == ()
            asleep.until.set()
            assert handle.result(300).step == 3
            assert same(other.load(), tree(3))
            assert other.verify().ok


def test_a_saver_that_slept_for_half_the_grace_time_never_publishes(store, waits):
    clock = ShiftedClock()

    class Sleeping(WrapperBackend):
        def _around(self, operation, names, call):
            if (operation, "/parts/" in names[0]) == ("publish", True):
                clock.ahead_s += 0.6 * GRACE_S
            return super()._around(operation, names, call)

    waits(clock=clock)
    with checkpointer(Sleeping(store), grace_s=GRACE_S) as ckpt:
        with pytest.raises(SaveAbortedError, match="not refreshed"):
            ckpt.save(tree(1), 1, mode="blocking")
        assert ckpt.steps() == []


def test_the_intent_is_refreshed_when_it_gets_old(store):
    backend = FaultyBackend(store)
    clock = ShiftedClock()
    publisher = Publisher(backend, Commit(), uid=A, step=1, grace_s=GRACE_S, clock=clock)
    publisher.publish_intent()
    clock.ahead_s = GRACE_S / 4
    publisher.refresh_intent()
    patient = Publisher(backend, Commit(), uid=B, step=1, grace_s=86400)
    patient.publish_intent()
    patient.refresh_intent()
    published = [batch[0] for call, batch in backend.calls if call == "publish"]
    assert published == [intent_name(A), intent_name(A), intent_name(B)]


def test_a_failed_save_cleans_up_and_leaves_no_intent(store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        save(ckpt, 1)
        before = names(store)
        faulty.fail("write")
        handle = ckpt.save(tree(2), 2)
        assert isinstance(handle.durable.exception(300), StorageError)
        ckpt._job.finished(None)
        assert names(store) == before


# -- gone while it is read -------------------------------------------------------------------------


def delete_it(ckpt):
    ckpt.delete(1)


def overwrite_it(ckpt):
    ckpt.save(tree(77), 1, mode="blocking", overwrite=True)
    ckpt.wait()


READS = {
    "keys": lambda c: c.keys(),
    "object": lambda c: c["w"],
    "region": lambda c: c.read("w", (slice(0, 3),)),
    "verify": lambda c: c.verify(),
    "shallow verify": lambda c: c.verify(deep=False),
}


@pytest.mark.parametrize(("cached", "goes"), [(True, delete_it), (False, overwrite_it)])
def test_a_checkpoint_that_went_away_says_so_and_is_not_called_damaged(cached, goes, ckpt, store):
    save(ckpt, 1)
    opened = {read: ckpt.open(1) for read in READS}
    if cached:
        for checkpoint in opened.values():
            checkpoint.keys()
    with checkpointer(store) as other:
        goes(other)
    if cached:
        assert opened.pop("keys").keys() == ["w", "b", "number"]
    for read, checkpoint in opened.items():
        with pytest.raises(CheckpointGoneError, match="deleted"):
            READS[read](checkpoint)


@pytest.mark.parametrize(
    ("way", "at", "goes"),
    [
        ("load", ".raw", overwrite_it),
        ("restore", "parts/", delete_it),
    ],
)
def test_a_checkpoint_that_goes_in_the_middle_of_a_read_says_so(way, at, goes, store):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt, checkpointer(store) as other:
        save(ckpt, 1)
        read = (lambda: ckpt.load(1)) if way == "load" else (lambda: ckpt.restore(tree(0), 1))
        with ThreadPoolExecutor(1) as pool, holding(faulty, "read", match=at) as held:
            future = pool.submit(read)
            assert held.reached.wait(300)
            goes(other)
            held.until.set()
            error = future.exception(300)
        assert type(error) is CheckpointGoneError


# -- everything at once ----------------------------------------------------------------------------


class Lifecycle(RuleBasedStateMachine):
    """The run against a dict of what was saved."""

    def __init__(self):
        super().__init__()
        self.store = memory()
        self.faulty = FaultyBackend(self.store)
        self.model = {}
        self.counter = 0
        self.keep = None
        self.restored = None
        self.open()

    def open(self):
        options = {} if self.keep is None else {"retention": {"keep_last": self.keep}}
        self.ckpt = checkpointer(self.faulty, **options)
        self.restored = None

    def retain(self, step):
        if self.keep is not None:
            kept = {*sorted(self.model)[-self.keep :], step, self.restored}
            self.model = {s: n for s, n in self.model.items() if s in kept}

    def top(self):
        return max(self.model, default=0)

    @rule(ahead=st.integers(1, 3), mode=st.sampled_from(["blocking", "async"]))
    def save(self, ahead, mode):
        self.counter += 1
        step = self.top() + ahead
        self.ckpt.save(tree(self.counter), step, mode=mode)
        self.ckpt.wait()
        self.model[step] = self.counter
        self.retain(step)

    @rule(step=st.integers(1, 6))
    def overwrite(self, step):
        self.counter += 1
        self.ckpt.save(tree(self.counter), step, mode="blocking", overwrite=True)
        self.ckpt.wait()
        self.model[step] = self.counter
        self.retain(step)

    @rule(
        call=st.integers(1, 4),
        operation=st.sampled_from(["create", "write", "seal", "publish", "stat", "list"]),
        late=st.booleans(),
        overwrite=st.booleans(),
    )
    def save_with_a_failing_store(self, call, operation, late, overwrite):
        self.counter += 1
        step = self.top() + (not overwrite or not self.model)
        # How many writes there are depends on how threads meet; the first is certain.
        self.faulty.fail(operation, nth=1 if operation == "write" else call, late=late)
        try:
            self.ckpt.save(tree(self.counter), step, mode="blocking", overwrite=overwrite)
        except PenstockError:
            failed = True
        else:
            failed = False
        finally:
            if self.ckpt._job is not None:
                self.ckpt._job.finished(None)
            self.faulty.clear()
        steps = self.ckpt.steps()
        if step in steps and same(self.ckpt.load(step), tree(self.counter)):
            self.model[step] = self.counter
        else:
            assert failed
        # Clean-up may have failed, or not run; what it should have left is there at least. The
        # first save makes room before it begins, also if it then fails.
        assert set(steps) <= set(self.model)
        expected = dict(self.model)
        self.retain(step)
        assert set(steps) >= set(self.model)
        self.model = {s: n for s, n in expected.items() if s in steps}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rewind(self, data):
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.ckpt.rewind(step)
        self.model = {s: n for s, n in self.model.items() if s <= step}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.ckpt.delete(step)
        del self.model[step]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def restore(self, data):
        step = data.draw(st.sampled_from(sorted(self.model)))
        target = tree(0)
        self.ckpt.restore(target, step)
        assert same(target, tree(self.model[step]))
        self.restored = step

    @rule()
    def prune(self):
        self.ckpt.prune()

    @rule(keep=st.sampled_from([None, 1, 2, 3]))
    def reopen(self, keep):
        self.ckpt.close()
        self.keep = keep
        self.open()

    @invariant()
    def every_step_is_what_was_saved(self):
        assert self.ckpt.steps() == sorted(self.model)
        assert self.ckpt.latest() == max(self.model, default=None)
        for step, number in self.model.items():
            assert same(self.ckpt.load(step), tree(number))

    def teardown(self):
        self.ckpt.close()


def searching(count, steps):
    return settings(
        max_examples=count, stateful_step_count=steps, deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip


class TestLifecycle(Lifecycle.TestCase):
    settings = searching(5, 10)


@pytest.mark.slow
class TestLifecycleForLonger(Lifecycle.TestCase):
    settings = searching(25, 20)


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_a_save_that_is_over_holds_none_of_the_state(tmp_path, mode):
    array = np.zeros(100_000)
    gone = weakref.ref(array)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save({"array": array}, step=1, mode=mode)
        handle.result()
        ckpt.wait()
        del array
        assert gone() is None
        assert ckpt.load(1)["array"].shape == (100_000,)

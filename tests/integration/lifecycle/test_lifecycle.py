"""Steps are saved, replaced, deleted and pruned; steps that the user still needs stay."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.integration.support import Run, checkpointer, holding, memory, place_of, same

from penstock import (
    Checkpointer,
    CheckpointGoneError,
    DamagedError,
    PenstockError,
    SaveAbortedError,
    StepExistsError,
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
        ckpt.wait()  # retention runs after `durable`


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


def test_overwrite_may_fill_a_skipped_step(ckpt):
    save(ckpt, 1, 5)
    save(ckpt, 3, overwrite=True)
    assert ckpt.steps() == [1, 3, 5]
    assert same(ckpt.load("latest"), tree(5))


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


# -- a damaged newest record -----------------------------------------------------------------------


@pytest.fixture
def damaged(run):
    """Steps 1, 2 and 3, the newest record damaged."""
    with run.open() as ckpt:
        save(ckpt, 1, 2, 3)
    run.flip(run.commit(3), 150)
    return run


def test_a_damaged_newest_record_is_not_skipped_silently(damaged):
    with damaged.open() as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        for ask in (ckpt.latest, ckpt.info, ckpt.load, lambda: ckpt.restore(tree(0))):
            with pytest.raises(DamagedError, match=damaged.commit(3)):
                ask()
        target = tree(0)
        report = ckpt.restore(target, on_damage="fallback")
        assert (report.step, report.fell_back_from) == (2, (3,))
        assert same(target, tree(2))


def test_a_run_continues_after_a_damaged_newest_record(damaged):
    with damaged.open() as ckpt:
        with pytest.raises(StepExistsError):
            ckpt.save(tree(3), 3)
        save(ckpt, 4)
        assert ckpt.steps() == [1, 2, 3, 4]
        assert same(ckpt.load(), tree(4))


# -- retention -------------------------------------------------------------------------------------


def test_retention_always_keeps_the_restored_step(store):
    with checkpointer(store) as ckpt:
        save(ckpt, 1, 2, 3)
    with checkpointer(store, retention={"keep_last": 1}) as ckpt:
        target = tree(0)
        ckpt.restore(target, 2)
        save(ckpt, 4, 5, 6)
        assert ckpt.steps() == [2, 6]
        assert same(ckpt.load(2), tree(2))


def test_retention_keeps_the_step_of_a_fallback(run):
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
    """As seen by a new process, which knows only the stored state."""
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


def test_a_fresh_commit_stays_even_below_newer_steps(store):
    with checkpointer(store) as ckpt:
        save(ckpt, 1, 5, 6, 7)
    with checkpointer(store, retention={"keep_last": 1}) as ckpt:
        ckpt.save(tree(2), 2, mode="blocking", overwrite=True)
        ckpt.wait()
        assert ckpt.steps() == [2, 7]
        assert same(ckpt.load(2), tree(2))


# -- prune -----------------------------------------------------------------------------------------


def age(run, uid, seconds=OLD):
    for path in sorted((run.root / "data" / uid).rglob("*")):
        os.utime(path, (seconds, seconds))


def leftover(run, uid, *, references=(), intent=True):
    """Data of a long-dead attempt, made from that of step 1."""
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


def test_prune_uses_the_configured_grace_time(old_run):
    leftover(old_run, A)
    age(old_run, A, time.time() - 3600)
    with old_run.open(grace_s=7200) as ckpt:
        assert ckpt.prune().uids == ()
    with old_run.open(grace_s=1800) as ckpt:
        assert ckpt.prune().uids == (A,)


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
            age(old_run, sleeper._saver.job.uid)
            assert sleeper.prune().uids == ()  # it is its own data
            assert other.prune().uids == (sleeper._saver.job.uid,)
            asleep.until.set()
            with pytest.raises(SaveAbortedError, match="intent is gone"):
                handle.result(300)
            assert other.steps() == [1, 2]
            faulty.clear()
            save(sleeper, 4)
            assert same(other.load(), tree(4))


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


# -- deleted during a read -------------------------------------------------------------------------


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
def test_a_deleted_checkpoint_is_reported_as_gone_not_damaged(cached, goes, ckpt, store):
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
def test_a_checkpoint_deleted_during_a_read_is_reported_gone(way, at, goes, store):
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


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_a_finished_save_holds_none_of_the_state(tmp_path, mode):
    array = np.zeros(100_000)
    gone = weakref.ref(array)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save({"array": array}, step=1, mode=mode)
        handle.result()
        ckpt.wait()
        del array
        assert gone() is None
        assert ckpt.load(1)["array"].shape == (100_000,)

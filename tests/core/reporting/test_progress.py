"""`on_progress`: how far a save, a restore, a load or a verification is."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core.concurrency.timing import CountedClock, Timing
from penstock.core.errors import SaveError, StorageError
from penstock.core.reporting.progress import Meter, follow, metered
from penstock.core.reporting.reports import Progress, SaveHandle, skipped_save
from penstock.testing.faults import FaultyBackend

STATE = {"w": torch.arange(40_000.0), "m": torch.ones(30_000), "epoch": 7}
SMALL = {"chunk_bytes": 4096, "block_bytes": 4096}
LONG = {**STATE, "w": torch.arange(1_500_000.0)}  # a batch has at most 256 frames: six batches
READS = {
    "restore": lambda ckpt, told: ckpt.restore({**LONG}, on_progress=told),
    "load": lambda ckpt, told: ckpt.load(on_progress=told),
    "verify": lambda ckpt, told: ckpt.verify(on_progress=told),
}
PHASES = {
    "restore": ["plan", "read", "place", "done"],
    "load": ["plan", "read", "place", "done"],
    "verify": ["manifest", "read", "done"],
}


@pytest.fixture
def store():
    store = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield store
    store.close()


@pytest.fixture
def ckpt(store):
    with penstock.Checkpointer(store, **SMALL) as ckpt:
        ckpt.save(STATE, step=1).result()
        yield ckpt


@pytest.fixture(scope="module")
def saved():
    backend = MemoryBackend(MemoryBackend.Config())
    with penstock.Checkpointer(backend, **SMALL) as ckpt:
        ckpt.save(LONG, step=1).result()
    yield backend
    backend.close()


@pytest.fixture
def reading(saved, waits):
    """Reads many batches, each of which is told."""
    waits(progress_interval_s=0.0)
    with penstock.Checkpointer(saved, **SMALL) as ckpt:
        yield ckpt


def phases(told):
    return list(dict.fromkeys(p.phase for p in told))


# -- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", READS)
def test_reading_tells_its_phases_and_all_of_its_bytes(what, reading):
    told = []
    report = READS[what](reading, told.append)
    assert phases(told) == PHASES[what]
    done = [p.bytes_done for p in told]
    assert done == sorted(done)
    assert len(set(done)) > 5
    assert all(p.bytes_done <= p.bytes_total for p in told)
    assert told[-1].bytes_done == told[-1].bytes_total > 6_000_000
    if what == "restore":
        assert told[-1].bytes_total == report.bytes_read


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_without_leave_of_the_clock_only_what_begins_and_ends_is_told(what, waits, saved):
    waits(progress_interval_s=1e9)
    told = []
    with penstock.Checkpointer(saved, **SMALL) as ckpt:
        READS[what](ckpt, told.append)
    assert phases(told) == PHASES[what]
    assert len(told) <= 5


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_calls_never_overlap_and_come_from_the_caller_or_from_who_reads(what, reading):
    inside = threading.Lock()
    threads = set()

    def on_progress(now):
        assert inside.acquire(blocking=False)
        threads.add((now.phase, threading.current_thread().name))
        inside.release()

    READS[what](reading, on_progress)
    me = threading.current_thread().name
    assert ("read", "penstock-load") in threads
    assert {name for _, name in threads} == {me, "penstock-load"}
    assert {phase for phase, name in threads if name != me} <= {"plan", "read"}


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_no_lock_is_held_while_it_is_called(what, reading):
    found = []

    def on_progress(now):
        if now.phase == "read" and not found:
            found.append(reading.verify().ok)
            found.append(reading.load(include="epoch"))

    READS[what](reading, on_progress)
    assert found == [True, {"epoch": 7}]


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_what_it_raises_harms_nothing_and_is_logged_once_as_text(what, reading, caplog):
    called = []

    def angry(now):
        called.append(now)
        if now.phase == "read":
            raise RuntimeError("no more")

    READS[what](reading, angry)
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "on_progress of the" in record.getMessage()
    assert "RuntimeError: no more" in record.getMessage()
    assert record.exc_info is None
    assert called[-1].phase == "read"
    assert [p.phase for p in called].count("read") == 1


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_a_failure_is_told_last(what, saved, waits):
    waits(progress_interval_s=0.0)
    told, store = [], FaultyBackend(saved)
    store.fail("read", StorageError("no"), nth=4, match="blobs/")
    with (
        penstock.Checkpointer(store, **SMALL) as ckpt,
        pytest.raises(penstock.PenstockError),
    ):
        READS[what](ckpt, told.append)
    assert [p.phase for p in told].count("failed") == 1
    assert told[-1].phase == "failed"
    assert told[-1].bytes_done < told[-1].bytes_total


def test_falling_back_counts_from_zero_again(ckpt, store):
    ckpt.save(STATE, step=2).result()
    (blob,) = [b.name for b in store.list(f"data/{ckpt.info(2).uid}/blobs/")]
    store.delete([blob])
    told = []
    report = ckpt.restore({**STATE}, on_damage="fallback", on_progress=told.append)
    assert report.fell_back_from == (2,)
    assert [(p.bytes_done, p.bytes_total) for p in told if p.phase == "plan"].count((0, 0)) == 2
    assert told[-1].bytes_total == report.bytes_read


# -- saving -------------------------------------------------------------------------------------


def test_when_a_blocking_save_returns_its_end_has_been_told(ckpt):
    told = []

    def slow(now):
        if now.phase == "durable":
            time.sleep(0.2)
        told.append(now)

    ckpt.save(STATE, step=2, mode="blocking", on_progress=slow)
    assert told[-1].phase == "durable"
    assert told[-1].bytes_total == 280_001
    order = ["capture", "write", "commit", "durable"]
    assert phases(told) == [phase for phase in order if phase in phases(told)]


def last(told, ended):
    def on_progress(now):
        told.append(now)
        if now.phase in {"durable", "failed", "skipped"}:
            ended.set()

    return on_progress


@pytest.mark.parametrize("mode", ["async", "lazy"])
def test_a_save_in_the_background_is_told_to_its_end(mode, ckpt):
    told, ended = [], threading.Event()
    ckpt.save(STATE, step=2, mode=mode, on_progress=last(told, ended)).result()
    assert ended.wait(60)
    assert told[-1].phase == "durable"
    assert len({p.phase for p in told}) == len(phases(told))


def test_telling_of_a_failure_does_not_count_as_seeing_it(store):
    told, ended = [], threading.Event()
    store.fail("create", StorageError("no"))
    ckpt = penstock.Checkpointer(store, **SMALL)
    ckpt.save(STATE, step=1, on_progress=last(told, ended))
    assert ended.wait(60)
    assert told[-1].phase == "failed"
    with pytest.raises(StorageError):
        ckpt.wait()
    ckpt.close()


def test_a_save_does_not_wait_for_its_listener(ckpt):
    held, called = threading.Event(), threading.Event()

    def on_progress(_):
        called.set()
        held.wait(60)

    handle = ckpt.save(STATE, step=2, on_progress=on_progress)
    assert called.wait(60)
    assert handle.result(60).step == 2
    assert ckpt.steps() == [1, 2]
    held.set()


def test_what_the_listener_of_a_save_raises_goes_no_further(caplog):
    handle, called = SaveHandle(4), []

    def angry(now):
        called.append(now)
        raise RuntimeError("no more")

    for future in (handle.captured, handle.committed, handle.durable):
        future.set_exception(SaveError("no"))
    follow(handle, angry)
    follow(handle, called.append)
    assert len(called) == 2
    assert not handle.error_seen
    assert "on_progress of the save of step 4 raised" in caplog.text


def test_a_skipped_save_is_told_once():
    told = []
    follow(skipped_save(4), told.append)
    assert told == [Progress(0, 0, "skipped")]


# -- the meter ----------------------------------------------------------------------------------


def test_bytes_are_told_at_most_ten_times_per_second():
    told, clock = [], CountedClock()
    meter = Meter(told.append, timing=Timing(clock=clock))
    meter.begin("plan")
    meter.will_enter("read")
    meter.expect(1000)
    for _ in range(1000):
        clock.advance(0.001)
        meter.advance(1)
    meter.end("done")
    reads = [p.bytes_done for p in told if p.phase == "read"]
    assert reads[0] == 0
    assert 9 <= len(reads) <= 11
    assert told[0] == Progress(0, 0, "plan")
    assert told[-1] == Progress(1000, 1000, "done")


def test_a_straggler_is_not_told():
    told, clock = [], CountedClock()
    meter = Meter(told.append, timing=Timing(clock=clock))
    meter.begin("read")
    meter.end("failed")
    clock.advance(60)
    meter.advance(5)
    assert [p.phase for p in told] == ["read", "failed"]


def test_an_interrupt_ends_what_was_told():
    told = []

    def interrupted():
        with metered(told.append, "it") as meter:
            meter.begin("read")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.phase for p in told] == ["read", "failed"]


def test_an_interrupt_in_the_callback_is_no_mistake_of_it(ckpt, caplog):
    def on_progress(now):
        if now.phase == "place":  # on the thread that called
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckpt.restore({**STATE}, on_progress=on_progress)
    assert "raised" not in caplog.text

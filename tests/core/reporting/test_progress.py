"""`on_progress`: the progress of a save, a restore, a load or a verification."""

import logging
import threading

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.testing.faults import FaultyBackend

STATE = {"w": torch.arange(40_000.0), "m": torch.ones(30_000), "epoch": 7}
SMALL = {"chunk_bytes": 4096, "block_bytes": 4096}
LONG = {**STATE, "w": torch.arange(1_500_000.0)}  # a batch has at most 256 frames: six batches
READS = {
    "restore": lambda ckpt, reports: ckpt.restore({**LONG}, on_progress=reports),
    "load": lambda ckpt, reports: ckpt.load(on_progress=reports),
    "verify": lambda ckpt, reports: ckpt.verify(on_progress=reports),
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
    """Reads many batches, and reports each."""
    waits(progress_interval_s=0.0)
    with penstock.Checkpointer(saved, **SMALL) as ckpt:
        yield ckpt


def phases(reports):
    return list(dict.fromkeys(p.phase for p in reports))


# -- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", READS)
def test_reading_reports_its_phases_and_all_its_bytes(what, reading):
    reports = []
    report = READS[what](reading, reports.append)
    assert phases(reports) == PHASES[what]
    done = [p.bytes_done for p in reports]
    assert done == sorted(done)
    assert len(set(done)) > 5
    assert all(p.bytes_done <= p.bytes_total for p in reports)
    assert reports[-1].bytes_done == reports[-1].bytes_total > 6_000_000
    if what == "restore":
        assert reports[-1].bytes_total == report.bytes_read


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_calls_never_overlap_and_use_the_caller_or_reader_thread(what, reading):
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
def test_no_lock_is_held_in_a_callback(what, reading):
    found = []

    def on_progress(now):
        if now.phase == "read" and not found:
            found.append(reading.verify().ok)
            found.append(reading.load(include="epoch"))

    READS[what](reading, on_progress)
    assert found == [True, {"epoch": 7}]


@pytest.mark.parametrize("what", ["restore", "verify"])
def test_a_callback_error_harms_nothing_and_is_logged_once(what, reading, caplog):
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


# -- saving -------------------------------------------------------------------------------------


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

"""The life of one save: which latch opens when, and how an abandoned save ends."""

import threading

import pytest
from tests.core.save.jobs import PATIENCE_S, job_of, memory, run, stored

from penstock.core.errors import SaveAbortedError, StorageTimeoutError
from penstock.core.format.records import commit_name
from penstock.core.save.request import SaveSurroundings
from penstock.testing.faults import FaultyBackend


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_save_commits_and_returns_its_memory(mode):
    backend = memory(f"job-{mode}")
    job = job_of(backend, mode=mode)
    assert job.progress().phase == "capture"
    assert run(job) is None
    assert job.progress().phase == "durable"
    assert commit_name(3, 0) in stored(backend)
    assert job.request.entries == ()


def test_save_interrupted_before_its_capture_stores_nothing():
    backend = memory("job-interrupted")
    job = job_of(backend, mode="async")
    job.interrupt(KeyboardInterrupt())
    assert job.finished(PATIENCE_S)
    assert job.released.wait(PATIENCE_S)
    assert isinstance(job.ending.error, SaveAbortedError)
    assert stored(backend) == []


def test_save_started_twice_runs_once():
    backend = FaultyBackend(memory("job-twice"))
    job = job_of(backend, mode="async")
    job.begin_capture()
    assert run(job) is None
    published = [names for operation, names in backend.calls if operation == "publish"]
    assert published.count((commit_name(3, 0),)) == 1


def test_async_save_writes_nothing_before_its_capture_is_over():
    backend = FaultyBackend(memory("job-later"))
    job = job_of(backend, mode="async")
    assert not job._finish.may_write.is_open
    assert backend.calls == []
    run(job)
    assert job._finish.may_write.is_open


def test_stalled_store_ends_the_save():
    gate = threading.Event()
    backend = FaultyBackend(memory("job-stuck"))
    backend.block("seal", gate)
    job = job_of(backend, io_timeout_s=0.3)
    job.begin_capture()
    job.capture_now()
    try:
        assert job.finished(PATIENCE_S)
        assert isinstance(job.ending.error, StorageTimeoutError)
        assert not job.released.is_open
    finally:
        gate.set()
    assert job.released.wait(PATIENCE_S)
    assert commit_name(3, 0) not in stored(backend)


class Cleaning(SaveSurroundings):
    def __init__(self):
        self.called = []

    def before_write(self, request, url):
        self.called.append("before write")

    def before_commit(self, request, uid):
        self.called.append("before commit")

    def after_commit(self, request, report):
        self.called.append("after commit")


class Onward:
    """The copy to a slower tier; the test ends it."""

    def prepare(self, record):
        self.record = record

    def begin(self):
        pass

    def go(self, callback):
        self.callback = callback

    def tiers(self):
        return ("fast", "slow")

    def check(self):
        pass


def test_committed_save_is_over_before_it_is_durable():
    surroundings, onward = Cleaning(), Onward()
    job = job_of(memory("job-onward"), surroundings=surroundings, onward=onward)
    assert run(job) is None
    assert job.handle.committed.done()
    assert not job.handle.durable.done()
    assert job.progress().phase == "drain"
    onward.callback(None)
    assert job.handle.durable.result().tiers == ("fast", "slow")
    assert surroundings.called == ["before write", "before commit", "after commit", "after commit"]

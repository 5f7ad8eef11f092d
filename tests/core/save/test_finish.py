"""From the intent to the commit record: the order of the calls, and leftovers of failures."""

import weakref

import numpy as np
import pytest
from tests.core.save.jobs import job_of, memory, run, stored

from penstock.core.catalog.commit_table import State
from penstock.core.errors import CommitUnknownError, FormatError, SaveError, StorageError
from penstock.core.format.records import commit_name, index_name, intent_name, part_name
from penstock.core.save.manifest import ManifestWriter
from penstock.core.save.request import SaveSurroundings
from penstock.testing.faults import FaultyBackend


def test_intent_comes_first_and_the_record_after_part_and_index():
    backend = FaultyBackend(memory("finish-order"))
    job = job_of(backend)
    assert run(job) is None
    published = [names[0] for operation, names in backend.calls if operation == "publish"]
    uid = job.uid
    assert published == [intent_name(uid), part_name(uid, 0), index_name(uid), commit_name(3, 0)]
    sealed = [n for n, (operation, _) in enumerate(backend.calls) if operation == "seal"]
    assert sealed[-1] < backend.calls.index(("publish", (part_name(uid, 0),)))


@pytest.mark.parametrize("failing", ["write", "seal", "publish intent", "publish parts/"])
def test_failure_before_the_seal_deletes_all_own_data(failing):
    operation, _, match = failing.partition(" ")
    backend = FaultyBackend(memory(f"finish-{operation}-{len(match)}"))
    backend.fail(operation, StorageError("broken"), match=match)
    job = job_of(backend)
    assert isinstance(run(job), StorageError)
    assert stored(backend) == []


def test_unreadable_manifest_leaves_no_data(monkeypatch):
    def refused(*_, **__):
        raise FormatError("too many objects")

    monkeypatch.setattr(ManifestWriter, "encode", refused)
    backend = memory("finish-large")
    job = job_of(backend)
    assert "no reader would accept its manifest" in str(run(job))
    assert stored(backend) == []


def test_failure_after_the_seal_leaves_the_data_to_prune():
    backend = FaultyBackend(memory("finish-index"))
    backend.fail("publish", StorageError("broken"), match="index")
    job = job_of(backend)
    assert isinstance(run(job), StorageError)
    assert part_name(job.uid, 0) in stored(backend)
    assert commit_name(3, 0) not in stored(backend)


def test_lost_reply_to_the_commit_deletes_nothing():
    backend = FaultyBackend(memory("finish-lost"))
    backend.fail("publish", StorageError("no answer"), match=commit_name(3, 0))
    backend.fail("read", StorageError("no answer"), match=commit_name(3, 0), times=None)
    job = job_of(backend)
    assert isinstance(run(job), CommitUnknownError)
    assert {part_name(job.uid, 0), index_name(job.uid)} <= set(stored(backend))


class Refusing(SaveSurroundings):
    def before_commit(self, request, uid):
        raise SaveError("another saver was first")


def test_save_that_must_not_commit_publishes_no_record():
    backend = memory("finish-refused")
    job = job_of(backend, surroundings=Refusing())
    assert "another saver" in str(run(job))
    assert commit_name(3, 0) not in stored(backend)
    assert job._finish.commit.state is State.ABORTED


@pytest.mark.parametrize("failing", ["index", commit_name(3, 0)])
def test_error_of_a_failed_commit_does_not_keep_the_state_alive(failing):
    state = {"w": np.arange(100.0)}
    alive = weakref.ref(state["w"])
    backend = FaultyBackend(memory(f"finish-held-{failing}"))
    backend.fail("publish", StorageError("broken"), match=failing)
    job = job_of(backend, state=state)
    del state
    assert run(job).__traceback__ is not None
    assert alive() is None

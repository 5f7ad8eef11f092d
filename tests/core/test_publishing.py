"""Publishing: what a lost or half answer of the store means."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core.errors import CommitUnknownError, StorageError, UnsyncedError
from penstock.core.testing.faults import FaultyBackend


@pytest.fixture
def store():
    backend = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield backend
    backend.close()


def test_a_lost_answer_is_success_if_the_record_is_ours(store):
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


def test_no_answer_and_no_record_leaves_the_outcome_open_and_the_data_in_place(store):
    store.add(_fault(StorageError("connection reset"), late=False))
    with penstock.Checkpointer(store) as ckpt:
        handle = ckpt.save({"w": torch.ones(3)}, 1)
        with pytest.raises(CommitUnknownError, match="unknown"):
            handle.result()
        assert ckpt.steps() == []
        assert any("/blobs/" in blob.name for blob in store.list("data/"))


def _fault(error, *, late):
    from penstock.core.testing.faults import Fault

    return Fault("publish", match="commits/", error=error, late=late)

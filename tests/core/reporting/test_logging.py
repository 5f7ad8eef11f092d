"""Logs: a line per save and restore, details at lower levels, only text."""

import logging

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core.errors import StorageError
from penstock.testing.faults import FaultyBackend

STATE = {"w": torch.arange(40_000.0), "m": torch.ones(30_000), "epoch": 7}


@pytest.fixture
def store():
    store = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield store
    store.close()


@pytest.fixture
def lines(caplog):
    """The messages of a level so far, which are then dropped."""
    caplog.set_level(logging.DEBUG, "penstock")

    def take(level):
        found = [r.getMessage() for r in caplog.records if r.levelno == level]
        caplog.clear()
        return found

    return take


def settle(ckpt):
    """Until the work after a commit is over, too."""
    ckpt.wait()
    ckpt._saver.job.released.wait()
    ckpt._saver.job._capture_over.wait()


def test_each_save_restore_and_load_is_one_line(store, lines):
    with penstock.Checkpointer(store) as ckpt:
        ckpt.save(STATE, step=4)
        settle(ckpt)
        ckpt.restore({**STATE})
        ckpt.load(include="w")
        first, second, third = lines(logging.INFO)
    assert first.startswith("saved step 4: 273.4 KiB in ")
    assert second.startswith("restored 3 objects of step 4: ")
    assert third.startswith("loaded 1 objects of step 4: 156.2 KiB in ")


def angry(event):
    raise RuntimeError(str(event)) from ValueError("and why")


def test_logs_are_text_and_keep_nothing_alive(store, caplog):
    caplog.set_level(logging.DEBUG, "penstock")
    with penstock.Checkpointer(store, on_event=angry, retention={"keep_last": 1}) as ckpt:
        for step in (1, 2):
            ckpt.save(STATE, step=step, on_progress=angry).result()
            settle(ckpt)
        ckpt.restore({**STATE}, on_progress=angry)
        ckpt.load(on_progress=angry)
        ckpt.verify(on_progress=angry)
        with pytest.raises(penstock.RestoreMismatchError):
            ckpt.restore({"w": torch.ones(1)})
        store.fail("create", StorageError("no"))
        assert ckpt.save(STATE, step=3).durable.exception() is not None
        settle(ckpt)
        store.fail("list", StorageError("no"), match="commits/", nth=2)
        ckpt.save(STATE, step=4).result()
        settle(ckpt)
        ckpt.rewind(4)
        ckpt.prune()
        ckpt.delete(4)
    text = " ".join(r.getMessage() for r in caplog.records)
    for kind in (
        "durable",
        "failed",
        "restore_failed",
        "load_done",
        "verified",
        "deleted",
        "pruned",
    ):
        assert f"on_event raised at {kind}" in text
    assert "cleaning up after step 4 failed: no" in text
    assert "on_progress of the save of step 1 raised" in text
    for record in caplog.records:
        assert record.exc_info is None
        assert not record.args or all(isinstance(a, str | int | float) for a in record.args), record


def test_a_damaged_checkpoint_is_logged_as_text(store, caplog):
    with penstock.Checkpointer(store) as ckpt:
        for step in (1, 2):
            ckpt.save(STATE, step=step, mode="blocking")
        store.delete([b.name for b in store.list(f"data/{ckpt.info(2).uid}/blobs/")])
        ckpt.restore({**STATE}, on_damage="fallback")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert all(isinstance(arg, str | int) for arg in record.args)

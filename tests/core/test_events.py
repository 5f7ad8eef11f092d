"""`on_event`: what a caller is told of its saves."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core import saving
from penstock.core.errors import StorageError
from penstock.core.testing.faults import FaultyBackend


@pytest.fixture
def backend():
    store = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield store
    store.close()


def test_a_save_is_told_step_by_step_and_in_order(backend):
    events = []
    with penstock.Checkpointer(backend, on_event=events.append) as ckpt:
        report = ckpt.save({"w": torch.ones(3)}, step=4).result()
    assert [(e.kind, e.step) for e in events] == [
        ("started", 4),
        ("captured", 4),
        ("committed", 4),
        ("durable", 4),
    ]
    assert events[-1].report is report


def test_a_failure_is_one_event_and_still_counts_as_unseen(backend):
    events = []
    backend.fail("create", StorageError("no"))
    ckpt = penstock.Checkpointer(backend, on_event=events.append)
    handle = ckpt.save({"w": torch.ones(3)}, step=4)
    with pytest.raises(StorageError):
        ckpt.wait()
    assert [e.kind for e in events if e.kind == "failed"] == ["failed"]
    assert events[-1].error is handle.durable.exception()
    ckpt.close()


def test_what_the_callback_raises_goes_no_further_than_the_log(backend, caplog):
    def angry(event):
        raise RuntimeError(event.kind)

    with (
        caplog.at_level(logging.ERROR, "penstock"),
        penstock.Checkpointer(backend, on_event=angry) as ckpt,
    ):
        ckpt.save({"w": torch.ones(3)}, step=4).result()
        assert ckpt.steps() == [4]
    assert "on_event raised at durable of step 4" in caplog.text


def test_a_callback_of_a_save_may_close_the_checkpointer(tmp_path):
    ckpt = penstock.Checkpointer(tmp_path)
    closed = []

    def close(_):
        ckpt.close()
        closed.append(True)

    handle = ckpt.save({"w": torch.ones(3)}, step=4)
    handle.durable.add_done_callback(close)
    handle.result()
    deadline = time.monotonic() + 60
    while not (closed and ckpt._backend._closed):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with penstock.Checkpointer(tmp_path) as again:
        assert again.steps() == [4]


def act(ckpt, action):
    if action == "save":
        ckpt.save({"w": torch.zeros(3)}, step=9, mode="blocking")
    else:
        getattr(ckpt, action)()


@pytest.mark.parametrize("action", ["close", "wait", "save", "fence"])
@pytest.mark.parametrize("kind", ["started", "captured", "committed"])
@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_a_callback_that_the_save_waits_for_may_not_wait_for_the_save(
    backend, kind, action, mode, caplog
):
    def on_event(event):
        if (event.kind, event.step) == (kind, 4):
            act(ckpt, action)

    ckpt = penstock.Checkpointer(backend, on_event=on_event)
    ckpt.save({"w": torch.ones(3)}, step=4, mode=mode).result()
    ckpt.save({"w": torch.ones(3)}, step=5).result()
    assert ckpt.steps() == [4, 5]
    ckpt.close()
    (record,) = [r for r in caplog.records if "on_event raised" in r.getMessage()]
    assert "before the callback returns" in str(record.exc_info[1])


@pytest.mark.parametrize("action", ["close", "wait", "save", "fence"])
@pytest.mark.parametrize("kind", ["durable", "failed"])
def test_when_a_save_has_ended_a_callback_may_do_anything(backend, kind, action, monkeypatch):
    monkeypatch.setattr(saving, "_RELEASE_S", 1e6)  # so that waiting for it would hang
    done = threading.Event()

    def on_event(event):
        if (event.kind, event.step) == (kind, 4):
            try:
                act(ckpt, action)
            except StorageError:
                assert kind == "failed"  # seen here, as nobody else has
            done.set()

    ckpt = penstock.Checkpointer(backend, on_event=on_event)
    if kind == "failed":
        backend.fail("create", StorageError("no"))
    handle = ckpt.save({"w": torch.ones(3)}, step=4)
    assert handle.durable.wait(60)
    assert done.wait(60)
    assert handle.failed == (kind == "failed")
    ckpt.close()

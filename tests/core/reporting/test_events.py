"""`on_event`: what a caller is told of its checkpoints."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core.errors import StorageError
from penstock.core.reporting.events import EventStream
from penstock.core.reporting.reports import SaveHandle
from penstock.testing.faults import FaultyBackend


@pytest.fixture
def backend():
    store = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield store
    store.close()


def test_a_save_is_told_step_by_step_and_in_order(backend):
    events = []
    with penstock.Checkpointer(backend, on_event=events.append) as ckpt:
        report = ckpt.save({"w": torch.ones(3)}, step=4).result()
        ckpt._job._capture_over.wait()
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


def test_events_of_a_save_come_in_order_whatever_its_threads_do():
    handle = SaveHandle(4)
    events, inside, go_on = [], threading.Event(), threading.Event()

    def on_event(event):
        if event.kind == "captured":
            inside.set()
            go_on.wait(60)
        events.append(event.kind)

    EventStream(on_event).announce(handle)
    capture = threading.Thread(target=handle.captured.set_result, args=(None,))
    capture.start()
    assert inside.wait(60)
    handle.committed.set_result("report")  # does not wait for the callback
    handle.durable.set_result("report")
    assert events == ["started"]
    go_on.set()
    capture.join(60)
    assert events == ["started", "captured", "committed", "durable"]


def test_a_commit_that_overtakes_the_word_of_its_capture_is_told_after_it():
    handle, events = SaveHandle(4), []
    EventStream(lambda event: events.append(event.kind)).announce(handle)
    handle.committed.set_result("report")
    handle.captured.set_result(None)
    handle.durable.set_result("report")
    assert events == ["started", "captured", "committed", "durable"]


def test_a_save_that_is_left_out_is_an_event(backend):
    events = []
    gate = threading.Event()
    backend.block("create", gate)
    with penstock.Checkpointer(backend, on_event=events.append, on_busy="skip") as ckpt:
        ckpt.save({"w": torch.ones(3)}, step=4)
        assert ckpt.save({"w": torch.ones(3)}, step=5).skipped
        gate.set()
    assert [e.kind for e in events if e.step == 5] == ["skipped"]


READS = {
    "restore": lambda ckpt, **how: ckpt.restore({"w": torch.ones(3), "e": 1}, **how),
    "load": lambda ckpt, **how: ckpt.load(**how),
}


@pytest.fixture
def told(backend):
    """A checkpointer with two checkpoints, and the events that come from now on."""
    events = []
    with penstock.Checkpointer(backend, on_event=events.append) as ckpt:
        for step in (4, 6):
            ckpt.save({"w": torch.ones(3), "e": 1}, step=step, mode="blocking")
        ckpt._job.released.wait()
        events.clear()
        yield ckpt, events


@pytest.mark.parametrize("what", READS)
def test_a_restore_or_load_is_told_with_its_report(what, told):
    ckpt, events = told
    result = READS[what](ckpt)
    started, done = events
    assert started == penstock.RestoreEvent(f"{what}_started", 6)
    assert (done.kind, done.step, done.error) == (f"{what}_done", 6, None)
    assert done.report.restored == ("w", "e")
    assert done.report.bytes_read == 13
    if what == "restore":
        assert done.report is result


@pytest.mark.parametrize("what", READS)
def test_each_checkpoint_that_is_tried_is_told(what, told, backend):
    ckpt, events = told
    backend.delete([b.name for b in backend.list(f"data/{ckpt.info(6).uid}/blobs/")])
    READS[what](ckpt, on_damage="fallback")
    kinds = [(f"{what}_started", 6), (f"{what}_started", 4), (f"{what}_done", 4)]
    assert [(e.kind, e.step) for e in events] == kinds
    assert events[-1].report.fell_back_from == (6,)


@pytest.mark.parametrize("what", READS)
def test_a_restore_or_load_that_fails_is_told(what, told, backend):
    ckpt, events = told
    backend.delete([b.name for b in backend.list(f"data/{ckpt.info(6).uid}/blobs/")])
    with pytest.raises(penstock.DamagedError) as failure:
        READS[what](ckpt)
    assert [e.kind for e in events] == [f"{what}_started", f"{what}_failed"]
    assert events[-1].error is failure.value


@pytest.mark.parametrize("what", READS)
def test_the_last_checkpoint_that_was_tried_is_the_one_that_failed(what, told, backend):
    ckpt, events = told
    backend.delete([b.name for b in backend.list("data/") if "/blobs/" in b.name])
    with pytest.raises(penstock.DamagedError):
        READS[what](ckpt, on_damage="fallback")
    assert (events[-1].kind, events[-1].step) == (f"{what}_failed", 4)


def test_a_step_that_is_not_there_is_a_restore_that_fails(told):
    ckpt, events = told
    with pytest.raises(penstock.CheckpointNotFoundError):
        ckpt.restore({"w": torch.ones(3)}, step=5)
    assert [(e.kind, e.step) for e in events] == [("restore_started", 5), ("restore_failed", 5)]


def test_a_save_that_is_refused_is_not_told(told):
    ckpt, events = told
    with pytest.raises(penstock.StepExistsError):
        ckpt.save({"w": torch.ones(3)}, step=5)
    assert events == []


def test_a_verification_and_a_pruning_are_told_with_their_reports(told):
    ckpt, events = told
    reports = [ckpt.verify(), ckpt.prune()]
    assert [e.kind for e in events] == ["verified", "pruned"]
    assert [e.report for e in events] == reports
    assert events[0].report is reports[0]
    assert events[0].step == 6


def test_what_is_deleted_is_told_and_why(backend):
    events = []
    keep = {"keep_last": 2}
    with penstock.Checkpointer(backend, on_event=events.append, retention=keep) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.ones(3)}, step=step, mode="blocking")
            ckpt._job.released.wait()
        ckpt.rewind(3)
        ckpt.rewind(2)
        ckpt.delete(2)
    deleted = [e for e in events if isinstance(e, penstock.DeleteEvent)]
    assert [(e.kind, e.steps, e.why) for e in deleted] == [
        ("deleted", (1,), "retention"),
        ("deleted", (3,), "rewind"),
        ("deleted", (2,), "delete"),
    ]


def test_of_retention_is_told_after_the_save_and_may_do_anything(backend, waits):
    waits(release_s=1e6)  # so that waiting for it would hang
    done = threading.Event()
    kinds = []

    def on_event(event):
        kinds.append(event.kind)
        if event.kind == "deleted":
            ckpt.wait()
            done.set()

    with penstock.Checkpointer(backend, on_event=on_event, retention={"keep_last": 1}) as ckpt:
        ckpt.save({"w": torch.ones(3)}, step=1).result()
        ckpt.wait()
        kinds.clear()
        ckpt.save({"w": torch.ones(3)}, step=2).result()
        assert done.wait(60)
    assert kinds == ["started", "captured", "committed", "durable", "deleted"]


def test_every_event_is_also_plain_data(told, backend):
    ckpt, events = told
    report = ckpt.save({"w": torch.ones(3), "e": 1}, step=8, mode="blocking").result()
    ckpt._job.released.wait()
    ckpt.restore({"w": torch.ones(3), "e": 1})
    backend.fail("create", StorageError("no room"))
    assert ckpt.save({"w": torch.ones(3)}, step=9).durable.exception() is not None
    ckpt.verify()
    ckpt.prune()
    ckpt.rewind(4)
    found = {e.kind: json.loads(json.dumps(e.as_dict())) for e in events}
    assert found["durable"]["seconds"] == report.seconds
    assert found["durable"]["uid"] == report.uid
    assert found["durable"]["step"] == 8
    assert found["durable"]["total"]["blobs"] == report.total.blobs
    assert found["failed"]["error"] == "StorageError: no room"
    assert found["restore_done"]["restored"] == 2
    assert "values" not in found["restore_done"]
    assert found["verified"]["damaged"] == 0
    assert found["pruned"]["uids"] == 0
    assert found["deleted"] == {"kind": "deleted", "steps": [6, 8], "why": "rewind"}


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


@pytest.mark.parametrize("future", ["committed", "durable"])
def test_a_callback_that_exits_keeps_no_save_from_ending(backend, future, caplog):
    def leave(_):
        raise SystemExit

    gate = threading.Event()
    backend.block("publish", gate, match="commits/")
    with penstock.Checkpointer(backend) as ckpt:
        handle = ckpt.save({"w": torch.ones(3)}, step=1)
        getattr(handle, future).add_done_callback(leave)
        gate.set()
        assert handle.result(30).step == 1
        ckpt.wait(30)
    assert "a callback of a save raised SystemExit" in caplog.text


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
    while not (closed and ckpt._backend.inner._closed):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with penstock.Checkpointer(tmp_path) as again:
        assert again.steps() == [4]


def act(ckpt, action):
    if action == "save":
        ckpt.save({"w": torch.zeros(3)}, step=9, mode="blocking")
    else:
        getattr(ckpt, action)()


@pytest.mark.parametrize(
    ("kind", "action", "mode"),
    [
        ("started", "close", "async"),
        ("captured", "wait", "async"),
        ("committed", "save", "async"),
        ("committed", "fence", "async"),
        ("started", "wait", "blocking"),
        ("captured", "save", "blocking"),
        ("committed", "close", "blocking"),
    ],
)
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
    assert "before the callback returns" in record.getMessage()


@pytest.mark.parametrize("action", ["close", "wait", "save", "fence"])
@pytest.mark.parametrize("kind", ["durable", "failed"])
def test_when_a_save_has_ended_a_callback_may_do_anything(backend, kind, action, waits):
    waits(release_s=1e6)  # so that waiting for it would hang
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


def test_a_save_never_raises_its_own_error_as_that_of_an_earlier_one(backend):
    with penstock.Checkpointer(backend) as ckpt:
        backend.fail("create", StorageError("no"))
        handle = ckpt.save({"w": torch.ones(3)}, step=4)
        assert handle.durable.wait(60)
        backend.clear()
        ckpt._saver.pending.begin(
            ckpt._job
        )  # as its callback does, when it saves in another thread
        ckpt._saver.pending.raise_earlier(ckpt._job)
        with pytest.raises(StorageError) as raised:
            ckpt.save({"w": torch.ones(3)}, step=5)
        assert raised.value.__notes__ == [
            "This earlier save failed; the save of step 5 has started."
        ]

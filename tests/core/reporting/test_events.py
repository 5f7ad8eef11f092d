"""`on_event`: the events of a caller's checkpoints."""

import json
import logging
import threading

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


def test_a_save_emits_its_events_in_order(backend):
    events = []
    with penstock.Checkpointer(backend, on_event=events.append) as ckpt:
        report = ckpt.save({"w": torch.ones(3)}, step=4).result()
        ckpt._saver.job._capture_over.wait()
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


READS = {
    "restore": lambda ckpt, **how: ckpt.restore({"w": torch.ones(3), "e": 1}, **how),
    "load": lambda ckpt, **how: ckpt.load(**how),
}


@pytest.fixture
def watched(backend):
    """A checkpointer with two checkpoints, and later events."""
    events = []
    with penstock.Checkpointer(backend, on_event=events.append) as ckpt:
        for step in (4, 6):
            ckpt.save({"w": torch.ones(3), "e": 1}, step=step, mode="blocking")
        ckpt._saver.job.released.wait()
        events.clear()
        yield ckpt, events


@pytest.mark.parametrize("what", READS)
def test_a_restore_or_load_emits_its_report(what, watched):
    ckpt, events = watched
    result = READS[what](ckpt)
    started, done = events
    assert started == penstock.RestoreEvent(f"{what}_started", 6)
    assert (done.kind, done.step, done.error) == (f"{what}_done", 6, None)
    assert done.report.restored == ("w", "e")
    assert done.report.bytes_read == 13
    if what == "restore":
        assert done.report is result


def test_verify_and_prune_emit_their_reports(watched):
    ckpt, events = watched
    reports = [ckpt.verify(), ckpt.prune()]
    assert [e.kind for e in events] == ["verified", "pruned"]
    assert [e.report for e in events] == reports
    assert events[0].report is reports[0]
    assert events[0].step == 6


def test_deletions_emit_their_reason(backend):
    events = []
    keep = {"keep_last": 2}
    with penstock.Checkpointer(backend, on_event=events.append, retention=keep) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.ones(3)}, step=step, mode="blocking")
            ckpt._saver.job.released.wait()
        ckpt.rewind(3)
        ckpt.rewind(2)
        ckpt.delete(2)
    deleted = [e for e in events if isinstance(e, penstock.DeleteEvent)]
    assert [(e.kind, e.steps, e.why) for e in deleted] == [
        ("deleted", (1,), "retention"),
        ("deleted", (3,), "rewind"),
        ("deleted", (2,), "delete"),
    ]


def test_every_event_is_also_plain_data(watched, backend):
    ckpt, events = watched
    report = ckpt.save({"w": torch.ones(3), "e": 1}, step=8, mode="blocking").result()
    ckpt._saver.job.released.wait()
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


def test_callback_errors_reach_only_the_log(backend, caplog):
    def angry(event):
        raise RuntimeError(event.kind)

    with (
        caplog.at_level(logging.ERROR, "penstock"),
        penstock.Checkpointer(backend, on_event=angry) as ckpt,
    ):
        ckpt.save({"w": torch.ones(3)}, step=4).result()
        assert ckpt.steps() == [4]
    assert "on_event raised at durable of step 4" in caplog.text


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
def test_a_callback_of_a_running_save_may_not_wait_for_that_save(
    backend, kind, action, mode, caplog
):
    acted = threading.Event()

    def on_event(event):
        if (event.kind, event.step) == (kind, 4):
            try:
                act(ckpt, action)
            finally:
                acted.set()

    if kind == "captured":  # the save would commit, and may end, while the callback runs
        backend.block("publish", acted, match="commits/")
    ckpt = penstock.Checkpointer(backend, on_event=on_event)
    ckpt.save({"w": torch.ones(3)}, step=4, mode=mode).result()
    ckpt.save({"w": torch.ones(3)}, step=5).result()
    assert ckpt.steps() == [4, 5]
    ckpt.close()
    (record,) = [r for r in caplog.records if "on_event raised" in r.getMessage()]
    assert "until the callback returns" in record.getMessage()


@pytest.mark.parametrize("action", ["close", "wait", "save", "fence"])
@pytest.mark.parametrize("kind", ["durable", "failed"])
def test_a_callback_after_a_save_may_do_anything(backend, kind, action, waits):
    waits(release_s=1e6)  # so that waiting for it would hang
    done = threading.Event()

    def on_event(event):
        if (event.kind, event.step) == (kind, 4):
            try:
                act(ckpt, action)
            except StorageError:
                assert kind == "failed"  # seen here, since no caller has
            done.set()

    ckpt = penstock.Checkpointer(backend, on_event=on_event)
    if kind == "failed":
        backend.fail("create", StorageError("no"))
    handle = ckpt.save({"w": torch.ones(3)}, step=4)
    assert handle.durable.wait(60)
    assert done.wait(60)
    assert handle.failed == (kind == "failed")
    ckpt.close()


def test_a_save_never_raises_its_own_error_as_an_earlier_one(backend):
    with penstock.Checkpointer(backend) as ckpt:
        backend.fail("create", StorageError("no"))
        handle = ckpt.save({"w": torch.ones(3)}, step=4)
        assert handle.durable.wait(60)
        backend.clear()
        ckpt._saver.pending.begin(ckpt._saver.job)  # like its callback that saves in another thread
        ckpt._saver.pending.raise_earlier(ckpt._saver.job)
        with pytest.raises(StorageError) as raised:
            ckpt.save({"w": torch.ones(3)}, step=5)
        assert raised.value.__notes__ == [
            "This earlier save failed; the save of step 5 has started."
        ]

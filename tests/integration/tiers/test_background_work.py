"""Tiers: deletions, retries, repairs and waits during copies."""

import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.integration.support import checkpointer, make_state, same
from tests.integration.tiers.places import Places

from penstock import CheckpointGoneError, NotDrainedError, PenstockError, StorageError
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.config.model import Retention
from penstock.core.errors import UnsyncedError
from penstock.core.tiers.whereabouts import is_marked, mark, pending
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend
from penstock.testing.hasty import FAST


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST)


@pytest.fixture
def places():
    return Places()


def test_retention_spares_the_durable_checkpoint_until_a_newer_one_is_durable(places):
    slow, event = FaultyBackend(places.other()), threading.Event()
    with places.open(durable=slow, retention={"keep_last": 1}) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.wait()
        slow.block("create", event)
        ckpt.save(make_state(2), 2).committed.result(300)
        ckpt.wait()
        ckpt.save(make_state(3), 3).committed.result(300)
        ckpt.wait()
        assert 1 in places.steps()[1]
        assert 2 in places.steps()[0]  # is being copied: or none would ever arrive there
        event.set()
    assert places.steps() == ([3], [3])


def test_retention_spares_the_next_step_to_copy(places):
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    with checkpointer(places.fast) as alone:
        for step in (2, 3):
            alone.save(make_state(step), step, mode="blocking")
            mark(places.fast, alone.info(step).uid, step)
    config = TieredConfig(fast="memory://", durable="memory://")
    both = TieredBackend(config, fast=places.fast, durable=places.durable)
    assert Catalog(both).apply_retention(Retention(keep_last=1)) == []
    with places.open(retention={"keep_last": 1}) as ckpt:
        ckpt.save(make_state(4), 4).result(300)
    assert places.steps() == ([4], [4])


def test_crash_right_after_commit_leaves_a_step_for_the_next_process(places, waits):
    waits(drain_failing_s=0.2)

    class Dying(WrapperBackend):
        dead = False

        def _around(self, operation, names, call):
            if self.dead:
                raise StorageError("the process is dead")
            found = super()._around(operation, names, call)
            self.dead = operation == "publish" and names[0].startswith("commits/")
            return found

    ckpt = places.open(fast=Dying(places.other_fast()))
    ckpt.save(make_state(1), 1).committed.exception(300)
    with suppress(PenstockError):
        ckpt.close()
    assert places.steps() == ([1], [])
    # Without the mark the next process may still find it by comparing the tiers.
    assert is_marked(places.fast, Catalog(places.fast).record(1).uid)
    with places.open() as ckpt:
        ckpt.save(make_state(2), 2).result(300)
    assert places.steps() == ([1, 2], [1, 2])


def test_overwriting_spares_the_durable_generation_until_the_next_is_durable(places):
    slow, event = FaultyBackend(places.other()), threading.Event()
    with places.open(durable=slow) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.wait()
        slow.block("create", event)
        ckpt.save(make_state(2), 1, overwrite=True).committed.result(300)
        ckpt.wait()
        assert places.steps() == ([1], [1])
        event.set()
    assert [i.name for i in places.durable.list("commits/")] == ["commits/00000001-2.json"]


def test_a_record_that_may_not_be_durable_is_republished(places):
    class Unsynced(WrapperBackend):
        calls = 0

        def publish(self, name, data, /, *, exclusive=False):
            super().publish(name, data, exclusive=exclusive)
            if name.startswith("commits/"):
                self.calls += 1
                if self.calls == 1:
                    raise UnsyncedError("the folder was not synced")

    durable = Unsynced(places.other())
    with places.open(durable=durable) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    assert durable.calls == 2
    assert pending(places.fast) == []


@pytest.mark.parametrize("when", ["at once", "late"])
def test_a_copy_landing_after_a_rewind_stays_deleted(places, when):
    held, go, landed = threading.Event(), threading.Event(), threading.Event()

    class Racing(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            race = name.startswith("commits/00000002") and not held.is_set()
            if race:
                held.set()
                go.wait(300)
            super().publish(name, data, exclusive=exclusive)
            if race:
                landed.set()

        def delete(self, names, /):
            super().delete(names)
            named = any(name.startswith("commits/00000002") for name in names)
            if when == "at once" and named and held.is_set() and not go.is_set():
                go.set()
                landed.wait(300)

    with places.open(durable=Racing(places.other())) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.save(make_state(2), 2).committed.result(300)
        assert held.wait(300)
        with places.open(durable=Racing(places.other())) as other:  # as another process would
            assert other.rewind(1) == [2]
        assert places.steps() == ([1], [1])
        go.set()
        assert landed.wait(300)
        assert ckpt._drains.settle(300)  # the copy withdraws its late record
        assert ckpt.save(make_state(22), 2).result(300).tiers == ("fast", "durable")
    with checkpointer(places.durable) as alone:
        assert alone.load(2)["epoch"] == 22


def test_a_copy_landed_without_a_reply_is_withdrawn_if_deleted_meanwhile(places):
    class Racing(WrapperBackend):
        raced = False

        def publish(self, name, data, /, *, exclusive=False):
            race = name.startswith("commits/00000002") and not self.raced
            if race:
                self.raced = True
                with places.open() as other:  # as another process would
                    assert other.rewind(1) == [2]
            super().publish(name, data, exclusive=exclusive)
            if race:
                raise UnsyncedError("no answer")

    with places.open(durable=Racing(places.other())) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        handle = ckpt.save(make_state(2), 2)
        assert isinstance(handle.durable.exception(300), CheckpointGoneError)
    assert places.steps() == ([1], [1])


def test_overwriting_is_refused_if_a_tier_may_have_a_higher_generation(places):
    with places.open(options={"keep_fast": 0}) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.save(make_state(2), 1, overwrite=True).result(300)
    away = FaultyBackend(places.other())
    away.add(Fault("list", times=None, error=StorageError("no route to host")))
    with places.open(durable=away) as ckpt:
        with pytest.raises(StorageError, match="no route"):
            ckpt.save(make_state(3), 1, overwrite=True)
        away.clear()
        assert ckpt.save(make_state(3), 1, overwrite=True).result(300).generation == 4
        assert ckpt.load(1)["epoch"] == 3


def test_repair_evicts_nothing_for_a_copy_damaged_elsewhere(places, caplog):
    with places.open() as ckpt:
        uid = ckpt.save(make_state(1), 1).result(300).uid
    name = f"data/{uid}/blobs/00000-0.raw"
    for backend, share in ((places.fast, 0.2), (places.durable, 0.7)):
        blob = backend._store.blobs[name]
        data = bytearray(blob.data)
        data[int(len(data) * share)] ^= 1
        backend._store.blobs[name] = replace(blob, data=data)
    for _ in range(2):
        with places.open() as ckpt:
            assert same(ckpt.load(1), make_state(1))
        assert "repairing a damaged copy failed" in caplog.text
        assert places.steps() == ([1], [1])


@pytest.mark.parametrize("what", ["close", "save", "exit"])
def test_a_callback_at_durable_may_do_anything(places, what):
    returned = threading.Event()

    def on_event(event):
        if (event.kind, event.step) != ("durable", 1):
            return
        if what == "exit":
            returned.set()
            raise SystemExit
        if what == "close":
            ckpt.close()
        else:
            ckpt.save(make_state(2), 2, mode="blocking")
        returned.set()

    ckpt = places.open(on_event=on_event)
    ckpt.save(make_state(1), 1).result(300)
    assert returned.wait(300)
    if what == "exit":
        ckpt.save(make_state(2), 2).result(300)
    ckpt.close()
    assert places.steps()[1] == ([1] if what == "close" else [1, 2])


def test_a_commit_after_close_reaches_waiters(places, waits):
    waits(release_s=0.1)
    go = threading.Event()

    def on_event(event):
        if event.kind == "committed":
            go.wait(300)

    ckpt = places.open(on_event=on_event)
    handle = ckpt.save(make_state(1), 1)
    ckpt.close()
    go.set()
    with pytest.raises(NotDrainedError):
        handle.result(300)


def test_steps_drained_by_another_process_are_durable(places):
    with places.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        record, outcomes = Catalog(places.fast).record(1), []
        places.fast.delete(["commits/00000001-0.json"])
        ckpt._drains.committed(0, record, outcomes.append, marked=True)
        assert ckpt._drains.settle(300)
        assert outcomes == [None]

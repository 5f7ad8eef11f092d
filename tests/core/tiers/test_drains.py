"""Copies from tier to tier, without training: progress, interruptions, leftovers."""

import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from tests.integration.support import checkpointer, holding, make_state, memory, same

from penstock.core.abc import ROOT_NAME, Tier
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.errors import (
    CheckpointGoneError,
    DamagedError,
    NotDrainedError,
    StepExistsError,
    StorageError,
)
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import commit_name, data_prefix
from penstock.core.tiers.drains import Drains
from penstock.core.tiers.eviction import MARGIN_BYTES
from penstock.core.tiers.whereabouts import is_marked, mark, pending, whereabouts
from penstock.testing.faults import Fault, FaultyBackend, WrapperBackend
from penstock.testing.hasty import FAST

GRACE_S = 3600.0


def saved(backend, *steps, marked=True):
    records = []
    with checkpointer(backend) as ckpt:
        for step in steps:
            ckpt.save(make_state(step), step, mode="blocking")
            record = Catalog(backend).record(step)
            if marked:
                mark(backend, record.uid, step)
            records.append(record)
    return records


def until(condition):
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "it does not come to that"
        time.sleep(0.01)


def steps_of(backend):
    return Catalog(backend).steps()


@contextmanager
def drains_of(*tiers):
    workers = Workers(2)
    drains = Drains(tiers, workers=workers, grace_s=GRACE_S)
    try:
        yield drains
    finally:
        drains.close()
        workers.close()


@pytest.fixture(autouse=True)
def hasty(waits):
    # A tier with slow errors is paused for a minute: here none is, on any machine.
    waits(FAST, drain_failing_s=0.2, tier_quick_error_s=1000.0)


class Waiter:
    def __init__(self):
        self.answers = []
        self.over = threading.Event()

    def __call__(self, error):
        self.answers.append(error)
        self.over.set()

    def get(self):
        assert self.over.wait(30), "nobody was told"
        (error,) = self.answers
        return error


def test_a_marked_checkpoint_goes_to_the_next_tier_and_waiters_learn():
    fast, durable = memory(), memory()
    (record,) = saved(fast, 1)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        waiter = Waiter()
        drains.committed(0, record, waiter, marked=is_marked(fast, record.uid))
        assert waiter.get() is None
        assert drains.settle(30)
    assert steps_of(durable) == [1]
    assert pending(fast) == []
    with checkpointer(durable) as ckpt:
        assert same(ckpt.load(1), make_state(1))
        assert ckpt.verify(1).ok


def test_leftovers_of_a_process_are_found_lowest_step_first():
    fast, durable = memory(), FaultyBackend(memory())
    saved(fast, 1, 2, 3)
    order = []

    class Noting(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            if name.startswith("commits/"):
                order.append(name)
            super().publish(name, data, exclusive=exclusive)

    target = Noting(durable)
    with drains_of(Tier("fast", fast), Tier("durable", target, durable=True)) as drains:
        assert drains.resume() == 3
        assert drains.resume() == 0
        assert drains.settle(30)
    assert [int(name[8:16]) for name in order] == [1, 2, 3]
    assert pending(fast) == []


def test_through_three_tiers():
    one, two, three = memory(), memory(), memory()
    (record,) = saved(one, 1)
    tiers = Tier("a", one), Tier("b", two), Tier("c", three, durable=True)
    with drains_of(*tiers) as drains:
        waiter = Waiter()
        drains.committed(0, record, waiter, marked=is_marked(one, record.uid))
        assert waiter.get() is None
        assert drains.settle(30)
        assert [steps_of(b) for b in (one, two, three)] == [[1], [1], [1]]
        assert whereabouts(tiers)[record.uid].tiers == (0, 1, 2)
        assert whereabouts(tiers)[record.uid].waiting == ()


@pytest.mark.parametrize("every", [1, 2])
def test_a_loss_of_the_middle_tier_is_copied_from_the_fast_one(every):
    """Such as memory of a restarted machine."""
    one, two, three = memory(), memory(), FaultyBackend(memory())
    event = threading.Event()
    held = three.block("create", event)
    (record,) = saved(one, 1)
    middle = Tier("b", two, drain_every=every)
    with drains_of(Tier("a", one), middle, Tier("c", three, durable=True)) as drains:
        waiter = Waiter()
        drains.committed(0, record, waiter, marked=True)
        assert held.reached.wait(30)
        two.delete([info.name for info in two.list("")])
        three.add(Fault("create", error=StorageError("its source is gone")))
        event.set()
        assert waiter.get() is None
        assert drains.settle(30)
        assert [steps_of(b) for b in (one, two, three)] == [[1], [1], [1]]
        assert [pending(b) for b in (one, two)] == [[], []]


@contextmanager
def sending_back():
    """A middle tier has lost a step to copy, while the fast one's mark is being published."""
    fast, middle = FaultyBackend(memory()), FaultyBackend(memory())
    goes_on = threading.Event()
    (record,) = saved(fast, 1, marked=False)
    held = fast.block("publish", goes_on)
    tiers = (Tier("a", fast), Tier("b", middle), Tier("c", memory(), durable=True))
    with drains_of(*tiers) as drains:
        waiter = Waiter()
        drains.committed(1, record, waiter, marked=True)
        assert held.reached.wait(30)
        try:
            yield drains, record, waiter, middle, goes_on
        finally:
            goes_on.set()


def test_waiters_also_wait_for_copies_sent_back():
    with sending_back() as (drains, _, waiter, middle, goes_on):
        copies = threading.Event()
        copying = middle.block("create", copies)
        settled = []
        waiting = threading.Thread(target=lambda: settled.append(drains.settle(60)))
        waiting.start()
        waiting.join(0.2)  # by then it knows that the first link is idle
        goes_on.set()
        assert copying.reached.wait(30)
        waiting.join(0.2)
        early = list(settled)
        copies.set()
        waiting.join(30)
        assert early == []
        assert settled == [True]
        assert waiter.get() is None


def test_a_step_deleted_while_sent_back_is_gone():
    with sending_back() as (drains, record, waiter, _, goes_on):
        withdrawing = threading.Thread(target=drains.withdraw, args=([record.uid],))
        withdrawing.start()
        until(lambda: drains.repairs.is_withdrawn(record.uid))
        withdrawing.join(0.2)  # by then the first link knows of it
        goes_on.set()
        withdrawing.join(30)
        assert isinstance(waiter.get(), CheckpointGoneError)


def test_a_step_deleted_in_the_queue_is_gone_or_copied_if_that_failed():
    fast, durable = memory(), FaultyBackend(memory())
    copied, queued = saved(fast, 1, 2)
    event = threading.Event()
    held = durable.block("create", event)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        waiter = Waiter()
        drains.committed(0, copied, Waiter(), marked=True)
        drains.committed(0, queued, waiter, marked=True)
        assert held.reached.wait(30)
        drains.withdraw([queued.uid])
        assert isinstance(waiter.get(), CheckpointGoneError)
        event.set()
        assert drains.settle(30)
        assert steps_of(durable) == [1]
        drains.reinstate([queued.uid])
        until(lambda: steps_of(durable) == [1, 2])


def test_an_absent_tier_is_retried_until_it_is_back(caplog):
    fast, durable = memory(), FaultyBackend(memory())
    for operation in ("list", "publish", "create", "read", "stat"):
        durable.add(Fault(operation, times=None, error=StorageError("no route to host")))
    (record,) = saved(fast, 1)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        waiter = Waiter()
        drains.committed(0, record, waiter, marked=is_marked(fast, record.uid))
        assert drains.settle(30)  # it fails, so waiting is useless
        assert drains.failing()
        assert "no route to host" in drains.states()[0].error
        assert not waiter.over.is_set()
        durable.clear()
        assert waiter.get() is None
        assert drains.settle(30)
        assert drains.states()[0].error == ""
    assert steps_of(durable) == [1]
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 1  # not one for each try
    assert "will be tried again" in errors[0].getMessage()


def test_waiters_learn_that_the_run_was_closed():
    fast, durable = memory(), FaultyBackend(memory())
    durable.add(Fault("list", times=None, error=StorageError("no route to host")))
    (record,) = saved(fast, 1)
    waiter = Waiter()
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        drains.committed(0, record, waiter, marked=is_marked(fast, record.uid))
        assert drains.settle(30)
    assert isinstance(waiter.get(), NotDrainedError)
    assert [r.step for r in pending(fast)] == [1]


def set_after_cancel(copier, event):
    """Set `event` once the copy in flight was cancelled."""
    cancel = copier.cancel

    def cancel_and_set(*uids):
        cancel(*uids)
        event.set()

    copier.cancel = cancel_and_set


def test_closing_ends_a_copy_in_flight():
    fast, durable = memory(), FaultyBackend(memory())
    (record,) = saved(fast, 1)
    event = threading.Event()
    held = durable.block("create", event)
    waiter = Waiter()
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        drains.committed(0, record, waiter, marked=is_marked(fast, record.uid))
        assert held.reached.wait(30)
        set_after_cancel(drains._links[0]._copier, event)
    assert isinstance(waiter.get(), NotDrainedError)
    assert steps_of(durable) == []
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        assert drains.resume() == 1
        assert drains.settle(30)
    assert steps_of(durable) == [1]


@pytest.mark.parametrize("why", ["damaged", "another's"])
def test_an_uncopyable_step_is_reported_once_and_stops_no_other(why, caplog):
    fast, durable = memory(), memory()
    first, second = saved(fast, 1, 2)
    if why == "damaged":
        blob = next(i.name for i in fast.list(f"data/{first.uid}/blobs/") if ".raw" in i.name)
        data = bytearray(fast._store.blobs[blob].data)
        data[len(data) // 2] ^= 1
        fast._store.blobs[blob] = replace(fast._store.blobs[blob], data=bytes(data))
    else:
        saved(durable, 1, marked=False)
    waiters = Waiter(), Waiter()
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        for record, waiter in zip((first, second), waiters, strict=True):
            drains.committed(0, record, waiter, marked=is_marked(fast, record.uid))
        assert waiters[1].get() is None
        error = DamagedError if why == "damaged" else StepExistsError
        assert isinstance(waiters[0].get(), error)
        assert drains.settle(30)
        assert list(drains.states()[0].lost) == [1]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    assert 2 in steps_of(durable)
    assert [r.step for r in pending(fast)] == [1]  # it is not evicted


def test_a_drain_replaces_no_data_of_another_step_with_the_same_uid():
    """Any writer of the fast tier could have put it there."""
    fast, durable = memory(), memory()
    (genuine,) = saved(durable, 7)
    (record,) = saved(fast, 200, marked=False)
    forged = replace(genuine, step=200)
    for info in durable.list(data_prefix(genuine.uid)):
        fast.publish(info.name, durable.read_record(info.name, limit_bytes=1 << 30))
    fast.delete([commit_name(200, record.generation)])
    fast.publish(commit_name(200, 0), encode_commit(forged))
    before = durable._store.blobs.copy()
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        waiter = Waiter()
        drains.committed(0, forged, waiter, marked=True)
        assert isinstance(waiter.get(), StepExistsError)
        assert drains.settle(30)
    after = {name: blob for name, blob in durable._store.blobs.items() if name != ROOT_NAME}
    assert after == before


# -- repair ----------------------------------------------------------------------------------------


def two_copies():
    """A checkpoint damaged in the fast of two tiers, and the repairing call."""
    fast, durable = memory(), memory()
    (record,) = saved(fast, 1, marked=False)
    with closing(Workers(2)) as workers:
        CheckpointCopy(fast, durable, record, workers=workers, grace_s=GRACE_S).run()
    blob = next(i.name for i in fast.list(f"data/{record.uid}/blobs/"))
    data = bytearray(fast._store.blobs[blob].data)
    data[len(data) // 2] ^= 1
    fast._store.blobs[blob] = replace(fast._store.blobs[blob], data=bytes(data))

    def is_damaged():
        return fast._store.blobs[blob].data == bytes(data)

    return fast, durable, record, [(blob, "durable")], is_damaged


def test_a_damaged_copy_in_the_queue_keeps_its_mark():
    fast, durable, record, damaged, is_damaged = two_copies()
    mark(fast, record.uid, 1)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        drains.repairs.begin(damaged)
        assert drains.settle(30)
    assert is_damaged()
    assert is_marked(fast, record.uid)


def test_a_step_deleted_during_verification_is_not_repaired():
    fast, durable, record, damaged, is_damaged = two_copies()
    slow, event = FaultyBackend(durable), threading.Event()
    held = slow.block("read", event, match="blobs/")
    with drains_of(Tier("fast", fast), Tier("durable", slow, durable=True)) as drains:
        drains.repairs.begin(damaged)
        assert held.reached.wait(30)
        drains.withdraw([record.uid])
        event.set()
        assert drains.settle(30)
    assert is_damaged()
    assert steps_of(fast) == [1]
    assert pending(slow) == []


# -- room ------------------------------------------------------------------------------------------


class Small(WrapperBackend):
    """Has this many bytes of room in total."""

    room = 0

    def free_bytes(self):
        used = sum(info.size_bytes for info in self.inner.list("data/"))
        return MARGIN_BYTES + self.room - used


def small(backend, room):
    backend = Small(backend)
    backend.room = room
    return backend


def size_of_one():
    backend = memory()
    saved(backend, 1)
    return sum(i.size_bytes for i in backend.list("data/"))


def test_eviction_takes_steps_of_the_next_tier_oldest_first():
    size = size_of_one()
    fast, durable = small(memory(), int(3.5 * size)), memory()
    saved(fast, 1, 2, 3)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        drains.resume()
        assert drains.settle(30)
        assert drains.room.place(4, size) == 0
    assert steps_of(fast) == [2, 3]
    assert steps_of(durable) == [1, 2, 3]


def test_fast_tier_only_steps_are_never_evicted():
    size = size_of_one()
    fast, durable = small(memory(), int(2.5 * size)), memory()
    saved(fast, 1, marked=False)
    saved(fast, 2)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        assert drains.room.place(3, size) == 1  # the durable one has room: write through
    assert steps_of(fast) == [1, 2]


def test_steps_lost_downstream_are_not_evicted():
    size = size_of_one()
    fast, durable = small(memory(), int(1.5 * size)), memory()
    saved(fast, 1)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        drains.resume()
        assert drains.settle(30)
        Catalog(durable).delete(1)
        assert drains.room.place(2, size) == 1
    assert steps_of(fast) == [1]


def lose_all(backend, uid):
    backend.delete([info.name for info in backend.list(f"data/{uid}/")])


def lose_a_blob(backend, uid):
    backend.delete([backend.list(f"data/{uid}/blobs/")[0].name])


def cut_a_blob(backend, uid):
    rewrite_a_blob(backend, uid, lambda data: data[: len(data) // 2])


def flip_a_byte(backend, uid):
    rewrite_a_blob(backend, uid, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def rewrite_a_blob(backend, uid, change):
    name = backend.list(f"data/{uid}/blobs/")[-1].name
    data = backend.read_record(name, limit_bytes=1 << 30)
    backend.delete([name])
    backend.publish(name, change(data))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_partly_lost_copy_is_replaced_only_from_a_good_source(damaged):
    fast, durable = memory(), memory()
    (record,) = saved(fast, 1)
    tiers = Tier("fast", fast), Tier("durable", durable, durable=True)
    with drains_of(*tiers) as drains:
        drains.resume()
        assert drains.settle(30)
    lose_a_blob(durable, record.uid)
    left = {info.name for info in durable.list("")}
    if damaged:
        flip_a_byte(fast, record.uid)
    mark(fast, record.uid, 1)
    with drains_of(*tiers) as drains:
        drains.resume()
        assert drains.settle(30)
    if damaged:
        assert left <= {info.name for info in durable.list("")}
    else:
        with checkpointer(durable) as ckpt:
            assert ckpt.verify(1).ok


@pytest.mark.parametrize("spoil", [lose_all, cut_a_blob, flip_a_byte])
def test_the_last_good_copy_stays_even_if_the_next_tier_lists_the_step(spoil, caplog):
    fast, durable = memory(), memory()
    (record,) = saved(fast, 1)
    tiers = Tier("fast", fast, keep_last=0), Tier("durable", durable, durable=True)
    with drains_of(Tier("fast", fast), tiers[1]) as drains:
        drains.resume()
        assert drains.settle(30)
    spoil(durable, record.uid)
    (second,) = saved(fast, 2)
    with drains_of(*tiers) as drains:
        drains.resume()
        assert drains.settle(30)
    assert "step 1 stays in tier fast" in caplog.text
    assert second.step not in steps_of(fast)
    with checkpointer(durable) as ckpt:  # and it was copied there again
        assert ckpt.verify(1).ok
        assert same(ckpt.load(1), make_state(1))
    with checkpointer(fast) as ckpt:
        assert same(ckpt.load(1), make_state(1))


def test_copies_of_this_process_are_checked_but_not_reread():
    fast, durable = memory(), FaultyBackend(memory())
    saved(fast, 1, 2)
    tiers = Tier("fast", fast, keep_last=1), Tier("durable", durable, durable=True)
    with drains_of(*tiers) as drains:
        drains.resume()
        assert drains.settle(30)
        assert steps_of(fast) == [2]
        lose_a_blob(durable, Catalog(durable).record(2).uid)
        saved(fast, 3)
        drains.resume()
        assert drains.settle(30)
        assert steps_of(fast) == [2, 3]
    read = [names for what, names in durable.calls if "read" in what]
    assert not [name for names in read for name in names if "/blobs/" in name]


def test_queued_steps_are_not_evicted_even_if_the_next_tier_lists_them():
    """The publisher of that record may never have got a response."""
    size = size_of_one()
    fast, durable = small(memory(), int(1.5 * size)), memory()
    (record,) = saved(fast, 1)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        workers = drains._workers
        CheckpointCopy(fast, durable, record, workers=workers, grace_s=GRACE_S).run()
        drains.eviction.note_verified(1, record)
        assert drains.room.place(2, size) == 1
        assert steps_of(fast) == [1]
        drains.resume()
        assert drains.settle(30)
        assert drains.room.place(2, size) == 0
    assert steps_of(fast) == []


def test_no_save_waits_for_reading_a_copy_of_another_process():
    size = size_of_one()
    fast, durable = small(memory(), int(1.5 * size)), FaultyBackend(memory())
    (record,) = saved(fast, 1, marked=False)
    with drains_of(Tier("fast", fast), Tier("durable", durable, durable=True)) as drains:
        workers = drains._workers
        CheckpointCopy(fast, durable, record, workers=workers, grace_s=GRACE_S).run()
        with holding(durable, "read", match="/blobs/"):
            assert drains.room.place(2, size) == 1
            assert drains.settle(30)
        until(lambda: drains.room.place(2, size) == 0)
    assert steps_of(fast) == []

"""Faults of the base of several ranks cost space, or the save: never data."""

import logging
import threading

import pytest
import torch
from tests.integration.ranks.saving import Job
from tests.integration.ranks.test_deltas import (
    RULES,
    bases_of,
    check,
    depths_of,
    in_rows,
    plain,
    save_all,
    warm,
    weights,
)
from tests.integration.support import checkpointer, memory

from penstock.core.abc.delegating import DelegatingBackend
from penstock.core.errors import RankError, StorageError
from penstock.core.format.commit_record import decode_intent
from penstock.core.format.records import commit_name, intent_name

__all__ = ["warm"]  # the fixture compiles the codec

LARGE = ("model", "large")


def run(store_of, step, state_of=in_rows, count=2):
    job = Job(count, store_of, rules=RULES)
    return job.run(lambda ckpt, rank: ckpt.save(state_of(step, rank, count), step).result(300))


def names(store):
    return [blob.name for blob in store.list("data/")]


class Before(DelegatingBackend):
    """Calls something once, before the first read of a record."""

    def __init__(self, inner, record, call):
        super().__init__(inner)
        self._record = record
        self._call = call

    def read_record(self, name, /, *, limit_bytes):
        call = self._call
        if name == self._record and call is not None:
            self._call = None
            call()
        return super().read_record(name, limit_bytes=limit_bytes)


def test_only_a_rank_with_a_deleted_base_stores_whole(caplog):
    """The deletion comes when rank 0 has confirmed the base: its data stays while a save may."""
    store = memory()
    save_all(store, 2, [0, 1], in_rows)
    intents = []

    def delete():
        with checkpointer(store) as ckpt:
            used = {name.split("/")[1] for name in names(store)}
            record = ckpt._catalog.record(1)
            attempt = (used - {record.uid, *record.references}).pop()
            name = intent_name(attempt)
            intents.append(decode_intent(store.read_record(name, limit_bytes=1 << 20), name))
            intents.append(record)
            ckpt.delete(1)
            ckpt.delete(0)
            ckpt._catalog.prune(grace_s=0)

    with caplog.at_level(logging.WARNING, "penstock"):
        found = run(lambda r: Before(store, commit_name(1, 0), delete) if r else store, 2)
    assert [report.step for report in found] == [2, 2]
    assert depths_of(store, 2, LARGE) == {(0, 0): {3}, (300, 0): {1}}
    assert "this rank refers to no earlier checkpoint" in caplog.text
    intent, record = intents
    assert set(intent.references) == {record.uid, *record.references}
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [2]
    check(store, [2])
    save_all(store, 2, [3], in_rows)
    check(store, [2, 3])


def test_a_rank_with_a_replaced_base_stores_whole():
    store = memory()
    save_all(store, 2, [0, 1], in_rows)

    def replace():
        with checkpointer(store) as ckpt:
            ckpt.delete(1)
        save_all(store, 2, [1], lambda step, rank, count: in_rows(7, rank, count))

    found = run(lambda rank: Before(store, commit_name(1, 0), replace) if rank else store, 2)
    assert [report.step for report in found] == [2, 2]
    assert depths_of(store, 2, LARGE) == {(0, 0): {3}, (300, 0): {1}}
    check(store, [0, 2])


@pytest.mark.parametrize(("how", "victim"), [("damaged", 0), ("gone", 1), ("short", 0)])
def test_an_unreadable_base_costs_space_only_on_that_rank(how, victim, tmp_path, caplog):
    root = f"posix://{tmp_path}"
    save_all(root, 2, [0], in_rows)
    with checkpointer(root) as ckpt:
        contents = ckpt.open(0).contents
        record = contents.everywhere({LARGE: ()})[victim]
        frame = record.frames[record.shards[0].chunks[0].frame]
        blob = tmp_path / record.head.blobs[frame.blob].name
    assert blob.name == f"0000{victim}-0.enc"
    data = bytearray(blob.read_bytes())
    data[frame.offset + 100] ^= how == "damaged"
    blob.write_bytes(data if how == "damaged" else data[:-1])
    if how == "gone":
        blob.unlink()
    with caplog.at_level(logging.WARNING, "penstock"):
        found = run(root, 1)
    assert [report.step for report in found] == [1, 1]
    assert ("is damaged" if how == "damaged" else "lost some of its files") in caplog.text
    depths = depths_of(root, 1, LARGE)
    whole, delta = (0, 300) if victim == 0 else (300, 0)
    assert 1 in depths[whole, 0]
    assert depths[delta, 0] == {2}
    check(root, [1])


class Full(DelegatingBackend):
    """A store without room for blobs."""

    def create(self, name, /, *, size_hint=0):
        msg = f"{name}: No space left on device"
        raise StorageError(msg)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_failed_save_leaves_borrowed_data(victim):
    store = memory()
    save_all(store, 2, [0, 1], in_rows)
    before = names(store)
    found = run(lambda rank: Full(store) if rank == victim else store, 2)
    assert [type(error) for error in found].count(RankError) == 1
    assert names(store) == before
    check(store, [0, 1])
    save_all(store, 2, [2], in_rows)
    assert bases_of(store, [2]) == [(1, 2)]
    check(store, range(3))


def test_a_base_that_only_some_ranks_could_use_is_in_the_record():
    """Rank 0 has no data to encode against it; the others have some."""
    store = memory()

    def state_of(step, rank, count):
        del count
        return {"mine": rank} if rank == 0 else {"w": weights(step)["model"]["large"]}

    for step in range(3):
        assert [r.step for r in run(store, step, state_of)] == [step, step]
    assert bases_of(store, range(3)) == [None, (0, 1), (1, 2)]
    with checkpointer(store) as ckpt:
        for step in range(3):
            assert torch.equal(ckpt.load(step)["w"], weights(step)["model"]["large"])


def test_a_save_during_deletion_of_its_base_restores():
    """As in `test_only_a_rank_with_a_deleted_base_...`, at any moment of the save."""
    store = memory()
    save_all(store, 2, [0], plain)
    stop = threading.Event()

    def delete():
        with checkpointer(store) as ckpt:
            while not stop.wait(0.002):
                for step in ckpt.steps()[:-1]:
                    ckpt.delete(step)
                ckpt._catalog.prune(grace_s=3600)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        save_all(store, 2, range(1, 12), plain)
    finally:
        stop.set()
        thread.join(300)
    check(store, [11])

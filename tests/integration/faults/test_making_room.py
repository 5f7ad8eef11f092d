"""A full disk heals: overdue retention and leftovers of dead savers go before a save needs room."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.integration.support import blank, checkpointer, make_state, memory, same

from penstock import StorageError, StorageFullError
from penstock.core.concurrency.processes import identity_of, is_over
from penstock.core.concurrency.timing import SYSTEM_CLOCK
from penstock.core.format.commit_record import decode_intent, encode_intent
from penstock.core.format.records import (
    IntentRecord,
    blob_name,
    data_uid,
    index_name,
    intent_name,
    part_name,
)
from penstock.testing.faults import FaultyBackend, WrapperBackend

LEFT = "e" * 32


class Small(WrapperBackend):
    """A store with little room, which reports the rest."""

    def __init__(self, inner, room_bytes):
        super().__init__(inner)
        self.room_bytes = room_bytes

    def free_bytes(self):
        return self.room_bytes - sum(info.size_bytes for info in self.inner.list(""))

    def create(self, name, /, *, size_hint=None):
        if self.free_bytes() < (size_hint or 0):
            msg = f"cannot write {name}: No space left on device (ENOSPC)"
            raise StorageFullError(msg)
        return super().create(name, size_hint=size_hint)


@pytest.fixture
def store():
    return memory()


@pytest.fixture(scope="module")
def dead():
    """The identity of an earlier process with this one's number."""
    return f"{identity_of(os.getpid())}0"


def test_a_process_counts_as_ended_only_once_it_has(dead):
    process = subprocess.Popen(["sleep", "600"])
    identity = identity_of(process.pid)
    assert not is_over(identity)
    process.kill()
    process.wait()
    assert is_over(identity)
    assert is_over(dead)
    assert not is_over(identity_of(os.getpid()))
    assert not is_over(identity_of(os.getppid()))
    for text in ("", "x", f"{dead}/", dead.rpartition("-")[0], f"{dead.rpartition('/')[0]}/-1-5"):
        assert not is_over(text)


def test_processes_have_no_identity_with_proc_of_another_pid_namespace():
    """Its numbers belong to other processes there, which may end while this one runs."""
    code = (
        "import os, penstock.core.concurrency.processes as p; print([p.identity_of(os.getpid())])"
    )
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        sys.executable,
        "-c",
        code,
    ]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespaces can be made here")
    assert done.stdout.strip() == "['']"


def save(backend, *steps, **options):
    with checkpointer(backend, **options) as ckpt:
        for step in steps:
            ckpt.save(make_state(step), step, mode="blocking")


def leftover(store, process, *, place=None, sealed=False, size_bytes=1000, references=()):
    """The leftovers of a saver killed during its writes; `sealed`: right before its record."""
    place = store.url if place is None else place
    now = SYSTEM_CLOCK.now_iso()
    intent = IntentRecord(
        LEFT, 99, references, "h", started=now, refreshed=now, process=process, place=place
    )
    store.publish(intent_name(LEFT), encode_intent(intent))
    names = [blob_name(LEFT, 0, 0, "raw")]
    names += [part_name(LEFT, 0), index_name(LEFT)] if sealed else []
    for name in names:
        store.publish(name, bytes(size_bytes))


def is_left(store):
    return any(data_uid(info.name) == LEFT for info in store.list("data/"))


def test_an_intent_names_process_and_host(store):
    with checkpointer(store) as ckpt:
        uid = ckpt.save(make_state(1), 1, mode="blocking").result().uid
        data = store.read_record(intent_name(uid), limit_bytes=1 << 20)
        intent = decode_intent(data, intent_name(uid))
        assert intent.process == identity_of(os.getpid())
        assert intent.place == ckpt._backend.url
    assert not is_over(intent.process)


def test_overdue_retention_runs_before_the_first_save_not_on_open(store):
    save(store, 1, 2, 3, 4)
    faulty = FaultyBackend(store)
    with checkpointer(faulty, retention={"keep_last": 1}) as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4]
        ckpt.restore(blank(make_state(0)), 2)
        faulty.fail("publish", StorageFullError("no space left"), match="intent.json")
        with pytest.raises(StorageFullError):
            ckpt.save(make_state(5), 5, mode="blocking")
        assert ckpt.steps() == [2, 4]  # restored from, and the newest
        ckpt.rewind(2)
        ckpt.save(make_state(30), 3, mode="blocking")
        ckpt.wait()
        assert ckpt.steps() == [2, 3]


def test_overwritten_data_stays_until_the_commit(store):
    save(store, 1, 2, 3)
    faulty = FaultyBackend(store)
    with checkpointer(faulty, retention={"keep_last": 1}) as ckpt:
        faulty.fail("publish", match="index")
        with pytest.raises(StorageError):
            ckpt.save(make_state(10), 1, mode="blocking", overwrite=True)
        assert ckpt.steps() == [1, 3]
        assert same(ckpt.load(1), make_state(1))


def test_a_save_fits_if_retention_was_never_reached(store):
    """Each process was killed after its commit: four checkpoints fill the store."""
    save(store, 1, 2, 3, 4)
    used = sum(info.size_bytes for info in store.list(""))
    small = Small(store, used + 1000)
    with pytest.raises(StorageFullError):
        save(small, 5)
    save(small, 5, retention={"keep_last": 1})
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [5]
        assert same(ckpt.load(), make_state(5))


@pytest.mark.parametrize(
    ("does", "stays"),
    [
        ("died", False),
        ("lives", True),
        ("died elsewhere", True),
        ("died in another namespace", True),
        ("died, and was copied", True),
        ("died right before its record", True),
        ("died, and its intent is gone", True),
        ("is of an older release", True),
    ],
)
def test_leftovers_of_dead_local_savers_are_deleted_at_once(does, stays, store, dead):
    boot, space, process = dead.split("/")
    identity = {
        "lives": identity_of(os.getppid()),
        "died elsewhere": "/".join((boot[::-1], space, process)),
        "died in another namespace": "/".join((boot, space[:-2] + "9]", process)),
        "is of an older release": "",
    }.get(does, dead)
    save(store, 1)
    place = "memory://elsewhere" if does == "died, and was copied" else None
    leftover(store, identity, place=place, sealed=does == "died right before its record")
    if does == "died, and its intent is gone":
        store.delete([intent_name(LEFT)])
    with checkpointer(store) as ckpt:
        assert is_left(store)  # not at opening
        ckpt.save(make_state(2), 2, mode="blocking")
        assert is_left(store) == stays
        assert same(ckpt.load(1), make_state(1))
        assert same(ckpt.load(2), make_state(2))


def test_data_only_a_dead_saver_would_borrow_goes_with_its_data(store, dead):
    save(store, 1)
    lent = blob_name("d" * 32, 0, 0, "raw")  # of a checkpoint that was deleted since
    store.publish(lent, b"x")
    leftover(store, dead, references=("d" * 32,))
    save(store, 2)
    assert not is_left(store)
    assert not store.list(lent)


def test_a_dead_savers_data_stays_if_records_are_unreadable(store, dead):
    """Of a run being copied over its own source, say."""
    leftover(store, dead)
    save(store, 1)
    assert is_left(store)


def test_later_saves_make_room_when_it_is_short(store, dead):
    save(store, 1)
    size = sum(info.size_bytes for info in store.list(""))
    small = Small(store, 5 * size + (4 << 20))
    with checkpointer(small) as ckpt:
        ckpt.save(make_state(2), 2, mode="blocking")
        leftover(store, dead)
        ckpt.save(make_state(3), 3, mode="blocking")
        assert is_left(store)  # there is room enough
        small.room_bytes = 5 * size
        ckpt.save(make_state(4), 4, mode="blocking")
        assert not is_left(store)


def test_a_full_store_drops_the_restored_step_once_a_newer_one_exists(store):
    save(store, 6)
    size = sum(info.size_bytes for info in store.list(""))
    small = Small(store, 100 * size + (8 << 20))
    with checkpointer(small, retention={"keep_last": 1}) as ckpt:
        ckpt.restore(blank(make_state(6)))
        ckpt.save(make_state(7), 7, mode="blocking")
        ckpt.wait()
        assert ckpt.steps() == [6, 7]  # there is room for the restored step
        small.room_bytes = 3 * size
        ckpt.save(make_state(8), 8, mode="blocking")
        ckpt.wait()
        assert ckpt.steps() == [8]
        assert same(ckpt.load(8), make_state(8))


def test_a_full_store_keeps_the_restored_step_until_a_newer_one(store):
    save(store, 6, 7)
    with checkpointer(Small(store, 0), retention={"keep_last": 1}) as ckpt:
        ckpt.restore(blank(make_state(6)), step=6)
        with pytest.raises(StorageFullError):
            ckpt.save(make_state(8), 8, mode="blocking")
        assert ckpt.steps() == [6, 7]


def test_a_full_store_is_cleaned_up_before_a_save_fails(store, dead):
    save(store, 1, 2, 3)
    faulty = FaultyBackend(store)
    with checkpointer(faulty, retention={"keep_last": 1}) as ckpt:
        ckpt.save(make_state(4), 4, mode="blocking")
        ckpt.wait()
        leftover(store, dead)
        faulty.fail("write", StorageFullError("No space left on device (ENOSPC)"))
        with pytest.raises(StorageFullError, match=r"ENOSPC.*has been deleted: save again"):
            ckpt.save(make_state(5), 5, mode="blocking")
        assert not is_left(store)
        ckpt.save(make_state(5), 5, mode="blocking")
        assert same(ckpt.load(5), make_state(5))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_full_store_error_says_what_prune_would_free(recorded, store):
    if recorded:
        save(store, 1)
    leftover(store, "", size_bytes=3 << 20)
    faulty = FaultyBackend(store)
    faulty.fail("write", StorageFullError("No space left on device (ENOSPC)"), times=None)
    way = "--grace 0s" if recorded else "--all --grace 0s"
    with checkpointer(faulty) as ckpt:
        message = (
            rf"ENOSPC.*3.0 MiB could be freed by `penstock prune {store.url} {way}`, if no other"
        )
        with pytest.raises(StorageFullError, match=message):
            ckpt.save(make_state(2), 2, mode="blocking")
    assert is_left(store)


def test_a_full_store_error_says_what_prune_frees_of_old_leftovers(store):
    class Aged(FaultyBackend):
        def list(self, prefix, /):
            return [
                replace(i, modified_s=1.0) if LEFT in i.name else i for i in super().list(prefix)
            ]

    save(store, 1)
    leftover(store, "", size_bytes=3 << 20)
    aged = Aged(store)
    aged.fail("write", StorageFullError("No space left on device (ENOSPC)"))
    message = rf"3.0 MiB could be freed by `penstock prune {store.url}`$"
    with checkpointer(aged) as ckpt, pytest.raises(StorageFullError, match=message):
        ckpt.save(make_state(2), 2, mode="blocking")
    assert is_left(store)


def test_a_full_store_without_garbage_is_reported_as_full(store, caplog):
    save(store, 1)
    faulty = FaultyBackend(store)
    faulty.fail("write", StorageFullError("No space left on device (ENOSPC)"), times=None)
    faulty.fail("list", match="data/", times=None)
    with checkpointer(faulty) as ckpt, pytest.raises(StorageFullError, match="ENOSPC"):
        ckpt.save(make_state(2), 2, mode="blocking")
    assert "making room on a full store failed" in caplog.text


def test_failed_housekeeping_is_logged_and_fails_no_save(store, caplog):
    save(store, 1, 2)
    faulty = FaultyBackend(store)
    with checkpointer(faulty, retention={"keep_last": 1}) as ckpt:
        faulty.fail("delete", match="commits/")
        ckpt.save(make_state(3), 3, mode="blocking")
        ckpt.wait()
        assert ckpt.steps() == [3]
    assert any("making room before a save failed" in r.getMessage() for r in caplog.records)

"""What is logged: a line per save and restore, details for whoever looks for them, only text."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import penstock
from penstock.backends.memory import MemoryBackend
from penstock.core.errors import StorageError
from penstock.testing.faults import FaultyBackend

STATE = {"w": torch.arange(40_000.0), "m": torch.ones(30_000), "epoch": 7}
RULES = [{"match": "m", "codecs": ["zstd"]}]


@pytest.fixture
def store():
    store = FaultyBackend(MemoryBackend(MemoryBackend.Config()))
    yield store
    store.close()


@pytest.fixture
def lines(caplog):
    """Messages of a level so far, which are then forgotten."""
    caplog.set_level(logging.DEBUG, "penstock")

    def take(level):
        found = [r.getMessage() for r in caplog.records if r.levelno == level]
        caplog.clear()
        return found

    return take


def settle(ckpt):
    """Until what follows a commit is over, too."""
    ckpt.wait()
    ckpt._job.released.wait()
    ckpt._job._capture_over.wait()


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


def test_details_of_a_save(store, lines):
    with penstock.Checkpointer(store, rules=RULES, retention={"keep_last": 1}) as ckpt:
        assert any("engine faulty" in line for line in lines(logging.DEBUG))
        ckpt.save(STATE, step=1)
        settle(ckpt)
        lines(logging.DEBUG)
        uid = ckpt.save(STATE, step=2, mode="blocking").result().uid
        settle(ckpt)
        details = lines(logging.DEBUG)
    plan = next(line for line in details if line.startswith("step 2: blocking save"))
    assert f"{uid}-0 of 3 objects, 280001 bytes (0 deferred), in 3 chunks" in plan
    for said in ("step 2: captured", "step 2: committed", "deleted by retention: steps 1"):
        assert said in details
    assert len([line for line in details if line.startswith(f"sealed data/{uid}/blobs/")]) == 2


def test_details_of_a_restore(store, lines):
    with penstock.Checkpointer(store, rules=RULES) as ckpt:
        uid = ckpt.save(STATE, step=2).result().uid
        settle(ckpt)
        lines(logging.DEBUG)
        report = ckpt.restore({**STATE}, include=["w", "m"])
        details = lines(logging.DEBUG)
    assert any(f"step 2: opened {uid}-0, 3 objects in 1 part(s)" in line for line in details)
    (reading,) = [line for line in details if "ranges" in line]
    assert "2 frames, 1 encoded, in 2 ranges" in reading
    assert f"{report.bytes_needed} bytes needed, {report.bytes_read} read" in reading


def test_more_chunks_do_not_make_more_lines(store, lines):
    counts = []
    for number, chunk_bytes in enumerate((1 << 20, 8192)):
        with penstock.Checkpointer(store, chunk_bytes=chunk_bytes, block_bytes=4096) as ckpt:
            lines(logging.DEBUG)
            ckpt.save(STATE, step=number)
            settle(ckpt)
            ckpt.restore({**STATE})
            ckpt.verify()
            details = lines(logging.DEBUG)
            counts.append(len(details))
    (plan,) = [line for line in details if "async save" in line]
    assert int(re.search(r"in (\d+) chunks", plan)[1]) > 30
    assert counts[0] == counts[1]


def angry(told):
    raise RuntimeError(str(told)) from ValueError("and why")


def test_what_is_logged_is_text_and_holds_nothing_alive(store, caplog):
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
    said = " ".join(r.getMessage() for r in caplog.records)
    for kind in (
        "durable",
        "failed",
        "restore_failed",
        "load_done",
        "verified",
        "deleted",
        "pruned",
    ):
        assert f"on_event raised at {kind}" in said
    assert "cleaning up after step 4 failed: no" in said
    assert "on_progress of the save of step 1 raised" in said
    for record in caplog.records:
        assert record.exc_info is None
        assert not record.args or all(isinstance(a, str | int | float) for a in record.args), record


def test_everything_that_is_published_has_a_line(store, lines):
    with penstock.Checkpointer(store) as ckpt:
        uid = ckpt.save(STATE, step=2).result().uid
        settle(ckpt)
        details = lines(logging.DEBUG)
    assert f"step 2: published data/{uid}/intent.json" in details
    assert "step 2: published commits/00000002-0.json" in details
    published = [line.split(":")[0] for line in details if line.startswith("published ")]
    assert published == [
        f"published data/{uid}/parts/00000.json.zst",
        f"published data/{uid}/index",
    ]


def test_cleaning_up_after_a_failure_has_a_line(store, lines):
    store.fail("create", StorageError("no"))
    with penstock.Checkpointer(store) as ckpt:
        assert ckpt.save(STATE, step=2).durable.exception() is not None
        settle(ckpt)
        uid = ckpt._job.uid
        assert f"step 2: cleaned up, data/{uid} is gone" in lines(logging.DEBUG)


def test_prune_says_why_each_attempt_stays_or_goes(store, lines):
    with penstock.Checkpointer(store) as ckpt:
        ckpt.save(STATE, step=2, mode="blocking")
        settle(ckpt)
        store.publish(f"data/{'0' * 32}/blobs/00000-0.raw", b"left behind")
        ckpt.prune()
        details = lines(logging.DEBUG)
    assert any(line.startswith("prune: of 2 attempts 1 stay") for line in details)
    assert f"prune: data/{'0' * 32} stays: it is gone, or younger than 86400 s" in details


def test_a_damaged_checkpoint_is_logged_as_text(store, caplog):
    with penstock.Checkpointer(store) as ckpt:
        for step in (1, 2):
            ckpt.save(STATE, step=step, mode="blocking")
        store.delete([b.name for b in store.list(f"data/{ckpt.info(2).uid}/blobs/")])
        ckpt.restore({**STATE}, on_damage="fallback")
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert all(isinstance(arg, str | int) for arg in record.args)

"""Metadata added after a save: overrides, places, and damage."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch
from tests.integration.support import Run, checkpointer, memory
from tests.integration.tiers.places import Places

from penstock import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    StorageError,
)
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.notes import NotesOfRun, write_note
from penstock.core.concurrency.workers import Workers
from penstock.core.copy.checkpoint_copy import CheckpointCopy
from penstock.core.format.commit_record import seal
from penstock.testing.faults import FaultyBackend, WrapperBackend

DELTAS = {"rules": [{"match": "**", "codecs": ["delta", "zstd"]}]}
DAY_S = 86400.0
BASE = torch.randint(1 << 15, 1 << 16, (5000,), generator=torch.Generator().manual_seed(0)).float()


def save(ckpt, *steps, **options):
    for step in steps:
        ckpt.save({"w": BASE + step}, step, mode="blocking", **options)
    ckpt.wait()


def noted(backend):
    return [info.name for info in backend.list("notes/")]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("notes") / "run")
    with run.open() as ckpt:
        save(ckpt, 1, 2, 3, metadata={"seed": 7, "loss": 9.0})
    return run


@pytest.fixture
def run(saved_run, tmp_path):
    return saved_run.copy_to(tmp_path / "run")


def test_later_annotations_override_earlier_keys(run):
    with run.open() as ckpt:
        ckpt.annotate(2, {"loss": 3.0, "by": "ada"})
        ckpt.annotate(2, {"loss": 2.0})
        assert ckpt.info(2).metadata == {"seed": 7, "loss": 2.0, "by": "ada"}
        assert ckpt.info(1).metadata == {"seed": 7, "loss": 9.0}
    with run.open() as ckpt:
        assert ckpt.open(2).info.metadata == {"seed": 7, "loss": 2.0, "by": "ada"}
        assert ckpt.verify(2).ok


def test_unstorable_values_are_refused_without_changes(run):
    with run.open() as ckpt:
        for metadata in (
            [], {1: 2}, {"x": object()}, {"x": "y" * (1 << 16)}, {"x": torch.ones(2)},
        ):  # fmt: skip
            with pytest.raises(ConfigError):
                ckpt.annotate(1, metadata)
        assert ckpt.info(1).metadata == {"seed": 7, "loss": 9.0}
    assert not (run.root / "notes").exists()


def test_missing_steps_cannot_be_annotated(run):
    with run.open() as ckpt:
        with pytest.raises(CheckpointNotFoundError, match="steps there: 1, 2, 3"):
            ckpt.annotate(4, {"loss": 1.0})
        run.flip(run.commit(3), 200)
        with pytest.raises(DamagedError):
            ckpt.annotate(3, {"loss": 1.0})


def test_annotation_of_the_save_in_flight_waits_for_its_commit(store, gate):
    faulty = FaultyBackend(store)
    with checkpointer(faulty) as ckpt:
        fault = faulty.block("publish", gate, match="commits/")
        handle = ckpt.save({"w": torch.ones(9)}, 1)
        assert fault.reached.wait(60)
        assert not handle.committed.done()
        threading.Timer(0.3, gate.set).start()  # or the step does not exist yet
        ckpt.annotate(1, {"loss": 1.0})
        assert ckpt.info(1).metadata == {"loss": 1.0}


def test_rank_0_writes_and_the_others_do_nothing(run, monkeypatch):
    """Like under torchrun; no rank waits for another."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, metadata in (("1", {"seed": 7, "loss": 9.0}), ("0", {"seed": 7, "loss": 1.0})):
        monkeypatch.setenv("RANK", rank)
        with run.open() as ckpt:
            ckpt.annotate(1, {"loss": 1.0})
            ckpt.pin(1, "best")
            assert ckpt.info(1).metadata == metadata
            assert ckpt.info(1).tags == (() if rank == "1" else ("best",))
            with pytest.raises(ConfigError):
                ckpt.annotate(1, {2: 3})


def test_overwrite_has_no_annotations_and_leaves_none(run):
    with run.open() as ckpt:
        ckpt.annotate(3, {"loss": 1.0})
        save(ckpt, 3, overwrite=True)
        assert ckpt.info(3).metadata == {}
        assert not noted(ckpt._backend)


@pytest.mark.parametrize(
    "delete",
    [
        lambda ckpt: ckpt.delete(2),
        lambda ckpt: ckpt.rewind(1),
        lambda ckpt: save(ckpt, 4),
    ],
    ids=["delete", "rewind", "retention"],
)
def test_notes_go_with_their_checkpoint_its_commit_record_first(run, delete):
    with run.open() as ckpt:
        ckpt.annotate(1, {"loss": 1.0})
        ckpt.annotate(2, {"loss": 2.0})
    with run.open() as ckpt:
        faulty = FaultyBackend(ckpt._backend.inner)
        with checkpointer(faulty, retention={"keep_last": 1}) as other:
            delete(other)
        calls = [names for call, names in faulty.calls if call == "delete"]
        first = {
            kind: n
            for n, names in reversed([*enumerate(calls)])
            for kind in {name.split("/")[0] for name in names}
        }
        assert first["commits"] < first["notes"]
        left = ckpt.steps()
        assert {info.name.split("/")[1] for info in ckpt._backend.list("notes/")} == {
            ckpt.info(step).uid for step in left if step == 1
        }


def test_notes_stay_while_a_borrowed_checkpoint_is_only_deleted(tmp_path):
    """Its blobs stay for the next one, its notes do not."""
    run = Run(tmp_path / "run")
    with run.open(**DELTAS) as ckpt:
        save(ckpt, 1, 2)
        assert ckpt.info(2).references
        ckpt.annotate(1, {"loss": 1.0})
        ckpt.delete(1)
        assert not noted(ckpt._backend)
        assert ckpt.verify(2).ok


def test_compaction_keeps_annotations_old_and_late(tmp_path):
    run = Run(tmp_path / "run")
    with run.open(**DELTAS) as ckpt:
        save(ckpt, 1, 2, metadata={"seed": 7})
        ckpt.annotate(2, {"loss": 1.0})
        before = ckpt.info(2).uid
        ckpt.compact([2])
        assert ckpt.info(2).uid != before
        assert ckpt.info(2).metadata == {"seed": 7, "loss": 1.0}
        ckpt.annotate(2, {"loss": 0.5})
        assert ckpt.info(2).metadata == {"seed": 7, "loss": 0.5}
        ckpt.delete(2)
        assert not noted(ckpt._backend)


def test_concurrent_annotations_both_count(run):
    class Between(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            if name.startswith("notes/") and not done:
                done.append(name)
                with run.open() as other:
                    other.annotate(1, {"theirs": 2})
            super().publish(name, data, exclusive=exclusive)

    done = []
    with run.open() as plain, checkpointer(Between(plain._backend.inner)) as ckpt:
        ckpt.annotate(1, {"mine": 1})
        assert ckpt.info(1).metadata == {"seed": 7, "loss": 9.0, "mine": 1, "theirs": 2}


def test_no_note_remains_on_a_concurrently_deleted_step(run):
    class Between(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            with run.open() as other:
                other.delete(1)
            super().publish(name, data, exclusive=exclusive)

    with run.open() as plain, checkpointer(Between(plain._backend.inner)) as ckpt:
        with pytest.raises(CheckpointGoneError, match="nothing was added"):
            ckpt.annotate(1, {"loss": 1.0})
        assert not noted(ckpt._backend)


def test_prune_deletes_notes_left_by_a_killed_deletion():
    backend = memory()
    with checkpointer(backend) as ckpt:
        save(ckpt, 1, 2)
        ckpt.annotate(1, {"loss": 1.0})
        ckpt.annotate(2, {"loss": 2.0})
        uid = ckpt.info(1).uid
        left = [info.name for info in backend.list(f"notes/{uid}/")]
        data = [info.name for info in backend.list(f"data/{uid}/")]
        backend.delete(["commits/00000001-0.json", *data])
        ckpt.prune()
        assert set(left) < set(noted(backend))  # they are too young
    with checkpointer(backend, grace_s=1e-9) as ckpt:
        assert ckpt.prune(dry_run=True).uids == (uid,)
        assert set(left) < set(noted(backend))
        report = ckpt.prune()
        assert (report.uids, report.names) == ((uid,), 1)
        assert len(noted(backend)) == 1
        assert ckpt.info(2).metadata == {"loss": 2.0}


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def annotated(run):
    """Two notes on step 2; the name of the later one."""
    with run.open() as ckpt:
        ckpt.annotate(2, {"loss": 3.0, "by": "ada"})
        ckpt.annotate(2, {"loss": 2.0})
        return noted(ckpt._backend)[1]


def forged(run, name):
    """A whole note under another name."""
    earlier = min((run.root / name).parent.iterdir())
    run.write(name, earlier.read_bytes())


def of_another_kind(run, name):
    run.write(name, seal({"uid": name.split("/")[1], "number": 2}))


def folder(run, name):
    run.remove(name)
    (run.root / name).mkdir()
    run.write(f"{name}/inside", b"")


@pytest.mark.parametrize(
    "damage",
    [
        lambda run, name: run.flip(name, 150),
        lambda run, name: run.write(name, b"x" * (1 << 20)),
        forged,
        of_another_kind,
        folder,
    ],
    ids=["flipped", "long", "forged", "other-fields", "folder"],
)
def test_damaged_note_is_reported_and_hides_no_other(run, annotated, damage, caplog):
    damage(run, annotated)
    with run.open() as ckpt:
        assert ckpt.info(2).metadata == {"seed": 7, "loss": 3.0, "by": "ada"}
        assert "a note is ignored" in caplog.text
        assert annotated in caplog.text
        report = ckpt.verify(2)
        assert [found.what.startswith(annotated) for found in report.damaged] == [True]
        assert not report.ok
        assert ckpt.verify(1).ok
        assert ckpt.steps() == [1, 2, 3]
        assert ckpt.load(2)["w"][0] == BASE[0] + 2
        ckpt.annotate(2, {"loss": 1.0})
        assert ckpt.info(2).metadata["loss"] == 1.0


# -- copies and tiers ------------------------------------------------------------------------------


def copied(source, target, step=1):
    record = Catalog(source).record(step)
    with closing(Workers(2)) as workers:
        CheckpointCopy(source, target, record, workers=workers, grace_s=DAY_S).run()


def notes_of(backend, step=1):
    record = Catalog(backend).record(step)
    return NotesOfRun.of(backend, record).read(record)


def test_copy_gets_notes_before_its_record():
    source, target = memory(), FaultyBackend(memory())
    with checkpointer(source) as ckpt:
        save(ckpt, 1)
        ckpt.annotate(1, {"loss": 1.0})
    copied(source, target)
    published = [names[0].split("/")[0] for call, names in target.calls if call == "publish"]
    assert published.index("notes") < published.index("commits")
    assert notes_of(target).metadata == {"loss": 1.0}


def test_note_added_during_a_copy_is_carried_over():
    source, target = memory(), memory()
    with checkpointer(source) as ckpt:
        save(ckpt, 1)

        class Between(WrapperBackend):
            def publish(self, name, data, /, *, exclusive=False):
                super().publish(name, data, exclusive=exclusive)
                if name.startswith("commits/"):
                    ckpt.annotate(1, {"loss": 1.0})

        copied(source, Between(target))
    assert notes_of(target).metadata == {"loss": 1.0}


def test_copy_that_commits_while_a_note_is_written_gets_it(tmp_path):
    class Between(WrapperBackend):
        def publish(self, name, data, /, *, exclusive=False):
            if name.startswith("notes/"):
                copied(fast, durable)
            super().publish(name, data, exclusive=exclusive)

    fast, durable = memory(), memory()
    with checkpointer(fast) as ckpt:
        save(ckpt, 1)
    config = TieredConfig(fast="memory://a", durable="memory://b")
    tiers = TieredBackend(config, fast=Between(fast), durable=durable)
    write_note(tiers, Catalog(fast).record(1), {"loss": 1.0}, {})
    assert notes_of(durable).metadata == notes_of(fast).metadata == {"loss": 1.0}
    tiers.close()


def test_second_copy_carries_later_notes():
    source, target = memory(), memory()
    with checkpointer(source) as ckpt:
        save(ckpt, 1)
        copied(source, target)
        ckpt.annotate(1, {"loss": 1.0})
        copied(source, target)
    assert notes_of(target).metadata == {"loss": 1.0}


def test_damaged_note_is_copied_verbatim():
    source, target = memory(), memory()
    with checkpointer(source) as ckpt:
        save(ckpt, 1)
        ckpt.annotate(1, {"loss": 1.0})
        ckpt.annotate(1, {"by": "ada"})
    name = noted(source)[0]
    source.publish(name, b"torn")
    copied(source, target)
    assert notes_of(target).metadata == {"by": "ada"}
    assert list(notes_of(target).damaged) == [name]


def test_annotations_are_in_each_tier_that_has_the_checkpoint():
    places = Places()
    with places.open() as ckpt:
        save(ckpt, 1)
        ckpt._drains.settle(60)
        ckpt.annotate(1, {"loss": 1.0})
        assert ckpt.info(1).metadata == {"loss": 1.0}
    for place in (places.fast, places.durable):
        assert notes_of(place).metadata == {"loss": 1.0}


def test_annotation_missing_in_a_tier_is_copied_there_before_eviction():
    places = Places()
    with places.open() as ckpt:
        save(ckpt, 1)
    broken = FaultyBackend(places.other())
    broken.fail("publish", match="notes/", error=StorageError("no answer"))
    with places.open(durable=broken) as ckpt:
        with pytest.raises(StorageError):
            ckpt.annotate(1, {"loss": 1.0})
        assert ckpt.info(1).metadata == {"loss": 1.0}
        ckpt._drains.eviction.evict(0, Catalog(places.fast).record(1))
        assert places.steps() == ([], [1])
        assert ckpt.info(1).metadata == {"loss": 1.0}
        assert not noted(places.fast)


def test_note_damaged_in_one_tier_is_read_from_another():
    places = Places()
    with places.open() as ckpt:
        save(ckpt, 1)
        ckpt._drains.settle(60)
        ckpt.annotate(1, {"loss": 1.0})
        (name,) = noted(places.fast)
        places.fast.publish(name, b"torn")
        assert ckpt.info(1).metadata == {"loss": 1.0}
        assert [found.what for found in ckpt.verify(1).damaged] == [name]
        assert ckpt.verify(1, repair=True).ok
        assert ckpt.verify(1).ok
        assert ckpt.info(1).metadata == {"loss": 1.0}


def test_damaged_note_does_not_block_data_repair():
    places = Places()
    with places.open() as ckpt:
        save(ckpt, 1)
        ckpt._drains.settle(60)
        ckpt.annotate(1, {"loss": 1.0})
        (name,) = noted(places.fast)
        for place in (places.fast, places.durable):
            place.publish(name, b"torn")
        blob = next(i.name for i in places.fast.list("data/") if i.name.endswith(".raw"))
        places.fast.publish(blob, bytes(places.fast.stat(blob).size_bytes))
        assert {found.what for found in ckpt.verify(1).damaged} == {name, "w"}
        ckpt.verify(1, repair=True)
        assert {found.what for found in ckpt.verify(1).damaged} == {name}
        assert ckpt.load(1)["w"][0] == BASE[0] + 1

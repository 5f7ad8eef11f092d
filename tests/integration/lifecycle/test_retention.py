"""Retention by a metric and by age: kept steps, deleted ones, and undeletable ones."""

from __future__ import annotations

import os
import time

import pytest
import torch
from tests.integration.support import Run, checkpointer, memory
from tests.integration.tiers.places import Places

from penstock import CheckpointGoneError
from penstock.testing.faults import WrapperBackend

BEST = {"keep_best": 2, "best_metric": "loss", "best_mode": "min"}
DAY_S = 86400.0


def save(ckpt, losses, **options):
    """Step N with the N-th of these losses; None: it has no metadata."""
    first = (ckpt.latest() or 0) + 1
    for step, loss in enumerate(losses, first):
        metadata = None if loss is None else {"loss": loss}
        state = {"w": torch.full((100,), float(step))}
        ckpt.save(state, step, mode="blocking", metadata=metadata, **options)
        ckpt.wait()


def saved(losses):
    """A store with step N of the N-th of these losses, and a newest step without one."""
    backend = memory()
    with checkpointer(backend) as ckpt:
        save(ckpt, [*losses, None])
    return backend


def left(backend, **retention):
    """The remaining steps of a copy of the store."""
    copy = memory()
    copy._store.blobs.update(backend._store.blobs)
    with checkpointer(copy, retention=retention) as ckpt:
        ckpt._catalog.apply_retention(ckpt._config.retention)
        return ckpt.steps()


LARGEST = {**BEST, "best_mode": "max"}


@pytest.mark.parametrize(
    ("losses", "rules"),
    [
        (
            [3.0, 1.0, 2.0, 4.0],
            [
                (BEST, [2, 3, 5]),
                (LARGEST, [1, 4, 5]),
                ({**BEST, "best_metric": "accuracy"}, [5]),
                ({**BEST, "keep_last": 2}, [2, 3, 4, 5]),
                ({**BEST, "keep_every": 4}, [2, 3, 4, 5]),
                ({**BEST, "keep_best": 9}, [1, 2, 3, 4, 5]),
            ],
        ),
        ([1.0, 1.0, 1.0, 2.0], [(BEST, [2, 3, 5])]),  # the newer of equal ones
        ([1.0, 1.0, 1.0, 0.5], [(LARGEST, [2, 3, 5])]),
        ([1, 2.5, 0, 10**400], [(BEST, [1, 3, 5]), (LARGEST, [2, 4, 5])]),
    ],
    ids=["different", "equal", "equal-max", "integers"],
)
def test_best_checkpoints_stay_and_the_newest(losses, rules):
    backend = saved(losses)
    for retention, kept in rules:
        assert left(backend, **retention) == kept, retention


def test_non_finite_metrics_never_win():
    bad = [None, float("nan"), float("inf"), float("-inf"), "0", True, [0.0], {"x": 1}]
    backend = saved([*bad[:4], 1.0, *bad[4:], 2.0, None])
    for rules in (BEST, LARGEST):
        assert left(backend, **rules) == [5, 10, 12]


def test_metrics_added_later_count():
    backend = memory()
    with checkpointer(backend, retention={**BEST, "keep_last": 2}) as ckpt:
        for loss in (3.0, 1.0, 2.0, 4.0, 5.0):
            save(ckpt, [9.0])
            ckpt.annotate(ckpt.latest(), {"loss": loss})
        assert ckpt.steps() == [2, 3, 4, 5]
        ckpt.annotate(4, {"loss": 0.5})
        save(ckpt, [9.0, 9.0])
        assert ckpt.steps() == [2, 4, 6, 7]


def test_best_checkpoint_that_has_lost_data_does_not_count():
    backend = memory()
    with checkpointer(backend) as ckpt:
        save(ckpt, [3.0, 1.0, 2.0, 4.0])
        uid = ckpt.info(2).uid
    backend.delete([info.name for info in backend.list(f"data/{uid}/blobs/")])
    with checkpointer(backend, retention=BEST) as ckpt:
        save(ckpt, [None])
        assert ckpt.steps() == [1, 2, 3, 5]  # the two best whole ones, and better ones


def test_checkpoint_with_a_damaged_note_is_never_deleted(caplog):
    for retention in (BEST, {"keep_last": 1}):
        backend = memory()
        with checkpointer(backend) as ckpt:
            save(ckpt, [3.0, 1.0, 2.0, 4.0])
            ckpt.annotate(1, {"loss": 0.0})
        (note,) = backend.list("notes/")
        backend.publish(note.name, b"torn")
        with checkpointer(backend, retention=retention) as ckpt:
            save(ckpt, [None])
            assert ckpt.steps() == ([1, 2, 3, 5] if retention is BEST else [1, 5])
        assert "a note is ignored" in caplog.text


def test_best_checkpoint_keeps_borrowed_data():
    """A step that others need goes, its data stays."""
    rules = [{"match": "**", "codecs": ["delta", "zstd"]}]
    retention = {"keep_best": 1, "best_metric": "loss", "best_mode": "min"}
    grown = torch.randint(1 << 15, 1 << 16, (5000,)).float()
    with checkpointer(memory(), rules=rules, retention=retention) as ckpt:
        for step, loss in enumerate([3.0, 2.0, 1.0, 4.0, 5.0], 1):
            ckpt.save({"w": grown + step}, step, mode="blocking", metadata={"loss": loss})
            ckpt.wait()
        assert ckpt.steps() == [3, 5]
        assert ckpt.info(3).references
        for step in (3, 5):
            assert torch.equal(ckpt.load(step)["w"], grown + step)
            assert ckpt.verify(step).ok


def test_best_checkpoint_stays_in_tiers_with_its_metric_in_any():
    places = Places()
    with places.open() as ckpt:
        save(ckpt, [3.0, 3.0, 3.0, 3.0])
        ckpt._drains.settle(60)
        ckpt.annotate(2, {"loss": 1.0})
    with places.open(retention={**BEST, "keep_best": 1}) as ckpt:
        save(ckpt, [None, None])
        ckpt._drains.settle(60)
        ckpt.wait()
        assert 2 in ckpt.steps()
        assert 1 not in ckpt.steps()
    assert all(2 in steps for steps in places.steps())


# -- pins ------------------------------------------------------------------------------------------


def test_retention_deletes_no_pinned_checkpoint():
    backend = memory()
    with checkpointer(backend, retention={"keep_last": 1}) as ckpt:
        save(ckpt, [None])
        ckpt.pin(1, "paper-v1")
        ckpt.pin(1, "best")
        save(ckpt, [None, None])
        assert ckpt.steps() == [1, 3]
        assert ckpt.info(1).tags == ("best", "paper-v1")
        assert ckpt.info(1).metadata == ckpt.info(3).metadata == {}
        assert ckpt.info(3).tags == ()
        ckpt.unpin(1, "best")
        ckpt.unpin(1, "never-was")
        save(ckpt, [None])
        assert ckpt.steps() == [1, 4]
        ckpt.unpin(1, "paper-v1")
        assert ckpt.info(1).tags == ()
        save(ckpt, [None])
        assert ckpt.steps() == [5]


def test_overdue_retention_spares_pins_also_in_tiers():
    places = Places()
    with places.open() as ckpt:
        save(ckpt, [None, None, None])
        ckpt._drains.settle(60)
        ckpt.pin(1, "best")
    with places.open(retention={"keep_last": 1}) as ckpt:
        save(ckpt, [None, None])
        ckpt._drains.settle(60)
        ckpt.wait()
        assert 1 in ckpt.steps()
        assert 2 not in ckpt.steps()
    assert all(1 in steps for steps in places.steps())


@pytest.mark.parametrize(
    "delete", [lambda ckpt: ckpt.delete(2), lambda ckpt: ckpt.rewind(1)], ids=["delete", "rewind"]
)
def test_pinned_checkpoint_can_be_deleted_by_name(delete):
    backend = memory()
    with checkpointer(backend) as ckpt:
        save(ckpt, [None, None])
        ckpt.pin(2, "best")
        delete(ckpt)
        assert ckpt.steps() == [1]
        assert not backend.list("notes/")


# -- by age ----------------------------------------------------------------------------------------


def aged(root, *days):
    """Steps 1, 2, ... with these ages in days."""
    run = Run(root)
    with run.open() as ckpt:
        save(ckpt, [float(step) for step in range(1, len(days) + 1)])
    for step, age in enumerate(days, 1):
        then = time.time() - age * DAY_S
        os.utime(run.root / run.commit(step), (then, then))
    return run


@pytest.mark.parametrize("within", ["168h", 7 * DAY_S])
def test_checkpoints_within_the_time_stay(tmp_path, within):
    run = aged(tmp_path / "run", 9, 7.1, 6.9, 1)
    with run.open(retention={"keep_within": within}) as ckpt:
        save(ckpt, [None])
        assert ckpt.steps() == [3, 4, 5]


def test_age_is_counted_back_from_the_newest_checkpoint(tmp_path):
    """So a run that paused for a month loses nothing before it continues."""
    run = aged(tmp_path / "run", 39, 36, 31, 30)
    with run.open(retention={"keep_within": "7d"}) as ckpt:
        assert ckpt._catalog.apply_retention(ckpt._config.retention) == [1]
        assert ckpt.steps() == [2, 3, 4]


def test_time_in_the_future_makes_nothing_older(tmp_path):
    run = aged(tmp_path / "run", 3, 2, 1, -400)
    with run.open(retention={"keep_within": "7d"}) as ckpt:
        save(ckpt, [None])
        assert ckpt.steps() == [1, 2, 3, 4, 5]


def test_age_metric_and_number_keep_jointly(tmp_path):
    run = aged(tmp_path / "run", 30, 20, 10, 3)
    with run.open(retention={**BEST, "keep_best": 1, "keep_within": "5d"}) as ckpt:
        save(ckpt, [None])
        assert ckpt.steps() == [1, 4, 5]


# -- concurrent notes ------------------------------------------------------------------------------


def test_note_added_during_retention_saves_the_step_or_is_refused():
    """Step 1 becomes the best while retention, on another thread, is about to delete it."""
    backend, listed = memory(), []

    class Between(WrapperBackend):
        def list(self, prefix, /):
            found = super().list(prefix)
            if prefix.startswith("notes/") and prefix != "notes/" and not listed:
                listed.append(prefix)
                with pytest.raises(CheckpointGoneError, match="being, deleted"):
                    ckpt.annotate(1, {"loss": 0.0})
            return found

    with checkpointer(backend) as plain:
        save(plain, [3.0, 1.0, 2.0])
    with checkpointer(Between(backend), retention=BEST) as ckpt:
        save(ckpt, [None])
        assert listed
        assert ckpt.steps() == [2, 3, 4]
    assert not backend.list("notes/")


def test_note_added_after_the_retention_scan_spares_the_step():
    backend, listed = memory(), []

    class Between(WrapperBackend):
        def list(self, prefix, /):
            found = super().list(prefix)
            if prefix == "notes/" and not listed:
                listed.append(prefix)
                ckpt.annotate(1, {"loss": 0.0})
            return found

    with checkpointer(backend) as plain:
        save(plain, [3.0, 1.0, 2.0])
    with checkpointer(Between(backend), retention=BEST) as ckpt:
        save(ckpt, [None])
        assert 1 in ckpt.steps()
        assert ckpt.info(1).metadata == {"loss": 0.0}

"""Changes of the store between a check and the decision based on it."""

from __future__ import annotations

import os
import shutil

import pytest
from tests.integration.support import checkpointer, make_state, memory, same

from penstock import CommitUnknownError, DamagedError, LostRaceError, StorageError
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.config.model import Retention
from penstock.testing.faults import WrapperBackend


class Between(WrapperBackend):
    """Runs `action` once, before or after call `number` of `operation` that names `match`."""

    def __init__(self, inner, operation, match, action, *, after=False, number=1):
        super().__init__(inner)
        self.operation = operation
        self.match = match
        self.action = action
        self.after = after
        self.left = number

    def _around(self, operation, names, call):
        hit = operation == self.operation and any(self.match in name for name in names)
        self.left -= hit
        if not hit or self.left or self.action is None:
            return super()._around(operation, names, call)
        action, self.action = self.action, None
        if not self.after:
            action()
        try:
            return super()._around(operation, names, call)
        finally:
            if self.after:
                action()


def files(root):
    return PosixBackend(PosixConfig(path=str(root), direct_io="off"))


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_root_vanishing_before_the_commit_is_a_failure(replaced, tmp_path):
    root = tmp_path / "run"

    def vanish():
        shutil.rmtree(root)
        if replaced:
            root.mkdir()

    with checkpointer(Between(files(root), "publish", "commits/", vanish)) as ckpt:
        with pytest.raises(CommitUnknownError, match=r"its data is no longer on"):
            ckpt.save(make_state(1), 1, mode="blocking")
        assert ckpt.steps() == []  # the late record is gone again
        ckpt.save(make_state(2), 2, mode="blocking")
        assert same(ckpt.load(2), make_state(2))


def test_a_race_is_lost_even_if_the_winner_was_deleted():
    store = memory()

    def win():
        with checkpointer(store) as other:
            other.save(make_state(20), 2, mode="blocking")

    class WonThenDeleted(Between):
        def read_record(self, name, /, *, limit_bytes):
            if name.startswith("commits/") and self.action is None:
                Catalog(store).delete(2)
            return super().read_record(name, limit_bytes=limit_bytes)

    with checkpointer(WonThenDeleted(store, "publish", "commits/", win)) as ckpt:
        with pytest.raises(LostRaceError, match="unless it was deleted since"):
            ckpt.save(make_state(2), 2, mode="blocking")
        assert ckpt.steps() == []


def saved_again(store):
    """Delete step 1 and save it again, like a resume from an earlier one."""

    def action():
        with checkpointer(store) as other:
            other.delete(1)
        with checkpointer(store) as other:
            other.save(make_state(10), 1, mode="blocking")

    return action


def run_of(*steps):
    store = memory()
    with checkpointer(store) as ckpt:
        for step in steps:
            ckpt.save(make_state(step), step, mode="blocking")
    return store


def test_retention_spares_a_step_resaved_since_its_scan():
    store = run_of(1)
    with checkpointer(store) as ckpt:
        ckpt.save(make_state(2), 2, mode="blocking")

    def once_more():
        with checkpointer(store) as other:
            other.rewind(1)
        saved_again(store)()

    # Between its choice of the steps to delete, and the first deletion.
    backend = Between(store, "list", "commits/", once_more, after=True, number=2)
    assert Catalog(backend).apply_retention(Retention(keep_last=1)) == []
    assert backend.action is None
    with checkpointer(store) as ckpt:
        assert same(ckpt.load(1), make_state(10))
        assert ckpt.verify(1).ok


def test_a_delayed_rewind_spares_a_resaved_step():
    store = run_of(0, 1)
    # After its check of the record's owner, and before the check for the deletion.
    backend = Between(store, "read", "commits/00000001", saved_again(store), after=True)
    Catalog(backend).rewind(0)
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [0, 1]
        assert same(ckpt.load(1), make_state(10))


def test_a_dry_run_of_prune_writes_nothing():
    class ReadOnly(WrapperBackend):
        def _around(self, operation, names, call):
            assert operation in {"read", "list", "stat"}
            return super()._around(operation, names, call)

    store = run_of(1)
    store.publish(f"data/{'d' * 32}/index", b"left behind")
    report = Catalog(ReadOnly(store)).prune(grace_s=-60, dry_run=True)
    assert report.uids == ("d" * 32,)


def test_a_failed_save_leaves_no_folders(tmp_path):
    root = tmp_path / "run"

    def fail():
        raise OSError(5, "the disk is gone")

    with checkpointer(files(root)) as ckpt:
        ckpt.save(make_state(1), 1, mode="blocking")
    before = sorted(root.rglob("*"))
    failing = checkpointer(Between(files(root), "seal", "blobs/", fail))
    with failing as ckpt, pytest.raises(StorageError, match="the disk is gone"):
        ckpt.save(make_state(2), 2, mode="blocking")
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("form", ["link", "pipe", "folder"])
def test_a_replaced_record_is_damage_until_it_is_deleted(form, tmp_path):
    root = tmp_path / "run"
    with checkpointer(files(root)) as ckpt:
        for step in (1, 2):
            ckpt.save(make_state(step), step, mode="blocking")
        uid = ckpt.info(2).uid
        record = root / "commits/00000002-0.json"
        record.rename(tmp_path / "record")
        if form == "link":
            record.symlink_to(tmp_path / "record")
        elif form == "pipe":
            os.mkfifo(record)
        else:
            record.mkdir()
            (record / "inside").touch()
        assert ckpt.steps() == [1, 2]
        for use in (ckpt.latest, ckpt.load, lambda: ckpt.load(2)):
            with pytest.raises(DamagedError, match=r"step 2 .* is damaged"):
                use()
        assert ckpt.prune().refused
        assert (root / f"data/{uid}/index").is_file()
        tree = make_state(0)
        report = ckpt.restore(tree, on_damage="fallback")
        assert (report.step, report.fell_back_from) == (1, (2,))
        if form != "folder":
            ckpt.delete(2)
            assert ckpt.latest() == 1

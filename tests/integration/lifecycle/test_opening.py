"""What a trainer learns on opening a run, or by `check`, before its first save."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.integration.support import checkpointer, memory
from torch import nn

from penstock import (
    Checkpointer,
    CheckpointNotFoundError,
    ConfigError,
    StepExistsError,
    StorageError,
    UnsupportedStateError,
)

NOBODY = 65534


@pytest.fixture
def open_folder():
    """A folder that every user can reach; pytest's own are private."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def another_user():
    """Without the privileges of root, which can write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("forbidden", ["root", "commits", "above"])
def test_a_read_only_root_is_reported_on_open(forbidden, open_folder, caplog):
    root = open_folder / "run"
    if forbidden != "above":
        with Checkpointer(f"posix://{root}") as ckpt:
            ckpt.save({"a": torch.ones(2)}, 1, mode="blocking")
    closed = {"root": root, "commits": root / "commits", "above": open_folder}[forbidden]
    for folder in [root, *root.glob("*")]:
        if folder.exists():
            folder.chmod(0o777)
    closed.chmod(0o555)
    with another_user(), Checkpointer(f"posix://{root}") as ckpt:
        (warning,) = warnings_of(caplog)
        assert str(root) in warning
        assert "can only be read, so every save will fail" in warning
        assert "EACCES" in warning
        with pytest.raises(StorageError, match="EACCES"):
            ckpt.check({"a": torch.ones(2)})
        if forbidden != "above":
            assert torch.equal(ckpt.load()["a"], torch.ones(2))


def test_a_writable_root_is_opened_without_a_warning(tmp_path, caplog):
    for _ in range(2):
        with Checkpointer(f"posix://{tmp_path}/run") as ckpt:
            ckpt.save({"a": 1}, 1, mode="blocking", overwrite=True)
    assert warnings_of(caplog) == []


def test_a_file_in_place_of_the_root_is_reported_on_open(tmp_path, caplog):
    (tmp_path / "run").touch()
    with Checkpointer(f"posix://{tmp_path}/run"):
        assert "ENOTDIR" in caplog.text


def test_a_root_in_a_virtual_file_system_fails():
    ckpt = Checkpointer("posix:///proc/xx/yy")
    with pytest.raises(StorageError, match=r"^/proc/xx/yy: cannot publish .*such as /proc"):
        ckpt.save({"a": 1}, 1, mode="blocking")


def test_ranks_without_a_process_group_are_refused_with_a_remedy(monkeypatch, caplog):
    store = memory()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with checkpointer(store) as ckpt:
        with pytest.raises(ConfigError, match=r"WORLD_SIZE is 4.*init_process_group.*'alone'"):
            ckpt.save({"a": 1}, 1)
        assert warnings_of(caplog) == []  # it may be opened before the group exists
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore({"a": 0})
        (warning,) = warnings_of(caplog)
    assert "WORLD_SIZE is 4" in warning
    caplog.clear()
    monkeypatch.setenv("RANK", "3")  # the launcher's rank 0 logs it for all
    with checkpointer(store) as ckpt, pytest.raises(CheckpointNotFoundError):
        ckpt.restore({"a": 0})
    assert warnings_of(caplog) == []
    monkeypatch.setenv("RANK", "0")
    with checkpointer(store) as ckpt, pytest.raises(CheckpointNotFoundError):
        ckpt.restore({"a": 0})
    assert len(warnings_of(caplog)) == 1
    caplog.clear()
    with checkpointer(store, ranks="alone") as ckpt:
        ckpt.save({"a": 1}, 1, mode="blocking")
        assert ckpt.load() == {"a": 1}
    assert warnings_of(caplog) == []
    with checkpointer(store, ranks="alone") as ckpt, pytest.raises(StepExistsError) as raised:
        ckpt.save({"a": 1}, 1)  # like another process of the job with this root
    assert "has ranks='alone', and WORLD_SIZE is 4" in raised.value.__notes__[0]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with checkpointer(store):
        assert warnings_of(caplog) == []


def test_check_describes_a_save_and_writes_nothing():
    store = memory()
    model = nn.Linear(40, 40)
    state = {"model": model, "tied": model.weight, "epoch": 3}
    state["optimizer"] = torch.optim.SGD(model.parameters(), momentum=0.9)
    with checkpointer(store) as ckpt:
        found = ckpt.check(state, mode="lazy")
        assert store.list("") == []
        report = ckpt.save(state, 1, mode="lazy").result()
    assert found.objects == report.objects
    assert found.bytes_raw == report.bytes_raw
    assert found.deferred_bytes == report.deferred_bytes > 0
    assert found.staging_bytes > 0
    with checkpointer(memory(), staging_bytes=0, chunk_bytes=4096) as ckpt:
        assert ckpt.check(state, mode="async").staging_bytes == 2 * 4096


def test_check_raises_what_a_save_would_raise():
    with checkpointer(memory()) as ckpt:
        ckpt.save({"a": 1}, 5, mode="blocking")
        good = {"a": torch.ones(2)}
        with pytest.raises(UnsupportedStateError, match="here/0"):
            ckpt.check({"here": [object(), torch.ones(1)]})
        with pytest.raises(StepExistsError, match="exists"):
            ckpt.check(good, 5)
        ckpt.check(good, 5, overwrite=True)
        ckpt.check(good, 6)
        for wrong in ({"mode": "fast"}, {"metadata": {"a": object()}}, {"step": -1}):
            with pytest.raises(ConfigError):
                ckpt.check(good, **wrong)
        ckpt.save(good, 6, mode="blocking")

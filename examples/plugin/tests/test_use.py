"""Saving and restoring; only the configuration names the plugins."""

import sqlite3
from array import array, typecodes

import penstock
import pytest
import torch

CONFIG = """
backend = "sqlite://{path}?timeout_s=30"

[[rules]]
match = "model/**"
codecs = [{{ type = "lzma", preset = 0 }}]
"""


def state(factor):
    return {
        "model": {"weight": torch.arange(300_000.0) * factor},
        "seen": array("q", [n * factor for n in range(40_000)]),
        "small": array("d", [0.5 * factor]),
        "empty": array("f"),
        "step": 7 * factor,
    }


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "penstock.toml"
    file.write_text(CONFIG.format(path=tmp_path / "deep" / "run.db"))
    return file


def test_state_comes_back(config, tmp_path):
    with penstock.Checkpointer.from_config(config) as ckpt:
        report = ckpt.save(state(1), step=1, mode="blocking").result()
        assert report.exclusive
        assert report.bytes_stored < report.bytes_raw / 2
    assert [p.name for p in tmp_path.joinpath("deep").iterdir()] == ["run.db"]
    target = state(0)
    seen, weight = target["seen"], target["model"]["weight"]
    with penstock.Checkpointer.from_config(config) as ckpt:
        ckpt.restore(target, step=1)
        loaded = ckpt.load(step=1)
        assert ckpt.verify(step=1).ok
    for tree in (target, loaded):
        assert torch.equal(tree["model"]["weight"], torch.arange(300_000.0))
        for name in ("seen", "small", "empty"):
            assert tree[name] == state(1)[name]
            assert tree[name].typecode == state(1)[name].typecode
        assert tree["step"] == 7
    assert target["seen"] is seen
    assert target["model"]["weight"] is weight


def test_arrays_can_grow_as_soon_as_save_and_restore_return(config):
    growing = array("d", range(100_000))
    with penstock.Checkpointer.from_config(config) as ckpt:
        handle = ckpt.save({"growing": growing}, step=1, mode="async")
        growing.append(1.0)
        handle.result()
        target = {"growing": array("d", bytes(8 * 100_000))}
        ckpt.restore(target)
        target["growing"].append(1.0)
        loaded = ckpt.load()["growing"]
        loaded.append(1.0)
    assert target["growing"] == growing
    assert loaded == growing


def test_two_names_of_one_array_are_stored_once_and_stay_one(config):
    counts = array("q", range(50_000))
    with penstock.Checkpointer.from_config(config) as ckpt:
        report = ckpt.save({"a": counts, "b": counts}, step=1).result()
        loaded = ckpt.load()
    assert report.bytes_raw < 2 * 8 * len(counts)
    assert loaded["a"] is loaded["b"]


def test_another_length_is_an_error_that_names_the_path(config):
    with penstock.Checkpointer.from_config(config) as ckpt:
        ckpt.save({"counts": array("q", [1, 2, 3])}, step=1).result()
        target = {"counts": array("q", [0, 0])}
        with pytest.raises(penstock.RestoreMismatchError, match="counts"):
            ckpt.restore(target)
    assert target["counts"] == array("q", [0, 0])


def test_text_is_refused(config):
    code = typecodes.strip("bBhHiIlLqQfd")[-1]
    with (
        penstock.Checkpointer.from_config(config) as ckpt,
        pytest.raises(penstock.UnsupportedStateError, match="names is an array of text"),
    ):
        ckpt.save({"names": array(code, "text")}, step=1)


def test_flipped_bit_in_the_file_is_found(config, tmp_path):
    with penstock.Checkpointer.from_config(config) as ckpt:
        ckpt.save(state(1), step=1).result()
    db = sqlite3.connect(tmp_path / "deep" / "run.db")
    query = "SELECT pieces.id FROM pieces JOIN blobs ON blob = blobs.id WHERE name LIKE '%.enc'"
    ((piece,),) = db.execute(query)
    with db.blobopen("pieces", "data", piece) as blob:
        blob.seek(1000)
        (byte,) = blob.read(1)
        blob.seek(1000)
        blob.write(bytes([byte ^ 1]))
    db.commit()
    db.close()
    with penstock.Checkpointer.from_config(config) as ckpt:
        assert not ckpt.verify(step=1).ok
        with pytest.raises(penstock.DamagedError, match="model/weight"):
            ckpt.restore(state(0), step=1)


def test_deleted_checkpoints_leave_nothing(config, tmp_path):
    with penstock.Checkpointer.from_config(config) as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step=step).result()
        ckpt.delete(1)
        assert ckpt.steps() == [2]
        target = state(0)
        ckpt.restore(target)
    assert target["seen"] == state(2)["seen"]
    db = sqlite3.connect(tmp_path / "deep" / "run.db")
    commits = db.execute("SELECT name FROM blobs WHERE name LIKE 'commits/%'").fetchall()
    uids = db.execute(
        "SELECT DISTINCT substr(name, 6, 32) FROM blobs WHERE name LIKE 'data/%'"
    ).fetchall()
    orphans = db.execute("SELECT id FROM pieces WHERE blob NOT IN (SELECT id FROM blobs)")
    assert [name for (name,) in commits] == ["commits/00000002-0.json"]
    assert len(uids) == 1
    assert orphans.fetchall() == []
    db.close()

"""Two tiers with two checkpoints at one step: what is deleted of it, and where."""

from __future__ import annotations

import pytest
from tests.integration.support import checkpointer, make_state

from penstock import Checkpointer, ConfigError
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog import Catalog
from penstock.core.survey import delete_records, uids_named


def place(folder):
    return PosixBackend(PosixConfig(path=str(folder)))


@pytest.fixture
def folders(tmp_path):
    """Step 1 is one checkpoint in the fast tier, another in the durable one."""
    folders = {"fast": tmp_path / "fast", "durable": tmp_path / "durable"}
    for epoch, folder in enumerate(folders.values()):
        with checkpointer(place(folder)) as ckpt:
            ckpt.save(make_state(epoch), 1).result(60)
    return folders


def config(folders):
    return {"type": "tiered"} | {name: f"posix://{folder}" for name, folder in folders.items()}


def left(folder):
    with checkpointer(place(folder)) as ckpt:
        return {step: ckpt.load(step)["epoch"] for step in ckpt.steps()}


def test_deleting_a_step_that_is_two_checkpoints_is_refused(folders):
    with Checkpointer(config(folders)) as ckpt, pytest.raises(ConfigError) as refused:
        ckpt.delete(1)
    assert "step 1 is not the same checkpoint in tiers fast and durable" in str(refused.value)
    assert "penstock delete URL 1 --tier NAME" in str(refused.value)
    assert (left(folders["fast"]), left(folders["durable"])) == ({1: 0}, {1: 1})


def test_what_retention_deletes_in_one_tier_spares_another_save_in_the_next(folders):
    with Checkpointer(config(folders)) as ckpt:
        backend = ckpt._backend
        (name,) = Catalog(backend).entries()[1]
        chosen = uids_named(backend, [name])
        assert delete_records(backend, [name], uids=chosen) == [name]
    assert left(folders["fast"]) == {}
    assert left(folders["durable"]) == {1: 1}


def test_a_rewind_forgets_both(folders):
    with checkpointer(place(folders["durable"])) as ckpt:
        ckpt.save(make_state(7), 2).result(60)
    with checkpointer(place(folders["fast"])) as ckpt:
        ckpt.save(make_state(8), 2).result(60)
        ckpt.delete(1)
    with Checkpointer(config(folders)) as ckpt:
        assert ckpt.rewind(1) == [2]
        assert ckpt.latest() == 1
    assert (left(folders["fast"]), left(folders["durable"])) == ({}, {1: 1})
    assert not list(folders["fast"].rglob("*.raw"))


def test_a_copy_that_cannot_be_read_goes_with_the_one_that_can(tmp_path):
    fast, durable = tmp_path / "a", tmp_path / "b"
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        ckpt.save(make_state(1), 1).result(60)
        ckpt.save(make_state(2), 2).result(60)
        (name,) = Catalog(ckpt._backend).entries()[1]
        chosen = uids_named(ckpt._backend, [name])
        (durable / name).write_bytes(b"nonsense\n")
        assert delete_records(ckpt._backend, [name], uids=chosen) == [name]
        assert ckpt.steps() == [2]
    assert (left(fast), left(durable)) == ({2: 2}, {2: 2})


def test_a_record_that_one_tier_alone_cannot_read_keeps_no_data_of_others(tmp_path):
    fast, durable = tmp_path / "a", tmp_path / "b"
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(make_state(step), step).result(60)
        (name,) = Catalog(ckpt._backend).entries()[3]
    (fast / name).write_bytes(b"nonsense\n")
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        ckpt.delete(1)
    assert [len(list(folder.glob("data/*"))) for folder in (fast, durable)] == [2, 2]


def test_a_record_that_no_tier_can_read_may_need_any_data(tmp_path):
    fast, durable = tmp_path / "a", tmp_path / "b"
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        for step in (1, 2):
            ckpt.save(make_state(step), step).result(60)
        (name,) = Catalog(ckpt._backend).entries()[2]
    for folder in (fast, durable):
        (folder / name).write_bytes(b"nonsense\n")
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        ckpt.delete(1)
    assert len(list(durable.glob("data/*"))) == 2

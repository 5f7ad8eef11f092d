"""Two tiers with two checkpoints at one step: which is deleted, and where."""

from __future__ import annotations

import pytest
from tests.integration.support import checkpointer, holding, make_state
from tests.integration.tiers.places import Places

from penstock import Checkpointer, ConfigError, StorageError
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.deletion import delete_records
from penstock.core.catalog.survey import uids_named
from penstock.core.format.records import mark_name
from penstock.core.tiers.whereabouts import at_step, pending
from penstock.testing.faults import Fault, FaultyBackend
from penstock.testing.hasty import FAST


def place(folder):
    return PosixBackend(PosixConfig(path=str(folder)))


@pytest.fixture
def folders(tmp_path):
    """Step 1 differs between the fast tier and the durable one."""
    folders = {"fast": tmp_path / "fast", "durable": tmp_path / "durable"}
    for epoch, folder in enumerate(folders.values()):
        with checkpointer(place(folder)) as ckpt:
            ckpt.save(make_state(epoch), 1).result(300)
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


def test_retention_in_one_tier_spares_another_save_in_the_next(folders):
    with Checkpointer(config(folders)) as ckpt:
        backend = ckpt._backend
        (name,) = Catalog(backend).entries()[1]
        chosen = uids_named(backend, [name])
        assert delete_records(backend, [name], uids=chosen) == [name]
    assert left(folders["fast"]) == {}
    assert left(folders["durable"]) == {1: 1}


def test_a_rewind_deletes_both(folders):
    with checkpointer(place(folders["durable"])) as ckpt:
        ckpt.save(make_state(7), 2).result(300)
    with checkpointer(place(folders["fast"])) as ckpt:
        ckpt.save(make_state(8), 2).result(300)
        ckpt.delete(1)
    with Checkpointer(config(folders)) as ckpt:
        assert ckpt.rewind(1) == [2]
        assert ckpt.latest() == 1
    assert (left(folders["fast"]), left(folders["durable"])) == ({}, {1: 1})
    assert not list(folders["fast"].rglob("*.raw"))


def test_an_unreadable_copy_goes_with_the_readable_one(tmp_path):
    fast, durable = tmp_path / "a", tmp_path / "b"
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        ckpt.save(make_state(1), 1).result(300)
        ckpt.save(make_state(2), 2).result(300)
        (name,) = Catalog(ckpt._backend).entries()[1]
        chosen = uids_named(ckpt._backend, [name])
        (durable / name).write_bytes(b"nonsense\n")
        assert delete_records(ckpt._backend, [name], uids=chosen) == [name]
        assert ckpt.steps() == [2]
    assert (left(fast), left(durable)) == ({2: 2}, {2: 2})


def test_a_record_unreadable_in_one_tier_keeps_no_data_of_others(tmp_path):
    fast, durable = tmp_path / "a", tmp_path / "b"
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(make_state(step), step).result(300)
        (name,) = Catalog(ckpt._backend).entries()[3]
    (fast / name).write_bytes(b"nonsense\n")
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        ckpt.delete(1)
    assert [len(list(folder.glob("data/*"))) for folder in (fast, durable)] == [2, 2]


def test_a_record_unreadable_in_all_tiers_keeps_all_data(tmp_path):
    fast, durable = tmp_path / "a", tmp_path / "b"
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        for step in (1, 2):
            ckpt.save(make_state(step), step).result(300)
        (name,) = Catalog(ckpt._backend).entries()[2]
    for folder in (fast, durable):
        (folder / name).write_bytes(b"nonsense\n")
    with Checkpointer(config({"fast": fast, "durable": durable})) as ckpt:
        ckpt.delete(1)
    assert len(list(durable.glob("data/*"))) == 2


@pytest.fixture
def nodes(waits):
    """Two nodes with a fast tier each, and one durable tier."""
    waits(FAST, drain_failing_s=0.0)
    one, other = Places(), Places()
    other.durable = one.durable
    return one, other


def epoch_of(backend, step=1):
    with checkpointer(backend) as ckpt:
        return ckpt.load(step)["epoch"]


def read_only(backend):
    """`backend`, to which nothing can be copied."""
    faulty = FaultyBackend(backend)
    for operation in ("create", "publish"):
        faulty.add(Fault(operation, times=None, error=StorageError("no route to host")))
    return faulty


def leave_generations(node, *epochs):
    """Overwrite step 1, and lose power before it reaches the durable tier."""
    with node.open(durable=read_only(node.other())) as ckpt:
        for epoch in epochs:
            ckpt.save(make_state(epoch), 1, overwrite=True).committed.result(300)


def test_leftover_overwrites_of_a_node_are_copied_by_its_next_process(nodes):
    node, _ = nodes
    with node.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    leave_generations(node, 2, 3)
    with node.open() as ckpt:
        ckpt.save(make_state(9), 9).result(300)
        assert ckpt._drains.settle(300)
    assert epoch_of(node.durable) == 3
    assert [record.generation for record in pending(node.fast)] == []


def test_a_leftover_generation_replaces_no_newer_checkpoint_of_another_node(nodes, caplog):
    node, other = nodes
    with node.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    leave_generations(node, 2, 3)
    with other.open() as ckpt:
        report = ckpt.save(make_state(7), 1, overwrite=True).result(300)
        assert (report.tiers, report.generation) == (("fast", "durable"), 2)
    with node.open() as ckpt:
        ckpt.save(make_state(9), 9).result(300)
        assert ckpt._drains.settle(300)
    assert epoch_of(node.durable) == 7
    assert "step 1 cannot be copied from tier fast to durable" in caplog.text
    assert [record.generation for record in pending(node.fast)] == [4]  # left alone


def test_overwrites_by_another_node_during_a_copy_stay(nodes):
    node, other = nodes
    with node.open() as ckpt:
        ckpt.save(make_state(1), 1).result(300)
    leave_generations(node, 2, 3)
    *lower, higher = at_step(node.fast, 1)
    node.fast.delete([mark_name(record.uid) for record in lower])
    durable = FaultyBackend(node.other())
    with node.open(durable=durable) as ckpt:
        with holding(durable, "publish", match="/index") as held:
            ckpt._drains.resume()
            assert held.reached.wait(300)
            with other.open() as there:
                there.save(make_state(7), 1, overwrite=True).result(300)
        assert ckpt._drains.settle(300)
    assert higher.generation > Catalog(node.durable).record(1).generation
    assert epoch_of(node.durable) == 7

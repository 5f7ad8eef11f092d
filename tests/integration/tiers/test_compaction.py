"""A step compacted in the durable tier while it is copied there, or overwritten."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.support import checkpointer, holding, make_state, same
from tests.integration.tiers.places import Places

from penstock import CheckpointGoneError, StorageError
from penstock.core.catalog.catalog import Catalog
from penstock.core.tiers.whereabouts import pending
from penstock.testing.faults import FaultyBackend
from penstock.testing.hasty import FAST


@pytest.fixture
def places(waits):
    waits(FAST)
    return Places()


def state(epoch):
    """A state that shares all but its epoch with the others."""
    return {**make_state(1), "epoch": epoch}


def compact(places, step, **how):
    """Compact a step as another process would."""
    with places.open(**how) as other:
        return other.compact([step]).steps


def dying(places):
    """Both places, for a process that dies before it deletes anything."""
    found = {"fast": FaultyBackend(places.other_fast()), "durable": FaultyBackend(places.other())}
    for backend in found.values():
        backend.fail("delete", StorageError("killed"), times=None)
    return found


def check(places, step, epoch, *, generation):
    """All remains of the step are whole, in both tiers, and nothing waits to be copied."""
    assert pending(places.fast) == []
    for backend in (places.fast, places.durable):
        assert Catalog(backend).record(step).generation == generation
        with checkpointer(backend) as ckpt:
            assert same(ckpt.load(step), state(epoch))
            assert ckpt.verify(step).ok


def test_an_overwrite_becomes_durable_despite_a_concurrent_compaction(places):
    fast = FaultyBackend(places.other_fast())
    with places.open(fast=fast, share=True) as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step).result(60)
        with holding(fast, "publish", match="parts/") as held:
            overwrite = ckpt.save(state(42), 2, overwrite=True)
            assert held.reached.wait(60)
            assert [one.generation for one in compact(places, 2)] == [1]
        assert overwrite.result(60).tiers == ("fast", "durable")
        ckpt.wait()
    check(places, 2, 42, generation=2)


def test_an_overwrite_becomes_durable_after_a_compaction_dies(places):
    fast = FaultyBackend(places.other_fast())
    with places.open(fast=fast, share=True) as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step).result(60)
        with holding(fast, "publish", match="parts/") as held:
            overwrite = ckpt.save(state(42), 2, overwrite=True)
            assert held.reached.wait(60)
            with pytest.raises(StorageError, match="killed"):
                compact(places, 2, **dying(places))
            assert Catalog(places.durable).record(2).generation == 1
        assert overwrite.result(60).tiers == ("fast", "durable")
        ckpt.wait()
    check(places, 2, 42, generation=2)


def test_a_compaction_yields_to_an_overwrite_in_the_copy_queue(places):
    durable, slow = FaultyBackend(places.other()), FaultyBackend(places.other())
    with places.open(share=True, durable=durable) as ckpt, ThreadPoolExecutor(1) as pool:
        for step in (1, 2):
            ckpt.save(state(step), step).result(60)
        with holding(durable, "create"):
            with holding(slow, "publish", match="commits/") as held:
                compacted = pool.submit(compact, places, 2, durable=slow)
                assert held.reached.wait(60)
                overwrite = ckpt.save(state(42), 2, overwrite=True)
                overwrite.committed.result(60)
            with pytest.raises(CheckpointGoneError, match="saved again during its compaction"):
                compacted.result(60)
            # The tier still has a checkpoint of the step until the overwrite arrives as well.
            assert Catalog(places.durable).steps() == [1, 2]
        assert overwrite.result(60).tiers == ("fast", "durable")
        ckpt.wait()
    check(places, 2, 42, generation=2)


def test_a_save_compacted_before_it_is_copied_is_durable(places):
    durable = FaultyBackend(places.other())
    with places.open(share=True, durable=durable) as ckpt:
        ckpt.save(state(1), 1).result(60)
        with holding(durable, "create") as held:
            handles = [ckpt.save(state(step), step) for step in (2, 3, 4)]
            handles[-1].committed.result(60)
            assert held.reached.wait(60)
            durable.clear()  # only the copy in flight is held
            assert compact(places, 3)
            assert ckpt.compact([4]).steps
        assert [handle.result(60).step for handle in handles] == [2, 3, 4]
        assert all("durable" in handle.result().tiers for handle in handles)
        assert not any(handle.failed for handle in handles)
    assert pending(places.fast) == []
    with checkpointer(places.durable) as ckpt:
        for step in (2, 3, 4):
            assert same(ckpt.load(step), state(step))
            assert ckpt.info(step).generation == (step > 2)

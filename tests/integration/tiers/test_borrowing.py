"""Checkpoints that borrow blobs, in tiers: a tier lists one only with every blob it needs."""

import pytest
from tests.core.borrowing import borrow, files_of
from tests.core.tiers.test_drains import drains_of
from tests.integration.support import blank, checkpointer, make_state, same
from tests.integration.tiers.places import Folders, Places

from penstock import Checkpointer
from penstock.core.abc import Tier
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.survey import has_data, survey_records
from penstock.core.format.records import mark_name
from penstock.core.storage.open import open_backend
from penstock.core.tiers.whereabouts import is_marked, mark
from penstock.testing.hasty import FAST

DELTA, LATER = "d" * 32, "e" * 32
STATE = make_state(1)


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST, drain_failing_s=0.2)


@pytest.fixture
def places():
    return Places()


def saved_chain(fast):
    """A base and two checkpoints that borrow from it, all waiting for the next tier."""
    with checkpointer(fast) as ckpt:
        ckpt.save(STATE, 1, mode="blocking")
    records = [Catalog(fast).record(1)]
    records += [borrow(fast, 1, 2, uid=DELTA), borrow(fast, 1, 3, uid=LATER)]
    for record in records:
        mark(fast, record.uid, record.step)
    return records


def tiers_of(places, **options):
    return Tier("fast", places.other_fast(), **options), Tier(
        "durable", places.other(), durable=True
    )


def drain(places, **options):
    with drains_of(*tiers_of(places, **options)) as drains:
        drains.resume()
        assert drains.settle(300)
        return drains.states()


def whole_at(place, *steps):
    with checkpointer(place) as ckpt:
        assert ckpt.steps() == list(steps)
        assert all(ckpt.verify(step).ok and same(ckpt.load(step), STATE) for step in steps)


@pytest.mark.parametrize("first_gone", [False, True])
def test_a_drain_copies_borrowed_blobs(places, first_gone):
    base, _, _ = saved_chain(places.fast)
    if first_gone:  # evicted there, or dropped by retention, before it was copied
        Catalog(places.fast).delete(1)
    drain(places)
    whole_at(places.durable, *([] if first_gone else [1]), 2, 3)
    assert files_of(places.durable, base.uid) >= {"blobs/00000-0.raw"}
    assert not any(is_marked(places.fast, record.uid) for record in [base])


@pytest.mark.parametrize("in_tiers", [True, False])
def test_leftovers_of_a_deletion_in_a_tier_block_no_drain(places, in_tiers):
    """Blobs that only a faster tier needs stay in the next one, where no record needs them."""
    base, _, _ = saved_chain(places.fast)
    later = Catalog(places.fast).record(3)
    places.fast.delete([mark_name(later.uid)])
    drain(places)
    whole_at(places.durable, 1, 2)
    with places.open() if in_tiers else checkpointer(places.other()) as ckpt:
        for step in (2, 1):
            ckpt.delete(step)
    if in_tiers:
        assert files_of(places.durable, base.uid) == {"blobs/00000-0.raw"}
    for record in survey_records(places.fast).records.values():
        mark(places.fast, record.uid, record.step)
    drain(places)
    whole_at(places.durable, *([] if in_tiers else [1, 2]), 3)


def test_an_eviction_spares_borrowed_blobs_until_the_last_borrower(places):
    base, delta, later = saved_chain(places.fast)
    drain(places)
    with drains_of(*tiers_of(places)) as drains:
        drains.eviction.evict(0, base)
        whole_at(places.fast, 2, 3)
        assert files_of(places.fast, base.uid) == {"blobs/00000-0.raw"}
        drains.eviction.evict(0, delta)
        whole_at(places.fast, 3)
        drains.eviction.evict(0, later)
    assert [info.name for info in places.fast.list("data/")] == []
    whole_at(places.durable, 1, 2, 3)


def test_a_fast_tier_with_the_last_step_keeps_its_borrowed_data(places):
    base, _, _ = saved_chain(places.fast)
    drain(places, keep_last=1)
    with drains_of(*tiers_of(places, keep_last=1)) as drains:
        drains._links[0].tidy()
        assert drains.settle(300)
        drains.close()
    whole_at(places.fast, 3)
    assert files_of(places.fast, base.uid) == {"blobs/00000-0.raw"}
    whole_at(places.durable, 1, 2, 3)


def test_a_damaged_borrowed_blob_downstream_is_found_before_eviction(places):
    """The drain keeps existing blobs of the durable tier, and does not read them."""
    with checkpointer(places.fast) as ckpt:
        ckpt.save(STATE, 1, mode="blocking")
    base = Catalog(places.fast).record(1)
    mark(places.fast, base.uid, 1)
    drain(places)
    borrow(places.fast, 1, 2, uid=DELTA)
    mark(places.fast, DELTA, 2)
    Catalog(places.fast).delete(1)
    name = f"data/{base.uid}/blobs/00000-0.raw"
    data = places.durable.read_record(name, limit_bytes=1 << 30)
    places.durable.delete([name])
    places.durable.publish(name, bytes(len(data)))
    drain(places, keep_last=0)
    whole_at(places.fast, 2)


def test_a_tier_without_a_borrowed_blob_lacks_the_checkpoint(places):
    base, delta, _ = saved_chain(places.fast)
    assert has_data(places.fast, delta)
    places.fast.delete([f"data/{base.uid}/blobs/00000-0.raw"])
    assert not has_data(places.fast, delta)


@pytest.fixture
def folders(tmp_path):
    made = Folders(tmp_path)
    fast = open_backend(f"posix://{made.fast}")
    saved_chain(fast)
    fast.close()
    with made.open() as ckpt:
        ckpt.save(make_state(2), 4).result(300)
        ckpt.wait()
        ckpt.delete(1)
        ckpt.delete(4)
    return made


def lent_blob(place):
    (found,) = place.glob("data/*/blobs/*.raw")
    return found


def test_a_lost_borrowed_blob_is_read_from_the_next_tier_and_recopied(folders):
    blob = lent_blob(folders.fast)
    good = blob.read_bytes()
    blob.unlink()
    state = blank(STATE)
    with folders.open() as ckpt:
        report = ckpt.restore(state, 2)
        assert same(state["model"], STATE["model"])
        assert [tier for _, tier in report.rescued] == ["durable"]
    assert blob.read_bytes() == good
    with Checkpointer(f"posix://{folders.fast}") as alone:
        assert all(alone.verify(step).ok for step in (2, 3))


@pytest.mark.parametrize(("bad", "how"), [("fast", "missing"), ("durable", "flip")])
def test_verify_repairs_a_borrowed_blob(folders, bad, how):
    blob = lent_blob(getattr(folders, bad))
    data = bytearray(blob.read_bytes())
    blob.unlink()
    if how == "flip":
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
    with folders.open() as ckpt:
        assert not ckpt.verify(3).ok
        assert ckpt.verify(2, repair=True).ok
        assert all(ckpt.verify(step).damaged == () for step in (2, 3))
    for place in (folders.fast, folders.durable):
        with Checkpointer(f"posix://{place}") as alone:
            assert alone.steps() == [2, 3]
            assert all(alone.verify(step).ok for step in (2, 3))

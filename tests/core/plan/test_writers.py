"""Which chunks each of several ranks writes, and the resulting rectangles."""

from hypothesis import given
from hypothesis import strategies as st
from tests.core.planned import NoBytes

from penstock.core.abc import StateObject
from penstock.core.plan.regions import flaw_of_cover
from penstock.core.plan.save import Capture, PlannedObject, plan_save
from penstock.core.plan.writers import (
    RankPlaces,
    among,
    chunks_of_rank,
    derivable,
    spans_of_rank,
)
from penstock.core.types import Kind, Region, Replica, Role, TensorSpec

CHUNK = 4 * 4096


def of_shape(path, shape, *, phase=64, regions=None, replica=None, kind=Kind.TENSOR):
    spec = TensorSpec("float32", 4, shape)
    regions = (Region.whole(shape),) if regions is None else regions
    nbytes = 4 * sum(region.numel for region in regions)
    source = NoBytes(nbytes, phase=phase)
    entry = StateObject(
        path, kind, spec, regions, Role.PARAMETER, "tensor", source, replica=replica
    )
    return PlannedObject(entry, Capture.FROZEN if kind is Kind.VALUE else Capture.NOW)


def plans_of(ranks):
    return [
        plan_save(objects, chunk_bytes=CHUNK, slab_limit_bytes=600, even_cuts=True)
        for objects in ranks
    ]


def stored(plans, mine):
    """The regions that all ranks store, by path."""
    found = {}
    for plan, chunks in zip(plans, mine, strict=True):
        spans = spans_of_rank(plan, chunks)
        for item, planned in enumerate(plan.objects):
            entry = planned.entry
            whole = [Region.whole(entry.spec.shape)] if entry.spec.nbytes else []
            regions = [s.region for s in spans[item]] if item in spans else whole
            found.setdefault(entry.path, []).extend(regions)
    return found


shapes = st.lists(
    st.lists(st.integers(1, 90), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8
)


@given(shapes, st.integers(1, 5), st.integers(1, 100_000))
def test_replicas_store_each_byte_once_at_any_address(sizes, count, writer_bytes):
    ranks = [
        [of_shape((f"t{n}",), s, phase=64 * (rank + n)) for n, s in enumerate(sizes)]
        for rank in range(count)
    ]
    plans = plans_of(ranks)
    mine = [
        chunks_of_rank(plan, RankPlaces(Replica(rank, count)), writer_bytes=writer_bytes)
        for rank, plan in enumerate(plans)
    ]
    assert sorted(n for chunks in mine for n in chunks) == list(range(len(plans[0].chunks)))
    for path, regions in stored(plans, mine).items():
        assert len(set(regions)) == len(regions)
        shape = ranks[0][int(path[0][1:])].entry.spec.shape
        assert flaw_of_cover(shape, regions) is None


@given(st.lists(st.integers(0, 5), min_size=1, unique=True), st.integers(1, 100_000))
def test_data_also_held_by_other_ranks_is_stored_by_saving_ranks(members, writer_bytes):
    plans = []
    for rank in members:
        replica = among(Replica(rank, 6, ranks=(0, 1, 2, 3, 4, 5)), members)
        plans += plans_of([[of_shape((f"t{n}",), (64, 64), replica=replica) for n in range(4)]])
    mine = [chunks_of_rank(plan, RankPlaces(), writer_bytes=writer_bytes) for plan in plans]
    assert sorted(n for chunks in mine for n in chunks) == list(range(len(plans[0].chunks)))


def test_writers_have_a_minimum_of_bytes_and_share_evenly():
    objects = [of_shape((f"t{n}",), (256, 64)) for n in range(16)]  # 64 KiB each
    plans = plans_of([objects] * 8)
    for writer_bytes, writers in [(1 << 18, 4), (1 << 20, 1), (1 << 10, 8)]:
        mine = [
            chunks_of_rank(plan, RankPlaces(Replica(rank, 8)), writer_bytes=writer_bytes)
            for rank, plan in enumerate(plans)
        ]
        sizes = [sum(plan.chunks[n].length for n in c) for plan, c in zip(plans, mine, strict=True)]
        assert sum(sizes) == 1 << 20
        assert [bool(size) for size in sizes] == [rank < writers for rank in range(8)]
        assert max(sizes) - min(sizes[:writers]) <= CHUNK


def test_values_are_written_by_the_first_rank_and_shards_by_holders():
    def rank_objects(rank):
        half = Region((16 * rank, 0), (16, 64))
        return [
            of_shape(("epoch",), (3,), kind=Kind.VALUE),
            of_shape(("half",), (32, 64), regions=(half,), replica=Replica(0, 1, (rank,))),
            of_shape(("none",), (1, 64), regions=() if rank else None, replica=Replica()),
        ]

    plans = plans_of([rank_objects(rank) for rank in range(2)])
    mine = [
        chunks_of_rank(plan, RankPlaces(Replica(n, 2)), writer_bytes=1)
        for n, plan in enumerate(plans)
    ]
    found = stored(plans, mine)
    assert found["epoch",] == [Region.whole((3,))]
    assert found["half",] == [Region((0, 0), (16, 64)), Region((16, 0), (16, 64))]
    assert found["none",] == [Region.whole((1, 64))]


def test_objects_of_other_replicas_never_share_a_slab():
    def rank_objects(rank):
        return [
            of_shape(("a",), (5,), replica=Replica(rank % 2, 2, (0, 1) if rank < 2 else (2, 3))),
            of_shape(("b",), (5,)),
            of_shape(("c",), (5,), replica=Replica(rank // 2, 2, (rank % 2, rank % 2 + 2))),
            of_shape(("d",), (5,), replica=Replica(rank, 4)),
        ]

    plans = plans_of([rank_objects(rank) for rank in range(4)])
    mine = [chunks_of_rank(plan, RankPlaces(Replica(rank, 4))) for rank, plan in enumerate(plans)]
    names = [
        {plan.objects[p.item].entry.path[0] for n in chunks for p in plan.chunks[n].pieces}
        for plan, chunks in zip(plans, mine, strict=True)
    ]
    assert names == [{"a", "b", "c", "d"}, {"c"}, {"a"}, set()]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=9), st.integers(1, 4), st.data())
def test_derivable_objects_go_to_the_rank_writing_their_master(rows, count, data):
    masters = [of_shape((f"master{n}",), (r, 64)) for n, r in enumerate(rows)]
    weights = [of_shape((f"weight{n}",), (r, 32)) for n, r in enumerate(rows)]
    pairs = {len(rows) + n: (n,) for n in range(len(rows)) if data.draw(st.booleans())}
    plan = plan_save(
        [*masters, *weights],
        chunk_bytes=CHUNK,
        slab_limit_bytes=600,
        even_cuts=True,
        masters=pairs,
    )
    places = [Replica(rank, count) for rank in range(count)]
    mine = [chunks_of_rank(plan, RankPlaces(place), writer_bytes=1) for place in places]
    assert sorted(n for chunks in mine for n in chunks) == list(range(len(plan.chunks)))
    found = [
        derivable(plan, chunks, place, count) for chunks, place in zip(mine, places, strict=True)
    ]
    writers = {
        item: {rank for rank, chunks in enumerate(mine) for n in chunks if item in items(plan, n)}
        for item in range(2 * len(rows))
    }
    for item, (master,) in pairs.items():
        assert len(writers[item]) == 1
        assert writers[item] <= writers[master]
        whole = writers[item] == writers[master]
        assert [rank for rank, one in enumerate(found) if item in one] == [*writers[item]] * whole
    assert not any(derivable(plan, chunks, Replica(0, count), count + 1) for chunks in mine)


def items(plan, number):
    return {piece.item for piece in plan.chunks[number].pieces}

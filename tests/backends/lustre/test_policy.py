"""Properties of the layouts that are chosen, for any number of ranks and OSTs."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.lustre.policy import (
    MAX_RUN_BYTES,
    MAX_STRIPES,
    MIN_IO_BYTES,
    MIN_OBJECT_BYTES,
    SEPARATE_SLACK,
    SLACK,
    STRIPE_UNIT,
    WIDEST,
    Demand,
    Ost,
    load,
    plan_striping,
    usable_osts,
    useful_stripes,
)

MIB = 1 << 20
GIB = 1 << 30
ROOMY = 1 << 60


def ring(count, **changes):
    return tuple(Ost(n, **({"free_bytes": ROOMY} | changes)) for n in range(count))


demands = st.builds(
    Demand,
    blob_bytes=st.none() | st.integers(0, 1 << 42),
    writers=st.integers(1, 300),
    writer=st.integers(0, 299),
    io_bytes=st.integers(1, 1 << 31),
    in_flight=st.integers(1, 64),
    salt=st.integers(0, (1 << 32) - 1),
)
osts = st.lists(
    st.builds(
        Ost,
        st.integers(0, 999),
        st.integers(0, 1 << 50),
        st.sampled_from(["", "", "", "D", "R", "S", "I", "N", "DS", "f"]),
    ),
    max_size=40,
    unique_by=lambda ost: ost.index,
).map(tuple)


@given(demands, osts)
def test_every_layout_is_one_that_lustre_takes(demand, known):
    striping = plan_striping(demand, known)
    assert 1 <= striping.stripe_count <= MAX_STRIPES
    assert striping.stripe_bytes % STRIPE_UNIT == 0
    assert STRIPE_UNIT <= striping.stripe_bytes <= 1 << 32
    if striping.osts:
        assert len(striping.osts) == len(set(striping.osts)) == striping.stripe_count
        assert set(striping.osts) <= {ost.index for ost in known}


@given(demands, osts)
def test_no_blob_goes_to_an_ost_that_is_closed_or_has_no_room(demand, known):
    free = {ost.index: ost for ost in known}
    for index in plan_striping(demand, known).osts:
        assert not set(free[index].flags) & set("NRSI")
        share = (GIB if demand.blob_bytes is None else demand.blob_bytes) * demand.writers
        assert free[index].free_bytes >= 2 * share // len(known)


@given(demands, st.integers(1, 200))
def test_stripes_are_never_more_than_useful(demand, count):
    striping = plan_striping(demand, ring(count))
    blob = GIB if demand.blob_bytes is None else demand.blob_bytes
    assert striping.stripe_count <= min(count, WIDEST)
    if demand.writers * striping.stripe_count <= count:
        assert striping.stripe_count <= demand.in_flight
    assert striping.stripe_count == 1 or blob >= striping.stripe_count * MIN_OBJECT_BYTES


def test_small_blobs_have_one_stripe():
    for writers in [1, 2, 7, 1000]:
        for blob in [0, 1, 4096, MIN_OBJECT_BYTES, 2 * MIN_OBJECT_BYTES - 1]:
            assert plan_striping(Demand(blob, writers), ring(100)).stripe_count == 1


def blobs_per_ost(writers, count, **changes):
    """Blobs' worth of bytes on each OST, over all writers, and the stripe counts there are."""
    known = ring(count)
    striped = [
        plan_striping(Demand(64 * GIB, writers, writer, salt=99, **changes), known)
        for writer in range(writers)
    ]
    spread = Counter()
    for striping in striped:
        for index in striping.osts:
            spread[index] += Fraction(1, striping.stripe_count)
    return spread, sorted({s.stripe_count for s in striped})


@given(st.integers(2, 400), st.integers(1, 120))
def test_ranks_load_all_osts_alike(writers, count):
    spread, counts = blobs_per_ost(writers, count)
    assert sum(spread.values()) == writers
    if writers * counts[-1] >= count:
        assert set(spread) == set(range(count))
    assert max(spread.values()) - min(spread.values()) <= Fraction(1, counts[-1])


@given(st.integers(2, 400), st.integers(1, 120))
def test_the_busiest_ost_has_hardly_more_than_any_layout_would_give_it(writers, count):
    spread, counts = blobs_per_ost(writers, count)
    useful = useful_stripes(Demand(64 * GIB), count)
    rounds, rest = divmod(writers, count)
    reachable = min(rounds + load(rest, count, n) for n in range(1, useful + 1))
    uniform = min(load(writers, count, n) for n in range(1, useful + 1))
    assert reachable <= uniform + 1e-9
    if rounds:
        assert max(spread.values()) <= reachable * SLACK
    elif rest * counts[-1] <= count:  # no two writers share an OST
        assert max(spread.values()) <= max(reachable * SEPARATE_SLACK, Fraction(1, 64))
    else:
        assert len(set(spread.values())) == 1 or max(spread.values()) <= reachable * SLACK
    # And with no more stripes than that takes.
    if rounds and rest:
        fewer = [rounds + load(rest, count, n) for n in range(1, counts[-1])]
        assert all(value > reachable * SLACK for value in fewer)
    assert counts in ([1], [counts[-1]], [1, counts[-1]])


def test_full_rounds_take_one_stripe_and_the_rest_several():
    for writers, count, stripes in [
        (100, 100, [1]),
        (1000, 50, [1]),
        (1001, 50, [1, 5]),
        (50, 100, [2]),
        (12, 10, [1, 5]),
        (100, 96, [1, 20]),
        (13, 96, [7]),
        (64, 96, [3]),
        (49, 96, [96]),
    ]:
        assert blobs_per_ost(writers, count)[1] == stripes


def test_a_lone_writer_takes_what_it_can_have_in_flight():
    assert plan_striping(Demand(64 * GIB), ring(100)).stripe_count == 64
    assert plan_striping(Demand(64 * GIB), ring(30)).stripe_count == 30
    assert plan_striping(Demand(64 * GIB, in_flight=5), ring(100)).stripe_count == 5
    few_bytes = Demand(64 * GIB, in_flight_bytes=32 * MIB)
    assert plan_striping(few_bytes, ring(100)).stripe_count == 8


@given(st.integers(1, 96))
def test_half_of_what_is_in_flight_covers_the_share_of_the_osts(writers):
    demand = Demand(64 * GIB, writers)
    striping = plan_striping(demand, ring(96))
    covered = demand.in_flight_bytes // 2 // striping.stripe_bytes
    if striping.stripe_bytes > MIN_IO_BYTES and striping.stripe_count > 1:
        assert covered >= min(striping.stripe_count, 96 // writers)
    if striping.stripe_count > 1:
        assert MIN_IO_BYTES <= striping.stripe_bytes <= MAX_RUN_BYTES


def test_few_writers_have_short_stripes():
    for writers, stripe_mib in [(1, 4), (4, 4), (8, 8), (13, 16), (24, 16), (49, 64), (64, 64)]:
        assert plan_striping(Demand(64 * GIB, writers), ring(96)).stripe_bytes == stripe_mib * MIB


def test_where_osts_hold_several_objects_stripes_are_long():
    assert plan_striping(Demand(64 * GIB, 100, 99), ring(96)).stripe_bytes == MAX_RUN_BYTES
    assert plan_striping(Demand(GIB, 100, 99), ring(96)).stripe_bytes == 32 * MIB  # but there are 2


@given(st.integers(1, 8), st.integers(0, 11), st.integers(0, 11))
def test_nodes_do_not_meet_on_all_their_osts_round_after_round(round_, node, other):
    def osts(place):
        ranks = range(8 * place, 8 * place + 8)
        return {plan_striping(Demand(GIB, 96 * 9, rank), ring(96)).osts[0] for rank in ranks}

    assert len(osts(node) & osts(12 * round_ + other)) <= 4


@given(st.integers(1, 60), st.integers(1, 4))
def test_every_round_of_writers_meets_every_ost_once(count, rounds):
    spread, stripes = blobs_per_ost(count * rounds, count)
    if count * rounds > 1:
        assert stripes == [1]
        assert set(spread.values()) == {rounds}


def test_a_lone_writer_leaves_the_choice_to_the_server():
    assert plan_striping(Demand(64 * GIB), ring(8)).osts == ()


def test_few_ranks_stand_apart_on_the_ring():
    striped = [plan_striping(Demand(GIB, 2, n, in_flight=2), ring(40)).osts for n in range(2)]
    assert striped == [(0, 10), (20, 30)]


def test_the_salt_turns_the_ring_and_nothing_else():
    plain = [plan_striping(Demand(64 * GIB, 8, n), ring(8)).osts for n in range(8)]
    turned = [plan_striping(Demand(64 * GIB, 8, n, salt=3), ring(8)).osts for n in range(8)]
    assert turned == [tuple((index + 3) % 8 for index in osts) for osts in plain]
    assert turned != plain


def test_degraded_osts_are_used_only_when_nothing_else_is_left():
    mixed = (Ost(0, ROOMY, "D"), Ost(1, ROOMY))
    assert usable_osts(Demand(GIB), mixed) == (1,)
    assert usable_osts(Demand(GIB), mixed[:1]) == (0,)


def test_a_full_ost_is_left_out():
    known = (*ring(4), Ost(4, 10 << 20))
    assert usable_osts(Demand(GIB, 4), known) == (0, 1, 2, 3)


def test_unknown_osts_get_few_stripes_and_no_names():
    for writers in [1, 8, 1000]:
        striping = plan_striping(Demand(64 * GIB, writers), ())
        assert (striping.stripe_count, striping.osts) == (4, ())
        assert plan_striping(Demand(1 << 20, writers), ()).stripe_count == 1


def test_without_several_stripes_a_stripe_is_one_request():
    assert plan_striping(Demand(MIB, io_bytes=16 * MIB), ring(4)).stripe_bytes == 16 * MIB
    assert plan_striping(Demand(MIB, io_bytes=100_000), ring(4)).stripe_bytes == 128 << 10
    assert plan_striping(Demand(64 * GIB), ()).stripe_bytes == 16 * MIB

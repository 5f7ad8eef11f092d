"""Properties of the chosen layouts, for any number of ranks and OSTs."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.lustre.policy import (
    MAX_STRIPES,
    MIN_OBJECT_BYTES,
    SEPARATE_SLACK,
    SLACK,
    STRIPE_UNIT,
    WIDEST,
    Demand,
    Ost,
    load,
    plan_striping,
    useful_stripes,
)

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
def test_every_layout_is_valid_for_lustre(demand, known):
    striping = plan_striping(demand, known)
    assert 1 <= striping.stripe_count <= MAX_STRIPES
    assert striping.stripe_bytes % STRIPE_UNIT == 0
    assert STRIPE_UNIT <= striping.stripe_bytes <= 1 << 32
    if striping.osts:
        assert len(striping.osts) == len(set(striping.osts)) == striping.stripe_count
        assert set(striping.osts) <= {ost.index for ost in known}


@given(demands, osts)
def test_no_blob_goes_to_a_closed_or_full_ost(demand, known):
    free = {ost.index: ost for ost in known}
    for index in plan_striping(demand, known).osts:
        assert not set(free[index].flags) & set("NRSI")
        share = (GIB if demand.blob_bytes is None else demand.blob_bytes) * demand.writers
        assert free[index].free_bytes >= 2 * share // len(known)


@given(demands, st.integers(1, 200))
def test_stripe_counts_stay_useful(demand, count):
    striping = plan_striping(demand, ring(count))
    blob = GIB if demand.blob_bytes is None else demand.blob_bytes
    assert striping.stripe_count <= min(count, WIDEST)
    if demand.writers * striping.stripe_count <= count:
        assert striping.stripe_count <= demand.in_flight
    assert striping.stripe_count == 1 or blob >= striping.stripe_count * MIN_OBJECT_BYTES


def blobs_per_ost(writers, count, **changes):
    """Blobs' worth of bytes on each OST, over all writers, and the stripe counts in use."""
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
def test_the_busiest_ost_has_little_more_than_under_any_layout(writers, count):
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
    # And with no more stripes than that needs.
    if rounds and rest:
        fewer = [rounds + load(rest, count, n) for n in range(1, counts[-1])]
        assert all(value > reachable * SLACK for value in fewer)
    assert counts in ([1], [counts[-1]], [1, counts[-1]])


@given(st.integers(1, 60), st.integers(1, 4))
def test_every_round_of_writers_uses_each_ost_once(count, rounds):
    spread, stripes = blobs_per_ost(count * rounds, count)
    if count * rounds > 1:
        assert stripes == [1]
        assert set(spread.values()) == {rounds}

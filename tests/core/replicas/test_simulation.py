"""Hosts with memory under faults, on a virtual clock; see `simulation.py` for what must hold."""

import pytest
from tests.core.replicas.simulation import World, explore

SEEDS = 100
CHUNKS = 5
MANY = 10_000


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_promise_breaks_in_worlds_of_hosts_drawn_from_seeds(chunk):
    counts = explore(range(chunk, SEEDS, CHUNKS))
    print(counts)
    for what in ("replicated", "kept", "deleted", "rewound", "pruned", "drained", "errors"):
        assert counts[what], what


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(100))
def test_no_promise_breaks_in_many_worlds_of_hosts(chunk):
    explore(range(SEEDS + chunk, MANY + SEEDS, 100))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_promise_breaks_with_many_hosts(seed):
    counts = World(seed, hosts=(100, 300, 1000)[seed]).run(10.0).counts
    assert counts["committed"]


def test_equal_seeds_run_equally():
    assert [World(seed).run().counts for seed in (1, 2)] == [explore([1]), explore([2])]

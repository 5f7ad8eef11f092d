"""Groups of hosts: each chance to survive equals the formula, for any number of hosts."""

import random
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.replicas.placement import group_hosts

SIZES = range(2, 65)


def named(count, domains=None):
    """Hosts of the given domains; without domains, each host is its own."""
    names = [f"h{number:04d}" for number in range(count)]
    return {name: name if domains is None else f"r{domains[i]}" for i, name in enumerate(names)}


def holders_of(groups):
    """The set of hosts that hold the files of each host, once all copies are made."""
    return {
        frozenset([host, *groups.receivers({host})]) for group in groups.groups for host in group
    }


def survivals(groups, lost):
    """How many sets of `lost` hosts leave a holder of every file, by looking at each set."""
    hosts = [host for group in groups.groups for host in group]
    held = holders_of(groups)
    sets = map(frozenset, combinations(hosts, lost))
    return sum(not any(holders <= gone for holders in held) for gone in sets)


def ring_losses(size, most):
    """How many sets of j hosts of a ring have fewer than `most` neighbors in a row, for each j."""
    counts = [0] * (size + 1)
    for bits in range(1 << size):
        ring = [bits >> (i % size) & 1 for i in range(size + most - 1)]
        counts[bits.bit_count()] += not any(all(ring[i : i + most]) for i in range(size))
    return counts


def formula(count, size, lost):
    """GEMINI's mixed placement: no group may lose all hosts, nor its ring `size` in a row."""
    whole = count // size - 1
    ways = [1]
    for losses in [*[ring_losses(size, size)] * whole, ring_losses(count - whole * size, size)]:
        product = [0] * min(len(ways) + len(losses) - 1, lost + 1)
        for i, a in enumerate(ways):
            for j, b in enumerate(losses[: len(product) - i]):
                product[i + j] += a * b
        ways = product
    return ways[lost] if lost < len(ways) else 0


def test_sixteen_hosts_survive_two_losses_as_gemini_says():
    share = survivals(group_hosts(named(16), 1), 2) / comb(16, 2)
    assert share == 1 - 16 * comb(14, 0) / (2 * comb(16, 2)) == pytest.approx(0.9333, abs=5e-5)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_losses_of_as_many_hosts_as_hold_a_file_survive_as_the_formula_says(copies):
    """Of m hosts: all sets but one per group, or one per host of a larger ring."""
    size = 1 + copies
    for count in SIZES:
        groups = group_hosts(named(count), copies)
        held = min(size, count)
        ring = count % held
        fatal = count // held if not ring else count // held - 1 + held + ring
        assert len(holders_of(groups)) == fatal, count
        assert {len(holders) for holders in holders_of(groups)} == {held}
        assert formula(count, held, held) == comb(count, held) - fatal
        if count % size == 0:
            assert fatal / comb(count, size) == pytest.approx(
                count * comb(count - size, 0) / (size * comb(count, size))
            )


def test_pairs_of_any_lost_hosts_are_counted_one_by_one():
    for count in SIZES:
        groups = group_hosts(named(count), 1)
        assert survivals(groups, 1) == count
        assert survivals(groups, 2) == formula(count, 2, 2)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_any_number_of_lost_hosts_survives_as_the_formula_says(copies):
    for count in range(2, 13):
        groups = group_hosts(named(count), copies)
        for lost in range(count + 1):
            expected = formula(count, min(1 + copies, count), lost)
            assert survivals(groups, lost) == expected, (count, lost)


@pytest.mark.parametrize("copies", [1, 2])
def test_no_loss_of_a_fault_domain_is_fatal_with_equal_domains(copies):
    for count in SIZES:
        size = min(1 + copies, count)
        # With a larger last group, its ring needs a domain for each of its hosts.
        racks = [number % (size + count % size) for number in range(count)]
        domains = named(count, racks)
        groups = group_hosts(domains, copies)
        for holders in holders_of(groups):
            assert len({domains[host] for host in holders}) == size, count
        assert formula(count, size, size) == comb(count, size) - len(holders_of(groups))


@given(st.lists(st.integers(0, 12), min_size=2, max_size=64), st.integers(1, 3))
def test_hosts_that_hold_one_file_share_no_domain_if_any_placement_can_do_that(racks, copies):
    domains = named(len(racks), racks)
    groups = group_hosts(domains, copies)
    size = groups.size
    assert sorted(host for group in groups.groups for host in group) == sorted(domains)
    assert [len(group) for group in groups.groups[:-1]] == [size] * (len(racks) // size - 1)
    assert size <= len(groups.groups[-1]) < 2 * size
    # Any two hosts of the ring are among `size` in a row, so no domain may be twice in a group.
    domain_sizes = [racks.count(rack) for rack in set(racks)]
    apart = all(len({domains[h] for h in group}) == len(group) for group in groups.groups)
    assert apart == can_be_apart(domain_sizes, size, len(groups.groups[-1]))


def can_be_apart(domain_sizes, size, ring):
    """Whether groups can be apart, by the theorem of Gale and Ryser on zero-one matrices."""
    total = sum(domain_sizes)
    columns = sorted([*[size] * ((total - ring) // size), ring], reverse=True)
    rows = sorted(domain_sizes, reverse=True)
    conjugate = [sum(row > i for row in rows) for i in range(len(columns))]
    return all(sum(columns[:k]) <= sum(conjugate[:k]) for k in range(1, len(columns) + 1)) and (
        max(rows) <= len(columns)
    )


def test_the_order_of_hosts_does_not_matter():
    domains = list(named(23, [number % 5 for number in range(23)]).items())
    groups = group_hosts(dict(domains), 2)
    random.Random(1).shuffle(domains)
    assert group_hosts(dict(domains), 2) == groups


def test_a_file_in_two_groups_is_not_safe_and_is_copied_within_one():
    groups = group_hosts(named(6), 1)
    (a, b), (c, _), _ = groups.groups
    assert not groups.is_safe({a, c})
    assert groups.receivers({a, c}) == [b]
    assert groups.is_safe({a, b, c})
    assert groups.receivers({a, b}) == groups.receivers(set()) == []
    assert groups.receivers({"elsewhere"}) == []


def test_receivers_do_not_depend_on_which_copy_arrives_first():
    groups = group_hosts(named(5), 2)  # one ring of five
    ring = groups.groups[0]
    assert groups.receivers({ring[1]}) == [ring[2], ring[3]]
    assert groups.receivers({ring[1], ring[2]}) == [ring[3]]


def test_one_host_alone_needs_no_copy():
    groups = group_hosts(named(1), 1)
    assert groups.is_safe({"h0000"})
    assert not groups.is_safe(set())

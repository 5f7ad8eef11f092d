"""What several hosts need alike is read by one of them, and all come to the same result."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.hosts.test_division import LENGTH, job, needs

from penstock.core.errors import FormatError
from penstock.core.hosts.division import HostNeeds, OwnPlan
from penstock.core.hosts.replicas import (
    bucket_digests,
    component_numbers,
    decode_digests,
    encode_digests,
    hosts_together,
    relayed,
)


def needs_of(members):
    return HostNeeds([OwnPlan(jobs, most_bytes=LENGTH).plan for jobs in members])


def agreed(hosts):
    """The needs of each host, the ranks of each, and what each comes to."""
    found = [needs_of(members) for members in hosts]
    ranks, first = [], 0
    for members in hosts:
        ranks.append(tuple(range(first, first + len(members))))
        first += len(members)
    told = {
        number: decode_digests(encode_digests(bucket_digests(component_numbers(one))))
        for number, one in enumerate(found)
    }
    ways = [relayed(one, told, ranks, here) for here, one in enumerate(found)]
    return found, ranks, ways


@st.composite
def jobs_of_hosts(draw):
    """Some kinds of hosts, and several hosts of each."""
    kinds = draw(st.lists(needs(), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=5))


@given(hosts=jobs_of_hosts())
@settings(max_examples=12)
def test_what_crosses_the_network_is_read_by_one_that_needs_it_and_all_agree(hosts):
    found, ranks, ways = agreed(hosts)
    readers, recipients, sources = {}, {}, {}
    for here, (host, way) in enumerate(zip(found, ways, strict=True)):
        numbers = component_numbers(host).tolist()
        for component, one in way.items():
            me = ranks[here][one.member]
            number = numbers[component]
            assert one.member in host.members(component)
            if one.source is None:
                assert number not in readers
                readers[number], recipients[number] = me, {*one.recipients}
            else:
                assert not one.recipients
                sources.setdefault(number, {})[me] = one.source
    assert readers.keys() == sources.keys()
    for number, by_rank in sources.items():
        assert {*by_rank.values()} == {readers[number]}
        assert {*by_rank} == recipients[number]


@pytest.mark.slow
@given(hosts=jobs_of_hosts())
def test_of_many_jobs_what_crosses_the_network_is_read_by_one_that_needs_it(hosts):
    test_what_crosses_the_network_is_read_by_one_that_needs_it_and_all_agree.hypothesis.inner_test(
        hosts
    )


@given(hosts=jobs_of_hosts())
@settings(max_examples=12)
def test_all_that_equal_hosts_need_crosses_the_network(hosts):
    found, _, ways = agreed([hosts[0], *hosts])
    assert len(ways[0]) == len(found[0].components)


@pytest.mark.slow
@given(hosts=jobs_of_hosts())
def test_of_many_jobs_all_that_equal_hosts_need_crosses_the_network(hosts):
    test_all_that_equal_hosts_need_crosses_the_network.hypothesis.inner_test(hosts)


def test_hosts_read_evenly_of_what_all_need():
    members = [[job("a", n, [(0, LENGTH)]) for n in range(64)] for _ in range(2)]
    _, _, ways = agreed([members] * 4)
    loads = {}
    for here, way in enumerate(ways):
        for one in way.values():
            if one.source is None:
                loads[here, one.member] = loads.get((here, one.member), 0) + 1
    assert len(loads) == 8
    assert set(loads.values()) == {8}


def test_what_one_host_needs_alone_stays_with_it():
    both, own = job("a", 0, [(0, LENGTH)]), job("b", 0, [(0, LENGTH)])
    found, _, ways = agreed([[[both, own]], [[both]]])
    assert [len(way) for way in ways] == [1, 1]
    (component,) = ways[0]
    assert found[0].blobs[found[0].components[component, 0]] == "a"


def test_hosts_whose_other_members_need_it_do_not_share():
    one = [job("a", 0, [(0, LENGTH)])]
    assert [len(way) for way in agreed([[one, []], [[], one]])[2]] == [0, 0]
    assert [len(way) for way in agreed([[one], [one, []]])[2]] == [0, 0]


def test_many_hosts_share_in_parts():
    sets = [(2 * n, 2 * n + 1) for n in range(100)]
    hosts, here = hosts_together(sets, 140)
    assert (hosts[here], len(hosts)) == ((140, 141), 36)
    hosts, here = hosts_together(sets, 3)
    assert (hosts[here], len(hosts)) == ((2, 3), 64)


def test_digests_fit_into_a_post_and_bad_ones_are_refused():
    rows = np.random.default_rng(0).integers(1, 1 << 62, 1_000_000).astype(np.uint64)
    assert len(encode_digests(bucket_digests(rows * np.uint64(4)))) < 40_000
    with pytest.raises(FormatError):
        decode_digests(encode_digests(np.zeros(5, np.uint32)))
    with pytest.raises(FormatError):
        decode_digests(b"-")

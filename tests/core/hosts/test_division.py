"""Which rank of one or several hosts reads which bytes: each once, by one that needs it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import FormatError
from penstock.core.format.records import Frame
from penstock.core.hosts.division import (
    HostNeeds,
    OwnPlan,
    ReadPlan,
    bucket_digests,
    component_numbers,
    decode_digests,
    encode_digests,
    hosts_together,
    relayed,
)
from penstock.core.plan.reads import ChunkUse, FrameJob
from penstock.core.types import ByteRange

BLOCK = 10
LENGTH = 80  # of each frame


def job(blob, frame, spans, *, chain=None):
    """A frame of a blob; a rank needs its `spans`."""
    ranges = tuple(ByteRange(*span) for span in spans)
    found = FrameJob(Frame(0, frame * LENGTH, LENGTH, LENGTH, 0, ()), blob, BLOCK, chain)
    found.ranges = ranges if chain is None else (ByteRange(0, LENGTH),)
    found.uses = [ChunkUse(None, r.start, r.start, r.length) for r in ranges]
    found.paths = [(blob, str(frame))] * len(found.uses)
    return found


def divided(jobs_by_member, most_bytes=LENGTH):
    plans = [OwnPlan(jobs, most_bytes=most_bytes) for jobs in jobs_by_member]
    sent = [ReadPlan.decode(memoryview(plan.plan.encode())) for plan in plans]
    return [plan.divide(HostNeeds(sent), me, {}) for me, plan in enumerate(plans)]


def read_by(division, me):
    """`(blob, byte)` for each byte that a member reads, and the bytes that it reads twice."""
    jobs = [*division.alone, *(p.job for p in division.pieces if p.reader == me)]
    return [
        (job.blob, job.frame.offset + byte)
        for job in jobs
        for span in job.ranges
        for byte in range(span.start, span.stop)
    ]


def needed_by(jobs):
    return {
        (j.blob, j.frame.offset + b) for j in jobs for s in j.ranges for b in range(s.start, s.stop)
    }


def got_by(division):
    """The bytes that a member has in the end, read or taken."""
    pieces = {
        (p.job.blob, p.job.frame.offset + byte)
        for p in division.pieces
        for byte in range(p.span.start, p.span.stop)
    }
    alone = {
        (j.blob, j.frame.offset + b)
        for j in division.alone
        for s in j.ranges
        for b in range(s.start, s.stop)
    }
    return pieces | alone


@st.composite
def needs(draw):
    """What up to five ranks need of a few frames: whole blocks that do not touch."""
    members = []
    for _ in range(draw(st.integers(2, 5))):
        jobs = []
        for blob, frame in draw(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 3)))):
            cuts = sorted(draw(st.sets(st.integers(0, LENGTH // BLOCK), min_size=2)))
            spans = [(a * BLOCK, b * BLOCK) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
            jobs.append(job(blob, frame, spans))
        members.append(jobs)
    return members


@given(members=needs())
@settings(max_examples=12)
def test_each_byte_is_read_once_by_one_user_and_all_agree(members):
    found = divided(members)
    read = [byte for me, division in enumerate(found) for byte in read_by(division, me)]
    needed = [needed_by(jobs) for jobs in members]
    assert sorted(read) == sorted(set().union(*needed))
    known = {}
    for me, division in enumerate(found):
        assert needed[me] <= got_by(division)
        for piece in division.pieces:
            facts = (piece.job.blob, piece.job.frame.offset, piece.span, piece.reader, piece.takers)
            of_all = {piece.reader, *piece.takers}
            assert me in of_all
            assert piece.reader not in piece.takers
            known.setdefault(piece.number, (facts, of_all, []))[2].append(me)
            assert known[piece.number][0][:4] == facts[:4]
    for _, of_all, members_of in known.values():
        assert sorted(of_all) == sorted(members_of)


@pytest.mark.slow
@given(members=needs())
def test_each_byte_of_many_needs_is_read_once(members):
    test_each_byte_is_read_once_by_one_user_and_all_agree.hypothesis.inner_test(members)


@given(members=needs())
@settings(max_examples=12)
def test_each_use_lies_within_one_read_or_taken_range(members):
    for jobs, division in zip(members, divided(members), strict=True):
        parts = [*division.alone, *(p.job for p in division.pieces)]
        for one in jobs:
            spans = [s for p in parts if p.paths[:1] == one.paths[:1] for s in p.ranges]
            for use in one.uses:
                inside = [s for s in spans if s.start <= use.at and use.at + use.length <= s.stop]
                assert len(inside) == 1


@pytest.mark.slow
@given(members=needs())
def test_each_use_of_many_needs_is_in_one_range(members):
    test_each_use_lies_within_one_read_or_taken_range.hypothesis.inner_test(members)


def test_replicas_share_the_bytes_evenly():
    frames = [("a", number, [(0, LENGTH)]) for number in range(40)]
    found = divided([[job(*frame) for frame in frames] for _ in range(4)], most_bytes=1 << 30)
    loads = [len(read_by(division, me)) for me, division in enumerate(found)]
    assert sum(loads) == 40 * LENGTH
    assert not any(division.alone for division in found)


def test_large_frames_are_spread_over_the_ranks_that_need_them():
    def large(number):
        found = job("a", number, [])
        length = 20 << 20
        found.frame = Frame(0, number * length, length, length, 0, ())
        found.ranges = (ByteRange(0, length),)
        return found

    found = divided([[large(n) for n in range(8)] for _ in range(4)], most_bytes=1 << 30)
    assert [sum(p.reader == me for p in found[0].pieces) for me in range(4)] == [2, 2, 2, 2]


def test_heavy_private_readers_read_less_for_others():
    both = [job("a", 0, [(0, LENGTH)])]
    alone = [job("b", 0, [(0, LENGTH)])]
    found = divided([[*both, *alone], both])
    assert [piece.reader for piece in found[0].pieces] == [1]


def test_an_encoded_frame_is_shared_as_a_whole_chunk():
    found = divided(
        [[job("a", 0, [(0, 10)], chain="zstd")], [job("a", 0, [(70, 80)], chain="zstd")]]
    )
    (piece,) = found[1].pieces
    assert piece.span == ByteRange(0, LENGTH)
    assert piece.job.ranges == (ByteRange(0, LENGTH),)


def test_a_chunk_too_large_for_the_window_is_read_by_each_rank():
    found = divided([[job("a", 0, [(0, LENGTH)])]] * 2, most_bytes=LENGTH - 1)
    assert [len(division.alone) for division in found] == [1, 1]
    assert not found[0].pieces


def test_two_jobs_of_one_rank_for_the_same_bytes_get_them():
    mine = [job("a", 0, [(0, 20)]), job("a", 0, [(10, 30)])]
    found = divided([mine, [job("a", 0, [(0, 30)])]])
    (piece,) = found[0].pieces
    assert len(piece.job.uses) == 2


def test_a_plan_with_an_unnamed_blob_is_refused():
    rows = np.array([[1, 0, 0, 0, 1]], np.int64)
    with pytest.raises(ValueError, match="not listed"):
        ReadPlan.decode(ReadPlan(("a",), rows).encode())


def needs_of(members):
    return HostNeeds([OwnPlan(jobs, most_bytes=LENGTH).plan for jobs in members])


def agreed(hosts):
    """The needs of each host, its ranks, and its results."""
    found = [needs_of(members) for members in hosts]
    ranks, first = [], 0
    for members in hosts:
        ranks.append(tuple(range(first, first + len(members))))
        first += len(members)
    facts = {
        number: decode_digests(encode_digests(bucket_digests(component_numbers(one))))
        for number, one in enumerate(found)
    }
    ways = [relayed(one, facts, ranks, here) for here, one in enumerate(found)]
    return found, ranks, ways


@st.composite
def jobs_of_hosts(draw):
    """Some kinds of hosts, and several hosts of each."""
    kinds = draw(st.lists(needs(), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=5))


@given(hosts=jobs_of_hosts())
@settings(max_examples=12)
def test_network_bytes_are_read_by_one_user_and_all_agree(hosts):
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
def test_network_bytes_of_many_jobs_are_read_by_one_user(hosts):
    test_network_bytes_are_read_by_one_user_and_all_agree.hypothesis.inner_test(hosts)


@given(hosts=jobs_of_hosts())
@settings(max_examples=12)
def test_all_needs_of_equal_hosts_cross_the_network(hosts):
    found, _, ways = agreed([hosts[0], *hosts])
    assert len(ways[0]) == len(found[0].components)


@pytest.mark.slow
@given(hosts=jobs_of_hosts())
def test_many_jobs_of_equal_hosts_share_all_over_the_network(hosts):
    test_all_needs_of_equal_hosts_cross_the_network.hypothesis.inner_test(hosts)


def test_hosts_share_common_reads_evenly():
    members = [[job("a", n, [(0, LENGTH)]) for n in range(64)] for _ in range(2)]
    _, _, ways = agreed([members] * 4)
    loads = {}
    for here, way in enumerate(ways):
        for one in way.values():
            if one.source is None:
                loads[here, one.member] = loads.get((here, one.member), 0) + 1
    assert len(loads) == 8
    assert set(loads.values()) == {8}


def test_needs_of_one_host_stay_with_it():
    both, own = job("a", 0, [(0, LENGTH)]), job("b", 0, [(0, LENGTH)])
    found, _, ways = agreed([[[both, own]], [[both]]])
    assert [len(way) for way in ways] == [1, 1]
    (component,) = ways[0]
    assert found[0].blobs[found[0].components[component, 0]] == "a"


def test_hosts_with_unequal_users_do_not_share():
    one = [job("a", 0, [(0, LENGTH)])]
    assert [len(way) for way in agreed([[one, []], [[], one]])[2]] == [0, 0]
    assert [len(way) for way in agreed([[one], [one, []]])[2]] == [0, 0]


def test_many_hosts_share_in_parts():
    sets = [(2 * n, 2 * n + 1) for n in range(100)]
    hosts, here = hosts_together(sets, 140)
    assert (hosts[here], len(hosts)) == ((140, 141), 36)
    hosts, here = hosts_together(sets, 3)
    assert (hosts[here], len(hosts)) == ((2, 3), 64)


def test_digests_fit_a_post_and_bad_ones_are_refused():
    rows = np.random.default_rng(0).integers(1, 1 << 62, 1_000_000).astype(np.uint64)
    assert len(encode_digests(bucket_digests(rows * np.uint64(4)))) < 40_000
    with pytest.raises(FormatError):
        decode_digests(encode_digests(np.zeros(5, np.uint32)))
    with pytest.raises(FormatError):
        decode_digests(b"-")

"""The save plan: cuts, slabs, and places in the `.raw` blob."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.planned import NoBytes, planned, raw_places

from penstock.core.errors import ConfigError
from penstock.core.format.blocks import (
    block_count,
    blocks_covering,
    blocks_span,
    frame_blocks,
    merge_spans,
)
from penstock.core.limits import MAX_CHUNK_BYTES
from penstock.core.plan.save import SLAB_ALIGNMENT, Capture, plan_save
from penstock.core.tree.known import Known
from penstock.core.types import PAGE_BYTES, ByteRange, Role

ORDER = [Capture.FROZEN, Capture.NOW, Capture.DEFERRED]


def item(nbytes, *, itemsize=4, phase=64, group="model", device="cpu", **other):
    fields = {"role": Role.PARAMETER, "dtype": "float32", **other}
    source = NoBytes(nbytes, phase=phase, device=device)
    return planned(source, itemsize=itemsize, path=(group,), **fields)


def kind_of(one):
    entry = one.entry
    return entry.path[0], entry.role, one.chain, entry.source.device, one.capture


@st.composite
def plan_items(draw):
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16, 3, 20]))
    count = draw(st.integers(0, 60 // itemsize) | st.integers(0, 30_000 // itemsize))
    return item(
        count * itemsize,
        itemsize=itemsize,
        phase=draw(st.integers(0, PAGE_BYTES - 1) | st.just(64)),
        group=draw(st.sampled_from(["model", "optimizer"])),
        role=draw(st.sampled_from([Role.PARAMETER, Role.OTHER])),
        chain=draw(st.sampled_from([0, 0, 1, 2])),
        device=draw(st.sampled_from(["cpu", "cuda:0"])),
        capture=draw(st.sampled_from(ORDER)),
    )


saves = {
    "items": st.lists(plan_items(), max_size=20),
    "chunk_bytes": st.integers(1, 5 * PAGE_BYTES),
    "slab_limit_bytes": st.integers(0, 3 * PAGE_BYTES),
    "encoded_slab_bytes": st.integers(64, 3 * PAGE_BYTES),
}


@given(**saves)
def test_no_two_frames_touch_one_page_and_offsets_ascend(items, chunk_bytes, **sizes):
    plan = plan_save(items, chunk_bytes=chunk_bytes, **sizes)
    places, blob_bytes = raw_places(plan)
    end = 0
    for chunk, offset in zip(plan.chunks, places, strict=True):
        if chunk.chain:
            continue
        assert offset // PAGE_BYTES >= -(-end // PAGE_BYTES)
        assert offset % PAGE_BYTES == chunk.phase
        end = offset + chunk.length
    assert blob_bytes == end


@given(**saves)
def test_every_byte_of_every_object_is_in_exactly_one_piece(items, chunk_bytes, **sizes):
    plan = plan_save(items, chunk_bytes=chunk_bytes, **sizes)
    ends = [0] * len(items)
    for chunk in plan.chunks:
        assert chunk.pieces
        for piece in chunk.pieces:
            assert piece.start == ends[piece.item]
            assert piece.stop > piece.start
            ends[piece.item] = piece.stop
    assert ends == [i.entry.source.nbytes for i in items]
    assert plan.raw_bytes == sum(ends)


@given(**saves)
def test_chunks_keep_within_their_bounds_and_cut_between_elements(items, chunk_bytes, **sizes):
    plan = plan_save(items, chunk_bytes=chunk_bytes, **sizes)
    rounded = max(PAGE_BYTES, chunk_bytes // PAGE_BYTES * PAGE_BYTES)
    for chunk in plan.chunks:
        end = 0
        for piece in chunk.pieces:
            assert piece.at >= end
            assert piece.start % items[piece.item].entry.spec.itemsize == 0
            assert piece.stop % items[piece.item].entry.spec.itemsize == 0
            end = piece.at + piece.stop - piece.start
        assert chunk.length == end <= rounded
        if chunk.slab and chunk.chain:
            assert chunk.length <= sizes["encoded_slab_bytes"]


@given(**saves)
def test_slabs_hold_only_whole_small_objects_of_one_kind(items, chunk_bytes, **sizes):
    plan = plan_save(items, chunk_bytes=chunk_bytes, **sizes)
    for chunk in plan.chunks:
        if not chunk.slab:
            assert len(chunk.pieces) == 1
            continue
        assert chunk.phase == 0
        inside = [items[piece.item] for piece in chunk.pieces]
        assert len({kind_of(i) for i in inside}) == 1
        for piece, owner in zip(chunk.pieces, inside, strict=True):
            assert piece.at % SLAB_ALIGNMENT == 0
            assert (piece.start, piece.stop) == (0, owner.entry.source.nbytes)
            assert owner.entry.source.nbytes < sizes["slab_limit_bytes"]


@given(**saves)
def test_order_is_frozen_now_deferred_else_as_described(items, **sizes):
    plan = plan_save(items, **sizes)
    keys = [(ORDER.index(c.capture), c.pieces[0].item, c.pieces[0].start) for c in plan.chunks]
    assert keys == sorted(keys)
    for chunk in plan.chunks:
        assert {items[p.item].capture for p in chunk.pieces} == {chunk.capture}
        assert {items[p.item].chain for p in chunk.pieces} == {chunk.chain}


@given(phase=st.integers(0, 1023).map(lambda n: n * 4), pages=st.integers(1, 9))
def test_a_large_object_keeps_its_phase_and_is_cut_at_memory_pages(phase, pages):
    nbytes = 40 * PAGE_BYTES
    plan = plan_save(
        [item(nbytes, phase=phase)], chunk_bytes=pages * PAGE_BYTES, slab_limit_bytes=0
    )
    places, blob_bytes = raw_places(plan)
    assert plan.chunks[0].phase == phase
    end = phase
    for chunk, offset in zip(plan.chunks, places, strict=True):
        assert chunk.phase == (phase + chunk.pieces[0].start) % PAGE_BYTES
        assert chunk.phase == 0 or chunk is plan.chunks[0]
        assert offset == end
        end = offset + chunk.length
    assert blob_bytes == end == phase + nbytes


@given(
    phase=st.integers(0, 1023).map(lambda n: n * 4),
    pages=st.integers(2, 9),
    nbytes=st.integers(1, 30_000).map(lambda n: n * 12),
    itemsize=st.sampled_from([4, 12]),
)
def test_even_cuts_do_not_depend_on_the_address(phase, pages, nbytes, itemsize):
    def cut(phase, chain=0):
        one = item(nbytes, phase=phase, itemsize=itemsize, chain=chain)
        sizes = {"chunk_bytes": pages * PAGE_BYTES, "slab_limit_bytes": 0}
        return plan_save([one], even_cuts=True, **sizes)

    plan = cut(phase)
    assert [c.pieces for c in plan.chunks] == [c.pieces for c in cut(0).chunks]
    for chunk in plan.chunks:
        assert chunk.phase + chunk.length <= pages * PAGE_BYTES
        if itemsize == 4:
            assert chunk.phase == (phase + chunk.pieces[0].start) % PAGE_BYTES
    assert [c.pieces for c in cut(phase, 1).chunks] == [c.pieces for c in cut(0, 1).chunks]


def test_an_object_at_a_misaligned_address_gets_phase_zero():
    plan = plan_save([item(8192, phase=66)], chunk_bytes=4096, slab_limit_bytes=0)
    assert [c.phase for c in plan.chunks] == [0, 0]


def test_chunk_size_is_rounded_down_to_pages():
    plan = plan_save([item(8192, phase=0)], chunk_bytes=8191, slab_limit_bytes=0)
    assert [c.length for c in plan.chunks] == [4096, 4096]


def test_an_object_without_bytes_has_no_chunk():
    plan = plan_save([item(0), item(0, chain=1)], chunk_bytes=4096)
    assert plan.chunks == ()


def test_an_object_at_the_slab_limit_is_not_gathered():
    plan = plan_save([item(1024), item(1020)], chunk_bytes=1 << 20, slab_limit_bytes=1024)
    assert [c.slab for c in plan.chunks] == [False, True]


def test_an_object_that_does_not_fit_opens_a_new_slab():
    plan = plan_save([item(3000), item(3000), item(1000)], chunk_bytes=4096)
    assert [[p.item for p in c.pieces] for c in plan.chunks] == [[0], [1, 2]]


def test_chunks_beyond_the_format_limit_are_refused():
    with pytest.raises(ConfigError, match="at most"):
        plan_save([item(4)], chunk_bytes=2 * MAX_CHUNK_BYTES)


def test_elements_larger_than_a_chunk_are_refused():
    with pytest.raises(ConfigError, match="one element"):
        plan_save([item(10_000, itemsize=5000)], chunk_bytes=4096, slab_limit_bytes=0)


# -- blocks -------------------------------------------------------------------------------------

frames = {
    "offset": st.integers(0, 50_000),
    "length": st.integers(0, 60_000),
    "block_bytes": st.integers(1, 5).map(lambda n: n * PAGE_BYTES),
}


@given(**frames)
def test_blocks_cover_a_frame_and_are_cut_at_pages_of_the_blob(offset, length, block_bytes):
    blocks = frame_blocks(offset, length, block_bytes)
    assert len(blocks) == block_count(offset, length, block_bytes)
    end = 0
    for block in blocks:
        assert block.start == end
        assert block.length > 0
        end = block.stop
    assert end == length
    page = offset // PAGE_BYTES * PAGE_BYTES
    for block in blocks[:-1]:
        assert (offset + block.stop - page) % block_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 64 << 20), st.integers(1, 50)), min_size=1, max_size=8))
def test_blocks_fit_the_pieces_and_keep_the_manifest_small(sizes):
    items = [item(4 * nbytes // 4) for nbytes, count in sizes for _ in range(count)]
    plan = plan_save(items, chunk_bytes=16 << 20)
    block = plan.fitting_block_bytes()
    assert block in {1 << n for n in range(18, 23)}
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
    average = plan.raw_bytes / len(pieces)
    assert block >= 4 << 20 or average / 6 <= block
    assert block == 256 << 10 or block <= average / 3 + 1
    blocks = sum(block_count(chunk.phase, chunk.length, block) for chunk in plan.chunks)
    assert block == 4 << 20 or 8 * (blocks - len(plan.chunks)) <= 8 * 7 * len(pieces)


def test_blocks_of_nothing_have_a_size():
    assert plan_save([], chunk_bytes=16 << 20).fitting_block_bytes() == 256 << 10


@given(data=st.data(), **frames)
def test_covering_blocks_are_exactly_those_a_range_touches(data, offset, length, block_bytes):
    bound = st.integers(0, length)
    pairs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=4))
    ranges = merge_spans(pairs)
    runs = blocks_covering(offset, length, block_bytes, ranges)
    blocks = frame_blocks(offset, length, block_bytes)
    touched = {
        n
        for n, b in enumerate(blocks)
        if any(max(r.start, b.start) < min(r.stop, b.stop) for r in ranges)
    }
    assert [n for run in runs for n in run] == sorted(touched)
    for run in runs:
        span = blocks_span(offset, length, block_bytes, run)
        assert span == ByteRange(blocks[run[0]].start, blocks[run[-1]].stop)
    for before, after in itertools.pairwise(runs):
        assert before.stop < after.start


def test_blocks_that_touch_are_one_run():
    ranges = [ByteRange(0, 10), ByteRange(5000, 5010), ByteRange(13000, 13001)]
    assert blocks_covering(0, 20_000, 4096, ranges) == [range(2), range(3, 4)]


def test_slabs_of_different_devices_are_kept_apart():
    plan = plan_save([item(64), item(64, device="cuda:0"), item(64)], chunk_bytes=4096)
    assert [[p.item for p in c.pieces] for c in plan.chunks] == [[0, 2], [1]]


def test_a_range_beyond_its_frame_is_refused():
    with pytest.raises(ValueError, match="outside"):
        blocks_covering(0, 100, 4096, [ByteRange(50, 101)])


def test_merging_joins_touching_ranges_and_drops_empty_ones():
    spans = [(5, 9), (0, 3), (3, 4), (6, 7), (4, 4)]
    assert list(merge_spans(spans)) == [ByteRange(0, 4), ByteRange(5, 9)]


cuttings = st.fixed_dictionaries(
    {
        "chunk_bytes": st.sampled_from([PAGE_BYTES, 2 * PAGE_BYTES]),
        "slab_limit_bytes": st.sampled_from([0, 600, 2 * PAGE_BYTES]),
        "even_cuts": st.booleans(),
        "masters": st.sampled_from([{}, {1: (0,)}]),
    }
)


@given(
    items=st.lists(
        st.tuples(plan_items(), plan_items(), st.booleans(), st.integers(1, 3)), max_size=8
    ),
    first=cuttings,
    second=cuttings,
)
def test_known_cuts_equal_freshly_made_cuts(items, first, second):
    """Some objects are unchanged, as between two saves of one job; some are equal."""
    items = [one[:3] for one in items for _ in range(one[3])]
    known = None
    before = [old for old, _, _ in items]
    after = [new if other else old for old, new, other in items]
    for objects, how in [(before, first), (after, first), (after, second), (before, second)]:
        known = Known(known)
        plan = plan_save(objects, known=known, **how)
        assert plan.chunks == plan_save(objects, **how).chunks
        assert plan.objects is objects
        assert plan_save(objects, known=Known(known), **how).chunks is plan.chunks


def test_interleaved_plans_get_their_own_cuts():
    """A planning signal handler, or another thread, may run before any line of a plan."""
    one, other = [item(1000), item(8)], [item(5000), item(40), item(8)]
    small, large = (plan_save(objects, chunk_bytes=PAGE_BYTES) for objects in (one, other))

    def interrupted(number, last):
        """Plan `one`, and `other` before line `number`; return the latter, None if no such line."""
        lines, within = itertools.count(), None

        def trace(frame, event, arg):
            del arg
            nonlocal within
            if frame.f_code is not plan_save.__code__:
                return None
            if event == "line" and next(lines) == number:
                within = plan_save(other, chunk_bytes=PAGE_BYTES, known=Known(last))
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            plan = plan_save(one, chunk_bytes=PAGE_BYTES, known=Known(last))
        finally:
            sys.settrace(before)
        assert (plan.chunks, plan.raw_bytes) == (small.chunks, small.raw_bytes)
        return within

    for earlier in ([], one, other):
        for number in itertools.count():
            last = Known()
            plan_save(earlier, chunk_bytes=PAGE_BYTES, known=last)
            within = interrupted(number, last)
            if within is None:
                break
            assert (within.chunks, within.raw_bytes) == (large.chunks, large.raw_bytes)
            for objects, plan in ((one, small), (other, large)):
                found = plan_save(objects, chunk_bytes=PAGE_BYTES, known=Known(last))
                assert found.chunks == plan.chunks
        assert number

"""The restore plan and regions, against real bytes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.blocks import frame_blocks
from penstock.core.errors import FormatError
from penstock.core.manifest import ChunkRef, Frame
from penstock.core.plan import Capture, PlanItem, plan_save
from penstock.core.regions import copy_region, region_batches, region_runs
from penstock.core.restore_plan import Wanted, plan_restore
from penstock.core.types import PAGE_BYTES, ByteRange, Region, Role


def contents(number, nbytes):
    return bytes((number * 31 + n * 7 + n // 251) % 256 for n in range(nbytes))


def store(sizes, chunk_bytes, chains):
    """Plan and "store" objects; frames of chain 1 hold the complement of their chunk."""
    items = [
        PlanItem(n, 1, 64, "g", Role.OTHER, chain, "cpu", Capture.NOW)
        for n, chain in zip(sizes, chains, strict=True)
    ]
    plan = plan_save(items, chunk_bytes=chunk_bytes, slab_limit_bytes=700, encoded_slab_bytes=900)
    blobs = {0: bytearray(plan.raw_blob_bytes), 1: bytearray()}
    frames, refs = [], [[] for _ in sizes]
    for number, chunk in enumerate(plan.chunks):
        data = bytearray(chunk.length)
        for piece in chunk.pieces:
            whole = contents(piece.item, sizes[piece.item])
            data[piece.at : piece.at + piece.stop - piece.start] = whole[piece.start : piece.stop]
            refs[piece.item].append(ChunkRef(number, piece.at, piece.start, piece.stop))
        offset = len(blobs[1]) if chunk.chain else chunk.offset
        if chunk.chain:
            blobs[1] += bytes(255 - b for b in data)
        else:
            blobs[0][offset : offset + chunk.length] = data
        length = len(data)
        frames.append(Frame(chunk.chain, offset, length, length, chunk.chain, ()))
    return blobs, frames, refs


def execute(plan, blobs, outs):
    for read in plan.reads:
        frame = read.frame
        chunk = bytearray(b"\xee" * frame.raw_length)  # what is not fetched must not be used
        for block in read.blocks:
            at = frame.offset + block.start
            got = blobs[frame.blob][at : at + block.length]
            assert len(got) == block.length
            chunk[block.start : block.stop] = got
        if frame.chain:
            chunk = bytes(255 - b for b in chunk)
        for use in read.uses:
            outs[use.wanted][use.start : use.start + use.length] = chunk[
                use.at : use.at + use.length
            ]


@st.composite
def stores(draw):
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 20_000), min_size=count, max_size=count))
    chains = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=count, max_size=count))
    return sizes, draw(st.integers(1, 4)) * PAGE_BYTES, chains


@given(data=st.data(), store_of=stores(), block_pages=st.integers(1, 3))
def test_any_ranges_of_any_objects_are_read_right_and_only_their_blocks(
    data, store_of, block_pages
):
    sizes, chunk_bytes, chains = store_of
    blobs, frames, refs = store(sizes, chunk_bytes, chains)
    block_bytes = block_pages * PAGE_BYTES
    wanted, expected = [], []
    for number in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5)):
        bound = st.integers(0, sizes[number])
        pairs = data.draw(st.none() | st.lists(st.tuples(bound, bound).map(sorted), max_size=3))
        ranges = None if pairs is None else [ByteRange(a, b) for a, b in pairs]
        wanted.append(Wanted(7, frames, refs[number], ranges))
        out = bytearray(sizes[number])
        for r in ranges if ranges is not None else [ByteRange(0, sizes[number])]:
            out[r.start : r.stop] = contents(number, sizes[number])[r.start : r.stop]
        expected.append(out)
    plan = plan_restore(wanted, block_bytes={7: block_bytes})
    outs = [bytearray(len(e)) for e in expected]
    execute(plan, blobs, outs)
    assert outs == expected
    places = [(r.frame.blob, r.frame.offset) for r in plan.reads]
    assert places == sorted(set(places))
    needed = 0
    for read in plan.reads:
        used = {n for u in read.uses for n in range(u.at, u.at + u.length)}
        needed += read.frame.length if read.frame.chain else len(used)
        if not read.frame.chain:
            fetched = {n for b in read.blocks for n in range(b.start, b.stop)}
            blocks = frame_blocks(read.frame.offset, read.frame.length, block_bytes)
            touched = [b for b in blocks if used & set(range(b.start, b.stop))]
            assert fetched == {n for b in touched for n in range(b.start, b.stop)}
    assert plan.bytes_needed == needed
    assert plan.bytes_to_read == sum(b.length for r in plan.reads for b in r.blocks)


def test_frames_that_two_sections_describe_differently_are_refused():
    ref = ChunkRef(0, 0, 0, 100)
    one, other = Frame(0, 0, 100, 100, 0, (1,)), Frame(0, 0, 100, 100, 0, (2,))
    with pytest.raises(FormatError, match="differently"):
        plan_restore([Wanted(0, [one], [ref]), Wanted(0, [other], [ref])], block_bytes={0: 4096})


def test_a_frame_that_two_sections_list_is_read_once():
    ref = ChunkRef(0, 0, 0, 100)
    wanted = [Wanted(0, [Frame(0, 0, 100, 100, 0, (1,))], [ref]) for _ in range(2)]
    plan = plan_restore(wanted, block_bytes={0: 4096})
    assert len(plan.reads) == 1
    assert (plan.bytes_needed, plan.bytes_to_read) == (100, 100)


def test_frames_of_different_parts_are_kept_apart():
    ref = ChunkRef(0, 0, 0, 100)
    frame = Frame(0, 0, 100, 100, 0, (1,))
    plan = plan_restore(
        [Wanted(1, [frame], [ref]), Wanted(0, [frame], [ref])], block_bytes={0: 4096, 1: 4096}
    )
    assert [read.part for read in plan.reads] == [0, 1]


# -- regions ------------------------------------------------------------------------------------


@st.composite
def regions(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    region = Region(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    return shape, region, draw(st.sampled_from([1, 2, 3, 4, 8, 16]))


def tensor(shape, itemsize):
    flat = np.arange(math.prod(shape) * itemsize, dtype=np.uint32).astype(np.uint8)
    return flat.reshape((*shape, itemsize))


def cut(array, region):
    index = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
    return array[index].tobytes()


@given(regions(), st.integers(0, 20))
def test_runs_are_exactly_the_bytes_of_a_region_with_small_gaps_joined(case, gap):
    shape, region, itemsize = case
    whole = tensor(shape, itemsize).tobytes()
    exact = region_runs(shape, region, itemsize)
    assert b"".join(whole[r.start : r.stop] for r in exact) == cut(tensor(shape, itemsize), region)
    for before, after in itertools.pairwise(exact):
        assert before.stop < after.start
    joined = []
    for run in exact:
        if joined and run.start - joined[-1].stop <= gap:
            joined[-1] = ByteRange(joined[-1].start, run.stop)
        else:
            joined.append(run)
    assert region_runs(shape, region, itemsize, merge_gap_bytes=gap) == joined


def test_runs_are_joined_over_gaps_of_exactly_the_given_size():
    region = Region((0, 0), (3, 4))
    assert len(region_runs((3, 10), region, 2, merge_gap_bytes=11)) == 3
    assert len(region_runs((3, 10), region, 2, merge_gap_bytes=12)) == 1


@given(regions(), st.integers(1, 300))
def test_a_region_read_in_batches_is_the_region(case, limit_bytes):
    shape, region, itemsize = case
    whole = tensor(shape, itemsize).tobytes()
    out = bytearray(region.numel * itemsize)
    end = elements = 0
    for batch in region_batches(shape, region, itemsize, limit_bytes):
        assert batch.cover.start >= end
        assert batch.cover.length <= max(limit_bytes, itemsize)
        end = batch.cover.stop
        elements += batch.region.numel
        source = bytearray(b"\xee" * batch.cover.length)
        for run in region_runs(shape, batch.region, itemsize):
            at = run.start - batch.cover.start
            source[at : at + run.length] = whole[run.start : run.stop]
        copy_region(
            memoryview(source), batch.cover, batch.region, memoryview(out), region,
            shape=shape, itemsize=itemsize,
        )  # fmt: skip
    assert elements == region.numel
    assert bytes(out) == cut(tensor(shape, itemsize), region)

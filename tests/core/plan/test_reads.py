"""The restore plan and regions, against real bytes."""

import itertools
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.planned import NoBytes, planned, raw_places

from penstock.core.errors import FormatError
from penstock.core.format.blocks import frame_blocks, merge_spans
from penstock.core.format.records import (
    BlobRecord,
    ChunkRef,
    Frame,
    ObjectRecord,
    PartHead,
    SectionInfo,
    ShardRecord,
)
from penstock.core.plan.reads import ObjectRequest, plan_reads
from penstock.core.plan.regions import (
    common_region,
    copy_region,
    flaw_of_cover,
    is_partition,
    one_copy,
    region_runs,
)
from penstock.core.plan.save import plan_save
from penstock.core.types import (
    PAGE_BYTES,
    ByteRange,
    Kind,
    Region,
    Role,
    TensorSpec,
    regions_of_range,
)


def contents(number, nbytes):
    return bytes((number * 31 + n * 7 + n // 251) % 256 for n in range(nbytes))


def store(sizes, chunk_bytes, chains):
    """Plan and "store" objects; frames of chain 1 hold the complement of their chunk."""
    items = [planned(NoBytes(n), chain=chain) for n, chain in zip(sizes, chains, strict=True)]
    plan = plan_save(items, chunk_bytes=chunk_bytes, slab_limit_bytes=700, encoded_slab_bytes=900)
    places, end = raw_places(plan)
    blobs = {0: bytearray(end), 1: bytearray()}
    frames, refs = [], [[] for _ in sizes]
    for number, chunk in enumerate(plan.chunks):
        data = bytearray(chunk.length)
        for piece in chunk.pieces:
            whole = contents(piece.item, sizes[piece.item])
            data[piece.at : piece.at + piece.stop - piece.start] = whole[piece.start : piece.stop]
            refs[piece.item].append(ChunkRef(number, piece.at, piece.start, piece.stop))
        offset = len(blobs[1]) if chunk.chain else places[number]
        if chunk.chain:
            blobs[1] += bytes(255 - b for b in data)
        else:
            blobs[0][offset : offset + chunk.length] = data
        length = len(data)
        frames.append(Frame(chunk.chain, offset, length, length, chunk.chain, ()))
    return blobs, frames, refs


def described(part, frames, refs, block_bytes=PAGE_BYTES):
    """An object of bytes in one shard of these chunks; the blobs are named after the part."""
    shape = (refs[-1].stop,)
    blobs = tuple(BlobRecord(f"part {part}, blob {n}", 0) for n in (0, 1))
    nothing = SectionInfo(0, 0, 0, "", 0, 0, None)
    head = PartHead("0" * 32, part, 1, 0, block_bytes, blobs, (), nothing, ())
    return ObjectRecord(
        0, ("x",), Kind.TENSOR, TensorSpec("uint8", 1, shape), Role.OTHER, "tensor", frames, head,
        (ShardRecord(Region.whole(shape), tuple(refs)),),
    )  # fmt: skip


def planned_reads(requests):
    """The jobs, and the bytes needed."""
    pairs = [(request, [request.record]) for request in requests]
    return plan_reads(pairs, lambda head, number: (head.rank, number))


def whole(record):
    return ObjectRequest(record, bytearray(record.spec.nbytes))


def execute(jobs, blobs):
    for read in jobs:
        frame = read.frame
        chunk = bytearray(b"\xee" * frame.raw_length)  # unfetched bytes must not be used
        for block in read.ranges:
            at = frame.offset + block.start
            got = blobs[frame.blob][at : at + block.length]
            assert len(got) == block.length
            chunk[block.start : block.stop] = got
        if frame.chain:
            chunk = bytes(255 - b for b in chunk)
        for use in read.uses:
            use.sink[use.start : use.start + use.length] = chunk[use.at : use.at + use.length]


@st.composite
def stores(draw):
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 20_000), min_size=count, max_size=count))
    chains = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=count, max_size=count))
    return sizes, draw(st.integers(1, 4)) * PAGE_BYTES, chains


@given(data=st.data(), store_of=stores(), block_pages=st.integers(1, 3))
def test_any_ranges_are_read_correctly_and_only_their_blocks(data, store_of, block_pages):
    sizes, chunk_bytes, chains = store_of
    blobs, frames, refs = store(sizes, chunk_bytes, chains)
    block_bytes = block_pages * PAGE_BYTES
    requests, sinks, expected = [], [], []
    for number in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5)):
        bound = st.integers(0, sizes[number])
        pairs = data.draw(st.none() | st.lists(st.tuples(bound, bound).map(sorted), max_size=3))
        ranges = None if pairs is None else merge_spans(pairs)
        record = described(7, frames, refs[number], block_bytes)
        sinks.append(bytearray(sizes[number]))
        if ranges is None:
            requests.append(ObjectRequest(record, sinks[-1]))
        for r in ranges or ():
            region = Region((r.start,), (r.length,))
            requests.append(ObjectRequest(record, sinks[-1], region, r.start))
        out = bytearray(sizes[number])
        for r in ranges if ranges is not None else [ByteRange(0, sizes[number])]:
            out[r.start : r.stop] = contents(number, sizes[number])[r.start : r.stop]
        expected.append(out)
    jobs, bytes_needed = planned_reads(requests)
    execute(jobs, blobs)
    assert sinks == expected
    places = [(r.frame.blob, r.frame.offset) for r in jobs]
    assert places == sorted(set(places))
    needed = 0
    for read in jobs:
        used = {n for u in read.uses for n in range(u.at, u.at + u.length)}
        needed += read.frame.length if read.frame.chain else len(used)
        if not read.frame.chain:
            fetched = {n for b in read.ranges for n in range(b.start, b.stop)}
            blocks = frame_blocks(read.frame.offset, read.frame.length, block_bytes)
            touched = [b for b in blocks if used & set(range(b.start, b.stop))]
            assert fetched == {n for b in touched for n in range(b.start, b.stop)}
    assert bytes_needed == needed


def test_frames_that_two_sections_describe_differently_are_refused():
    ref = ChunkRef(0, 0, 0, 100)
    one, other = Frame(0, 0, 100, 100, 0, (1,)), Frame(0, 0, 100, 100, 0, (2,))
    with pytest.raises(FormatError, match="differently"):
        planned_reads([whole(described(0, [frame], [ref])) for frame in (one, other)])


def test_a_frame_that_two_sections_list_is_read_once():
    ref = ChunkRef(0, 0, 0, 100)
    frame = (0, 0, 100, 100, 0, (1,))
    requests = [whole(described(0, [Frame(*frame)], [ref])) for _ in range(2)]
    jobs, needed = planned_reads(requests)
    assert len(jobs) == 1
    assert needed == sum(b.length for b in jobs[0].ranges) == 100


def test_frames_of_different_parts_are_kept_apart():
    ref = ChunkRef(0, 0, 0, 100)
    frame = Frame(0, 0, 100, 100, 0, (1,))
    jobs, _ = planned_reads([whole(described(part, [frame], [ref])) for part in (1, 0)])
    assert [read.blob for read in jobs] == ["part 0, blob 0", "part 1, blob 0"]


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
def test_runs_are_the_bytes_of_a_region_with_small_gaps_joined(case, gap):
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


@given(regions(), st.data())
def test_a_range_of_elements_is_few_rectangles_in_order(case, data):
    shape, _, itemsize = case
    count = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    found = regions_of_range(shape, start, stop)
    pieces = b"".join(cut(tensor(shape, itemsize), region) for region in found)
    assert pieces == tensor(shape, itemsize).tobytes()[start * itemsize : stop * itemsize]
    assert all(region.numel for region in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


def elements(region):
    spans = zip(region.offsets, region.sizes, strict=True)
    return set(itertools.product(*(range(o, o + n) for o, n in spans)))


def spans_of(dimensions):
    """Non-empty rectangles within 5 elements along each dimension."""
    ends = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    spans = st.lists(ends, min_size=dimensions, max_size=dimensions)
    return spans.map(lambda s: Region([a for a, _ in s], [b - a + 1 for a, b in s]))


def cuts(shape, places):
    """A tensor of `shape`, cut into two at each place: which piece, which dimension, how far."""
    pieces = [Region.whole(shape)]
    for which, dimension, far in places:
        piece, d = pieces[which % len(pieces)], dimension % len(shape)
        if piece.sizes[d] > 1:
            size = 1 + far % (piece.sizes[d] - 1)
            start = (*piece.offsets[:d], piece.offsets[d] + size, *piece.offsets[d + 1 :])
            pieces.remove(piece)
            for offsets, n in ((piece.offsets, size), (start, piece.sizes[d] - size)):
                pieces.append(Region(offsets, (*piece.sizes[:d], n, *piece.sizes[d + 1 :])))
    return pieces


PLACES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 9)), max_size=9)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), PLACES, st.data())
def test_regions_are_a_partition_if_each_element_is_in_one(shape, places, data):
    found = cuts(shape, places)
    assert is_partition(shape, found)
    found += data.draw(st.lists(spans_of(len(shape)), max_size=2))
    found = data.draw(st.permutations(found))[: data.draw(st.integers(0, len(found)))]
    held = [element for region in found for element in elements(region)]
    assert is_partition(shape, found) == (sorted(held) == sorted(elements(Region.whole(shape))))


def across(dimensions, size, dimension):
    """All but the last of the slices that a tensor is cut into along one dimension."""
    for start in range(size - 1):
        bounds = [(start, 1) if d == dimension else (0, size) for d in range(dimensions)]
        yield Region(*zip(*bounds, strict=True))


def test_few_shards_of_many_dimensions_need_little_memory():
    lone = Region((1,) * 64, (1,) * 64)
    assert "no shard has elements [0:1, 0:1" in flaw_of_cover((3,) * 64, [lone])
    crossed = [region for d in range(40) for region in across(40, 3, d)]
    assert "overlap in too many ways" in flaw_of_cover((3,) * 40, crossed)
    assert one_copy((3,) * 40, crossed) is None


def test_a_futile_search_for_copies_ends():
    size = 300
    rows = [Region((n,), (1,)) for n in range(size)]
    windows = [Region((n,), (size // 2,)) for n in range(size // 2)]
    assert "overlap in too many ways" in flaw_of_cover((size,), rows + windows)
    assert one_copy((size,), rows + windows) is not None


@given(regions(), st.data())
def test_a_piece_of_a_region_is_copied_from_any_range_with_it(case, data):
    shape, region, itemsize = case
    count = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    whole = tensor(shape, itemsize).tobytes()
    out = bytearray(region.numel * itemsize)
    for first, last in ((0, start), (start, stop), (stop, count)):
        span = ByteRange(first * itemsize, last * itemsize)
        for rectangle in regions_of_range(shape, first, last):
            common = common_region(rectangle, region)
            if common is not None:
                copy_region(
                    memoryview(whole)[span.start : span.stop], span, common, memoryview(out),
                    region, shape=shape, itemsize=itemsize,
                )  # fmt: skip
    assert bytes(out) == cut(tensor(shape, itemsize), region)


@given(regions(), st.data())
def test_exactly_the_regions_of_whole_copies_are_covered(case, data):
    shape, region, _ = case
    held = [region, *data.draw(st.lists(regions().map(lambda other: other[1]), max_size=3))]
    held = [one for one in held if len(one.sizes) == len(shape)]
    held = [
        r
        for r in held
        if all(o + n <= m for o, n, m in zip(r.offsets, r.sizes, shape, strict=True))
    ]
    every = sorted(elements(Region.whole(shape)))
    distinct = {one for one in held if one.numel}
    copies = [
        set(some)
        for count in range(1, len(distinct) + 1)
        for some in combinations(distinct, count)
        if sorted(e for one in some for e in elements(one)) == every
    ]
    flaw = flaw_of_cover(shape, [*held, *held])
    assert (flaw is None) == (set().union(*copies) == distinct and bool(copies or not every))
    assert one_copy(shape, held) is None or bool(copies or not every)

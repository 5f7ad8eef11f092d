"""Regions of tensors of several ranks, assembled from shards of any shape."""

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.plan.test_reads import cut, tensor

from penstock.core.abc import ByteSink
from penstock.core.errors import FormatError
from penstock.core.format.records import ChunkRef, ObjectRecord, PartHead, ShardRecord
from penstock.core.plan.reads import ObjectRequest, chunk_uses
from penstock.core.restore.fill import BytesSink
from penstock.core.types import Kind, Region, Role, TensorSpec


class Blind(ByteSink):
    """A sink that shows no memory, as that of a GPU."""

    def __init__(self, nbytes):
        self.nbytes, self.device, self.address, self.memory = nbytes, "cuda:0", None, None
        self.data = bytearray(nbytes)

    def view(self):
        return None

    def copy_in(self, start, data, /):
        self.data[start : start + data.nbytes] = data


@st.composite
def splits(draw, region, depth=3):
    """Rectangles that make up `region`."""
    wide = [d for d, n in enumerate(region.sizes) if n > 1]
    if not wide or not depth or draw(st.integers(0, 3)) == 0:
        return [region]
    at = draw(st.sampled_from(wide))
    first = draw(st.integers(1, region.sizes[at] - 1))
    found = []
    for start, size in ((0, first), (first, region.sizes[at] - first)):
        offsets = (*region.offsets[:at], region.offsets[at] + start, *region.offsets[at + 1 :])
        piece = Region(offsets, (*region.sizes[:at], size, *region.sizes[at + 1 :]))
        found += draw(splits(piece, depth - 1))
    return found


@st.composite
def wanted(draw, shape):
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def stored_as(shards, shape, itemsize, per_part=1, block_bytes=4096):
    """The shards, described by as many parts; shard n has its bytes in frame n."""
    spec = TensorSpec("x", itemsize, shape)
    found = []
    for part, at in enumerate(range(0, len(shards), per_part)):
        records = tuple(
            ShardRecord(region, (ChunkRef(at + n, 0, 0, region.numel * itemsize),))
            for n, region in enumerate(shards[at : at + per_part])
        )
        head = PartHead("0" * 32, part, 1, 0, block_bytes, (), (), None, ())
        found.append(
            ObjectRecord(0, ("w",), Kind.TENSOR, spec, Role.OTHER, "tensor", (), head, records)
        )
    return found


def give(shard, use, data, step):
    """Deliver only the bytes that a use asks for, `step` elements at once."""
    size = data.itemsize * data.shape[-1]
    stored = memoryview(cut(data, shard.region))
    end = use.at + use.length
    for at in range(use.at, end, step * size):
        use.sink.copy_in(use.start + at - use.at, stored[at : min(at + step * size, end)])


@given(st.data())
def test_any_region_is_assembled_from_any_shards(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    itemsize = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    shards = data.draw(splits(Region.whole(shape)))
    shards += data.draw(st.lists(st.sampled_from(shards), max_size=2))  # replicas
    values = tensor(shape, itemsize)
    per_part, block_bytes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    stored = stored_as(shards, shape, itemsize, per_part, block_bytes)
    region = data.draw(st.none() | wanted(shape))
    expected = cut(values, region or Region.whole(shape))
    at = data.draw(st.integers(0, 3)) * itemsize
    sink = data.draw(st.sampled_from([BytesSink, Blind]))(at + len(expected))
    used = set()
    for _, shard, _, use in chunk_uses(ObjectRequest(stored[0], sink, region, at), stored):
        give(shard, use, values, data.draw(st.integers(1, 9)))
        used.add((shard.region, use.at, use.length))
    assert bytes(sink.data) == bytes(at) + expected
    assert all(
        a[0] != b[0] or a[1] + a[2] <= b[1] or b[1] + b[2] <= a[1] for a, b in combinations(used, 2)
    )


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([Region((0, 0), (2, 4)), Region((3, 0), (3, 4))], "no shard has elements [2:3, 0:4]"),
        (
            [Region((0, 0), (3, 4)), Region((2, 0), (4, 4))],
            "several shards have elements [2:3, 0:4]",
        ),
        ([Region((0, 0), (6, 2)), Region((0, 2), (6, 1))], "no shard has elements [0:6, 3:4]"),
        ([Region((1, 0), (5, 4))], "no shard has elements [0:1, 0:4]"),
        # As many duplicate elements as missing ones.
        ([Region((0, 0), (4, 4)), Region((0, 0), (2, 4))], "no shard has elements [4:6, 0:4]"),
        (
            [Region((0, 0), (6, 1)), Region((0, 1), (6, 2)), Region((0, 2), (6, 1))],
            "no shard has elements [0:6, 3:4]",
        ),
        ([], "no shard has elements [0:6, 0:4]"),
    ],
)
def test_shards_that_omit_or_repeat_elements_are_refused(shards, why):
    stored = stored_as(shards, (6, 4), 1)
    (whole,) = stored_as([Region.whole((6, 4))], (6, 4), 1)
    request = ObjectRequest(whole, BytesSink(24))
    with pytest.raises(FormatError, match=re.escape(f"w from (0, 0) on: {why}")):
        list(chunk_uses(request, stored))
    # Verification assembles nothing.
    assert len(list(chunk_uses(request._replace(sink=None), stored))) == len(stored)

"""Tables of shards and the index over them, against plain dicts and lists."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.manifests import UID

from penstock.core.errors import FormatError
from penstock.core.format.index import (
    IndexReader,
    SectionShards,
    dump_table,
    encode_index,
    load_table,
    shard_table,
)
from penstock.core.types import Region

# Few values, so that hashes collide; and all over, edges included.
hashes = st.integers(0, 40) | st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**64 - 1, 2**63])
sides = st.integers(0, 2**62 - 1) | st.integers(0, 3)
rectangles = st.lists(st.tuples(sides, sides), max_size=4).map(
    lambda pairs: Region([o for o, _ in pairs], [n for _, n in pairs])
)
shards = st.tuples(hashes, st.booleans() | rectangles)
parts = st.lists(st.lists(st.lists(shards, max_size=9), max_size=4), max_size=4)


def table_of(sections):
    return shard_table([SectionShards([h for h, _ in s], [r for _, r in s]) for s in sections])


def tables_of(per_part):
    return [table_of(sections) for sections in per_part]


def whole(values):
    return [(value, True) for value in values]


class Reads:
    def __init__(self, encoded, data=None):
        self.data = encoded.data if data is None else data
        self.lengths = []
        self.entry = encoded.entry

    def __call__(self, offset, length):
        self.lengths.append(length)
        return self.data[offset : offset + length]

    def reader(self, **options):
        return IndexReader(self, self.entry, **options)


def find(reader, wanted):
    return reader.find_all(np.array([wanted], np.uint64))


def listed(table):
    rows = zip(table.hashes.tolist(), table.places(), table.dims.tolist(), strict=True)
    return [(*row, region) for row, region in zip(rows, table.regions(), strict=True)]


def expected_rows(per_part):
    rows = [
        (h, (part, number), r)
        for part, sections in enumerate(per_part)
        for number, section in enumerate(sections)
        for h, r in section
    ]
    return sorted(rows, key=lambda row: row[:2])  # stable: shards of a section keep their order


def rows_of(table):
    """The given rows: True for whole objects, False without bytes."""
    return [
        (h, place, region if isinstance(region, Region) else dims == 0xFF)
        for h, place, dims, region in listed(table)
    ]


@given(parts, st.lists(hashes, max_size=5), st.booleans())
def test_a_search_finds_every_shard_with_its_region(per_part, others, at_once):
    encoded = encode_index(UID, tables_of(per_part))
    rows = expected_rows(per_part)
    reader = Reads(encoded).reader(whole_bytes=(1 << 20) * at_once)
    assert sum(map(len, reader.blocks())) == len(rows)
    wanted = {row[0] for row in rows}
    for one in [*wanted, *others]:
        assert rows_of(find(reader, one)) == [row for row in rows if row[0] == one]
    every = np.array([*wanted, *others], np.uint64)
    assert rows_of(reader.find_all(every)) == rows
    assert [row for block in reader.blocks() for row in rows_of(block)] == rows


def test_one_path_of_a_large_index_takes_the_head_and_one_block():
    values = np.random.default_rng(2).integers(0, 2**64 - 1, 300_000, np.uint64, endpoint=True)
    encoded = encode_index(UID, [table_of([whole(values.tolist())])])
    for value in [int(values.min()), int(values.max()), *values[::40_009].tolist()]:
        reads = Reads(encoded)
        assert find(reads.reader(whole_bytes=0), value).places() == [(0, 0)]
        assert len(reads.lengths) == 2
        assert sum(reads.lengths) < 50_000


def test_a_thousand_regular_shards_take_less_than_two_bytes_each():
    def part(rank):
        held = [(n * 0x9E3779B97F4A7C15 % 2**64, Region((rank * 4, 0), (4, 64))) for n in range(50)]
        return table_of([held])

    encoded = encode_index(UID, [part(rank) for rank in range(1000)])
    assert len(encoded.data) < 2 * 50 * 1000


@given(st.data())
def test_every_flipped_bit_is_found(data):
    encoded = encode_index(UID, [table_of([whole(range(20))])])
    at = data.draw(st.integers(0, len(encoded.data) * 8 - 1))
    bad = bytearray(encoded.data)
    bad[at // 8] ^= 1 << at % 8
    with pytest.raises(FormatError, match="sha256"):
        list(Reads(encoded, bytes(bad)).reader().blocks())


@pytest.mark.parametrize("change", [{"head_length": 0}, {"length": 10**6}, {"head_length": 30}])
def test_a_head_that_contradicts_its_index_is_refused(change):
    encoded = encode_index(UID, [table_of([whole(range(20))])])
    reads = Reads(encoded)
    reads.entry = replace(encoded.entry, **change)
    with pytest.raises(FormatError):
        reads.reader()


def test_an_index_truncated_by_a_store_is_refused():
    encoded = encode_index(UID, [table_of([whole(range(50_000))])])
    with pytest.raises(FormatError, match="got 0 of"):
        find(Reads(encoded, encoded.data[:1000]).reader(whole_bytes=0), 49_999)


@given(st.lists(st.lists(shards, max_size=9), max_size=5))
def test_table_round_trips(sections):
    table = table_of(sections)
    again = load_table(dump_table(table), "x", count=len(table))
    assert listed(again) == listed(table)
    assert [row for piece in again.cut(2) for row in listed(piece)] == listed(table)


@pytest.mark.parametrize(
    ("at", "byte", "complaint"),
    [
        (0, 1, "ascending"),  # the highest plane of the hashes
        (3 * 16, 65, "dimensions"),
        (3 * 16, 2, "bounds"),
        (3 * 17, 0x80, "out of bounds"),
        (3 * 17, 0x40, "out of bounds"),
    ],
)
def test_a_lying_table_is_refused(at, byte, complaint):
    table = table_of([[(1, Region((5,), (6,))), (2, True)], [(3, False)]])
    raw = bytearray(dump_table(table))
    raw[at] = byte
    with pytest.raises(FormatError, match=complaint):
        load_table(bytes(raw), "x", count=3)


@pytest.mark.parametrize("length", [0, 50, 66, 68])
def test_a_table_of_another_length_is_refused(length):
    raw = dump_table(table_of([[(1, Region((5,), (6,))), (2, True)], [(3, False)]]))
    assert len(raw) == 3 * 17 + 16
    with pytest.raises(FormatError, match="does not hold"):
        load_table((raw + bytes(9))[:length], "x", count=3)

"""The index against a plain dict, whole and by range reads."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.manifests import UID

from penstock.core.errors import FormatError
from penstock.core.format.index import (
    ENTRY,
    HEADER,
    IndexReader,
    dump_hashes,
    encode_index,
    load_hashes,
    sort_hashes,
)
from penstock.core.format.strict_json import dump_json, load_json

# Few values, so that hashes collide; and all over, edges included.
hashes = st.integers(0, 40) | st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**64 - 1, 2**63])
parts = st.lists(st.lists(st.lists(hashes, max_size=12), max_size=4), max_size=4)


class Reads:
    def __init__(self, encoded, data=None):
        self.data = encoded.data if data is None else data
        self.lengths = []
        self._entry = encoded.entry

    def __call__(self, offset, length):
        self.lengths.append(length)
        return self.data[offset : offset + length]

    def reader(self, **options):
        entry = self._entry
        return IndexReader(self, size=entry.length, sha256=entry.sha256, name=entry.name, **options)


def as_dict(per_part):
    found = {}
    for part, sections in enumerate(per_part):
        for section, values in enumerate(sections):
            for value in values:
                found.setdefault(value, []).append((part, section))
    return found


@given(parts, st.lists(hashes, max_size=5), st.booleans())
def test_a_search_finds_what_a_dict_finds(per_part, others, whole):
    encoded = encode_index(UID, [sort_hashes(sections) for sections in per_part])
    expected = as_dict(per_part)
    for wanted in [*expected, *others]:
        reader = Reads(encoded).reader(whole_bytes=(1 << 20) * whole)
        assert sorted(reader.find(wanted)) == sorted(expected.get(wanted, []))


@pytest.mark.parametrize("bits", [64, 44, 12])
def test_a_large_index_is_searched_by_small_reads_even_when_hashes_are_not_uniform(bits):
    rng = np.random.default_rng(1)
    values = rng.integers(0, 2**bits - 1, 200_000, dtype=np.uint64, endpoint=True)
    encoded = encode_index(UID, [sort_hashes([values[:1000].tolist(), values[1000:].tolist()])])
    expected = {}
    for position, value in enumerate(values.tolist()):
        expected.setdefault(value, []).append((0, int(position >= 1000)))
    for value in values[::9973].tolist():
        reads = Reads(encoded)
        assert sorted(reads.reader(whole_bytes=0).find(value)) == sorted(expected[value])
        assert sum(reads.lengths) < encoded.entry.length / 4


def test_uniform_hashes_are_found_with_one_small_read():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 2**64 - 1, 300_000, dtype=np.uint64, endpoint=True)
    encoded = encode_index(UID, [sort_hashes([values.tolist()])])
    for value in [int(values.min()), int(values.max()), *values[::40_009].tolist()]:
        reads = Reads(encoded)
        assert reads.reader(whole_bytes=0).find(value) == [(0, 0)]
        assert len(reads.lengths) == 1
        assert reads.lengths[0] < 100_000


def test_all_entries_of_a_path_that_thousands_of_ranks_hold_are_found():
    per_part = [[[rank * 10 + n for n in range(3)], [2**63]] for rank in range(3000)]
    encoded = encode_index(UID, [sort_hashes(sections) for sections in per_part])
    expected = [(rank, 1) for rank in range(3000)]
    assert Reads(encoded).reader(whole_bytes=0).find(2**63) == expected
    per_part = [[[2**62], [7], [2**64 - 1]] for _ in range(3000)]
    encoded = encode_index(UID, [sort_hashes(sections) for sections in per_part])
    for section, value in enumerate([2**62, 7, 2**64 - 1]):
        reads = Reads(encoded)
        found = reads.reader(whole_bytes=0).find(value)
        assert found == [(rank, section) for rank in range(3000)]
        assert max(reads.lengths) < encoded.entry.length / 4


def test_not_found_is_said_only_of_a_verified_index():
    encoded = encode_index(UID, [sort_hashes([list(range(5000))])])
    good = Reads(encoded)
    assert good.reader(whole_bytes=0).find(2**50) == []
    assert good.lengths[-1] == encoded.entry.length
    bad = bytearray(encoded.data)
    at = HEADER.size + 4321 * ENTRY.itemsize
    bad[at : at + 8] = b"\xff" * 8  # the entry that is searched for, overwritten
    with pytest.raises(FormatError, match="index"):
        Reads(encoded, bytes(bad)).reader(whole_bytes=0).find(4321)


@given(st.data())
def test_no_flipped_bit_of_a_small_index_goes_unseen(data):
    encoded = encode_index(UID, [sort_hashes([list(range(20))])])
    at = data.draw(st.integers(0, len(encoded.data) * 8 - 1))
    bad = bytearray(encoded.data)
    bad[at // 8] ^= 1 << at % 8
    with pytest.raises(FormatError, match="sha256"):
        Reads(encoded, bytes(bad)).reader()


def test_an_index_of_an_impossible_size_is_refused_unread():
    encoded = encode_index(UID, [])
    for size in (0, 15, 17, 16 + 16 + 8):
        reads = Reads(encoded)
        with pytest.raises(FormatError, match="no index"):
            IndexReader(reads, size=size, sha256=encoded.entry.sha256, name="x")
        assert reads.lengths == []


def test_an_index_that_a_store_cuts_short_is_refused():
    encoded = encode_index(UID, [sort_hashes([list(range(5000))])])
    with pytest.raises(FormatError):
        Reads(encoded, encoded.data[:1000]).reader(whole_bytes=0).find(4999)


@given(st.lists(st.lists(hashes, max_size=9), max_size=5))
def test_path_hashes_of_a_part_come_back(sections):
    table = sort_hashes(sections)
    count = sum(map(len, sections))
    again = load_hashes(dump_hashes(table), "x", count=count, sections=len(sections))
    assert again.hashes.tolist() == table.hashes.tolist() == sorted(itertools.chain(*sections))
    assert again.sections.tolist() == table.sections.tolist()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hashes": "AAAA"}, "3 paths"),
        ({"hashes": "????"}, "base64"),
        ({"hashes": 5}, "string"),
        ({"hashes": "//////////8AAAAAAAAAAAAAAAAAAAAA"}, "ascending"),
        ({"sections": "AAAAAAAAAAAAAAAJ"}, "not there"),
    ],
)
def test_path_hashes_that_lie_are_refused(change, complaint):
    body = load_json(dump_hashes(sort_hashes([[1, 2], [3]])), "x")
    with pytest.raises(FormatError, match=complaint):
        load_hashes(dump_json({**body, **change}), "x", count=3, sections=2)

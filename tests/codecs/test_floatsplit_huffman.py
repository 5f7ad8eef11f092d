"""Frames of Huffman codes that numba writes: zstd reads the plane from them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codecs.huffman_planes import code, read, stored

from penstock.codecs.floatsplit import entropy

huffman = pytest.importorskip(
    "penstock.codecs.huffman", reason="numba, of the extra `fast`, is missing"
)


@given(st.binary(min_size=1, max_size=48))
def test_zstd_reads_the_plane_that_was_coded(seed):
    code(seed)


def test_planes_of_every_length_are_coded():
    sizes = (16384, 16391, 131071, 131072, 131073, 200_001, 262_144)
    # From 250 on they wrap around to 0, like differences from a prediction.
    for size, first in product(sizes, (0, 100, 250)):
        plane = np.random.default_rng(size).geometric(0.3, size).astype(np.uint8) + np.uint8(first)
        frame = stored(plane)
        assert 0 < len(frame) < size / 2
        assert (read(frame, size) == plane).all()


def test_a_code_is_never_longer_than_zstd_allows():
    # Fibonacci counts make the deepest tree.
    counts, plane = [1, 1], []
    while sum(counts) < 200_000:
        counts.append(counts[-1] + counts[-2])
    for byte, count in enumerate(counts):
        plane.append(np.full(count, byte, np.uint8))
    plane = np.random.default_rng(0).permutation(np.concatenate(plane))
    assert len(counts) > 20
    assert (read(stored(plane), plane.size) == plane).all()


def test_a_frame_is_as_short_as_that_of_zstd():
    rng = np.random.default_rng(0)
    for spread in (1.0, 4.0, 12.0):
        plane = (rng.standard_normal(1 << 18) * spread + 120).astype(np.uint8)
        assert len(stored(plane)) < 1.005 * len(entropy._compress(plane))


@pytest.mark.parametrize(
    "plane",
    [
        np.zeros(1 << 17, np.uint8),
        np.resize(np.arange(2, dtype=np.uint8), 1 << 17),
        np.resize(np.arange(256, dtype=np.uint8), 1 << 17),
        np.zeros(1000, np.uint8),
        np.zeros(0, np.uint8),
        # One half of it exceeds zstd's limit, in a code that serves both.
        (np.repeat([1, 0], 1 << 17) * (np.arange(1 << 18) % 128 + 1)).astype(np.uint8),
    ],
    ids=["one byte", "the first two", "all alike", "short", "empty", "two halves"],
)  # fmt: skip
def test_uncodable_planes_are_left_to_zstd(plane):
    assert stored(plane) == b""


def test_a_frame_that_has_no_room_is_left_to_zstd():
    plane = np.random.default_rng(0).geometric(0.3, 1 << 17).astype(np.uint8)
    length = len(stored(plane))
    for room in (0, 7, 16384, length - 1, length):
        assert stored(plane, room) == b""
    assert len(stored(plane, length + 1000)) == length


def test_a_plane_that_changes_during_coding_stays_within_its_memory():
    # As if the bytes had been counted before they changed to those with the longest codes.
    counts, bits = np.ones(256, np.int64), np.zeros(256, np.int64)
    counts[:8] = 1 << 20
    codes, pairs = np.zeros(256, np.uint64), np.zeros(1 << 16, np.uint64)
    huffman._tabulate(bits, huffman._choose(counts, bits), codes, pairs)
    assert bits.max() > 10
    plane = np.full(1 << 16, 255, np.uint8)
    memory = np.zeros(1 << 18, np.uint8)
    room = 1 << 14
    words, out = (huffman._words_at_each_byte(m) for m in (plane, memory[:room]))
    end = huffman._store_stream(plane, words, 0, plane.size, codes, pairs, out, 0)
    assert end == 0
    assert memory[: room // 2].any()
    assert not memory[room:].any()


@pytest.mark.usefixtures("without_numba")
def test_without_numba_zstd_writes_the_frames():
    plane = np.random.default_rng(0).geometric(0.3, 1 << 17).astype(np.uint8)
    out = np.zeros_like(plane)
    method, length = entropy.encode_plane(plane, entropy.Method.ZSTD, 0, out)
    assert method is entropy.Method.ZSTD
    assert (read(bytes(out[:length]), plane.size) == plane).all()
    assert len(stored(plane)) < 1.005 * length

"""Each kernel gives the same results by numba and by numpy; the splits of blocks of every kind."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from penstock.codecs.floatsplit.entropy import pack, packed_size, unpack
from penstock.codecs.floatsplit.prediction import Grid
from penstock.codecs.kernels import PLAIN, kernels
from penstock.codecs.plain import BLOCK_ELEMENTS, UNUSED_BITS, Halves

ELEMENTS = 5000
WIDTHS = {2: (1, 1), 4: (1, 1, 2), 8: (1, 1, 2, 4)}


@pytest.fixture(params=["numpy", "numba"])
def table(request):
    if request.param == "numpy":
        return PLAIN
    pytest.importorskip("numba", reason="numba, of the extra `fast`, is missing")
    assert kernels() is not PLAIN
    return kernels()


def grid_of(rng, *, predicted):
    if not predicted:
        return None
    rows, columns = rng.integers(0, 1 << 16, (2, 60), np.uint16)
    return Grid(rows, np.resize(columns, 97), 41)


def block_of(rng, itemsize, kind, grid):
    """Elements that can be split so, with any lower bits."""
    top = rng.integers(0, 1 << 16, ELEMENTS, np.uint16)
    if kind is Halves.UNSIGNED:
        top &= 0x7FFF
    if kind is Halves.NEAR:
        top = rng.integers(-(1 << 13), 1 << 13, ELEMENTS).astype(np.uint16)
        top[:2] = (0xE000, 0x1FFF)  # the last that fit
        if grid is not None:
            top += grid.terms(ELEMENTS, np.empty(BLOCK_ELEMENTS, np.uint16))
    block = rng.integers(0, 1 << 63, ELEMENTS, np.uint64)
    below = np.uint64(8 * itemsize - 16)
    block = block & np.uint64((1 << int(below)) - 1) | top.astype(np.uint64) << below
    return block.astype(f"<u{itemsize}")


def empty_planes(itemsize, *, apart=False):
    widths = (1,) * itemsize if apart else WIDTHS[itemsize]
    return [np.empty(ELEMENTS * w, np.uint8).view(f"<u{w}") for w in widths]


def test_joining_restores_a_block(table):
    for itemsize, kind, predicted, apart in product(WIDTHS, Halves, (False, True), (False, True)):
        expect_joined(table, itemsize, kind, predicted=predicted, apart=apart)


def expect_joined(table, itemsize, kind, *, predicted, apart):
    rng = np.random.default_rng(itemsize)
    grid = grid_of(rng, predicted=predicted)
    block = block_of(rng, itemsize, kind, grid)
    before, parts = block.copy(), empty_planes(itemsize, apart=apart)
    assert table.split_block(block, parts, kind, grid)
    assert (block == before).all()
    expected = empty_planes(itemsize, apart=apart)
    assert PLAIN.split_block(block, expected, kind, grid)
    for part, other in zip(parts, expected, strict=True):
        assert (part == other).all()
    if kind in UNUSED_BITS:
        assert int(parts[1].max()) < 0x100 >> UNUSED_BITS[kind]
    joined = np.zeros_like(block)
    table.join_block(parts, kind, grid, joined)
    assert (joined == block).all()


@pytest.mark.parametrize("kind", [Halves.UNSIGNED, Halves.NEAR])
def test_one_unfitting_element_is_detected(table, kind):
    for itemsize, predicted, place in product(WIDTHS, (False, True), (0, ELEMENTS - 1)):
        expect_noticed(table, kind, itemsize, place, predicted=predicted)


def expect_noticed(table, kind, itemsize, place, *, predicted):
    rng = np.random.default_rng(0)
    grid = grid_of(rng, predicted=predicted)
    block = block_of(rng, itemsize, kind, grid)
    tops = block.view("<u2")[itemsize // 2 - 1 :: itemsize // 2]
    if kind is Halves.UNSIGNED:
        tops[place] |= 0x8000
    else:
        terms = np.zeros(ELEMENTS, np.uint16)
        if grid is not None:
            terms = grid.terms(ELEMENTS, np.empty(BLOCK_ELEMENTS, np.uint16))
        for far in (0x2000, 0xDFFF, 0x8000):
            tops[place] = (int(terms[place]) + far) % (1 << 16)
            assert not table.split_block(block, empty_planes(itemsize), kind, grid)
    assert not table.split_block(block, empty_planes(itemsize), kind, grid)


def test_differences_are_equal_and_invertible(table):
    for size in (1, 2, 4, 8):
        rng = np.random.default_rng(size)
        # Unaligned, as frames and chunks may be; and longer than one step of numpy.
        new, old = (
            np.frombuffer(rng.bytes(size * 70_001 + 1), np.uint8)[1:].view(f"<u{size}")
            for _ in range(2)
        )
        expected, found, back = (np.empty_like(new) for _ in range(3))
        PLAIN.subtract(new, old, expected)
        table.subtract(new, old, found)
        table.add(found, old, back)
        assert np.array_equal(found, expected)
        assert np.array_equal(back, new)


def test_values_are_scattered_to_the_places_of_set_bits(table):
    for size, share in product((1, 7, 8, 9, 1001, 40_000), (0.0, 0.1, 1.0)):
        places = np.random.default_rng(size).random(size) < share
        values = np.arange(1, places.sum() + 2, dtype=np.uint8)
        plane, expected = np.full(size, 0xAA, np.uint8), np.zeros(size, np.uint8)
        expected[places] = values[:-1]
        table.scatter(np.packbits(places), values, plane)
        assert np.array_equal(plane, expected)


def test_packed_bytes_unpack():
    for unused, size in product((1, 2), (0, 1, 31, 32, 63, 64, 65, 1000, 4096 + 7)):
        plane = np.random.default_rng(size).integers(0, 256 >> unused, size).astype(np.uint8)
        packed = np.empty(packed_size(size, unused), np.uint8)
        pack(plane, unused, packed)
        assert size < 64 or len(packed) < size
        back = np.empty_like(plane)
        unpack(packed, unused, back)
        assert (back == plane).all()

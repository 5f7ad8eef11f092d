"""The store-independent parts of a mover: checksums of passing bytes, and a steady rate.
`test_checkpoint_copy.py` tests the mover.
"""

from itertools import pairwise

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.concurrency.timing import CountedClock
from penstock.core.copy.mover import CheckedBlob, Cursor, Throttle
from penstock.core.types import ByteRange

offsets = st.lists(st.integers(0, 300), max_size=8)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=10),
    st.integers(0, 9),
    offsets,
    offsets,
)
def test_every_damaged_byte_is_found_in_any_stream_order(gaps_and_lengths, tail, damage, cuts):
    """Padding between ranges has no checksum."""
    ranges, end = [], 0
    for gap, length in gaps_and_lengths:
        ranges.append(ByteRange(end + gap, end + gap + length))
        end += gap + length
    end += tail
    content = bytearray(np.random.default_rng(end).bytes(end))
    sums = [xxhash.xxh3_64_intdigest(content[r.start : r.stop]) for r in ranges]
    damaged = {at for at in damage if at < end}
    for at in damaged:
        content[at] ^= 1
    cuts = sorted({0, end, *(at for at in cuts if at < end)})
    starts = np.array([r.start for r in ranges], np.int64)
    lengths = np.array([r.length for r in ranges], np.int64)
    cursor = Cursor(CheckedBlob("blob", end, starts, lengths, np.array(sums, np.uint64)))
    wrong, compared = [], 0
    for start, stop in pairwise(cuts):
        view = memoryview(content)[start:stop]
        whole, expected, late = cursor.take(start, view)
        wrong += late
        compared += len(whole)
        for r, want in zip(whole, expected, strict=True):
            if xxhash.xxh3_64_intdigest(view[r.start : r.stop]) != want:
                wrong.append(ByteRange(start + r.start, start + r.stop))
    assert set(wrong) == {r for r in ranges if any(r.start <= at < r.stop for at in damaged)}
    assert compared <= len(ranges)


def test_throttle_spreads_bytes_without_bursts():
    clock = CountedClock()
    throttle = Throttle(100.0, clock)
    assert throttle.take(50) == 0.0
    assert throttle.take(100) == 0.5
    clock.advance(0.5)
    assert throttle.take(10) == 1.0
    clock.advance(59.5)
    assert throttle.take(200) == 0.0
    assert throttle.take(1) == 2.0
    assert Throttle(None, clock).take(1 << 40) == 0.0

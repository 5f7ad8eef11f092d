from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.delta import Comparison, DeltaCodec, DeltaConfig, _compare
from penstock.core.abc import DECLINED, CodecContext
from penstock.core.errors import CodecError

CODEC = DeltaCodec(DeltaConfig())


def context(array, base):
    return CodecContext(
        str(array.dtype),
        array.itemsize,
        array.shape,
        0,
        array.nbytes,
        base=memoryview(base).cast("B"),
    )


def encoded(array, base):
    out = bytearray(CODEC.max_encoded_size(array.nbytes))
    length = CODEC.encode(
        memoryview(array).cast("B"), memoryview(out), context=context(array, base)
    )
    return length if length is DECLINED else out[:length]


def decoded(frame, array, base):
    out = np.empty_like(array)
    CODEC.decode(memoryview(frame), memoryview(out).cast("B"), context=context(array, base))
    return out


def neighbors(dtype, *, count=70_000, step=3):
    """Two arrays of bit patterns: the second differs from the first by a few units."""
    rng = np.random.default_rng(7)
    old = rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, count, np.uint64).astype(dtype)
    return old, old + rng.integers(-step, step + 1, count).astype(dtype)


def test_neighbors_round_trip_as_small_numbers():
    for dtype in ["uint8", "uint16", "uint32", "uint64"]:
        old, new = neighbors(dtype)
        frame = encoded(new, old)
        words = np.frombuffer(frame, dtype)
        assert words[-1] == Comparison.SUBTRACT
        assert words[:-1].max() <= 6
        assert decoded(frame, new, old).tobytes() == new.tobytes()


def test_flipped_bits_are_compared_by_xor():
    old = np.random.default_rng(1).integers(0, 1 << 32, 50_000, np.uint32)
    new = old ^ np.uint32(1 << 19)
    frame = encoded(new, old)
    assert np.frombuffer(frame, np.uint32)[-1] == Comparison.XOR
    assert decoded(frame, new, old).tobytes() == new.tobytes()


@given(
    st.binary(min_size=1, max_size=300), st.sampled_from([1, 2, 4, 8]), st.sampled_from(Comparison)
)
def test_every_pattern_of_bits_round_trips(data, size, how):
    words = np.frombuffer(data * size, f"<u{size}")
    base = words[::-1].copy()
    frame = bytearray(words.nbytes + size)
    target = np.frombuffer(frame, f"<u{size}")
    _compare(words, base, how, target[:-1])
    target[-1] = how
    assert decoded(frame, words, base).tobytes() == words.tobytes()


def test_chunks_unrelated_to_their_base_are_declined():
    rng = np.random.default_rng(2)
    old, new = rng.integers(0, 1 << 16, (2, 40_000), np.uint64).astype(np.uint16)
    assert encoded(new, old) is DECLINED


def test_without_a_base_it_declines_to_encode_and_refuses_to_decode():
    array = np.arange(1000, dtype=np.uint32)
    alone = CodecContext("uint32", 4, (1000,), 0, 4000)
    out = memoryview(bytearray(CODEC.max_encoded_size(4000)))
    assert CODEC.encode(memoryview(array).cast("B"), out, context=alone) is DECLINED
    with pytest.raises(CodecError, match="none is recorded"):
        CODEC.decode(memoryview(bytes(4004)), memoryview(array.copy()).cast("B"), context=alone)


def test_inputs_stay_as_they_are():
    old, new = neighbors("uint16")
    before = old.tobytes(), new.tobytes()
    decoded(encoded(new, old), new, old)
    assert (old.tobytes(), new.tobytes()) == before


@pytest.mark.parametrize("damage", ["short", "long", "unknown", "base"])
def test_a_damaged_frame_is_refused(damage):
    old, new = neighbors("uint32")
    frame = encoded(new, old)
    base = old
    if damage == "short":
        frame = frame[:-4]
    elif damage == "long":
        frame = frame + bytes(4)
    elif damage == "unknown":
        frame[-4:] = b"\x02\0\0\0"
    else:
        base = old[:-1]
    with pytest.raises(CodecError):
        decoded(frame, new, base)


def test_elements_of_odd_sizes_are_compared_byte_by_byte():
    for itemsize in [3, 12, 16]:
        old = np.zeros(5000 * itemsize, np.uint8)
        new = old.copy()
        new[::97] = 1
        odd = CodecContext("void", itemsize, (5000,), 0, new.nbytes, base=memoryview(old))
        out = bytearray(CODEC.max_encoded_size(new.nbytes))
        new[1::5] = 7
        length = CODEC.encode(memoryview(new), memoryview(out), context=odd)
        back = bytearray(new.nbytes)
        if length is not DECLINED:
            CODEC.decode(memoryview(out)[:length], memoryview(back), context=odd)
            assert bytes(back) == new.tobytes()

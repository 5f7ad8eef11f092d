"""Frames of floats: bit-exact for any bits, smaller for known patterns, never trusted."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs import floatsplit
from penstock.codecs.floatsplit import FloatsplitCodec, FloatsplitConfig, entropy
from penstock.codecs.floatsplit.entropy import Method, decode_plane, packed_size
from penstock.codecs.kernels import PLAIN, kernels
from penstock.core.abc import DECLINED, CodecContext
from penstock.core.errors import CodecError

WORDS = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
CODEC = FloatsplitCodec(FloatsplitConfig())


def context_of(dtype, itemsize, raw, shape=None, start=0):
    return CodecContext(dtype, itemsize, shape or (len(raw) // itemsize,), start, len(raw))


def encoded(raw, context, codec=CODEC):
    out = memoryview(bytearray(codec.max_encoded_size(len(raw))))
    length = codec.encode(memoryview(raw), out, context=context)
    return DECLINED if length is DECLINED else bytes(out[:length])


def decoded(frame, context):
    out = bytearray(b"\xaa" * context.raw_length)
    CODEC.decode(memoryview(frame), memoryview(out), context=context)
    return bytes(out)


def ratio(raw, context, codec=CODEC):
    frame = encoded(raw, context, codec)
    assert decoded(frame, context) == raw
    return len(raw) / len(frame)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.02


def moments(rows, columns, seed=0):
    """Near an outer product, as the second moments of Adam are."""
    rng = np.random.default_rng(seed)
    log = rng.standard_normal((rows, 1)) * 2 + rng.standard_normal((1, columns)) * 2
    return np.exp(log + 0.3 * rng.standard_normal((rows, columns))).astype(np.float32) * 1e-8


def bf16(array):
    return (array.view(np.uint32) >> 16).astype(np.uint16)


WIDE = {"bfloat16": bf16, "float32": np.asarray, "float64": np.float64}


def test_random_weights_shrink_by_exponent_entropy():
    weights = normal(1024, 1024)
    assert ratio(weights.tobytes(), context_of("float32", 4, weights.tobytes())) > 1.19
    half = bf16(weights).tobytes()
    assert ratio(half, context_of("bfloat16", 2, half)) > 1.49


def test_second_moments_are_predicted_by_row_and_column():
    raw = moments(2048, 512).tobytes()
    context = context_of("float32", 4, raw, (2048, 512))
    plain = FloatsplitCodec(FloatsplitConfig(predict=False))
    assert ratio(raw, context) > 1.05 * ratio(raw, context, plain)


def test_a_sign_that_is_always_zero_is_not_stored():
    raw = np.abs(normal(512, 1024)).tobytes()
    signed = normal(512, 1024).tobytes()
    assert len(encoded(raw, context_of("float32", 4, raw))) < 0.98 * len(
        encoded(signed, context_of("float32", 4, signed))
    )


def test_one_sign_missed_by_the_sample_round_trips():
    array = np.abs(normal(1 << 20))
    array[700_001] *= -1
    raw = array.tobytes()
    assert (
        decoded(encoded(raw, context_of("float32", 4, raw)), context_of("float32", 4, raw)) == raw
    )


def few_differences(dtype, share=0.1, elements=40_000):
    rng = np.random.default_rng(4)
    words = np.zeros(elements, dtype)
    words[rng.random(elements) < share] = 1
    words[::1000] = np.iinfo(dtype).max
    return words.tobytes()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_mostly_zero_numbers_take_under_a_bit_per_byte(dtype):
    raw = few_differences(dtype)
    itemsize = np.dtype(dtype).itemsize
    # A Huffman code of each byte plane would take a bit for each of its bytes.
    assert ratio(raw, context_of(dtype, itemsize, raw)) > 12


@pytest.mark.usefixtures("loops")
def test_bytes_of_a_sparse_plane_keep_their_places():
    for share, size in product((0.0, 0.001, 0.1, 0.39), (1, 63, 64, 65, 40_003)):
        rng = np.random.default_rng(size)
        plane = rng.integers(1, 256, 4096 + size).astype(np.uint8)
        plane[rng.random(plane.size) >= share] = 0
        expect_sparse(plane)


def expect_sparse(plane):
    out = np.empty_like(plane)
    method, length = entropy.encode_plane(plane, Method.SPARSE, 0, out)
    assert method is Method.SPARSE
    back = np.full_like(plane, 0xAA)
    decode_plane(out[:length], method, 0, back)
    assert np.array_equal(back, plane)


@pytest.mark.usefixtures("loops")
def test_a_sparse_plane_with_used_last_bytes_round_trips():
    for size, used in product((1, 7, 8, 9, 1001), (0, 1, 3)):
        plane = np.zeros(4096 + size, np.uint8)
        plane[-used or plane.size :] = 9
        expect_sparse(plane)


@pytest.mark.parametrize("damage", ["short", "length", "map", "more"])
@pytest.mark.usefixtures("loops")
def test_a_damaged_sparse_plane_is_refused(damage):
    plane = np.zeros(1001, np.uint8)
    plane[5] = 1 if damage != "more" else 0
    out = np.empty(2000, np.uint8)
    _, length = entropy.encode_plane(plane, Method.SPARSE, 0, out)
    stored = out[:length].copy()
    if damage == "short":
        stored = stored[:3]
    elif damage == "length":
        stored[:4] = 0xFF
    elif damage == "map":
        odd = np.full(126, 0xFF, np.uint8)  # bits beyond the plane
        frame = entropy._compress(odd)
        head = np.frombuffer(len(frame).to_bytes(4, "little") + frame, np.uint8)
        values = np.frombuffer(entropy._compress(np.ones(1001, np.uint8)), np.uint8)
        stored = np.concatenate([head, values])
    else:
        stored = np.append(stored, stored[-1:])
    with pytest.raises(CodecError):
        decode_plane(stored, Method.SPARSE, 0, np.empty_like(plane))


def test_zeros_take_almost_nothing():
    raw = bytes(1 << 20)
    assert len(encoded(raw, context_of("float32", 4, raw))) < 1000


@pytest.mark.parametrize("dtype", WIDE)
def test_chunks_of_a_matrix_may_begin_and_end_anywhere(dtype):
    ends = [(0, 0), (5, 0), (0, 9), (1777, 31)]
    for columns, (first, last) in product((32, 448, 1000), ends):
        array = moments(60_000 // columns, columns)
        words = WIDE[dtype](array)
        raw = words.reshape(-1)[first : words.size - last].tobytes()
        context = context_of(dtype, words.itemsize, raw, array.shape, first * words.itemsize)
        frame = encoded(raw, context)
        assert len(frame) < len(raw)
        assert decoded(frame, context) == raw


@pytest.mark.parametrize("dtype", WORDS)
@given(seed=st.integers(0, 2**32 - 1), elements=st.integers(0, 3000), spread=st.integers(1, 64))
def test_every_bit_pattern_survives(dtype, seed, elements, spread):
    size = WORDS[dtype]
    rng = np.random.default_rng(seed)
    # Few distinct top bits, so the chunk is accepted, and any bits below them.
    words = rng.integers(0, 1 << 63, elements, np.uint64)
    if size > 1 and elements:
        top = rng.choice(rng.integers(0, 1 << 16, spread, np.uint64), elements)
        below = np.uint64(8 * size - 16)
        words = (words & np.uint64((1 << int(below)) - 1)) | (top << below)
    raw = words.astype(f"<u{size}").tobytes()
    context = context_of(dtype, size, raw)
    frame = encoded(raw, context)
    if frame is not DECLINED:
        assert len(frame) < len(raw)
        assert decoded(frame, context) == raw


def test_special_values_round_trip_exactly():
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 2.2e-308])
    words = np.concatenate([special.view(np.uint64), [0x7FF0000000000001, 0xFFF8DEADBEEF0001]])
    raw = np.tile(words.astype(np.uint64), 300).tobytes()
    context = context_of("float64", 8, raw)
    assert decoded(encoded(raw, context), context) == raw


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("uint8", 1), ("bool", 1), ("complex64", 8), ("float32", 2)]
)
def test_non_floats_are_declined(dtype, itemsize):
    assert encoded(bytes(4096), context_of(dtype, itemsize, bytes(4096))) is DECLINED


def test_incompressible_data_is_declined():
    raw = random.Random(0).randbytes(1 << 18)
    assert encoded(raw, context_of("float32", 4, raw)) is DECLINED
    assert encoded(raw[:400], context_of("float32", 4, raw[:400])) is DECLINED


@pytest.mark.parametrize("times", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", WIDE)
def test_a_changed_frame_is_refused_or_decodes_to_something_else(dtype, times):
    array = moments(64, 96)
    raw = WIDE[dtype](array).tobytes()
    context = context_of(dtype, WORDS[dtype], raw, array.shape)
    frame = encoded(raw, context)
    rng = random.Random(1)
    refused = 0
    for _ in range(times):
        changed = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(min(len(frame), rng.choice([16, 600, len(frame)])))] = (
                rng.randrange(256)
            )
        end = rng.choice([len(frame), rng.randrange(len(frame))])
        try:
            decoded(bytes(changed[:end]), context)
        except CodecError:
            refused += 1
    assert refused > times // 3


def test_a_sign_that_is_always_zero_is_not_stored_where_elements_are_predicted():
    array = moments(512, 512)
    raw = bf16(array).tobytes()
    context = context_of("bfloat16", 2, raw, array.shape)
    # 6 bits as they are, and Huffman codes of 8 bits around zero: 9 of 16 bits.
    assert ratio(raw, context) > 1.8


@pytest.mark.parametrize("dtype", WIDE)
def test_one_element_far_from_its_prediction_survives(dtype):
    for odd in (-1e-12, 0.0, np.inf, np.nan, 1e30):
        array = moments(512, 448)
        array[300, 5] = odd
        raw = WIDE[dtype](array).tobytes()
        assert ratio(raw, context_of(dtype, WORDS[dtype], raw, array.shape)) > 1


def test_a_frame_of_any_chunk_is_at_most_slightly_longer():
    rng = np.random.default_rng(3)
    for raw in (rng.bytes(1 << 20), bytes(1 << 20), moments(512, 512).tobytes()):
        for dtype, size in WORDS.items():
            frame = encoded(raw, context_of(dtype, size, raw, ((1 << 20) // size // 512, 512)))
            assert frame is DECLINED or len(frame) < 1.001 * len(raw)


@pytest.mark.parametrize("dtype", WIDE)
def test_memory_of_a_thread_is_reused(dtype):
    array = moments(4096, 512)
    raw = WIDE[dtype](array).tobytes()
    context = context_of(dtype, WORDS[dtype], raw, array.shape)
    out = memoryview(bytearray(CODEC.max_encoded_size(len(raw))))
    back = memoryview(bytearray(len(raw)))
    frame = out[: CODEC.encode(memoryview(raw), out, context=context)]
    CODEC.decode(frame, back, context=context)
    tracemalloc.start()
    try:
        CODEC.encode(memoryview(raw), out, context=context)
        CODEC.decode(frame, back, context=context)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert back == raw


def test_elements_at_odd_addresses_survive():
    array = moments(300, 512)
    for dtype, words in (("float32", array), ("bfloat16", bf16(array))):
        raw = words.tobytes()
        context = context_of(dtype, words.itemsize, raw, array.shape)
        chunk = memoryview(bytearray(b"x" + raw)).toreadonly()[1:]
        out = memoryview(bytearray(CODEC.max_encoded_size(len(raw)) + 1))[1:]
        length = CODEC.encode(chunk, out, context=context)
        back = memoryview(bytearray(len(raw) + 3))[3:]
        CODEC.decode(out[:length].toreadonly(), back, context=context)
        assert back == raw


def test_a_library_without_huffman_only_frames_writes_readable_ones(monkeypatch):
    assert entropy._options() is entropy._HUFFMAN_ONLY
    monkeypatch.setattr(entropy, "_contexts", entropy._Contexts())
    monkeypatch.setattr(entropy, "_options", lambda: entropy._NEARLY_HUFFMAN_ONLY)
    raw = bf16(normal(512, 512)).tobytes()
    assert ratio(raw, context_of("bfloat16", 2, raw)) > 1.48
    plane = np.random.default_rng(0).geometric(0.3, 1 << 17).astype(np.uint8)
    assert len(entropy._compress(plane)) < plane.size / 2


def test_a_packed_plane_of_another_length_is_refused():
    plane = np.zeros(1000, np.uint8)
    for unused in (0, 1, 2):
        for size in {0, 1, 999, 1000} - {packed_size(1000, unused) if unused else -1}:
            with pytest.raises(CodecError, match="stored bytes"):
                decode_plane(np.zeros(size, np.uint8), Method.PACKED, unused, plane)


@pytest.mark.usefixtures("without_numba")
def test_numpy_reads_what_numba_writes_and_splits_alike(monkeypatch):
    pytest.importorskip("numba", reason="numba, of the extra `fast`, is missing")
    array = moments(700, 448)
    signed = np.where(np.random.default_rng(1).random(array.shape) < 0.5, -array, array)
    for words in (array, signed, bf16(array), bf16(signed), array.astype(np.float64)):
        dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[words.itemsize]
        raw = words.reshape(-1)[77:].tobytes()
        context = context_of(dtype, words.itemsize, raw, array.shape, 77 * words.itemsize)
        frame = encoded(raw, context)
        with monkeypatch.context() as patch:
            # Only Huffman codes differ: zstd writes them here, too.
            fast = replace(kernels(), store_codes=PLAIN.store_codes)
            for module in (floatsplit, entropy):
                patch.setattr(module, "kernels", lambda fast=fast: fast)
            assert encoded(raw, context) == frame
            patch.setattr(entropy, "kernels", kernels)
            by_numba = encoded(raw, context)
        assert decoded(by_numba, context) == raw

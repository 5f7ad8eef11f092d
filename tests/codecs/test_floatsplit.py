"""Frames of floats: bit-exact whatever the bits are, smaller where that is known, never trusted."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.floatsplit import FloatsplitCodec, FloatsplitConfig
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


def test_random_weights_shrink_by_what_their_exponents_hold():
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


def test_one_sign_that_the_sample_did_not_see_comes_back():
    array = np.abs(normal(1 << 20))
    array[700_001] *= -1
    raw = array.tobytes()
    assert (
        decoded(encoded(raw, context_of("float32", 4, raw)), context_of("float32", 4, raw)) == raw
    )


def test_zeros_take_next_to_nothing():
    raw = bytes(1 << 20)
    assert len(encoded(raw, context_of("float32", 4, raw))) < 1000


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("columns", [32, 448, 1000])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (5, 0), (0, 9), (1777, 31)])
def test_chunks_of_a_matrix_may_begin_and_end_anywhere(itemsize, columns, first, last):
    array = moments(60_000 // columns, columns)
    words = {2: bf16(array), 4: array, 8: array.astype(np.float64)}[itemsize]
    dtype = {2: "bfloat16", 4: "float32", 8: "float64"}[itemsize]
    raw = words.reshape(-1)[first : words.size - last].tobytes()
    context = context_of(dtype, itemsize, raw, array.shape, first * itemsize)
    frame = encoded(raw, context)
    assert len(frame) < len(raw)
    assert decoded(frame, context) == raw


@pytest.mark.parametrize("dtype", WORDS)
@given(seed=st.integers(0, 2**32 - 1), elements=st.integers(0, 3000), spread=st.integers(1, 64))
def test_every_bit_pattern_comes_back(dtype, seed, elements, spread):
    size = WORDS[dtype]
    rng = np.random.default_rng(seed)
    # Few distinct top bits, so that the chunk is taken, and any bits below them.
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


def test_special_values_come_back_bit_for_bit():
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 2.2e-308])
    words = np.concatenate([special.view(np.uint64), [0x7FF0000000000001, 0xFFF8DEADBEEF0001]])
    raw = np.tile(words.astype(np.uint64), 300).tobytes()
    context = context_of("float64", 8, raw)
    assert decoded(encoded(raw, context), context) == raw


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("uint8", 1), ("bool", 1), ("complex64", 8), ("float32", 2)]
)
def test_what_is_no_float_is_declined(dtype, itemsize):
    assert encoded(bytes(4096), context_of(dtype, itemsize, bytes(4096))) is DECLINED


def test_what_would_not_shrink_is_declined():
    raw = random.Random(0).randbytes(1 << 18)
    assert encoded(raw, context_of("float32", 4, raw)) is DECLINED
    assert encoded(raw[:400], context_of("float32", 4, raw[:400])) is DECLINED


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_changed_frame_is_refused_or_decodes_to_something_else(dtype):
    size = WORDS[dtype]
    array = moments(64, 96)
    raw = (bf16(array) if size == 2 else array.astype(f"f{size}")).tobytes()
    context = context_of(dtype, size, raw, array.shape)
    frame = encoded(raw, context)
    rng = random.Random(1)
    refused = 0
    for _ in range(3000):
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
    assert refused > 1000


def test_a_frame_of_version_1_is_readable_for_ever():
    array = np.arange(1, 513, dtype=np.float32).reshape(16, 32) * np.float32(0.001)
    context = context_of("float32", 4, array.tobytes(), (16, 32))
    assert decoded(bytes.fromhex(GOLDEN), context) == array.tobytes()
    assert zlib.crc32(bytes.fromhex(GOLDEN)) == GOLDEN_CRC


GOLDEN = (
    "010402000000020000000000000000000128000020ed010020950100200002000028b52ffd600001f5000070"
    "7576767777777778797a7b7c7d7e0710009cd8a9cb299324e27596c50128b52ffd6000011d0f0006e0771a10"
    "48fa001c001052424a484cce80081071218bfdfaebbbdb8490680072006f0031fcba5b6d16fb5fad559f3a95"
    "f651e893773699fb5299d49147635e240ef1e0af77eb70367b167bd52c158a2e8d42b387a3912f9549fc6eb3"
    "bfd59ff650beb92bf5634ec47f37ce8ed52a7a3473e44abcfdfd9edff51cbfed9a9ee5f8eff7fcaee7b8cfeb"
    "388fe3310cbfafeb8a6c43b420d90facc7df71e5b06e5435fc0c2ac6f4426ad1574429a0134f093ec209d17c"
    "603aec0ccb05a542324147401e1c0d8c053941718028300cc08541e0cfd7e3dd3b5d0e77b3d56cda4c1683bd"
    "5c758bb552a55027da54228d4421d0fcf174381b4d46c65c2c15ca4412794e40502c0e0c108902c36140008e"
    "0b85c12010f8fbf97cbd1e8f77dfbb9d4e97cbe170b79bcd56abd9368d06309bc964b1180cf67ab95c75dd6a"
    "b158ab954a954aa150a7134d9b4ca51289341a89442110689e3f1f8fa7d3e170361b8d269391650ce672b158"
    "2a150a65329148e2310cc3f0fbbeafebbaee8888c8761b12a2d5828064b31f1f58ac87c7ff77745caf1c1c56"
    "ebc646b5aaa1e1fb1919542ac6747a7121955a58f47d4545344a4101854e4c3c9f12123c1f11e1744240349b"
    "0f0f4ca68343c3be33302c970b0b4aa58242329990a0eb080848e4c1c1f1686060341614040028b52ffd6000"
    "015d0c00241812129b12d79b601274d7399bfd60c2124374a5d708396a9bccfd2f6091c2f3122b435c748da5"
    "bed7ef082039516a839bb4cce5fd162f47607891a9c2dbf306121e2b37434f5c6874818d99a5b2becad7e3ef"
    "fb0814202d3945515e6a76838f9ba7b4c0ccd9e5f1fd0a16222f3b4753606c7885919da9b6c2cedbe7f30006"
    "0c12181e242b31373d43494f565c62686e747a81878d93999fa5acb2b8bec4cad0d7dde3e9eff5fb02080e14"
    "1a20262d33393f454b51585e646a70767c83898f959ba1a7aeb4bac0c6ccd2d9dfe5ebf1f7fd040a10161c22"
    "282f353b41474d535a60666c72787e858b91979da3a9b0b6bcc2c8ced4dbe1e7edf3f9008306890c8f129518"
    "9b1ea124a72bae31b437ba3dc043c649cc4fd256d95cdf62e568eb6ef174f77afd8104870a8d109316991c9f"
    "22a528ac2fb235b83bbe41c447ca4dd053d75add60e366e96cef72f578fb7e0285088b0e9114971a9d20a326"
    "a92db033b639bc3fc245c84bce51d458db5ee164e76aed70f376f97c4183c4064789ca0c4d8fd0120100761b"
    "909a296f6fa66f0ba6426fbd0b59a6f442906f96bde40b325980a6cdf41b426990b76f029629bd50e4770b9e"
    "32c559ec8013a63acd61f4881baf42d669fd9024b7256fb9024c96e02973bd07509ae42e77c10b549ee8327b"
    "c50f59a2ec3680c9135da6f03a84cd1761abf43e88d21b65aff9428cd61f69b3fd4690da246db700254a6f94"
    "b9de02274c7196bbe005294e7398bde2072b50759abfe4092e52779cc1e60b3054799ec3e80d32577ba0c5ea"
    "0f34597da2c7ec11365b80a4c9ee13385d82a6cbf0153a5f84a9cdf2173c6186abd0f4193e6388add2f61b40"
    "658aafd4f91d42678cb1d6fb1f44698eb3d8fd22466b90b5daff24486d92b7dc001325384a5d6f8194a6b9cb"
    "def00215273a4c5f718496a8bbcde0f20517293c4e61738698aabdcfe2f407192b3e506375889aadbfd1e4f6"
    "091b2e405265778a9cafc1d3e6f80b1d30425467798c9eb1c3d6e8fa0d1f324457697b8ea0b3c5d8eafc0f21"
    "3446596b7d90a2b5c7daecff112336485b6d8092a4b7c9dcee011325384a5d6f8294a6b9cbdef00315283a4c"
    "5f718496a9bbcde0f205172a3c4e61738698abbdd0e2f407192c3e516375889aadbfd2e4f6091b2e40536577"
    "8a9cafc1d4e6f90b1d304255677a8c9eb1c3d6e8fb0d1f324457697c8ea0b3c5d8eafd0f223446596b7e90a3"
    "b5c7daecff112436485b6d8092a5b7c9dcee008a139c25ae38c14ad35de66f"
)
GOLDEN_CRC = 4014883192

"""`factor` finds the coefficient of clipped gradients, keeps every bit, and declines the rest."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.codecs.factor import FactorCodec
from penstock.codecs.floatsplit import FloatsplitCodec, FloatsplitConfig
from penstock.core.abc import DECLINED, CodecContext, PluginConfig
from penstock.core.errors import CodecError, DamagedError
from penstock.core.pipeline.codec_chain import CodecChain

CODEC = FactorCodec(PluginConfig())
RARE = np.array(
    [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF],
    np.uint32,
)
RARE = np.concatenate([RARE, RARE | np.uint32(1 << 31)]).view(np.float32)


def context_of(raw, dtype="float32"):
    return CodecContext(dtype, 4, (len(raw) // 4,), 0, len(raw))


def encoded(raw, dtype="float32"):
    out = memoryview(bytearray(CODEC.max_encoded_size(len(raw))))
    length = CODEC.encode(memoryview(raw), out, context=context_of(raw, dtype))
    return DECLINED if length is DECLINED else bytes(out[:length])


def decoded(frame, length):
    out = bytearray(b"\xaa" * length)
    CODEC.decode(memoryview(frame), memoryview(out), context=context_of(out))
    return bytes(out)


def gradients(count, factor=1.0, seed=0):
    """Return bfloat16 numbers of many magnitudes times one factor, as clipping leaves them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator) * 1e-4
    numbers *= torch.exp2(torch.randint(-20, 20, (count,), generator=generator).float())
    return (numbers.bfloat16().float() * torch.tensor(factor)).numpy()


def plain(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).numpy()


def expect_half(array):
    """Check that the array comes back, and that nearly all elements have a code alone."""
    raw = array.tobytes()
    frame = encoded(raw)
    assert frame is not DECLINED
    assert decoded(frame, len(raw)) == raw
    assert len(frame) < 0.51 * len(raw) + 20


@given(st.floats(2.0**-60, 2.0**60, width=32), st.integers(0, 1000))
def test_finds_any_factor(factor, seed):
    expect_half(gradients(500, factor, seed))


def test_finds_the_factor_of_a_clipped_gradient():
    weight = torch.nn.Parameter(torch.zeros(100, 70))
    weight.grad = torch.from_numpy(gradients(7000)).reshape(100, 70)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    expect_half(weight.grad.numpy())


def test_finds_the_factor_among_zeros_and_on_both_sides_of_a_block():
    for count in (32768, 32769, 100_003):
        array = gradients(count, 0.3)
        array[: count // 2] = 0
        array[count // 2 : count // 2 + 9] = -0.0
        expect_half(array)


@pytest.mark.parametrize("count", [64, 65_541])
def test_rare_bits_and_exceptions_come_back(count):
    array = gradients(count, 0.123)
    array[: len(RARE) // 2] = RARE[: len(RARE) // 2]
    array[-len(RARE) // 2 :] = RARE[len(RARE) // 2 :]
    raw = array.tobytes()
    frame = encoded(raw)
    assert count == 64 or frame is not DECLINED
    assert frame is DECLINED or decoded(frame, len(raw)) == raw


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(0, 200),
    st.floats(2.0**-130, 2.0**120, width=32),
    st.integers(0, 3),
)
def test_any_bits_come_back(words, count, factor, rest):
    raw = np.array(words, np.uint32).tobytes() + gradients(count, factor).tobytes() + bytes(rest)
    frame = encoded(raw)
    assert frame is DECLINED or decoded(frame, len(raw)) == raw
    if rest:
        assert frame is DECLINED


def test_subnormal_numbers_come_back_from_a_thread_that_flushes_them():
    array = gradients(5000, 0.3)
    array[::11] = np.arange(455, dtype=np.uint32).view(np.float32)
    raw = array.tobytes()
    flushed = torch.set_flush_denormal(True)
    try:
        assert decoded(encoded(raw), len(raw)) == raw
    finally:
        torch.set_flush_denormal(False)
    assert flushed or not torch.backends.cpu.get_cpu_capability().startswith("AVX")


def test_a_quarter_of_the_elements_may_be_others():
    for share, accepted in ((0.2, True), (0.4, False)):
        for seed in range(10):
            array = gradients(20_000, 0.7, seed)
            others = np.random.default_rng(seed).random(20_000) < share
            array[others] = plain(20_000, seed)[others]
            raw = array.tobytes()
            frame = encoded(raw)
            assert (frame is not DECLINED) == accepted
            assert not accepted or decoded(frame, len(raw)) == raw


def test_declines_what_has_no_common_factor():
    summed = sum(gradients(10_000, 0.3, seed) for seed in range(4))
    halves = np.concatenate([gradients(5000, 0.3), gradients(5000, 0.4)])
    for array in (plain(10_000), summed, halves, plain(3), RARE, np.arange(1000, dtype="<u4")):
        assert encoded(array.tobytes()) is DECLINED
    raw = gradients(1000, 0.3).tobytes()
    for dtype in ("int32", "uint8", "bfloat16", "float64"):
        assert encoded(raw, dtype) is DECLINED


def test_floatsplit_compresses_its_output():
    raw = gradients(1 << 20, 0.3).tobytes()
    floatsplit = FloatsplitCodec(FloatsplitConfig())
    lengths = []
    for chain in (CodecChain([floatsplit]), CodecChain([CODEC, floatsplit])):
        out = memoryview(bytearray(chain.max_encoded_size(len(raw))))
        frame = chain.encode(memoryview(raw), out, context=context_of(raw))
        assert frame.declined == ()
        back = bytearray(len(raw))
        chain.decode(
            out[: frame.length], memoryview(back), context=context_of(raw), lengths=frame.lengths
        )
        assert back == raw
        lengths.append(frame.length)
    assert lengths[1] < 0.75 * lengths[0]


def test_a_frame_with_wrong_numbers_is_refused():
    array = gradients(40_000, 0.3)
    array[[5, 32_770]] = 1 / 3  # two runs of one exception
    raw = array.tobytes()
    frame = encoded(raw)
    head = 2 * array.size
    for at, new in (
        (head, b"\0\0\0\0"),  # the factor
        (head, b"\0\0\0\x40"),
        (head, b"\0\0\xc0\xff"),
        (head + 4, b"\2"),  # the runs in the first block
        (head + 4, b"\xff\xff\xff\xff"),
        (head + 8, b"\xff\xff"),  # the place in the first block
        (head + 10, b"\xff\x7f"),  # in the second block, which is shorter
        (head + 12, b"\2"),  # the exceptions of the first run
        (head + 12, b"\0\0"),
        (head + 12, b"\xff\xff\xff\xff"),
    ):
        damaged = bytearray(frame)
        damaged[at : at + len(new)] = new
        tracemalloc.start()
        with pytest.raises(CodecError, match="factor: "):
            decoded(damaged, len(raw))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 << 20
    for length in (len(raw) - 4, len(raw) + 4, len(raw) + 1, 0):
        with pytest.raises(CodecError):
            decoded(frame, length)


def test_a_flipped_byte_of_a_checkpoint_is_damage(tmp_path):
    rules = [{"match": "**", "codecs": ["factor"]}]
    state = {"g": torch.from_numpy(gradients(3000, 0.3))}
    with penstock.Checkpointer(tmp_path, rules=rules) as ckpt:
        ckpt.save(state, 1, mode="blocking")
        assert torch.equal(ckpt.load(1)["g"], state["g"])
    (blob,) = tmp_path.glob("data/*/blobs/*.enc")
    stored = blob.read_bytes()
    assert 6000 < len(stored) < 6100
    for at in (0, 5000, *range(6000, len(stored))):
        blob.write_bytes(stored[:at] + bytes([stored[at] ^ 0x10]) + stored[at + 1 :])
        with penstock.Checkpointer(tmp_path) as ckpt, pytest.raises(DamagedError):
            ckpt.load(1)

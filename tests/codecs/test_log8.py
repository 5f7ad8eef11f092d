"""`log8` keeps the relative error of second moments small, and zeros exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.codecs.log8 import Log8Codec, _tables
from penstock.core.abc import DECLINED, CodecContext, PluginConfig
from penstock.core.errors import CodecError

CODEC = Log8Codec(PluginConfig())


def context_of(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    return CodecContext(name, tensor.itemsize, tuple(tensor.shape), 0, tensor.nbytes)


def encoded(tensor):
    raw = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
    out = memoryview(bytearray(CODEC.max_encoded_size(raw.nbytes)))
    length = CODEC.encode(raw.toreadonly(), out, context=context_of(tensor))
    return DECLINED if length is DECLINED else out[:length]


def given_back(tensor):
    frame = encoded(tensor)
    assert frame is not DECLINED
    back = torch.empty_like(tensor)
    out = memoryview(back.view(torch.uint8).numpy()).cast("B")
    CODEC.decode(frame, out, context=context_of(tensor))
    return back


def moments(count, octaves=30.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(-octaves * torch.rand(count, generator=generator))


def test_the_relative_error_is_half_a_step():
    for octaves in [0.01, 5.0, 30.0, 100.0]:
        for count in [1, 2, 255, 256, 257, 70_000]:
            tensor = moments(count, octaves)

            error = ((given_back(tensor) - tensor).abs() / tensor).max()

            # 254 steps for this many octaves; the table has 2^12 cells for one.
            assert error <= 2 ** (octaves / 254 / 2) - 1 + 2**-11


def test_exactly_zeros_become_zero():
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        tensor = moments(5000, 20).to(dtype)
        tensor[::3] = 0
        tensor[256:512] = 0
        tensor[512:768] = (
            torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )  # the smallest
        tensor[1000] = torch.finfo(dtype).max

        back = given_back(tensor)

        assert torch.equal(back == 0, tensor == 0)
        assert back.isfinite().all()
        assert (back >= 0).all()


def test_block_extremes_and_equal_numbers_are_exact():
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        tensor = moments(256, 10).to(dtype)
        back = given_back(tensor)
        assert back.max() == tensor.max()
        assert (
            given_back(torch.full((300,), 0.1, dtype=dtype))
            .eq(torch.tensor(0.1, dtype=dtype))
            .all()
        )
        assert not given_back(torch.zeros(300, dtype=dtype)).any()


# About a sixteenth of an octave a step is as wide as a cell of the table.
def test_a_second_pass_changes_nothing():
    for dtype in [torch.float32, torch.bfloat16]:
        for octaves in [0.0, 1e-5, 0.01, 0.06, 0.062, 0.0625, 0.07, 1.0, 20.0, 100.0]:
            once = given_back(moments(70_000, octaves).to(dtype))
            assert torch.equal(given_back(once), once)


def test_a_chunk_of_impossible_second_moments_is_unchanged():
    for at in [0, 300, 69_999]:
        for odd in [-1e-9, -0.0, torch.inf, -torch.inf, torch.nan]:
            tensor = moments(70_000)
            tensor[at] = odd
            assert encoded(tensor) is DECLINED


def test_other_dtypes_are_declined():
    for dtype in [torch.float64, torch.int32, torch.uint8, torch.float8_e5m2]:
        assert encoded(torch.ones(300).to(dtype)) is DECLINED


def test_a_block_range_without_floats_is_refused():
    for low, high in [(2, 1), (1, 0x7F800000), (0x80000001, 0x80000002)]:
        tensor = torch.ones(3)
        frame = encoded(tensor)
        frame[:8] = np.array([low, high], "<u4").tobytes()
        with pytest.raises(CodecError, match="are not valid"):
            CODEC.decode(frame, memoryview(bytearray(12)), context=context_of(tensor))


def test_the_tables_match_the_logarithm():
    logarithms, mantissas = (table.astype(np.float64) / 2**23 for table in _tables())
    np.testing.assert_allclose(mantissas, np.exp2((np.arange(4096) + 0.5) / 4096) - 1, atol=2**-22)
    middles = (np.arange(1 << 14) + 0.5) / (1 << 14)
    np.testing.assert_allclose(logarithms, np.log2(1 + middles), atol=2**-13 * 1.01)
    cells = _tables()[0][_tables()[1] >> 9] >> 11
    np.testing.assert_array_equal(cells, np.arange(4096))  # each maps back to itself


def test_an_update_of_adam_keeps_its_size():
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.rand(200, 1, generator=generator), torch.rand(1, 256, generator=generator)
    scale = (rows * columns + 1e-3) * 1e-4
    m = scale * torch.randn(200, 256, generator=generator)
    v = scale.square() * (0.2 + torch.rand(200, 256, generator=generator))

    update = m / (v.sqrt() + 1e-8)
    after = m / (given_back(v).sqrt() + 1e-8)

    assert (after - update).norm() / update.norm() < 1e-2

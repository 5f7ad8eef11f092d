"""Whether one tensor is another one, rounded: exact for each bit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.support import bits

from penstock.core.abc import convert_floats
from penstock.providers.tensor.elements import is_rounded
from penstock.providers.tensor.sources import TensorSource

HALVES = [torch.bfloat16, torch.float16]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def of_bits(*numbers):
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).view(torch.float32)


def as_core_rounds(master, dtype):
    out = bytearray(2 * master.numel())
    convert_floats(memoryview(bits(master)), "float32", memoryview(out), str(dtype)[6:])
    return torch.frombuffer(out, dtype=dtype).view(master.shape)


@pytest.mark.parametrize("dtype", HALVES)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_a_tensor_is_derived_only_if_readers_get_its_bits(dtype, numbers):
    master = of_bits(*numbers)
    rounded = as_core_rounds(master, dtype)
    assert is_rounded(rounded, master) is not bool(rounded.isnan().any())
    by_torch = master.to(dtype)
    if is_rounded(by_torch, master):
        assert bits(by_torch) == bits(rounded)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", HALVES)
def test_one_bit_anywhere_makes_a_difference(dtype, device):
    master = torch.randn(3, 700_001, device=device)
    rounded = master.to(dtype)
    assert is_rounded(rounded, master)
    for place, bit in itertools.product((0, 1_000_003, -1), (1, -(1 << 15))):
        changed = rounded.clone()
        changed.view(torch.int16).view(-1)[place] ^= bit
        assert not is_rounded(changed, master), (place, bit)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", HALVES)
def test_any_layout_is_compared_element_by_element(dtype, device):
    master = torch.randn(1100, 1300, device=device).t()
    for rounded in (master.to(dtype), master.to(dtype).contiguous()):
        assert is_rounded(rounded, master)
        assert is_rounded(rounded, master.contiguous())
        changed = rounded.clone(memory_format=torch.preserve_format)
        changed[1299, 0] += 1
        assert not is_rounded(changed, master)


@pytest.mark.parametrize("dtype", HALVES)
def test_zeros_of_another_sign_and_nans_count_in_any_layout(dtype):
    for flat in (True, False):
        master = torch.zeros(200, 300)
        rounded = master.to(dtype) if flat else master.to(dtype).t().contiguous().t()
        assert is_rounded(rounded, master)
        rounded[7, 7] = -0.0
        assert not is_rounded(rounded, master)
        master[7, 7] = rounded[7, 7] = torch.nan
        rounded.copy_(master)
        assert not is_rounded(rounded, master)


def test_freed_memory_is_not_read():
    master = torch.randn(1000)
    source, other = TensorSource(master.bfloat16()), TensorSource(master)
    assert source.is_rounded(other)
    master.untyped_storage().resize_(0)
    assert not source.is_rounded(other)

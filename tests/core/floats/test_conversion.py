"""Conversions between float formats are torch's, to the bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from penstock.core.abc import FLOAT_DTYPES, convert_floats

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NARROW = [dtype for dtype, itemsize in FLOAT_DTYPES.items() if itemsize < 4]


def converted(elements: np.ndarray, source: str, target: str) -> np.ndarray:
    result = np.empty(len(elements), BITS[FLOAT_DTYPES[target]])
    convert_floats(memoryview(elements).cast("B"), source, memoryview(result).cast("B"), target)
    return result


def by_torch(elements: np.ndarray, source: str, target: str) -> np.ndarray:
    tensor = torch.from_numpy(elements.copy()).view(getattr(torch, source))
    unsigned = getattr(torch, f"uint{8 * FLOAT_DTYPES[target]}")
    return tensor.to(getattr(torch, target)).view(unsigned).numpy()


def every(dtype: str) -> np.ndarray:
    return np.arange(1 << 8 * FLOAT_DTYPES[dtype], dtype=np.uint64).astype(
        BITS[FLOAT_DTYPES[dtype]]
    )


def wide_cases(dtype: str) -> np.ndarray:
    """Random bits, all numbers of the narrow formats, and their neighbors and midpoints."""
    generator = np.random.default_rng(5)
    stored = BITS[FLOAT_DTYPES[dtype]]
    values = [
        torch.from_numpy(every(narrow)).view(getattr(torch, narrow)).double().numpy()
        for narrow in NARROW
    ]
    numbers = np.unique(np.concatenate([v[np.isfinite(v)] for v in values]))
    between = (numbers[1:] + numbers[:-1]) / 2
    floats = np.concatenate(
        [numbers, between, [0.0, -0.0, np.inf, -np.inf, 1e300, -1e300, 5e-324, 1e-46, 3.4028236e38]]
    )
    with np.errstate(all="ignore"):
        exact = floats.astype(np.float32 if dtype == "float32" else np.float64).view(stored)
    nans = generator.integers(1, 1 << (23 if dtype == "float32" else 52), 999).astype(stored)
    nans |= stored(0x7F800000 if dtype == "float32" else 0x7FF0000000000000)
    top = stored(1) << stored(8 * FLOAT_DTYPES[dtype] - 1)
    return np.concatenate(
        [
            *(exact + stored(step) for step in (0, 1, 2)),
            *(exact - stored(step) for step in (1, 2)),
            generator.integers(0, np.iinfo(stored).max, 300_000, stored, endpoint=True),
            nans,
            nans | top,
        ]
    )


def cases(dtype: str) -> np.ndarray:
    return every(dtype) if dtype in NARROW else wide_cases(dtype)


def defined(elements: np.ndarray, source: str, target: str) -> np.ndarray:
    """Leaves out numbers on which torch versions disagree: too large for float8_e4m3fn."""
    if target != "float8_e4m3fn":
        return elements
    values = torch.from_numpy(elements).view(getattr(torch, source)).double().abs().numpy()
    return elements[~(values > 464)]


@pytest.mark.parametrize("source", FLOAT_DTYPES)
def test_every_conversion_equals_torchs_bits(source):
    numbers = cases(source)
    for target in FLOAT_DTYPES:
        elements = defined(numbers, source, target)
        expected, result = by_torch(elements, source, target), converted(elements, source, target)
        if target == "bfloat16" != source:  # torch writes one NaN in a vector, another after it
            nans = (expected & 0x7FFF) > 0x7F80
            assert ((result[nans] & 0x7FFF) > 0x7F80).all()
            result[nans] = expected[nans]
        np.testing.assert_array_equal(result, expected, err_msg=target)


@pytest.mark.parametrize("source", FLOAT_DTYPES)
def test_subnormals_are_converted_in_a_thread_that_flushes_them(source):
    """As in workers started after `torch.set_flush_denormal(True)`."""
    numbers = cases(source)
    elements = {target: defined(numbers, source, target) for target in FLOAT_DTYPES}
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush subnormal numbers")
    found = {}

    def convert_flushing():
        torch.set_flush_denormal(True)
        for target, chosen in elements.items():
            found[target] = converted(chosen, source, target)

    thread = threading.Thread(target=convert_flushing)
    thread.start()
    thread.join()
    for target, chosen in elements.items():
        expected = converted(chosen, source, target)
        np.testing.assert_array_equal(found[target], expected, err_msg=target)


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_values_too_large_for_e4m3fn_become_its_maximum(source):
    values = torch.tensor([465.0, 1e9, -1e9, torch.inf, -torch.inf]).to(getattr(torch, source))
    elements = values.view(getattr(torch, f"uint{8 * FLOAT_DTYPES[source]}")).numpy()

    result = converted(elements, source, "float8_e4m3fn")

    assert [hex(code) for code in result] == ["0x7e", "0x7e", "0xfe", "0x7e", "0xfe"]


def test_memory_at_any_address_is_converted():
    elements = np.random.default_rng(1).standard_normal(1000).astype(np.float32).view(np.uint32)
    source, target = bytearray(4001), bytearray(2003)
    source[1:] = elements.tobytes()

    convert_floats(memoryview(source)[1:], "float32", memoryview(target)[3:], "bfloat16")

    assert bytes(target[3:]) == by_torch(elements, "float32", "bfloat16").tobytes()
    assert target[:3] == b"\0\0\0"

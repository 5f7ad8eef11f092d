"""Elements of one float dtype, placed into memory of another."""

import random
import tracemalloc

import pytest
import torch
from tests.integration.support import bits

from penstock.core.tree.cast import CastSink
from penstock.core.types import TensorSpec
from penstock.providers.tensor.sources import TensorSink

COUNT = 1_200_000


def spec(dtype):
    return TensorSpec(str(dtype).removeprefix("torch."), dtype.itemsize, (COUNT,))


def filled(inner, stored, into, step):
    sink = CastSink(inner, spec(stored.dtype), spec(into))
    data = memoryview(bits(stored))
    assert sink.nbytes == len(data)
    assert sink.view() is None
    size = stored.dtype.itemsize
    for start in reversed(range(0, COUNT, step)):
        sink.copy_in(start * size, data[start * size : (start + step) * size])


@pytest.mark.parametrize(
    ("one", "other", "step", "strided"),
    [
        (torch.float32, torch.bfloat16, COUNT, False),
        (torch.float32, torch.float16, 700_001, True),
        (torch.bfloat16, torch.float32, 700_001, False),
        (torch.float64, torch.bfloat16, 300_000, True),
    ],
)
def test_pieces_arrive_in_place_in_any_memory(one, other, step, strided):
    stored = torch.randn(COUNT, generator=torch.Generator().manual_seed(1)).to(one)
    target = (
        torch.zeros(COUNT, 2, dtype=other)[:, 1] if strided else torch.zeros(COUNT, dtype=other)
    )
    filled(TensorSink(target), stored, other, step)
    assert bits(target) == bits(stored.to(other))


def test_pieces_may_split_elements_and_come_in_any_order():
    for seed in range(3):
        for other in [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2]:
            stored = torch.randn(501, dtype=torch.float64)
            target = torch.zeros(501, dtype=other)
            sink = CastSink(TensorSink(target), spec(torch.float64), spec(other))
            data = memoryview(bits(stored))
            chance = random.Random(seed)
            cuts = sorted(chance.sample(range(1, data.nbytes), 300))
            pieces = list(zip([0, *cuts], [*cuts, data.nbytes], strict=True))
            chance.shuffle(pieces)

            for start, stop in pieces:
                sink.copy_in(start, data[start:stop])

            assert bits(target) == bits(stored.to(other))


@pytest.mark.parametrize("strided", [False, True])
def test_no_second_copy_of_the_tensor_is_made(strided):
    target = torch.zeros(1 << 11, 1 << 11, dtype=torch.bfloat16)
    inner = TensorSink(target.t() if strided else target)
    sink = CastSink(inner, spec(torch.float32), spec(torch.bfloat16))
    data = memoryview(bits(torch.randn(1 << 11, 1 << 11)))
    sink.copy_in(0, data)  # the scratch of this thread stays

    tracemalloc.start()
    try:
        sink.copy_in(0, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < target.nbytes // 4

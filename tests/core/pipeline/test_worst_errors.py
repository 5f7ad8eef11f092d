"""The worst errors of floats, and what NaN, infinities and zeros count as."""

import math

import pytest
import torch

from penstock.core.pipeline.worst_errors import worst_errors
from penstock.core.types import WorstErrors

NAN, INF = math.nan, math.inf
ENDLESS = WorstErrors(INF, INF)


def compared(saved, given, dtype=torch.float32):
    def view(values):
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
        return memoryview(tensor.to(dtype).view(torch.uint8).numpy()).cast("B")

    return worst_errors(view(saved), view(given), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2],
    ids=str,
)
def test_the_worst_of_each_kind_is_found(dtype):
    saved, given = [1.0, 128.0, 0.5, 4.0], [1.5, 112.0, 0.5, 4.0]
    assert compared(saved, given, dtype) == WorstErrors(16.0, 0.5)


@pytest.mark.parametrize("at", [0, 65_535, 65_536, 199_999])
def test_an_error_is_found_wherever_it_is(at):
    saved = torch.ones(200_000)
    given = saved.clone()
    given[at] = 0.75
    assert compared(saved, given) == WorstErrors(0.25, 0.25)


def test_odd_numbers_count_as_what_they_are():
    for saved, given, errors in [
        ([1.0, NAN, INF, -INF, 0.0, -0.0], [1.0, NAN, INF, -INF, -0.0, 0.0], WorstErrors(0, 0)),
        ([NAN, NAN], [NAN, NAN], WorstErrors(0, 0)),
        ([2.0, NAN], [1.0, NAN], WorstErrors(1.0, 0.5)),
        ([2.0, INF], [1.0, INF], WorstErrors(1.0, 0.5)),
        ([1.0, NAN], [1.0, 5.0], ENDLESS),
        ([1.0, 5.0], [1.0, NAN], ENDLESS),
        ([NAN, 5.0], [5.0, NAN], ENDLESS),
        ([INF, NAN], [NAN, NAN], ENDLESS),
        ([1e30], [INF], ENDLESS),
        ([INF], [1e30], ENDLESS),
        ([INF], [-INF], ENDLESS),
        ([0.0, 1.0], [2.0, 1.0], WorstErrors(2.0, INF)),
        ([2.0, 1.0], [0.0, 1.0], WorstErrors(2.0, 1.0)),
        ([], [], WorstErrors(0, 0)),
    ]:
        assert compared(saved, given) == errors

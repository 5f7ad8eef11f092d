"""The lines of tensors that ranks compare: taken when `save` is called."""

import pytest
import torch

from penstock.core.ranks.structure import Brought
from penstock.core.tree.describe import describe_tree
from penstock.providers.tensor import TensorProvider
from penstock.providers.values import ValueProvider
from penstock.testing.stored import StaticProviders

PROVIDERS = StaticProviders([TensorProvider(), ValueProvider()])

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "small": lambda t: t[0, :9],
    "every other": lambda t: t[::2, ::2],
}


def lines_of(state):
    description = describe_tree(state, providers=PROVIDERS, allow_pickle=False)
    return Brought.of(description.entries, (), {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_compare_a_tensor_as_of_the_call_of_save(layout):
    """Training continues right after it, at different paces."""
    one, other = (LAYOUTS[layout](torch.ones(64, 64)) for _ in range(2))
    of_one, of_other = lines_of({"w": one}), lines_of({"w": other})
    one += 1
    assert of_one.digests() == of_other.digests()
    assert of_one.digests() != lines_of({"w": one}).digests()


def test_the_memory_order_of_a_tensor_is_no_difference():
    values = torch.arange(4096.0).view(64, 64)
    turned = values.t().contiguous().t()
    assert turned.stride() != values.stride()
    of_values, of_turned = lines_of({"w": values}), lines_of({"w": turned})
    assert of_values.digests() == of_turned.digests()

"""Children that a provider describes in a batch are stored like single ones."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.abc import Node, Placement, StateProvider
from penstock.core.errors import PluginError, UnsupportedStateError
from penstock.core.types import Role
from penstock.providers.ndarray import NdarrayProvider
from penstock.providers.tensor import TensorProvider
from penstock.providers.values import ValueProvider
from penstock.testing.providers import store
from penstock.testing.stored import StaticProviders


class Box:
    def __init__(self, items, roles):
        self.items, self.roles = items, roles


class BoxProvider(StateProvider):
    name = "box"
    forms = ("box",)

    def __init__(self, *, together):
        self._together = together

    def claims(self, kind, /):
        return 50 if kind is Box else None

    def describe(self, value, path, /, *, context):
        yield Node(path, "box")
        paths = [(*path, str(number)) for number in range(len(value.items))]
        if self._together:
            yield from chain(*context.describe_each(value.items, paths, value.roles))
            return
        for item, here, role in zip(value.items, paths, value.roles, strict=True):
            yield from context.describe(item, here, role=role)

    def place(self, value, path, /, *, context):
        return Placement()

    def rebuild(self, stored, /, *, device, context):
        return Placement()


def stored(items, roles, *, together):
    others = [TensorProvider(), NdarrayProvider(), ValueProvider()]
    providers = StaticProviders([BoxProvider(together=together), *others])
    return store({"box": Box(items, roles)}, providers=providers)


WEIGHT = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
ITEMS = [
    WEIGHT, WEIGHT[0].detach(), torch.arange(4), torch.empty(0), torch.tensor(2.5),
    torch.arange(6)[::2],
    np.arange(3), 7, "text", [torch.ones(2), {"deep": 1}], (), {"a": torch.zeros(3)},
]  # fmt: skip
ROLES = [None, Role.OPTIMIZER, Role.BUFFER, Role.PARAMETER, Role.OTHER]


@given(picks=st.lists(st.tuples(st.sampled_from(ITEMS), st.sampled_from(ROLES)), max_size=12))
def test_children_described_at_once_are_stored_alike(picks):
    items, roles = [item for item, _ in picks], [role for _, role in picks]
    at_once, each = (stored(items, roles, together=together) for together in (True, False))
    assert at_once.tree.objects == each.tree.objects
    assert at_once.tree.aliases == each.tree.aliases
    assert at_once.data == each.data


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (torch.ones(2).to_sparse(), UnsupportedStateError),
        (torch._efficientzerotensor(2), PluginError),  # whose address torch refuses to give
    ],
)
def test_an_unstorable_child_is_named_among_many(bad, error):
    with pytest.raises(error, match="box/1"):
        stored([torch.ones(2), bad, torch.ones(2)], [None] * 3, together=True)

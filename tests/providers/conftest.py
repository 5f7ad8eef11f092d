"""Every provider, and round trips of state through a checkpoint in memory."""

import pytest

from penstock.providers.grads import GradsProvider
from penstock.providers.module import ModuleProvider
from penstock.providers.ndarray import NdarrayProvider
from penstock.providers.optimizer import OptimizerProvider
from penstock.providers.rng import RngProvider
from penstock.providers.stateful import StatefulProvider
from penstock.providers.tensor import TensorProvider
from penstock.providers.values import ValueProvider
from penstock.testing.providers import store
from penstock.testing.stored import StaticProviders


@pytest.fixture(scope="session")
def providers():
    return StaticProviders(
        [
            GradsProvider(), ModuleProvider(), NdarrayProvider(), OptimizerProvider(),
            RngProvider(), StatefulProvider(), TensorProvider(), ValueProvider(),
        ]
    )  # fmt: skip


@pytest.fixture(scope="session")
def save(providers):
    def save(state, **options):
        return store(state, providers=providers, **options)

    return save

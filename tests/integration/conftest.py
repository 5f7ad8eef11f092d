"""A store that can be held up, and what holds it."""

import pytest
from tests.integration.support import memory
from tests.integration.training import Gate

from penstock.core.testing.faults import FaultyBackend


@pytest.fixture
def store():
    """A store that can be stopped."""
    return FaultyBackend(memory())


@pytest.fixture
def gate():
    """Lets go in the end of whatever it stopped."""
    event = Gate()
    yield event
    event.set()

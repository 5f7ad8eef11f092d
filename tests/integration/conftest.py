"""Which file engine, a store that can be held up, and what holds it."""

import pytest
from tests.integration.support import memory, uring_missing
from tests.integration.training import Gate

from penstock.testing.faults import FaultyBackend


@pytest.fixture(params=["posix", pytest.param("uring", marks=pytest.mark.slow)])
def kind(request):
    """Each engine for files that can be used here; one in the quick run, as both conform."""
    missing = uring_missing() if request.param == "uring" else None
    if missing:
        pytest.skip(f"needs io_uring: {missing}")
    return request.param


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

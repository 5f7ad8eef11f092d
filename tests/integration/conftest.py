"""File engines, and a store that can be blocked."""

import pytest
from tests.integration.support import memory, uring_missing
from tests.integration.training import Gate

from penstock.testing.faults import FaultyBackend


@pytest.fixture(params=["posix", pytest.param("uring", marks=pytest.mark.slow)])
def kind(request):
    """Each usable file engine; one in the quick run, since both conform."""
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
    """Releases in the end all that it stopped."""
    event = Gate()
    yield event
    event.set()

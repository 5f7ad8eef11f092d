"""Codecs with and without numba."""

import pytest

from penstock.codecs import delta, floatsplit
from penstock.codecs.floatsplit import entropy
from penstock.codecs.kernels import PLAIN


@pytest.fixture
def without_numba(monkeypatch):
    for module in (delta, floatsplit, entropy):
        monkeypatch.setattr(module, "kernels", lambda: PLAIN)


@pytest.fixture(params=["numpy", "numba"])
def loops(request):
    """Runs a test with the loops of numpy, and with those that numba compiles."""
    if request.param == "numpy":
        request.getfixturevalue("without_numba")
    else:
        pytest.importorskip("numba", reason="numba, of the extra `fast`, is missing")
    return request.param

"""Penstock's own suite: every promise of the contract."""

import pytest
from penstock.testing.backends import BACKEND_CHECKS


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_backend(check, server):
    check(lambda root: server.open(prefix=root))

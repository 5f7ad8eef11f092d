"""Penstock's own suite."""

import pytest
from penstock.core.testing.backends import BACKEND_CHECKS


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"ttl_s": 600, "chunk_bytes": 70_001}], ids=["plain", "odd"]
)
def test_backend(check, options, server):
    opened = []

    def open_root(root):
        opened.append(server.open(prefix=root, **options))
        return opened[-1]

    check(open_root)

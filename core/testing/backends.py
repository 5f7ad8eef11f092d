"""Conformance suite for backends: what the contract promises, as plain functions.

```python
def open_root(root: str) -> Backend:  # equal `root`: the same store; a new one: empty
    return MyBackend(MyConfig(path=f"{tmp}/{root}"))

check_backend(open_root)                                    # all, or with pytest:

@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_backend(check): check(open_root)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.testing.backends_access import ACCESS_CHECKS
from penstock.core.testing.backends_blobs import BLOB_CHECKS
from penstock.core.testing.backends_records import RECORD_CHECKS

if TYPE_CHECKING:
    from penstock.core.testing.expectations import BackendCheck, OpenRoot

BACKEND_CHECKS: tuple[BackendCheck, ...] = (
    *BLOB_CHECKS,
    *ACCESS_CHECKS,
    *RECORD_CHECKS,
)
"""Every check; each takes the function that opens a root, and raises AssertionError."""


def check_backend(open_root: OpenRoot, /) -> None:
    """Run all checks, each on roots of its own.

    Args:
        open_root: Opens the root of that name; the first time it must be empty.

    Raises:
        AssertionError: A promise of the contract is not kept; a note names it.
    """
    for check in BACKEND_CHECKS:
        try:
            check(open_root)
        except Exception as error:
            error.add_note(f"while checking that {check.__name__.replace('_', ' ')}")
            raise

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

import unittest
from typing import TYPE_CHECKING

from penstock.core.testing.backends_access import ACCESS_CHECKS
from penstock.core.testing.backends_blobs import BLOB_CHECKS
from penstock.core.testing.backends_instance import INSTANCE_CHECKS
from penstock.core.testing.backends_records import RECORD_CHECKS
from penstock.core.testing.expectations import NotDeclaredError, NotTriedError

if TYPE_CHECKING:
    from penstock.core.testing.expectations import BackendCheck, OpenRoot

BACKEND_CHECKS: tuple[BackendCheck, ...] = (
    *BLOB_CHECKS,
    *ACCESS_CHECKS,
    *RECORD_CHECKS,
    *INSTANCE_CHECKS,
)
"""Every check; each takes the function that opens a root, and raises AssertionError.

A check of something that a backend need not offer asks the instance whether it declares it. If
not, it raises NotDeclaredError; where something cannot be tried on the store at hand it raises
NotTriedError. Pytest and unittest show both as a skip, with the reason.
"""


def check_backend(open_root: OpenRoot, /) -> tuple[str, ...]:
    """Run all checks, each on roots of its own.

    Args:
        open_root: Opens the root of that name; the first time it must be empty.

    Returns:
        Names of the checks that were left out, because the backend does not declare what they are
        about, or because it cannot be tried (a crash, where no forked process can use the store);
        everything else was checked.

    Raises:
        AssertionError: A promise of the contract is not kept, or a check was skipped though the
            backend declares what it is about; a note names it.
    """
    left_out: list[str] = []
    for check in BACKEND_CHECKS:
        try:
            check(open_root)
        except (NotDeclaredError, NotTriedError):
            left_out.append(check.__name__)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except Exception as error:
            if not isinstance(error, unittest.SkipTest):
                error.add_note(_while(check))
                raise
            raise _skipped(check) from error
        except BaseException as error:
            # How test frameworks skip; a promise that nobody looked at is not kept.
            raise _skipped(check) from error
    return tuple(left_out)


def _skipped(check: BackendCheck) -> AssertionError:
    error = AssertionError("the check was skipped, though nothing says that it does not apply")
    error.add_note(_while(check))
    return error


def _while(check: BackendCheck) -> str:
    return f"while checking that {check.__name__.replace('_', ' ')}"

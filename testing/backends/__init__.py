"""The conformance suite of backends: the promises of the contract, as plain functions.

```python
def open_root(root: str) -> Backend:  # same `root`: same store; new `root`: empty store
    return MyBackend(MyConfig(path=f"{tmp}/{root}"))

check_backend(open_root)                                    # all, or with pytest:

@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_backend(check): check(open_root)
```
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING

from penstock.testing.backends.blobs import ACCESS_CHECKS, BLOB_CHECKS
from penstock.testing.backends.forks import PROCESS_CHECKS
from penstock.testing.backends.published import INSTANCE_CHECKS, RECORD_CHECKS
from penstock.testing.expectations import NotDeclaredError, NotTriedError

if TYPE_CHECKING:
    from penstock.testing.expectations import BackendCheck, OpenRoot

BACKEND_CHECKS: tuple[BackendCheck, ...] = (
    *BLOB_CHECKS,
    *ACCESS_CHECKS,
    *RECORD_CHECKS,
    *INSTANCE_CHECKS,
    *PROCESS_CHECKS,
)
"""All checks; each takes the function that opens a root, and raises AssertionError.

A check of an optional capability raises NotDeclaredError if the instance does not declare the
capability, and NotTriedError if the store at hand cannot run it. Pytest and unittest show both as
a skip, with the reason.
"""


def check_backend(open_root: OpenRoot, /) -> tuple[str, ...]:
    """Run all checks, each on its own roots.

    Args:
        open_root: Opens the root with the given name. Each root must be empty when it is first
            opened.

    Returns:
        The names of the skipped checks: those of capabilities that the backend does not declare,
            and those that cannot run on this store. For example, a crash check needs a store that a
            forked process can use.

    Raises:
        AssertionError: A promise of the contract is broken, or something other than the suite
            skipped a check; a note names the check.
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
            # Test frameworks skip by a BaseException. If anything but the suite skips a check, the
            # check did not run, so it must not count as passed.
            raise _skipped(check) from error
    return tuple(left_out)


def _skipped(check: BackendCheck) -> AssertionError:
    error = AssertionError("something other than the suite skipped the check: remove that skip")
    error.add_note(_while(check))
    return error


def _while(check: BackendCheck) -> str:
    return f"while checking that {check.__name__.replace('_', ' ')}"

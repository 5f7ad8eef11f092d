"""Each of our backends keeps every promise of the contract."""

import contextlib
import inspect
from itertools import product

import pytest
from tests.backends.conftest import open_backend

from penstock.backends.hosts import HostsBackend, HostsConfig
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.abc import HostRoot
from penstock.testing.backends import BACKEND_CHECKS, check_backend
from penstock.testing.backends import blobs as backends_blobs
from penstock.testing.backends import forks as backends_processes
from penstock.testing.backends import published as backends_records
from penstock.testing.expectations import NotDeclaredError, NotTriedError
from penstock.testing.faults import WrapperBackend

KINDS = ["memory", "posix-auto", "posix-off", "uring-auto", "uring-off"]
GROUPS = {
    "blobs": backends_blobs.BLOB_CHECKS,
    "access": backends_blobs.ACCESS_CHECKS,
    "records": backends_records.RECORD_CHECKS,
    "instance": backends_records.INSTANCE_CHECKS,
    "processes": backends_processes.PROCESS_CHECKS,
}


def _cases():
    for group, kind in product(GROUPS, KINDS):
        # Records are never written with direct I/O.
        twin = kind.endswith("-auto") and group in {"records", "processes"}
        yield pytest.param(group, kind, marks=[pytest.mark.slow] if twin else [])


@pytest.mark.parametrize(("group", "open_root"), [*_cases()], indirect=["open_root"])
def test_backend_conforms(group, open_root):
    for check in GROUPS[group]:
        with contextlib.suppress(NotDeclaredError, NotTriedError):
            check(open_root)


def _hosts(tmp_path, root, *, joined):
    found = HostsBackend(HostsConfig(path=""), root=open_backend("posix-off", tmp_path / root))
    if joined:
        own = HostRoot("a", 0, found.own)
        other = HostRoot("b", 0, MemoryBackend(MemoryConfig(name=f"{tmp_path}{root}")))
        found.join(own, [other], leads=True)
    return found


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("joined", [False, True], ids=["one", "two"])
def test_roots_of_hosts_conform(tmp_path, group, joined):
    for check in GROUPS[group]:
        with contextlib.suppress(NotDeclaredError, NotTriedError):
            check(lambda root: _hosts(tmp_path, root, joined=joined))


@pytest.mark.slow
def test_wrapper_conforms(tmp_path):
    check_backend(
        lambda root: WrapperBackend(MemoryBackend(MemoryConfig(name=f"{tmp_path}{root}")))
    )


def test_no_check_is_forgotten():
    written = {
        function
        for module in (
            backends_blobs,
            backends_processes,
            backends_records,
        )
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["open_root"]
    }
    assert written == set(BACKEND_CHECKS)

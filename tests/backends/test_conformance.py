"""Every backend of ours keeps every promise of the contract, and the suite notices broken ones."""

import inspect

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.errors import StorageError
from penstock.core.testing.backends import BACKEND_CHECKS, check_backend
from penstock.core.testing.backends import access as backends_access
from penstock.core.testing.backends import blobs as backends_blobs
from penstock.core.testing.backends import instance as backends_instance
from penstock.core.testing.backends import processes as backends_processes
from penstock.core.testing.backends import records as backends_records
from penstock.core.testing.wrapper import WrapperBackend
from penstock.core.types import ReadRequest

KINDS = ["memory", "posix-auto", "posix-off", "uring-auto", "uring-off"]


@pytest.mark.parametrize("open_root", KINDS, indirect=True)
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_backend_conforms(check, open_root):
    check(open_root)


def test_wrapper_conforms(tmp_path):
    check_backend(
        lambda root: WrapperBackend(MemoryBackend(MemoryConfig(name=f"{tmp_path}{root}")))
    )


def test_no_check_is_forgotten():
    written = {
        function
        for module in (
            backends_access,
            backends_blobs,
            backends_instance,
            backends_processes,
            backends_records,
        )
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["open_root"]
    }
    assert written == set(BACKEND_CHECKS)


class ShortRead(WrapperBackend):
    def read(self, requests):
        self.inner.read([ReadRequest(r.name, r.offset, r.target[:-1]) for r in requests])


class Overwriting(WrapperBackend):
    def publish(self, name, data, *, exclusive=False):
        self.inner.publish(name, data)


class Unsorted(WrapperBackend):
    def list(self, prefix):
        return list(reversed(self.inner.list(prefix)))


class Forgetful(WrapperBackend):
    def delete(self, names):
        self.inner.delete(names[1:])


@pytest.mark.parametrize("broken", [ShortRead, Overwriting, Unsorted, Forgetful])
def test_suite_finds_a_broken_backend(broken, tmp_path):
    with pytest.raises((AssertionError, StorageError)) as caught:
        check_backend(lambda root: broken(MemoryBackend(MemoryConfig(name=f"{tmp_path}{root}"))))
    assert "while checking that" in caught.value.__notes__[0]

"""Backends under test: every kind, with and without direct I/O."""

import pytest
from tests.integration.support import uring_missing

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.uring.engine import UringBackend, UringConfig

FILE_KINDS = ["posix-auto", "posix-off", "uring-auto", "uring-off"]


def open_backend(kind, path, **options):
    """A backend of `kind` (`posix-off`: posix with direct_io="off") over `path`."""
    name, _, mode = kind.partition("-")
    if name == "memory":
        return MemoryBackend(MemoryConfig(name=str(path)))
    options = {"path": str(path), "direct_io": mode or "auto", **options}
    if name == "posix":
        return PosixBackend(PosixConfig(**options))
    missing = uring_missing()
    if missing:
        pytest.skip(f"needs io_uring: {missing}")
    return UringBackend(UringConfig(**options))


@pytest.fixture
def open_root(request, tmp_path):
    """Opens roots by name with the kind of the test's parameter."""
    return lambda root: open_backend(request.param, tmp_path / root)


@pytest.fixture(params=FILE_KINDS)
def open_files(request):
    """Opens file backends of the test's kind; closes them."""
    opened = []

    def open_files(path, **options):
        opened.append(open_backend(request.param, path, **options))
        return opened[-1]

    yield open_files
    for backend in opened:
        backend.close()


@pytest.fixture
def files(open_files, tmp_path):
    """A file backend over `tmp_path / "root"`, which does not exist yet."""
    return open_files(tmp_path / "root")


@pytest.fixture
def needs_uring():
    """Skip, saying why, where io_uring cannot be used."""
    missing = uring_missing()
    if missing:
        pytest.skip(f"needs io_uring: {missing}")

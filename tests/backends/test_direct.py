"""Direct I/O is used where it is proven, and reported correctly."""

# ruff: noqa: PTH103, PTH112, PTH123, PTH208 - descriptors, flags and links are tested

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess

import pytest

from penstock.backends.local import blob as direct_module
from penstock.backends.local.blob import DirectAccess
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.errors import CapabilityError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import pattern

MIB = 1 << 20


@pytest.fixture
def direct_path(tmp_path):
    """A folder on a file system that takes O_DIRECT."""
    refusal = DirectAccess("auto", str(tmp_path)).refusal
    if refusal is not None:
        pytest.skip(f"needs a file system with direct I/O: {refusal}")
    return tmp_path


@pytest.fixture
def memory_path():
    """A folder on a file system that keeps its files in memory."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs a tmpfs at /dev/shm")
    path = f"/dev/shm/penstock-test-{os.getpid()}"
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def cached_pages(path):
    """How many whole pages of a file are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(memory))
        resident = (ctypes.c_ubyte * -(-len(memory) // 4096))()
        failed = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), resident)
        del anchor
        assert not failed
        # Truncating the file to length loads its last page.
        return sum(flags & 1 for flags in resident[:-1])


def write(backend, name="data/a.raw"):
    writer = backend.create(name)
    # Odd address and odd length: it is fully misaligned, and still not cached.
    data = pattern(8 * MIB + 5)
    writer.write([WriteRequest(65, (memoryview(data)[1:],))])
    flags = fcntl.fcntl(writer._blob.fd, fcntl.F_GETFL)
    writer.seal(64 + len(data))
    return bool(flags & os.O_DIRECT), data


def test_direct_writes_and_reads_leave_nothing_in_the_page_cache(open_files, direct_path):
    backend = open_files(direct_path / "root")
    path = direct_path / "root" / "data" / "a.raw"
    used, data = write(backend)
    assert used == backend.capabilities.direct_io
    if not used:
        assert cached_pages(path) > 2000
        return
    assert cached_pages(path) == 0
    target = bytearray(len(data))
    backend.read([ReadRequest("data/a.raw", 64, memoryview(target))])
    assert target[1:] == data[1:]
    assert cached_pages(path) == 0


def test_required_direct_io_is_not_silently_dropped(memory_path):
    os.makedirs(memory_path)
    backend = PosixBackend(PosixConfig(path=memory_path, direct_io="on"))
    with pytest.raises(CapabilityError, match="tmpfs keeps files in memory; use direct_io='auto'"):
        backend.create("a.raw")
    assert os.listdir(memory_path) == []
    with open(f"{memory_path}/b.raw", "wb") as file:
        file.write(bytes(MIB))
    with pytest.raises(CapabilityError):
        backend.read([ReadRequest("b.raw", 0, memoryview(bytearray(MIB)))])
    backend.close()


@pytest.mark.parametrize("where", ["flag", "write"])
def test_a_refusal_is_logged_and_falls_back(open_files, direct_path, monkeypatch, where):
    if where == "flag":
        real = fcntl.fcntl

        def refuse(fd, command, flags=0):
            if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, command, flags)

        monkeypatch.setattr(direct_module.fcntl, "fcntl", refuse)
    else:

        def refuse(fd, views, offset):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(direct_module.os, "pwritev", refuse)
    backend = open_files(direct_path / "root")
    capabilities = backend.capabilities
    monkeypatch.undo()
    assert not capabilities.direct_io
    assert (
        "Invalid argument" in capabilities.notes[0] or "direct_io is off" in capabilities.notes[0]
    )
    used, data = write(backend)
    assert not used
    assert (direct_path / "root" / "data" / "a.raw").read_bytes()[65:] == data[1:]


def test_a_read_only_reader_still_reads_directly(direct_path, monkeypatch):
    write(PosixBackend(PosixConfig(path=str(direct_path / "root"))))
    path = direct_path / "root" / "data" / "a.raw"

    def read_only(folder, *, named):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(direct_module, "_nameless", read_only)
    backend = PosixBackend(PosixConfig(path=str(direct_path / "root")))
    assert "Read-only file system" in backend.capabilities.notes[0]
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    backend.read([ReadRequest("data/a.raw", 64, memoryview(bytearray(8 * MIB)))])
    assert cached_pages(path) == 0
    assert backend.capabilities.direct_io
    backend.close()


def test_a_probe_without_o_tmpfile_leaves_no_files(direct_path, monkeypatch):
    real = os.open

    def no_tmpfile(path, flags, mode=0o777, **where):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode, **where)

    monkeypatch.setattr(direct_module.os, "open", no_tmpfile)
    assert DirectAccess("auto", str(direct_path)).refusal is None
    assert os.listdir(direct_path) == []
    assert "cannot be probed" in DirectAccess("auto", str(direct_path / "later")).refusal
    assert os.listdir(direct_path) == []


def test_files_in_memory_are_never_called_direct(memory_path):
    backend = PosixBackend(PosixConfig(path=memory_path))
    assert not backend.capabilities.direct_io
    assert backend.capabilities.memory_alignment == 1
    assert "tmpfs" in backend.capabilities.notes[0]
    used, _ = write(backend)
    assert not used
    backend.close()

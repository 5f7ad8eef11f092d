"""Opening and closing leaks nothing; URLs and options; errors that cross processes."""

# ruff: noqa: PTH208 - descriptors, flags and links are tested

import gc
import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.uring.engine import UringBackend, UringConfig
from penstock.core.errors import ConfigError, StorageError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import pattern


def left_since(before=None):
    """New threads and descriptors; those of other tests may still end."""
    links = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            links[re.sub(r"\d+", "", str(path.readlink()))] += 1
    now = Counter(threading.enumerate()), links
    return now if before is None else (now[0] - before[0], now[1] - before[1])


def use(backend, name):
    """Start the engine, and leave a writer of each fate."""
    data = memoryview(pattern(300_000))
    for fate in ("sealed", "aborted", "open"):
        writer = backend.create(f"{name}.{fate}", size_hint=64 + len(data))
        writer.write([WriteRequest(64, (data,))])
        if fate == "sealed":
            writer.seal(64 + len(data))
        elif fate == "aborted":
            writer.abort()
    target = memoryview(bytearray(len(data)))
    backend.submit_read([ReadRequest(f"{name}.sealed", 64, target)]).result(300)
    for missing in ("missing", f"{name}.sealed"):
        with pytest.raises(StorageError):
            backend.read([ReadRequest(missing, 1 << 40, target)])


def test_opening_and_closing_200_times_leaks_neither_descriptors_nor_threads(open_files, tmp_path):
    use(open_files(tmp_path / "root"), "warm")
    gc.collect()
    before = left_since()
    for n in range(200):
        backend = open_files(tmp_path / "root")
        assert backend.capabilities
        if n % 20 == 0:
            use(backend, str(n))
        backend.close()
    assert left_since(before) == (Counter(), Counter())


def test_a_backend_dropped_without_close_is_cleaned_up(tmp_path, request, needs_uring):
    gc.collect()
    before = left_since()
    for kind, config in ((PosixBackend, PosixConfig), (UringBackend, UringConfig)):
        backend = kind(config(path=str(tmp_path / "root")))
        use(backend, kind.name)
        del backend
        gc.collect()
    assert left_since(before) == (Counter(), Counter())


def test_close_aborts_unsealed_blobs(files, tmp_path):
    writer = files.create("half.raw")
    writer.write([WriteRequest(0, (memoryview(b"x"),))])
    files.close()
    assert os.listdir(tmp_path / "root") == []


@pytest.mark.parametrize("backend", [PosixBackend, UringBackend])
@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("posix:///nvme/run%20one", "/nvme/run one"),
        ("uring:///nvme/a%2Bb", "/nvme/a+b"),
        ("file:///nvme/run", "/nvme/run"),
        ("file://localhost/nvme/run", "/nvme/run"),
        ("posix://runs/gpt", "runs/gpt"),
        ("runs/100%25", "runs/100%25"),
        ("/nvme/run", "/nvme/run"),
    ],
)
def test_urls_name_paths(backend, url, path):
    assert backend.from_url(url, {}).path == path


def test_urls_that_name_a_machine_or_two_paths_are_refused():
    with pytest.raises(ConfigError, match="looks like a machine"):
        PosixBackend.from_url("file://server/share", {})
    for nothing in ("", "  ", "posix://", "file://"):
        with pytest.raises(ConfigError, match="names no folder"):
            PosixBackend.from_url(nothing, {})
    with pytest.raises(ConfigError, match="remove 'path'"):
        PosixBackend.from_url("posix:///a", {"path": "/b"})


def test_urls_carry_options():
    config = UringBackend.from_url("uring:///x", {"depth": "8", "direct_io": "off"})
    assert config == UringConfig(path="/x", depth=8, direct_io="off")
    config = PosixBackend.from_url("posix:///x", {"parallel": "2", "allocate_bytes": "0"})
    assert config == PosixConfig(path="/x", parallel=2, allocate_bytes=0)
    assert MemoryBackend.from_url("memory://run", {}) == MemoryConfig(name="run")
    assert MemoryBackend.from_url("memory://", {}) == MemoryConfig()


def test_shown_urls_can_be_opened(tmp_path):
    path = str(tmp_path / "run one+50%")
    backend = PosixBackend(PosixConfig(path=path))
    assert backend.url.startswith("file:///")
    assert PosixBackend.from_url(backend.url, {}).path == path

"""`lustre` over a folder that claims to be on Lustre, with a program in place of `lfs`."""

import errno
import os

import pytest
from tests.backends.lustre.conftest import ATTRIBUTE
from tests.backends.lustre.structures import plain

from penstock.backends.local.threads import ThreadEngine
from penstock.backends.lustre import LustreBackend, LustreConfig
from penstock.backends.lustre.backend import LayoutPlacer, cut_bytes
from penstock.backends.lustre.components import Component, Layout, parse_layout
from penstock.core.errors import (
    BlobExistsError,
    CapabilityError,
    ConfigError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
)
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.backends import check_backend
from penstock.testing.expectations import at_phase

MIB = 1 << 20
GIB = 1 << 30
BLOB = "data/u/blobs/00000-0.raw"


def layout_of(path):
    return parse_layout(os.getxattr(path, ATTRIBUTE)).components


def _names(folder):
    return [path.name for path in folder.iterdir()]


def put(backend, name=BLOB, data=b"penstock", size_hint=None):
    writer = backend.create(name, size_hint=size_hint)
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))


# -- conformance ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["posix", pytest.param("uring", marks=pytest.mark.uring)])
def test_conforms_on_another_file_system(engine, tmp_path):
    check_backend(
        lambda root: LustreBackend(
            LustreConfig(path=str(tmp_path / root), not_lustre="warn", engine=engine)
        )
    )


@pytest.mark.slow
def test_conforms_with_layouts_set(open_lustre, lfs):
    # Records too are placed, and blobs striped over named OSTs: every path that differs.
    lfs.set(default_count=-1)
    check_backend(lambda root: open_lustre(root, writers=2, shows_layouts=False, records="dom"))


# -- whether this is Lustre -----------------------------------------------------------------------


def test_another_file_system_is_refused_by_name(tmp_path):
    with pytest.raises(CapabilityError, match=r"is not on Lustre, but on .*not_lustre='warn'"):
        LustreBackend(LustreConfig(path=str(tmp_path / "not" / "yet")))
    assert not (tmp_path / "not").exists()


# -- layouts are set ------------------------------------------------------------------------------


def test_a_blob_gets_its_layout_before_any_byte(open_lustre, lfs, tmp_path):
    backend = open_lustre()
    writer = backend.create(BLOB, size_hint=GIB)
    path = tmp_path / "root" / BLOB
    assert path.stat().st_size == 0
    (component,) = layout_of(path)
    assert component.stripe_count == len(component.osts) == 8
    assert component.stripe_bytes == 16 * MIB
    (call,) = lfs.calls("setstripe")
    assert call[1:-1] == ["-c", "8", "-S", str(16 * MIB), "-i", "-1"]
    writer.abort()
    assert _names(path.parent) == []


def test_ranks_share_the_osts_evenly(open_lustre, tmp_path):
    taken = []
    for rank in range(4):
        backend = open_lustre(writers=4, writer=rank)
        name = f"data/u/blobs/{rank:05d}-0.raw"
        backend.create(name, size_hint=GIB)
        taken += layout_of(tmp_path / "root" / name)[0].osts
    assert sorted(taken) == list(range(8))


def test_osts_are_queried_once_not_per_blob(open_lustre, lfs):
    backend = open_lustre()
    for number in range(5):
        put(backend, f"data/u/blobs/{number}.raw", size_hint=GIB)
    calls = [call[0] for call in lfs.calls()]
    assert {name: calls.count(name) for name in calls} == {"setstripe": 5, "df": 1, "getstripe": 1}


def test_records_get_one_stripe_if_the_default_is_wide(open_lustre, lfs, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    os.setxattr(root, ATTRIBUTE, plain(count=0xFFFF))
    backend = open_lustre()
    backend.publish("commits/1.json", b"{}", exclusive=True)
    backend.publish("data/u/intent.json", b"{}")
    for name in ("commits/1.json", "data/u/intent.json"):
        assert layout_of(root / name)[0].stripe_count == 1
    assert backend.read_record("commits/1.json", limit_bytes=9) == b"{}"
    with pytest.raises(BlobExistsError):
        backend.publish("commits/1.json", b"other", exclusive=True)


# -- failures of lfs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", [{"unknown_options": ["S"]}, {"not_lustre": True}, {"ioctl_fails": True}]
)
def test_a_plain_file_is_written_if_layouts_fail(open_lustre, lfs, tmp_path, caplog, state):
    lfs.set(**state)
    backend = open_lustre()
    put(backend)
    put(backend, "data/u/blobs/2.raw")
    assert (tmp_path / "root" / BLOB).read_bytes() == b"penstock"
    warnings = [r.message for r in caplog.records if "layouts cannot be set" in r.message]
    assert len(warnings) == 1


def test_without_lfs_plain_files_are_written(open_lustre, tmp_path, caplog):
    put(open_lustre(lfs="no-such-program"))
    assert (tmp_path / "root" / BLOB).read_bytes() == b"penstock"
    assert "'no-such-program' cannot be run" in caplog.text
    assert "option 'lfs'" in caplog.text


def test_a_hung_lfs_is_abandoned(open_lustre, lfs, tmp_path):
    backend = open_lustre()
    backend._client._timeout_s = 0.2
    lfs.set(hangs=True)
    with pytest.raises(StorageTimeoutError, match=r"setstripe .* did not end within 0.2 s"):
        backend.create(BLOB)
    assert _names((tmp_path / "root" / BLOB).parent) == []


# -- requests and stripes -------------------------------------------------------------------------


class Recording(LustreBackend):
    """Moves bytes by threads whose system calls are recorded, and may fail."""

    requests: list
    fails_at = None
    number = errno.ENOSPC

    def _open_engine(self):
        self.requests = []
        return ThreadEngine(4, readv=self._read, writev=self._write)

    def _read(self, fd, views, offset):
        self.requests.append((offset, sum(v.nbytes for v in views)))
        return os.preadv(fd, views, offset)

    def _write(self, fd, views, offset):
        length = sum(v.nbytes for v in views)
        self.requests.append((offset, length))
        if self.fails_at is not None and offset <= self.fails_at < offset + length:
            raise OSError(self.number, os.strerror(self.number))
        return os.pwritev(fd, views, offset)


@pytest.mark.parametrize(
    ("direct_io", "stripe", "start"),
    [("auto", 4 * MIB, 4096), ("auto", 16 * MIB, 5 * MIB + 64), ("off", 4 * MIB, 5 * MIB + 64)],
)
def test_no_request_spans_two_osts(open_lustre, direct_io, stripe, start):
    backend = open_lustre(cls=Recording, direct_io=direct_io, stripe_bytes=stripe)
    data = at_phase(os.urandom(40 * MIB), start % 4096)
    writer = backend.create(BLOB, size_hint=GIB)
    small, rest = data[:100], data[100:]
    writer.write([WriteRequest(start, (small, rest))])
    writer.seal(start + len(data))
    written = list(backend.requests)
    backend.requests.clear()
    target = at_phase(bytes(len(data)), start % 4096)
    backend.read([ReadRequest(BLOB, start, target)])
    assert target == data
    for requests in (written, backend.requests):
        assert all(at // stripe == (at + n - 1) // stripe for at, n in requests)
        assert sum(n for _, n in requests) >= len(data)
        assert max(n for _, n in requests) == stripe


@pytest.mark.parametrize(
    ("components", "cut"),
    [
        ([Component(stripe_count=4, stripe_bytes=16 * MIB, osts=(0, 1, 2, 3))], 16 * MIB),
        ([Component(stripe_count=1, stripe_bytes=16 * MIB, osts=(0,))], 0),
        ([Component(stripe_count=4, stripe_bytes=MIB, osts=(0, 1, 2, 3))], 0),
        ([Component(stripe_count=2, stripe_bytes=8 * MIB, osts=(0, 1))] * 2, 8 * MIB),
        (
            [
                Component(0, 64 * MIB, 2, 4 * MIB, (0, 1)),
                Component(64 * MIB, None, 2, 16 * MIB, (2, 3)),
            ],
            4 * MIB,
        ),
        (
            [
                Component(0, 64 * MIB, 2, 6 * MIB, (0, 1)),
                Component(64 * MIB, None, 2, 16 * MIB, (2, 3)),
            ],
            0,
        ),
        ([Component(on_mdt=True, stripe_count=0, stripe_bytes=8 * MIB)], 0),
    ],
)
def test_requests_are_split_at_large_stripes(components, cut):
    assert cut_bytes(Layout(tuple(components))) == cut


# -- errors and warnings --------------------------------------------------------------------------


def test_a_failed_write_names_the_full_ost(open_lustre, lfs, tmp_path):
    backend = open_lustre(cls=Recording)
    writer = backend.create(BLOB, size_hint=GIB)
    osts = layout_of(tmp_path / "root" / BLOB)[0].osts
    lfs.ost(osts[2], free_kib=7)
    backend.fails_at = 2 * 16 * MIB + 5
    with pytest.raises(StorageFullError) as caught:
        writer.write([WriteRequest(0, (memoryview(bytes(64 * MIB)),))])
    assert f"are on OST {osts[2]} (OST{osts[2]:04x}) with 0.0 MB free" in str(caught.value)
    assert "of 8 OSTs" in str(caught.value)
    writer.abort()


def test_a_url_names_no_program(tmp_path):
    with pytest.raises(ConfigError, match="lfs names a program to run"):
        LustreBackend.from_url(f"lustre://{tmp_path}", {"lfs": "/any/program"})


def test_lfs_does_not_follow_a_swapped_in_link(open_lustre, lfs, tmp_path, monkeypatch):
    """Between its opening and the call of `lfs`."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = (tmp_path / "root" / BLOB).parent
    place = LayoutPlacer._place

    def swapped(self, path, striping):
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(elsewhere)
        place(self, path, striping)

    monkeypatch.setattr(LayoutPlacer, "_place", swapped)
    backend = open_lustre()
    backend.create(BLOB, size_hint=1 << 30).abort()
    assert list(elsewhere.iterdir()) == []


def test_other_failures_name_the_ost_without_querying_space(open_lustre, lfs, tmp_path):
    backend = open_lustre(cls=Recording)
    writer = backend.create(BLOB, size_hint=GIB)
    backend.fails_at, backend.number = 0, errno.EIO
    asked = len(lfs.calls("df"))
    with pytest.raises(StorageError, match=r"EIO.*the bytes are on OST \d \(OST000\d\)$"):
        writer.write([WriteRequest(0, (memoryview(bytes(MIB)),))])
    assert len(lfs.calls("df")) == asked
    writer.abort()


def test_a_malformed_layout_stops_no_write(open_lustre, tmp_path, caplog):
    backend = open_lustre()
    put(backend, data=bytes(2 * MIB))
    os.setxattr(tmp_path / "root" / BLOB, ATTRIBUTE, b"nonsense")
    backend.read([ReadRequest(BLOB, 0, memoryview(bytearray(2 * MIB)))])
    assert "a layout is not understood" in caplog.text

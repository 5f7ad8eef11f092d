"""What is made durable, in which order, and the leftovers of a failure."""

# ruff: noqa: PTH115, PTH123, PTH208, SIM115 - descriptors, flags and links are tested

import errno
import os
import stat
import threading

import pytest

from penstock.core.errors import BlobExistsError, StorageError, StorageFullError, UnsyncedError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import pattern

MIB = 1 << 20


class Syncs:
    """Records real fsyncs: which path, and how long the file was by then."""

    def __init__(self, monkeypatch, events):
        self._real = os.fsync
        self.monkeypatch = monkeypatch
        self.events = events
        self.fail_on = None
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.events.append(("fsync", path, os.fstat(fd).st_size))
        if self.fail_on is not None and self.fail_on(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._real(fd)

    def paths(self):
        return [event[1] for event in self.events if event[0] == "fsync"]


@pytest.fixture
def events():
    return []


@pytest.fixture
def syncs(monkeypatch, events):
    return Syncs(monkeypatch, events)


def is_file(fd):
    return stat.S_ISREG(os.fstat(fd).st_mode)


def test_seal_syncs_the_whole_file_once_and_then_every_folder(files, tmp_path, syncs):
    root = str(tmp_path / "root")
    writer = files.create("data/u/blobs/0.raw", size_hint=100 * MIB)
    data = pattern(MIB)
    for n in range(20):
        writer.write([WriteRequest(n * MIB, (memoryview(data),))])
    assert not [path for path in syncs.paths() if path.endswith(".raw")], "synced per region"
    syncs.events.clear()
    writer.seal(20 * MIB)
    blob = f"{root}/data/u/blobs/0.raw"
    # Truncated and complete before the one fsync of the file; then the folders, inside out.
    assert syncs.events[0] == ("fsync", blob, 20 * MIB)
    folders = [f"{root}/data/u/blobs", f"{root}/data/u", f"{root}/data", root, str(tmp_path)]
    assert syncs.paths()[1:] == folders


@pytest.mark.parametrize("exclusive", [True, False])
def test_publish_syncs_the_record_before_it_has_its_name(files, tmp_path, syncs, exclusive):
    root = str(tmp_path / "root")
    for call in ("link", "replace"):
        real = getattr(os, call)

        def named(source, target, *, real=real, call=call, **where):
            real(source, target, **where)
            syncs.events.append((call, target, 0))

        syncs.monkeypatch.setattr(os, call, named)
    files.create("first.raw").abort()
    syncs.events.clear()
    files.publish("commits/1.json", b"{}", exclusive=exclusive)
    kinds = [event[0] for event in syncs.events]
    assert kinds == ["fsync", "link" if exclusive else "replace", "fsync", "fsync", "fsync"]
    temporary, folders = syncs.paths()[0], syncs.paths()[1:]
    assert temporary.startswith(f"{root}/commits/~")
    assert syncs.events[0][2] == 2
    assert folders == [f"{root}/commits", root, str(tmp_path)]


def test_delete_is_durable_in_one_folder_before_it_touches_the_next(files, tmp_path, syncs):
    root = str(tmp_path / "root")
    for name in ("commits/1.json", "data/u/index", "data/u/x", "data/keep"):
        files.publish(name, b"x")
    real = os.unlink

    def unlink(path, **where):
        real(path, **where)
        syncs.events.append(("unlink", path, 0))

    syncs.monkeypatch.setattr(os, "unlink", unlink)
    syncs.events.clear()
    files.delete(["commits/1.json", "data/u/index", "data/u/x"])
    assert [event[:2] for event in syncs.events] == [
        ("unlink", "1.json"),
        ("fsync", f"{root}/commits"),
        ("fsync", root),  # commits/ was left empty and is gone
        ("unlink", "index"),
        ("unlink", "x"),
        ("fsync", f"{root}/data/u"),
        ("fsync", f"{root}/data"),
    ]
    assert sorted(os.listdir(root)) == ["data"]
    assert os.listdir(f"{root}/data") == ["keep"]


def test_a_blob_is_dead_after_a_failed_fsync_and_never_synced_again(files, tmp_path, syncs):
    writer = files.create("data/a.raw")
    writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
    syncs.fail_on = is_file
    syncs.events.clear()
    with pytest.raises(StorageError, match=r"cannot seal data/a\.raw .*EIO"):
        writer.seal(MIB)
    syncs.fail_on = None
    for _ in range(2):
        with pytest.raises(StorageError, match="dead since an earlier failure"):
            writer.seal(MIB)
    with pytest.raises(StorageError, match="dead since an earlier failure"):
        writer.write([WriteRequest(2 * MIB, (memoryview(b"x"),))])
    assert syncs.paths() == [f"{tmp_path}/root/data/a.raw"]
    writer.abort()
    assert files.list("") == []


def test_a_seal_whose_folder_cannot_be_synced_fails(files, syncs):
    writer = files.create("data/a.raw")
    writer.write([WriteRequest(0, (memoryview(b"x"),))])
    syncs.fail_on = lambda fd: not is_file(fd)
    with pytest.raises(StorageError, match="EIO"):
        writer.seal(1)
    syncs.fail_on = None
    writer.abort()
    assert files.list("") == []


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_publish_that_cannot_be_synced_leaves_no_record(files, syncs, exclusive, tmp_path):
    files.publish("commits/0.json", b"0")
    syncs.fail_on = is_file
    with pytest.raises(StorageError, match="EIO"):
        files.publish("commits/1.json", b"1", exclusive=exclusive)
    assert os.listdir(tmp_path / "root" / "commits") == ["0.json"]


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("folder", ["/root/commits", "/root", ""])
def test_a_publish_with_a_failed_folder_sync_reports_the_record(
    files, syncs, exclusive, folder, tmp_path
):
    files.publish("commits/0.json", b"0")
    syncs.fail_on = lambda fd: os.readlink(f"/proc/self/fd/{fd}") == f"{tmp_path}{folder}"
    with pytest.raises(UnsyncedError, match=r"commits/1\.json .*EIO.*may not survive a power cut"):
        files.publish("commits/1.json", b"1", exclusive=exclusive)
    assert files.read_record("commits/1.json", limit_bytes=1) == b"1"
    assert sorted(os.listdir(tmp_path / "root" / "commits")) == ["0.json", "1.json"]


def test_a_lost_exclusive_publish_is_not_taken_for_an_unsynced_one(files, syncs):
    files.publish("commits/1.json", b"first", exclusive=True)
    syncs.fail_on = lambda fd: not is_file(fd)
    with pytest.raises(BlobExistsError):
        files.publish("commits/1.json", b"second", exclusive=True)


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_waits_for_a_running_seal_and_closes_no_other_file(files, syncs, tmp_path, fails):
    writer = files.create("data/a.raw")
    writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
    aborting = threading.Thread(target=writer.abort)
    strangers = []

    def meanwhile(fd):
        if is_file(fd):
            aborting.start()
            aborting.join(0.1)  # it has every chance to close the file under the fsync
            strangers.extend(open(tmp_path / f"{n}.log", "w") for n in range(8))
            assert os.readlink(f"/proc/self/fd/{fd}") == f"{tmp_path}/root/data/a.raw"
        return fails

    syncs.fail_on = meanwhile
    if fails:
        with pytest.raises(StorageError, match="EIO"):
            writer.seal(MIB)
    else:
        writer.seal(MIB)
    aborting.join()
    for n, stranger in enumerate(strangers):
        assert os.readlink(f"/proc/self/fd/{stranger.fileno()}") == f"{tmp_path}/{n}.log"
        stranger.close()
    assert [info.name for info in files.list("")] == ([] if fails else ["data/a.raw"])


def test_offsets_beyond_32_bits_are_kept(open_files, tmp_path):
    backend = open_files(tmp_path / "root", allocate_bytes=0)
    writer = backend.create("a.raw")
    far = (5 << 30) + 64
    data = pattern(600_000)
    writer.write([WriteRequest(64, (memoryview(b"near"),)), WriteRequest(far, (memoryview(data),))])
    writer.seal(far + len(data))
    target = bytearray(len(data))
    backend.read([ReadRequest("a.raw", far, memoryview(target))])
    assert target == data
    assert (tmp_path / "root" / "a.raw").stat().st_blocks * 512 < 2 * MIB
    backend.delete(["a.raw"])


def test_a_full_disk_says_how_much_is_free(files, monkeypatch, tmp_path):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = files.create("a.raw")
    writer.write([WriteRequest(0, (memoryview(b"x"),))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            StorageFullError, match=r"a\.raw under .*ENOSPC.*MiB are free; make room"
        ):
            writer.seal(1)
    # Writes then in flight report it, too: the caller may see theirs first.
    with pytest.raises(StorageFullError, match=r"dead since an earlier failure .*make room"):
        writer.write([WriteRequest(9 << 20, (memoryview(b"x"),))])
    writer.abort()


def test_surplus_of_reserved_space_is_released(open_files, tmp_path):
    backend = open_files(tmp_path / "root", allocate_bytes=64 * MIB)
    writer = backend.create("a.raw")
    writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
    path = tmp_path / "root" / "a.raw"
    if backend.capabilities.direct_io:
        assert path.stat().st_blocks * 512 >= 64 * MIB
    writer.seal(MIB)
    assert path.stat().st_blocks * 512 <= 2 * MIB
    assert path.stat().st_size == MIB


def test_space_is_reserved_no_further_than_the_hint(open_files, tmp_path):
    backend = open_files(tmp_path / "root")
    writer = backend.create("a.raw", size_hint=3 * MIB)
    writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
    assert (tmp_path / "root" / "a.raw").stat().st_blocks * 512 <= 4 * MIB
    writer.write([WriteRequest(5 * MIB, (memoryview(pattern(MIB)),))])  # the hint was wrong
    writer.seal(6 * MIB)
    assert (tmp_path / "root" / "a.raw").read_bytes()[5 * MIB :] == pattern(MIB)


def test_a_file_system_without_reservation_is_written(files, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("penstock.backends.local.blob.fallocate", refuse)
    writer = files.create("a.raw")
    writer.write([WriteRequest(0, (memoryview(pattern(MIB)),))])
    writer.seal(MIB)
    target = bytearray(MIB)
    files.read([ReadRequest("a.raw", 0, memoryview(target))])
    assert target == pattern(MIB)


def test_two_requests_in_one_page_are_refused_before_either_is_damaged(files):
    writer = files.create("a.raw")
    writer.write([WriteRequest(64, (memoryview(b"first"),))])
    with pytest.raises(StorageError, match="two requests touch one unit"):
        writer.write([WriteRequest(4000, (memoryview(bytes(200)),))])
    both = [WriteRequest(at, (memoryview(b"x"),)) for at in (8192, 8200)]
    with pytest.raises(StorageError, match="two requests touch one unit"):
        writer.write(both)
    writer.seal(69)
    target = bytearray(5)
    files.read([ReadRequest("a.raw", 64, memoryview(target))])
    assert target == b"first"

"""Names under a root: links, temporary files, foreign files, missing and forbidden roots."""

# ruff: noqa: PTH101, PTH208 - descriptors, flags and links are tested

import os

import pytest

from penstock.core.errors import BlobNotFoundError, BlobTruncatedError, StorageError
from penstock.core.types import ReadRequest, WriteRequest
from penstock.testing.expectations import pattern

DAY_S = 24 * 3600


def names(backend, prefix=""):
    return [info.name for info in backend.list(prefix)]


def store(backend, name, data=b"data"):
    writer = backend.create(name)
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))


def test_only_the_first_write_creates_the_root(files, tmp_path):
    root = tmp_path / "root"
    assert files.list("") == []
    assert files.list("commits/") == []
    assert files.capabilities.local
    with pytest.raises(BlobNotFoundError):
        files.stat("commits/1.json")
    with pytest.raises(BlobNotFoundError):
        files.read([ReadRequest("commits/1.json", 0, memoryview(bytearray(1)))])
    files.delete(["commits/1.json"])
    assert not root.exists()
    files.publish("commits/1.json", b"{}")
    assert (root / "commits" / "1.json").read_bytes() == b"{}"


def test_links_are_listed_but_never_followed(files, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.raw").write_bytes(b"secret")
    store(files, "data/real.raw")
    root = tmp_path / "root"
    (root / "data" / "link.raw").symlink_to(outside / "secret.raw")
    (root / "data" / "inner.raw").symlink_to(root / "data" / "real.raw")
    (root / "folder").symlink_to(outside)
    assert names(files, "data/") == ["data/inner.raw", "data/link.raw", "data/real.raw"]
    assert [b.size_bytes for b in files.list("data/")] == [0, 0, 4]
    assert names(files, "folder/") == []
    target = memoryview(bytearray(6))
    for name in ("data/link.raw", "data/inner.raw", "folder/secret.raw"):
        with pytest.raises(StorageError, match=r"link|folder"):
            files.read([ReadRequest(name, 0, target)])
        with pytest.raises(StorageError):
            files.read_record(name, limit_bytes=100)
        with pytest.raises(StorageError):
            files.stat(name)
    for name in ("folder/new.raw", "folder/deep/new.raw"):
        with pytest.raises(StorageError, match="link"):
            files.create(name)
        with pytest.raises(StorageError, match="link"):
            files.publish(name, b"x")
    files.delete(["folder/secret.raw"])
    assert os.listdir(outside) == ["secret.raw"]


def test_publish_replaces_a_link_instead_of_writing_through_it(files, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    files.publish("a.json", b"1")
    (tmp_path / "root" / "b.json").symlink_to(outside)
    files.publish("b.json", b"2")
    assert outside.read_bytes() == b"mine"
    assert names(files) == ["a.json", "b.json"]


def test_the_root_itself_may_be_a_link(open_files, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    backend = open_files(tmp_path / "runs")
    store(backend, "data/a.raw")
    assert (tmp_path / "disk" / "data" / "a.raw").read_bytes() == b"data"


def test_sweep_removes_only_old_temporary_files_and_old_empty_folders(files, tmp_path):
    files.publish("commits/1.json", b"x")
    store(files, "data/u/blobs/0.raw")
    root = tmp_path / "root"
    now_s = (root / "commits" / "1.json").stat().st_mtime
    kept = {"commits/1.json", "data/u/blobs/0.raw", "commits/~young", "data/young/", "~mine", "my/"}
    gone = {"commits/~old", "data/u/blobs/~old", "data/dead/", "data/dead/parts/~old"}
    for name in sorted(kept | gone):
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/") and not path.exists():
            path.write_bytes(b"x")
    (root / "commits" / "link").symlink_to(tmp_path)
    (tmp_path / "~outside").write_bytes(b"x")
    for path in [*root.rglob("*"), tmp_path / "~outside"]:
        age_s = DAY_S - 60 if "young" in path.name else DAY_S + 60
        os.utime(path, (now_s - age_s, now_s - age_s), follow_symlinks=False)
    files.sweep(now_s - DAY_S)
    for name in kept:
        assert (root / name).exists(), name
    for name in gone - {"data/dead/"}:
        assert not (root / name).exists(), name
    assert (tmp_path / "~outside").exists()
    for path in root.rglob("*"):  # removing the file has made the folder young again
        os.utime(path, (now_s - 2 * DAY_S,) * 2, follow_symlinks=False)
    files.sweep(now_s - DAY_S)
    assert not (root / "data" / "dead").exists()
    assert (root / "data" / "u" / "blobs" / "0.raw").exists()


@pytest.mark.parametrize("top", ["commits", "data"])
@pytest.mark.parametrize("what", ["a symbolic link", "not a folder"])
def test_a_link_or_file_as_a_top_folder_is_an_error_not_an_empty_list(what, top, files, tmp_path):
    files.publish(f"{top}/1.json", b"x")
    place = tmp_path / "root" / top
    place.rename(tmp_path / "elsewhere")
    if what == "not a folder":
        place.write_bytes(b"")
    else:
        place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=rf"{top} is {what}.* Move the "):
        files.list(f"{top}/")


def test_writing_survives_deletion_of_the_folder(open_files, tmp_path):
    import threading

    one, two = open_files(tmp_path / "root"), open_files(tmp_path / "root")
    stop = threading.Event()

    def delete():
        while not stop.is_set():
            two.delete(["data/gone"])

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for n in range(40):
            one.publish("data/gone", b"x")
            store(one, f"data/{n}.raw")
            one.delete([f"data/{n}.raw"])
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user whom permissions stop; root passes")
def test_a_forbidden_root_fails(open_files, tmp_path):
    (tmp_path / "root").mkdir(mode=0o500)
    with pytest.raises(StorageError, match=r"EACCES.*permissions"):
        open_files(tmp_path / "root").publish("a.json", b"x")


def test_reading_needs_no_write_access(open_files, tmp_path):
    writer = open_files(tmp_path / "root")
    store(writer, "data/a.raw", pattern(900_000))
    os.chmod(tmp_path / "root" / "data" / "a.raw", 0o400)
    reader = open_files(tmp_path / "root")
    target = bytearray(900_000)
    reader.read([ReadRequest("data/a.raw", 0, memoryview(target))])
    assert target == pattern(900_000)
    assert os.listdir(tmp_path / "root") == ["data"]


def test_foreign_and_temporary_files_are_not_listed(files, tmp_path):
    store(files, "data/a.raw")
    folder = tmp_path / "root" / "data"
    for name in ("~0123", "b.raw~", "notes for me.txt", "é"):
        (folder / name).write_bytes(b"x")
    os.mkfifo(folder / "pipe")
    (folder / "lost+found").mkdir()
    assert names(files) == ["data/a.raw", "data/pipe"]
    with pytest.raises(StorageError, match="not a regular file"):
        files.read([ReadRequest("data/pipe", 0, memoryview(bytearray(1)))])


def test_delete_removes_empty_folders_but_never_the_root(files, tmp_path):
    store(files, "a/b/c/d.raw")
    files.publish("a/x", b"x")
    files.delete(["a/b/c/d.raw"])
    assert os.listdir(tmp_path / "root" / "a") == ["x"]
    files.delete(["a/x"])
    assert os.listdir(tmp_path / "root") == []


def test_a_file_in_place_of_the_root_fails(open_files, tmp_path):
    (tmp_path / "root").write_bytes(b"")
    backend = open_files(tmp_path / "root")
    with pytest.raises(StorageError, match="ENOTDIR"):
        backend.publish("a.json", b"x")
    with pytest.raises(StorageError, match="ENOTDIR"):
        backend.create("a.raw")


def test_relative_roots_resolve_when_opened(open_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = open_files("runs/gpt")
    monkeypatch.chdir("/")
    backend.publish("a.json", b"x")
    assert (tmp_path / "runs" / "gpt" / "a.json").exists()


def test_a_read_beyond_the_end_reports_the_length(files):
    store(files, "a.raw", b"12345")
    with pytest.raises(BlobTruncatedError, match=r"bytes 3 to 6 of a\.raw under .*: it ends at 5"):
        files.read([ReadRequest("a.raw", 3, memoryview(bytearray(3)))])

"""A storage root that others can write: nothing outside it is read or changed."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.core.forging import forge
from tests.integration.support import TINY, blank, checkpointer, make_state, memory, same

from penstock import Checkpointer, DamagedError
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.errors import BlobNotFoundError, PenstockError, StorageError
from penstock.core.types import ReadRequest

SECRET = b"not for anybody's eyes: " + bytes(range(200))
NAMES = [
    "..", "../outside/secret", "data/../../outside/secret", "/etc/passwd", "a//b", "./a", "a/.",
    "", "/", "a\0b", "a b", "a\\b", "~a", "ä", "a\n", "a" * 5000, "-\x7f",
]  # fmt: skip


@pytest.fixture
def outside(tmp_path):
    """The target of a hostile root."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    (folder / "commits").mkdir()
    return folder


@pytest.fixture
def untouched(outside):
    """After any test everything outside the root is unchanged."""
    before = listing(outside)
    yield
    assert listing(outside) == before


def listing(folder):
    return {
        path.relative_to(folder).as_posix(): (path.lstat().st_ino, path.lstat().st_mtime_ns,
                                              path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "root"
    with opened(root) as ckpt:
        ckpt.save(make_state(1), 1, mode="blocking")
        ckpt.save(make_state(2), 2, mode="blocking")
    return root


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "root")


def opened(root):
    return Checkpointer(f"posix://{root}?direct_io=off", **TINY)


def uid_of(root, step):
    with opened(root) as ckpt:
        return ckpt.open(step).info.uid


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_every_operation_refuses_a_name_outside_the_root(root):
    backend = PosixBackend(PosixConfig(path=str(root), direct_io="off"))
    before = listing(root)
    operations = [
        backend.create,
        lambda name: backend.publish(name, b"x", exclusive=True),
        lambda name: backend.publish(name, b"x"),
        lambda name: backend.read([ReadRequest(name, 0, memoryview(bytearray(1)))]),
        lambda name: backend.read_record(name, limit_bytes=100),
        backend.stat,
        lambda name: backend.delete([name]),
    ]
    for name in NAMES:
        for operation in operations:
            with pytest.raises(StorageError):
                operation(name)
        if name and len(name) < 300:  # a longer one is a prefix of nothing
            with pytest.raises(StorageError):
                backend.list(name)
    backend.close()
    assert listing(root) == before


ELSEWHERE = ["../../outside/secret", "/etc/passwd", "\0", "a" * 70_000]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        *(("blob", name) for name in ELSEWHERE),
        *((field, ELSEWHERE[0]) for field in ("index", "part", "borrowed", "uid")),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_a_record_naming_data_elsewhere_is_refused(name, field, root):
    files = {n: (root / n).read_bytes() for n in files_of(root)}

    def change(level, value):
        if level == "head" and field == "blob":
            value["blobs"][0][0] = name
        if level == "body" and field == "part":
            value["parts"][0]["name"] = name
        if level == "body" and field == "index":
            value["index"]["name"] = name
        if level == "body" and field == "borrowed":
            value["borrowed"] = [[name, 1]]
        if level == "body" and field == "uid":
            value["uid"] = name
        return value

    for path, data in forge(files, change, number=1).items():
        (root / path).write_bytes(data)
    with opened(root) as ckpt:
        with pytest.raises(DamagedError):
            ckpt.load(2)
        with pytest.raises(DamagedError):
            ckpt.restore(blank(make_state(2)), 2)
        assert same(ckpt.load(1), make_state(1))
        ckpt.prune()


def files_of(root):
    return [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]


# -- planted links ---------------------------------------------------------------------------------


PLANTED = {
    "commits": lambda uid: "commits",
    "data": lambda uid: "data",
    "attempt": lambda uid: f"data/{uid}",
    "blobs": lambda uid: f"data/{uid}/blobs",
    "parts": lambda uid: f"data/{uid}/parts",
    "part": lambda uid: f"data/{uid}/parts/00000.json.zst",
    "index": lambda uid: f"data/{uid}/index",
    "intent": lambda uid: f"data/{uid}/intent.json",
    "record": lambda uid: "commits/00000002-0.json",
    "raw": lambda uid: f"data/{uid}/blobs/00000-0.raw",
}


def each_link():
    """All links to a copy, which could be read; others only from a record."""
    for what, to in itertools.product(PLANTED, ["a copy", "a secret", "itself", "/dev/zero"]):
        quick = to == "a copy" or what == "record"
        yield pytest.param(what, to, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("what", "to"), [*each_link()])
def test_a_planted_link_is_not_followed(what, to, root, outside):
    place = root / PLANTED[what](uid_of(root, 2))
    copy = outside / "copy"
    place.rename(copy)
    target = {"a copy": copy, "a secret": outside / "secret", "itself": place}.get(to, to)
    place.symlink_to(target)
    before = listing(outside)
    with opened(root) as ckpt:
        for use in (
            lambda: ckpt.load(2), lambda: ckpt.verify(2), lambda: ckpt.info(2),
            lambda: ckpt.open(2).read("table", (slice(1, 6),)),
            lambda: ckpt.restore(blank(make_state(2)), 2, on_damage="fallback"),
            ckpt.prune,
            lambda: ckpt.save(make_state(3), 3, mode="blocking").result(),
            lambda: ckpt.delete(2),
        ):  # fmt: skip
            try:
                got = use()
            except PenstockError:
                continue
            if isinstance(got, dict):  # reading it all needs neither of these
                assert what in {"intent", "index"}
                assert same(got, make_state(2))
        assert listing(outside) == before
        if what not in {"commits", "data"}:
            assert same(ckpt.load(1), make_state(1))


@pytest.mark.usefixtures("untouched")
def test_nothing_is_written_through_a_link_in_place_of_a_folder(tmp_path, outside):
    root = tmp_path / "root"
    root.mkdir()
    for name in ("commits", "data"):
        (root / name).symlink_to(outside)
    with opened(root) as ckpt:
        with pytest.raises(PenstockError):
            ckpt.save(make_state(1), 1, mode="blocking")
        with pytest.raises(PenstockError):
            ckpt.load(1)
        with pytest.raises(StorageError, match="is a symbolic link"):
            ckpt.prune()


@pytest.mark.usefixtures("untouched")
def test_links_in_the_data_are_damage_and_prune_ignores_them(root, outside):
    for number, target in enumerate([outside, outside / "secret", root, root / "data"]):
        (root / f"data/{number:032x}").symlink_to(target)
        (root / f"commits/{number + 10:08d}-0.json").symlink_to(target)
    with opened(root) as ckpt:
        assert ckpt.steps() == [1, 2, 10, 11, 12, 13]
        with pytest.raises(DamagedError, match=r"step 13 .* is damaged"):
            ckpt.latest()
        assert ckpt.prune().refused
        assert same(ckpt.load(2), make_state(2))
        for step in (10, 11, 12, 13):
            ckpt.delete(step)
        assert ckpt.latest() == 2


# -- races -----------------------------------------------------------------------------------------


def exchange(one, other):
    """Swap two names at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, rename_exchange = -100, 2
    if libc.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange):
        raise OSError(ctypes.get_errno(), "renameat2")


@contextmanager
def swapping(one, other):
    """Exchange two names repeatedly while the block runs; restore them in the end."""
    stop, done, failed = threading.Event(), [0], []

    def loop():
        try:
            while not stop.is_set() or done[0] % 2:
                exchange(one, other)
                done[0] += 1
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize(
    "what",
    ["attempt", *(pytest.param(w, marks=pytest.mark.slow) for w in ("commits", "blobs", "raw"))],
)
def test_a_folder_swapped_for_a_link_during_a_read_is_refused(what, root, outside):
    """The link points to a copy in which every value differs: reading it would show."""
    place = root / PLANTED[what](uid_of(root, 2))
    elsewhere = outside / "other"
    if place.is_dir():
        shutil.copytree(place, elsewhere)
    else:
        shutil.copy(place, elsewhere)
    for file in [elsewhere, *elsewhere.rglob("*")]:
        if file.is_file() and file.suffix == ".raw":
            file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    link = root / "link"
    link.symlink_to(elsewhere)
    try:
        exchange(place, link)
        exchange(place, link)
    except OSError as error:
        pytest.skip(f"needs renameat2 with RENAME_EXCHANGE: {error}")
    before = listing(outside)
    expected = make_state(2)
    outcomes = {"read": 0, "refused": 0}
    with opened(root) as ckpt, swapping(place, link) as swaps:
        while min(outcomes.values()) < 3 and swaps[0] < 200_000:
            try:
                got = ckpt.load(2)
            except PenstockError as error:
                # If bytes of the copy were read, their checksums would not match.
                assert "checksum" not in str(error)  # noqa: PT017 - it may be read
                outcomes["refused"] += 1
            else:
                assert same(got, expected)
                outcomes["read"] += 1
    assert sum(outcomes.values()) > 0
    assert swaps[0] > 0
    assert listing(outside) == before
    with opened(root) as ckpt:
        assert same(ckpt.load(2), expected)


@pytest.mark.parametrize("what", ["data", pytest.param("commits", marks=pytest.mark.slow)])
def test_a_folder_swapped_for_a_link_during_a_write_is_refused(what, root, outside):
    link = root / "link"
    link.symlink_to(outside)
    try:
        exchange(root / what, link)
        exchange(root / what, link)
    except OSError as error:
        pytest.skip(f"needs renameat2 with RENAME_EXCHANGE: {error}")
    before = listing(outside)
    saved = []
    with opened(root) as ckpt:
        with swapping(root / what, link):
            for step in range(3, 13):
                try:
                    ckpt.save(make_state(step), step, mode="blocking")
                    saved.append(step)
                except PenstockError:
                    continue
        assert listing(outside) == before
        for step in saved:
            assert same(ckpt.load(step), make_state(step))


# -- lying records ---------------------------------------------------------------------------------


def test_a_record_above_the_size_limit_is_refused_unread(root):
    path = root / "commits/00000002-0.json"
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with opened(root) as ckpt, pytest.raises(DamagedError, match=str(1 << 40)):
        ckpt.load(2)


@pytest.mark.parametrize("name", ["commits", "commits/00000002-0.json", "commits/x", "data"])
def test_pipes_and_sockets_hang_no_reader(name, root):
    place = root / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with opened(root) as ckpt:
        for read in (ckpt.load, ckpt.latest, ckpt.steps, ckpt.verify):
            try:
                read()
            except PenstockError as error:
                assert str(error)  # noqa: PT017 - it may be read


def test_metadata_of_a_hostile_record_is_only_data(root):
    files = {n: (root / n).read_bytes() for n in files_of(root)}
    evil = {"$": "enum", "class": "os:system", "__class__": "os", "a": ["\x1b[2J", "\u202e"]}

    def change(level, value):
        return {**value, "metadata": evil} if level == "body" else value

    for path, data in forge(files, change, number=1).items():
        (root / path).write_bytes(data)
    with opened(root) as ckpt:
        assert ckpt.info(2).metadata == json.loads(json.dumps(evil))
        assert same(ckpt.load(2), make_state(2))


def test_a_blob_of_an_unreferenced_save_is_refused():
    """A writer of one save of a run cannot make it read another's blobs by name."""
    store = memory()
    with checkpointer(store) as ckpt:
        ckpt.save({"secret": torch.arange(9.0)}, 1, mode="blocking")
        other = ckpt.open(1).info.uid
        ckpt.save({"mine": torch.zeros(9)}, 2, mode="blocking")
        mine = ckpt.open(2).info.uid
        files = {n: bytes(blob.data) for n, blob in store._store.blobs.items()}

        def change(level, value):
            if level == "head":
                value["blobs"][0][0] = value["blobs"][0][0].replace(mine, other)
            return value

        for name, data in forge(files, change, number=1).items():
            store.publish(name, data)
        with pytest.raises(DamagedError, match=other):
            ckpt.load(2)


def test_missing_data_is_distinguished_from_refused(root):
    backend = PosixBackend(PosixConfig(path=str(root), direct_io="off"))
    with pytest.raises(BlobNotFoundError):
        backend.stat("data/nothing")
    backend.close()


def test_every_test_named_by_the_security_page_exists():
    tests = Path(__file__).parents[2]
    page = (tests.parent / "docs" / "security.md").read_text()
    files = {path.relative_to(tests).as_posix(): path.read_text() for path in tests.rglob("*.py")}
    names = set(re.findall(r"`(test_\w+)`", page))
    assert len(names) >= 10
    defined = {
        name
        for text in files.values()
        for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    }
    assert names <= defined
    assert set(re.findall(r"`(\w+/test_\w+\.py)`", page)) <= files.keys()

"""Roots below a folder open to all users: their owners, and write access."""

import os
import stat

import pytest

from penstock import Checkpointer
from penstock.backends.local import folders
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.errors import CapabilityError


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder such as `/dev/shm`."""
    monkeypatch.setattr(folders, "_warned", set())
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def give_away(folder, monkeypatch):
    """Let it belong to another user."""
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
    else:
        monkeypatch.setattr(folders.os, "geteuid", lambda: 65534)


def place(root, **options):
    return PosixBackend(PosixConfig(path=str(root), **options))


CALLS = {
    "list": lambda backend: backend.list("commits/"),
    "read": lambda backend: backend.read_record("commits/x", limit_bytes=9),
    "publish": lambda backend: backend.publish("commits/x", b"x"),
    "create": lambda backend: backend.create("data/x"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("below", [".", "deeper/run"])
def test_a_root_of_another_user_is_refused(call, below, shared, monkeypatch):
    entrance = shared / "run"
    (entrance / below).mkdir(parents=True)
    give_away(entrance, monkeypatch)
    backend = place(entrance / below)
    with pytest.raises(CapabilityError, match=r"belongs to user .*\$\{USER\}-run"):
        call(backend)
    assert not list((entrance / below).iterdir())
    trusting = place(entrance / below, owner="any")
    trusting.publish("commits/x", b"x")
    assert trusting.read_record("commits/x", limit_bytes=9) == b"x"


def test_a_link_of_another_user_is_refused(shared, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (shared / "run").symlink_to(tmp_path / "mine")
    if os.geteuid() == 0:
        os.chown(shared / "run", 65534, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(folders.os, "geteuid", lambda: 65534)
    with pytest.raises(CapabilityError):
        place(shared / "run").publish("commits/x", b"x")
    assert not list((tmp_path / "mine").iterdir())


def test_foreign_tiers_do_not_open(shared, tmp_path, monkeypatch):
    (shared / "run").mkdir()
    give_away(shared / "run", monkeypatch)
    places = {"fast": f"posix://{shared / 'run'}", "durable": str(tmp_path / "durable")}
    with pytest.raises(CapabilityError, match="belongs to user"):
        Checkpointer({"type": "tiered", **places})


def test_a_new_root_is_private_to_its_user(shared):
    before = os.umask(0)
    try:
        place(shared / "run").publish("commits/x", b"x")
        place(shared / "other" / "run").publish("commits/x", b"x")
    finally:
        os.umask(before)
    for entrance in (shared / "run", shared / "other"):
        assert stat.S_IMODE(entrance.stat().st_mode) == 0o700


def test_a_root_writable_by_others_warns_once(shared, caplog):
    (shared / "run").mkdir()
    (shared / "run").chmod(0o777)
    place(shared / "run").publish("commits/x", b"x")
    place(shared / "run").list("commits/")
    assert caplog.text.count("can be written by other users") == 1

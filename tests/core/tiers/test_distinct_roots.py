"""Two tiers in one place: an eviction would delete the other's data."""

import ctypes
import os
from contextlib import contextmanager

import pytest

from penstock import Checkpointer, ConfigError


@pytest.mark.parametrize("how", ["same", "link", "engine", "not there yet", "parent is a link"])
def test_one_folder_is_one_tier(how, tmp_path):
    fast = durable = str(tmp_path / "run")
    if how != "not there yet":
        (tmp_path / "run").mkdir()
    if how == "link":
        durable = str(tmp_path / "other")
        (tmp_path / "other").symlink_to(fast)
    if how == "engine":
        durable = f"posix://{fast}"
    if how == "parent is a link":
        (tmp_path / "way").symlink_to(tmp_path)
        fast, durable = str(tmp_path / "new"), str(tmp_path / "way" / "new")
    with pytest.raises(ConfigError, match="one place"):
        Checkpointer({"type": "tiered", "fast": fast, "durable": durable})


def test_one_bucket_is_one_tier():
    url = "s3://bucket/run?endpoint_url=http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="one place"):
        Checkpointer({"type": "tiered", "fast": url, "durable": url})


def test_siblings_are(tmp_path):
    places = {"fast": str(tmp_path / "a"), "durable": str(tmp_path / "b")}
    with Checkpointer({"type": "tiered", **places}) as ckpt:
        ckpt.save({"x": 1}, 1).result(60)
        assert ckpt.verify(1).ok


@contextmanager
def dead_mount(folder):
    """A FUSE mount without its server: every call fails with ENOTCONN."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    refused = libc.mount(b"gone", bytes(folder), b"fuse", 0, options)
    why = os.strerror(ctypes.get_errno())
    os.close(device)
    if refused:
        pytest.skip(f"needs the right to mount: {why}")
    try:
        yield folder
    finally:
        libc.umount2(bytes(folder), 2)


@contextmanager
def out_of_reach(folder):
    """A path without access rights: look-ups fail as at a dead mount."""
    yield folder / ("x" * 300)


@pytest.mark.parametrize("gone", [dead_mount, out_of_reach])
def test_a_run_opens_with_one_tier_on_a_dead_mount(gone, tmp_path, waits):
    waits(drain_failing_s=0.0)
    with gone(tmp_path / "mount") as folder:
        places = {"fast": str(tmp_path / "fast"), "durable": str(folder / "run")}
        with Checkpointer({"type": "tiered", **places}) as ckpt:
            ckpt.save({"x": 1}, 1).committed.result(60)
    with Checkpointer(tmp_path / "fast") as alone:
        assert alone.load(1) == {"x": 1}

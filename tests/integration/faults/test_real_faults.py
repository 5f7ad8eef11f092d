"""Faults of real file systems and limits: one save fails with a reason, and the run goes on.

The error says what failed, where and what to do. Committed checkpoints stay whole, the next save
works once the fault is gone, and nothing stays open or reserved. `test_failures` fills a disk.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from tests.integration.support import same

from penstock import Checkpointer, PenstockError, StorageError

OPTIONS = {"chunk_bytes": 1 << 16, "block_bytes": 1 << 14, "workers": 2}


def make(number):
    generator = torch.Generator().manual_seed(number)
    return {
        "big": torch.randint(0, 256, (256 << 10,), dtype=torch.uint8, generator=generator),
        "small": [torch.full((5,), float(number))],
        "number": number,
    }


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False)


@contextmanager
def tmpfs(folder):
    """A file system of 16 MiB, or a skip with the reason."""
    folder.mkdir()
    if not shutil.which("mount") or os.geteuid() != 0:
        pytest.skip("needs root and mount(8)")
    done = command("mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder))
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Closed rings let go of their files a moment later.
        for _ in range(10_000):
            if command("umount", str(folder)).returncode == 0:
                break
            time.sleep(0.02)
        else:
            pytest.fail(f"something under {folder} is still open: {command('umount', folder)}")


def open_files():
    """Descriptors of files and folders, without those of rings, memfds and shared tensors.

    Tensors that an earlier test has shared live until they are collected.
    """
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    others = ("memfd:", "/dev/shm/torch_")
    return sorted(k for k in links if k.startswith("/") and not any(o in k for o in others))


class Job:
    """Saves, one after the other, and what the steps that were committed must hold."""

    def __init__(self, ckpt, root):
        self.ckpt = ckpt
        self.root = Path(root)
        self.step = 0
        self.committed = []

    def save(self, **options):
        self.step += 1
        handle = self.ckpt.save(make(self.step), self.step, **options)
        handle.result(300)
        self.committed.append(self.step)

    def fails(self, kind, *texts, mode="async"):
        """The next save fails so, at the handle and nowhere else, and leaves no file open."""
        files = open_files()
        with pytest.raises(kind) as caught:
            self.save(mode=mode)
        for text in [*texts, str(self.root)]:
            assert text in str(caught.value)
        self.ckpt.wait()  # the handle has told it already
        assert self.ckpt._saver.staging._used == 0
        assert open_files() == files

    def check(self, folder=None):
        """All that was committed is there and whole, also for others."""
        with Checkpointer(f"posix://{folder or self.root}") as fresh:
            assert fresh.steps() == self.committed
            for step in self.committed:
                assert same(fresh.load(step), make(step))
                assert fresh.verify(step).ok

    def no_rubbish(self):
        """A failed save has taken its data away by itself."""
        files = [path for path in self.root.glob("data/*/**/*") if path.is_file()]
        assert len({path.relative_to(self.root).parts[1] for path in files}) == len(self.committed)


@contextmanager
def job(kind, root, **options):
    with Checkpointer(f"{kind}://{root}", **{**OPTIONS, **options}) as ckpt:
        yield Job(ckpt, root)


# -- limits and rights -----------------------------------------------------------------------------


@contextmanager
def limited(which, soft):
    old = resource.getrlimit(which)
    resource.setrlimit(which, (soft, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, old)


@pytest.mark.parametrize("beyond", [0, 100, 512], ids=["pages", "bytes", "blocks"])
def test_a_limit_on_the_size_of_files(beyond, kind, tmp_path):
    """Within a page or a block of the device, direct I/O is told of it by other names."""
    with job(kind, tmp_path / "run") as work:
        work.save()
        with limited(resource.RLIMIT_FSIZE, (64 << 10) + beyond):
            for mode in ("async", "blocking"):
                work.fails(StorageError, "ulimit -f", "EFBIG" if not beyond else "(E", mode=mode)
        work.check()
        work.no_rubbish()
        work.save()
        work.check()


def test_no_more_files(kind, tmp_path):
    with job(kind, tmp_path / "run") as work:
        work.save()
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        with limited(resource.RLIMIT_NOFILE, highest + 3):  # two at least, without any gap too
            taken = []
            with suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            try:
                with pytest.raises(StorageError, match=r"EMFILE.*ulimit -n"):
                    work.save()
                work.step -= 1
                with pytest.raises(StorageError, match=r"EMFILE.*ulimit -n"):
                    work.ckpt.load()
                os.close(taken.pop())  # so that a folder can be listed, but not much more
                os.close(taken.pop())
                with pytest.raises(StorageError, match=r"EMFILE.*ulimit -n"):
                    work.save()
            finally:
                for number in taken:
                    os.close(number)
        work.ckpt.wait()
        assert work.ckpt._saver.staging._used == 0
        work.save()
        work.check()


# -- read-only, gone, replaced ---------------------------------------------------------------------


def test_a_file_system_that_becomes_read_only(kind, tmp_path):
    with tmpfs(tmp_path / "disk") as disk, job(kind, disk / "run") as work:
        work.save()
        assert command("mount", "-o", "remount,ro", str(disk)).returncode == 0
        for mode in ("async", "blocking"):
            work.fails(StorageError, "EROFS", "read-only", mode=mode)
        with pytest.raises(StorageError, match="EROFS"):
            work.ckpt.delete(1)
        with pytest.raises(StorageError, match="EROFS"):
            work.ckpt.prune()
        work.check()  # which only reads
        assert command("mount", "-o", "remount,rw", str(disk)).returncode == 0
        work.save()
        work.check()


def test_a_root_that_is_replaced_by_another_run(kind, tmp_path):
    root, other = tmp_path / "run", tmp_path / "other"
    with job(kind, other) as there:
        there.step = 20
        there.save()
    with job(kind, root) as work:
        work.save()
        root.rename(tmp_path / "moved")
        other.rename(root)
        assert work.ckpt.steps() == [21]
        with pytest.raises(PenstockError, match=r"rewind|overwrite"):
            work.save()  # at step 2: the run that is there now is further
        work.step, work.committed = 21, [21]
        work.save()
        work.check()
        work.committed = [1]
        work.check(tmp_path / "moved")


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400, 10 * 365 * 86400], ids=["back", "ahead"])
def test_a_wall_clock_that_jumps_costs_no_save_and_no_data(jump_s, kind, tmp_path, monkeypatch):
    really = time.time
    with job(kind, tmp_path / "run", grace_s=3600) as work:
        work.save()
        monkeypatch.setattr(time, "time", lambda: really() + jump_s)
        work.save()
        assert work.ckpt.prune().uids == ()
        work.save(mode="blocking")
        monkeypatch.undo()
        assert work.ckpt.prune().uids == ()
        work.save()
        work.check()

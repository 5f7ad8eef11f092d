"""Faults of real file systems and limits: one save fails with a reason, and the run continues.

Each engine, each fault: the error says what failed, where and what to do; committed steps stay
whole; once the fault is gone the next save works; nothing stays open or reserved.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from tests.integration.support import same

from penstock import Checkpointer, DamagedError, PenstockError, StorageError, StorageFullError
from penstock.core.storage.open import open_backend
from penstock.testing.faults import FaultyBackend

OPTIONS = {"chunk_bytes": 1 << 16, "block_bytes": 1 << 14, "workers": 2}
ENCODED = {"rules": [{"match": "big", "codecs": ["zstd"]}]}
ROOT = Path(__file__).parents[3]


def make(number, kib=256):
    generator = torch.Generator().manual_seed(number)
    return {
        "big": torch.randint(0, 256, (kib << 10,), dtype=torch.uint8, generator=generator),
        "small": [torch.full((5,), float(number))],
        "number": number,
    }


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False)


@contextmanager
def mounted(folder, *how):
    """Mount something, or skip with the reason."""
    folder.mkdir(exist_ok=True)
    if not shutil.which("mount") or os.geteuid() != 0:
        pytest.skip("needs root and mount(8)")
    done = command("mount", *how, str(folder))
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Closed rings release their files a moment later.
        for _ in range(10_000):
            if command("umount", str(folder)).returncode == 0:
                break
            time.sleep(0.02)
        else:
            pytest.fail(f"something under {folder} is still open: {command('umount', folder)}")


@contextmanager
def small_ext4(tmp_path, mib, backing=None):
    if not shutil.which("mkfs.ext4"):
        pytest.skip("needs mkfs.ext4")
    image = (backing or tmp_path) / "image"
    with image.open("wb") as file:
        file.truncate(mib << 20)
    lazy = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
    made = command("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", lazy, str(image))
    assert made.returncode == 0, made.stderr
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as folder:
        yield folder


@contextmanager
def tmpfs(tmp_path, mib):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={mib}m", "none") as folder:
        yield folder


FILE_SYSTEMS = {"ext4": small_ext4, "tmpfs": tmpfs}


def open_files():
    """Descriptors of files and folders, without those of rings, memfds and shared tensors.

    Tensors shared by an earlier test live until they are collected.
    """
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    others = ("memfd:", "/dev/shm/torch_")
    return sorted(k for k in links if k.startswith("/") and not any(o in k for o in others))


class Job:
    """Successive saves, and the required content of committed steps."""

    def __init__(self, ckpt, root, kib=256):
        self.ckpt = ckpt
        self.root = Path(root)
        self.kib = kib
        self.step = 0
        self.committed = []

    def save(self, **options):
        self.step += 1
        handle = self.ckpt.save(make(self.step, self.kib), self.step, **options)
        handle.result(300)
        self.committed.append(self.step)

    def fails(self, kind, *texts, mode="async", where=None):
        """The next save fails so, only at the handle, and leaves no file open."""
        files = open_files()
        with pytest.raises(kind) as caught:
            self.save(mode=mode)
        for text in [*texts, str(where or self.root)]:
            assert text in str(caught.value)
        self.ckpt.wait()  # the handle has reported it already
        assert self.ckpt._saver.memory.staging._used == 0
        assert open_files() == files

    def check(self, folder=None):
        """All committed steps exist and are whole, also for others."""
        with Checkpointer(f"posix://{folder or self.root}") as fresh:
            assert fresh.steps() == self.committed
            for step in self.committed:
                assert same(fresh.load(step), make(step, self.kib))
                assert fresh.verify(step).ok

    def no_rubbish(self):
        """A failed save has deleted its own data."""
        files = [path for path in self.root.glob("data/*/**/*") if path.is_file()]
        assert len({path.relative_to(self.root).parts[1] for path in files}) == len(self.committed)


@contextmanager
def job(kind, root, **options):
    kib = options.pop("kib", 256)
    with Checkpointer(f"{kind}://{root}", **{**OPTIONS, **options}) as ckpt:
        yield Job(ckpt, root, kib)


# -- full ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "rules"), [("ext4", {}), ("tmpfs", ENCODED)], ids=["ext4-raw", "tmpfs-encoded"]
)
def test_a_full_file_system(system, rules, kind, tmp_path):
    with FILE_SYSTEMS[system](tmp_path, 8) as disk, job(kind, disk / "run", **rules) as work:
        for mode in ("async", "blocking"):
            work.save(mode=mode)
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(bytes(free - (192 << 10)))
        for mode in ("async", "blocking", "lazy"):
            work.fails(StorageFullError, "ENOSPC", "make room", mode=mode)
        work.check()
        work.no_rubbish()
        (disk / "other").unlink()
        work.save()
        work.check()


def test_a_disk_so_full_that_not_even_an_intent_fits(kind, tmp_path):
    with tmpfs(tmp_path, 4) as disk, job(kind, disk / "run") as work:
        work.save()
        with (disk / "other").open("wb", buffering=0) as other, suppress(OSError):
            while other.write(bytes(4096)):
                pass
        work.fails(StorageFullError, "ENOSPC", "intent")
        work.check()
        work.ckpt.delete(1)  # deleting needs no room
        work.committed.remove(1)
        (disk / "other").unlink()
        work.save()
        work.check()


def test_a_file_system_without_inodes(kind, tmp_path):
    how = ("-t", "tmpfs", "-o", "size=8m,nr_inodes=40", "none")
    with mounted(tmp_path / "disk", *how) as disk, job(kind, disk / "run") as work:
        work.save()
        with suppress(OSError):
            for number in range(100):
                (disk / f"{number}").touch()
        work.fails(StorageFullError, "ENOSPC")
        work.check()
        for path in disk.glob("[0-9]*"):
            path.unlink()
        work.save()
        work.check()


def test_a_thin_device_smaller_than_its_file_system(kind, tmp_path):
    """An ext4 on a loop device whose file cannot grow: the device fails accepted writes."""
    with (
        mounted(tmp_path / "backing", "-t", "tmpfs", "-o", "size=3m", "none") as backing,
        small_ext4(tmp_path, 16, backing) as disk,
        job(kind, disk / "run") as work,
    ):
        work.save()
        work.kib = 4096
        work.fails(StorageError, "blobs/")
        work.kib = 256
        work.check()


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
    """Within a page or a block of the device, direct I/O gets other error codes."""
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
        assert work.ckpt._saver.memory.staging._used == 0
        work.save()
        work.check()


def test_a_read_only_mount_is_readable_and_logged_on_open(kind, tmp_path, caplog):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as disk:
        with Checkpointer(f"{kind}://{disk}/run", **OPTIONS) as ckpt:
            ckpt.save(make(1), 1, mode="blocking")
        assert "can only be read" not in caplog.text
        assert command("mount", "-o", "remount,ro", str(disk)).returncode == 0
        for name in ("run", "other/run"):
            caplog.clear()
            with Checkpointer(f"{kind}://{disk}/{name}", **OPTIONS) as ckpt:
                assert "EROFS" in caplog.text
                with pytest.raises(StorageError, match=r"EROFS.*mounted read-only"):
                    ckpt.check(make(1))
                if name == "run":
                    assert same(ckpt.load(1), make(1))


def test_no_right_to_write(kind, tmp_path):
    """Without privileges: root may write everywhere."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    root = tmp_path / "run"
    with job(kind, root) as work:
        work.save()
        for folder in [root, *root.rglob("*")]:
            folder.chmod(0o755 if folder.is_dir() else 0o644)
        inside = []
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(300)
            try:
                for folder in [tmp_path, *tmp_path.parents]:
                    if folder.stat().st_uid == 0 and not folder.stat().st_mode & 1:
                        folder.chmod(folder.stat().st_mode | 0o11)
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                with Checkpointer(f"{kind}://{root}", **OPTIONS) as ckpt:
                    inside.append(str(same(ckpt.load(1), make(1))))
                    for call in (
                        lambda: ckpt.save(make(2), 2).result(),
                        lambda: ckpt.delete(1),
                        ckpt.prune,
                    ):
                        try:
                            call()
                            inside.append("it worked")
                        except PenstockError as error:
                            inside.append(f"{type(error).__name__}: {error}")
            except BaseException as error:  # noqa: BLE001 - reported to the parent
                inside.append(repr(error))
            finally:
                os.write(writing, "\n".join(inside).encode())
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            lines = pipe.read().splitlines()
        os.waitpid(child, 0)
        assert lines[0] == "True", lines  # it may still read
        assert len(lines) == 4, lines
        for line in lines[1:]:
            assert line.startswith("StorageError"), lines
            assert "EACCES" in line, lines
            assert str(root) in line
            assert "check the owner and the permissions" in line
        work.check()
        work.save()
        work.check()


# -- read-only, gone, replaced ---------------------------------------------------------------------


def test_a_file_system_that_becomes_read_only(kind, tmp_path):
    with tmpfs(tmp_path, 16) as disk, job(kind, disk / "run") as work:
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


class Held:
    """A checkpointer whose save is held before a call of its store."""

    def __init__(self, kind, root, operation, match=""):
        self.gate = threading.Event()
        self.store = FaultyBackend(open_backend(f"{kind}://{root}"))
        self.operation, self.match = operation, match

    def hold(self):
        return self.store.block(self.operation, self.gate, match=self.match)


@contextmanager
def held_job(kind, root, operation, match=""):
    held = Held(kind, root, operation, match)
    try:
        with Checkpointer(held.store, **OPTIONS) as ckpt:
            try:
                yield Job(ckpt, root), held
            finally:
                held.gate.set()
    finally:
        held.store.close()


MOMENTS = ["create", "seal", "publish index"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_root_removed_during_a_save(moment, kind, tmp_path):
    root = tmp_path / "run"
    with held_job(kind, root, *moment.split()) as (work, held):
        work.save()
        fault = held.hold()
        handle = work.ckpt.save(make(9), 9)
        fault.reached.wait()
        shutil.rmtree(root)
        held.gate.set()
        with pytest.raises(PenstockError, match=r"step 9|run"):
            handle.result(300)
        work.ckpt.wait()
        assert work.ckpt.steps() == []
        assert work.ckpt._saver.memory.staging._used == 0
        held.store.clear()
        work.step, work.committed = 9, []
        work.save()
        work.check()


def test_a_root_removed_at_the_last_moment_is_only_damage(kind, tmp_path):
    """After the last check of its intent a save cannot know; readers do."""
    root = tmp_path / "run"
    with held_job(kind, root, "publish", "commits/") as (work, held):
        fault = held.hold()
        handle = work.ckpt.save(make(9), 9)
        fault.reached.wait()
        shutil.rmtree(root)
        held.gate.set()
        handle.durable.exception(300)
        if work.ckpt.steps():
            with pytest.raises(DamagedError, match="is missing"):
                work.ckpt.load()
            work.ckpt.delete(9)
        held.store.clear()
        work.step, work.committed = 9, []
        work.save()
        work.check()


def test_a_root_replaced_by_another_run(kind, tmp_path):
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
            work.save()  # at step 2: the run there now is further
        work.step, work.committed = 21, [21]
        work.save()
        work.check()
        work.committed = [1]
        work.check(tmp_path / "moved")


def test_a_root_replaced_by_a_file(kind, tmp_path):
    root = tmp_path / "run"
    with job(kind, root) as work:
        work.save()
        root.rename(tmp_path / "moved")
        root.write_text("not a folder")
        with pytest.raises(StorageError, match="ENOTDIR"):
            work.save()
        work.ckpt.wait()
        root.unlink()
        (tmp_path / "moved").rename(root)
        work.save()
        work.check()


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


def test_a_wall_clock_that_jumps_in_the_middle_of_a_save_costs_nothing(kind, tmp_path, monkeypatch):
    really, jump_s = time.time, 10 * 365 * 86400
    with held_job(kind, tmp_path / "run", "seal") as (work, held):
        fault = held.hold()
        handle = work.ckpt.save(make(1), 1)
        fault.reached.wait()
        monkeypatch.setattr(time, "time", lambda: really() + jump_s)
        held.gate.set()
        handle.result(300)
        work.committed = [1]
        work.check()


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400, 10 * 365 * 86400], ids=["back", "ahead"])
def test_a_store_whose_clock_jumped_loses_nothing_that_is_committed(jump_s, kind, tmp_path):
    """Times of files are the store's; committed steps are safe at any of them."""
    root = tmp_path / "run"
    with job(kind, root, grace_s=3600) as work:
        work.save()
        when = time.time() + jump_s
        for path in root.rglob("*"):
            os.utime(path, (when, when))
        work.save()
        assert work.ckpt.prune().uids == ()
        work.check()


# -- a fault is logged and raised once -------------------------------------------------------------


def test_a_background_failure_is_raised_once_and_training_lives(kind, tmp_path, caplog):
    with job(kind, tmp_path / "run") as work:
        work.save()
        with limited(resource.RLIMIT_FSIZE, 64 << 10):
            handle = work.ckpt.save(make(2), 2)
            # The write may fail before the last byte is captured: then captured fails as well, and
            # a caller that asks for its error has seen that.
            assert handle.captured.wait(300)
            work.ckpt._saver.job.finished(None)
        raised = []
        for call in (work.ckpt.fence, work.ckpt.wait, work.ckpt.fence):
            try:
                call()
            except StorageError as error:
                raised.append(str(error))
        assert len(raised) == 1
        assert "EFBIG" in raised[0]
        errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert "save of step 2 failed" in errors[0]
        work.step = 2
        work.save()
        work.check()

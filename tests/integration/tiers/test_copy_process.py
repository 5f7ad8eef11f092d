"""Copies from tier to tier by a separate process: what ends it, and what it cannot do."""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.integration.support import checkpointer, same

from penstock import (
    Checkpointer,
    CheckpointGoneError,
    DamagedError,
    SaveAbortedError,
)
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.timing import CountedClock
from penstock.core.concurrency.workers import Workers
from penstock.core.format.commit_record import unseal
from penstock.core.storage.open import open_backend
from penstock.core.tiers import process as copy_process
from penstock.core.tiers.link import WORTH_BYTES
from penstock.core.tiers.process import ProcessCopy, ProcessSetup
from penstock.core.tiers.whereabouts import pending
from penstock.testing.hasty import FAST

SLOW = "100 KB"  # per second: a state takes long enough to be caught in transit
STEADY = "400 KB"  # the same, and the copy ends within the test
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST, drain_failing_s=5.0)


@pytest.fixture(autouse=True)
def no_leftover_process(others):
    yield
    until(lambda: not children())


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "penstock")
    return caplog


def state(seed=1):
    return {"w": torch.arange(seed, seed + 150_000), "step": seed}


def tiers_at(folder, **options):
    table = {"type": "tiered", "fast": f"{folder}/fast", "durable": f"{folder}/durable"}
    return {**table, "drain_in": "process", **options}


_others = set()  # such as servers of other tests


@pytest.fixture(autouse=True)
def others():
    _others.update(started())
    yield
    _others.clear()


def children():
    """Process ids of this test's unreaped children."""
    return [pid for pid in started() if pid not in _others]


def started():
    """Children of this process, of any of its threads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(folder.name))
    return found


def until(condition):
    """Wait until `condition` returns a true value, and return that."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, "it does not come to that"
        time.sleep(0.05)  # `condition` may read all of /proc
    return found


def in_transit(folder):
    """The copying process, once it writes."""
    until(lambda: list(Path(folder).glob("data/*/intent.json")))
    (pid,) = children()
    return pid


def begun(handle, folder):
    handle.committed.result(PATIENCE_S)
    return in_transit(f"{folder}/durable")


def test_another_process_copies_a_whole_checkpoint_then_ends(tmp_path, log):
    with checkpointer(tiers_at(tmp_path)) as ckpt:
        report = ckpt.save(state(), 1).result(PATIENCE_S)
        assert report.tiers == ("fast", "durable")
    assert "process" in log.text
    assert pending(open_backend(tmp_path / "fast")) == []
    with checkpointer(str(tmp_path / "durable")) as alone:
        assert same(alone.load(1), state())


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_killed_process_is_restarted_without_a_loss(tmp_path, log, number, waits):
    waits(FAST)
    with checkpointer(tiers_at(tmp_path, drain_bytes_per_s=STEADY)) as ckpt:
        handle = ckpt.save(state(), 1)
        os.kill(begun(handle, tmp_path), number)
        assert handle.result(PATIENCE_S).tiers == ("fast", "durable")
    assert f"ended with signal {number.name}" in log.text
    with checkpointer(str(tmp_path / "durable")) as alone:
        assert same(alone.load(1), state())


def test_a_stalled_process_is_killed_and_restarted(tmp_path, log, waits, monkeypatch):
    stopped = threading.Event()

    class Jumping(CountedClock):
        """Counts once more seconds than any limit, so only the stopped process is late."""

        def advance(self, seconds):
            super().advance(1e4 if stopped.is_set() else seconds)
            stopped.clear()

    monkeypatch.setattr(copy_process, "CountedClock", Jumping)
    waits(FAST)
    options = tiers_at(tmp_path, drain_bytes_per_s=STEADY)
    with checkpointer(options) as ckpt:
        handle = ckpt.save(state(), 1)
        os.kill(begun(handle, tmp_path), signal.SIGSTOP)
        stopped.set()
        assert handle.result(PATIENCE_S).tiers == ("fast", "durable")
    assert "no progress for 600 s; the copying process was killed" in log.text


def test_it_yields_to_training_hides_secrets_and_ends_on_deletion(tmp_path):
    durable = {"type": "fsspec", "url": f"file://{tmp_path}/durable", "options": {}}
    durable["options"]["auto_mkdir"] = True
    durable["options"]["skip_instance_cache"] = "hunter2"  # any option may be a password
    with checkpointer(tiers_at(tmp_path, durable=durable, drain_bytes_per_s=SLOW)) as ckpt:
        handle = ckpt.save(state(), 1)
        pid = begun(handle, tmp_path)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(mine + 10, 19)
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 500
        assert os.getsid(pid) != os.getsid(0)  # it ignores Ctrl-C at the terminal
        assert b"hunter2" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
        ckpt.delete(1)
        with pytest.raises(CheckpointGoneError):
            handle.result(PATIENCE_S)
        assert ckpt.steps() == []
    assert Catalog(open_backend(tmp_path / "durable")).steps() == []


def test_it_ends_with_the_trainer_despite_a_live_fork(tmp_path):
    reading, writing = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            ckpt = checkpointer(tiers_at(tmp_path, drain_bytes_per_s="1 KB"))
            pid = begun(ckpt.save(state(), 1), tmp_path)
            worker = os.fork()
            if worker:
                os.write(writing, f"{pid} {worker}".encode())
            time.sleep(2 * PATIENCE_S)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        pid, worker = map(int, os.read(reading, 100).split())
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        os.close(reading)
    try:
        until(lambda: not is_running(pid))
        assert is_running(worker)
    finally:
        os.kill(worker, signal.SIGKILL)
    with checkpointer(tiers_at(tmp_path)) as ckpt:  # it left no lease to wait for
        ckpt.save(state(2), 2).result(PATIENCE_S)
        ckpt.close()
    assert Catalog(open_backend(tmp_path / "durable")).steps() == [1, 2]


def saved_in_fast(folder):
    """A checkpoint only in the fast tier, and the means to copy it by a process."""
    with checkpointer(str(folder / "fast")) as alone:
        alone.save(state(), 1).result(PATIENCE_S)
    setup = ProcessSetup(tiers_at(folder), 0, PATIENCE_S)
    return setup, Catalog(open_backend(folder / "fast")).record(1)


def test_a_cancelled_copy_releases_its_lease_despite_blocked_signals(tmp_path, waits):
    waits(process_end_s=10 * PATIENCE_S)  # it is not killed
    setup, record = saved_in_fast(tmp_path)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        copy = ProcessCopy(setup, record, workers=Workers(1), grace_s=3600.0, bytes_per_s=1e5)

        def cancel():
            in_transit(tmp_path / "durable")
            copy.cancel()

        threading.Thread(target=cancel).start()
        with pytest.raises(SaveAbortedError):
            copy.run(on_progress=lambda _: None)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    (lease,) = (tmp_path / "durable").glob("data/*/copy.json")
    assert unseal(lease.read_bytes(), lease.name)["token"] == ""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# With "accept" the process takes its own place for the run's: only the trainer then sees that the
# copy is in the wrong place.
@pytest.mark.parametrize(("private", "roots"), [("fast", "check"), ("durable", "accept")])
def test_tiers_visible_only_to_the_trainer_use_threads(tmp_path, log, private, roots):
    with checkpointer(tiers_at(tmp_path, roots=roots, **{private: "memory://"})) as ckpt:
        assert ckpt.save(state(), 1).result(PATIENCE_S).tiers == ("fast", "durable")
        assert ckpt.steps() == [1]
    assert warned(log) == 1


def warned(log):
    """The count of warnings that threads must copy."""
    found = [r for r in log.records if "threads of the trainer copy to tier durable" in r.message]
    return sum(record.levelno == logging.WARNING for record in found)


def test_deleting_does_not_wait_for_a_process_that_does_not_start(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with checkpointer(tiers_at(tmp_path)) as ckpt:
        handle = ckpt.save(state(), 1)
        handle.committed.result(PATIENCE_S)
        until(children)
        ckpt.delete(1)
        with pytest.raises(CheckpointGoneError):
            handle.result(PATIENCE_S)
        assert not children()


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python", None])
def test_without_a_process_threads_copy(tmp_path, log, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    with checkpointer(tiers_at(tmp_path)) as ckpt:
        assert ckpt.save(state(), 1).result(PATIENCE_S).tiers == ("fast", "durable")
    assert "threads of the trainer copy to tier durable: a copying process" in log.text


def test_an_ended_process_is_not_awaited_despite_a_live_fork(tmp_path, log, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 100 & echo $! >>{tmp_path}/forks\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with checkpointer(tiers_at(tmp_path)) as ckpt:
        assert ckpt.save(state(), 1).result(PATIENCE_S).tiers == ("fast", "durable")
    (fork,) = (tmp_path / "forks").read_text().split()
    os.kill(int(fork), signal.SIGKILL)
    assert "ended with exit code 0" in log.text


@pytest.mark.parametrize("drain_in", ["auto", "thread"])
def test_a_small_checkpoint_starts_no_process(tmp_path, log, drain_in):
    with checkpointer(tiers_at(tmp_path, drain_in=drain_in)) as ckpt:
        ckpt.save(state(), 1).result(PATIENCE_S)
    assert "process" not in log.text


def test_a_process_starts_only_for_worthwhile_copies(tmp_path, log, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")  # only the start of one counts
    worth = {"w": torch.arange(WORTH_BYTES // 8), "step": 1}
    with Checkpointer(tiers_at(tmp_path, drain_in="auto")) as ckpt:
        assert ckpt.save(worth, 1).result(PATIENCE_S).tiers == ("fast", "durable")
    assert "threads of the trainer copy to tier durable: a copying process" in log.text


def test_the_trainers_environment_is_harmless(tmp_path, log, capfd, monkeypatch):
    here, there, site = tmp_path / "here", tmp_path / "there", tmp_path / "site"
    for folder in (here, there, site):
        folder.mkdir()
    for name in ("json", "queue", "threading"):  # in the working directory: must not be imported
        (here / f"{name}.py").write_text("import os; os.mkdir('ran')\n")
    (site / "sitecustomize.py").write_text("print('welcome')\nprint('{}', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # an entry that is not a string
    monkeypatch.chdir(here)
    with checkpointer(tiers_at(".")) as ckpt:
        monkeypatch.chdir(there)  # relative paths keep their meaning
        assert ckpt.save(state(), 1).result(PATIENCE_S).tiers == ("fast", "durable")
    assert "threads of the trainer" not in log.text
    assert "welcome" not in capfd.readouterr().out
    assert list(there.iterdir()) == []
    assert not (here / "ran").exists()


def test_damage_found_by_the_process_is_raised_with_object_names(tmp_path):
    setup, record = saved_in_fast(tmp_path)
    (blob,) = (tmp_path / "fast").glob("data/*/blobs/*")
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(DamagedError) as caught:
        ProcessCopy(setup, record, workers=Workers(1), grace_s=3600.0).run(on_progress=int)
    assert caught.value.damaged == ("step", "w")

"""`penstock doctor`: what it finds, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tests import interpreters
from tests.core.cli.command import tree_of

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.cli.probe import measure

SMALL = ("--probe-size", "1MiB")


def checks_of(done):
    return {check["name"]: check for check in done.json["checks"]}


# -- nothing stays behind -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "not/there/yet"])
@pytest.mark.parametrize("options", [SMALL, ("--no-probe",)])
def test_doctor_leaves_nothing_behind(call, tmp_path, name, options):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = tree_of(tmp_path)
    done = call("doctor", f"posix://{tmp_path}/{name}", *options)
    assert (done.code, done.err) == (0, "")
    assert ("\nok    speed " in done.out) == (options is SMALL)
    assert tree_of(tmp_path) == before


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_doctor_that_is_told_to_end_leaves_nothing_behind(tmp_path, number):
    root = tmp_path / "not" / "there"
    code = "from penstock.core.cli.main import main; main()"
    # Its files must be seen by this test before they are gone: then it is in mid-probe.
    words = ("doctor", f"posix://{root}", "--probe-size", "2GiB")
    process = interpreters.start(
        "-c",
        code,
        *words,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not any(root.glob("data/*/blobs/*")):
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert list(tmp_path.iterdir()) == []


def test_probe_keeps_to_its_limit_and_reads_back_what_it_wrote():
    backend = MemoryBackend(MemoryConfig())
    speed = measure(backend, 20 << 20, root=None)
    assert 0 < speed.bytes <= 20 << 20
    assert speed.same
    assert list(backend.list("")) == []


# -- findings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_doctor_fails_where_a_file_stands_in_the_way(call, tmp_path, name):
    (tmp_path / "file").write_text("mine")
    done = call("doctor", f"posix://{tmp_path}/{name}", *SMALL)
    assert done.code == 1
    assert "\nfail  folder " in done.out
    assert "A save would fail: see folder" in done.out
    assert (tmp_path / "file").read_text() == "mine"


def test_doctor_finds_leftovers_and_damaged_checkpoints(call, tmp_path):
    with penstock.Checkpointer(f"posix://{tmp_path}") as ckpt:
        ckpt.save({"number": 1}, step=1, mode="blocking")
    blobs = tmp_path / "data" / ("a" * 32) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "00000-0.raw").write_bytes(bytes(3000))
    (blobs / "~0123").write_bytes(bytes(50))
    os.utime(blobs / "00000-0.raw", (1, 1))
    found = checks_of(call("doctor", tmp_path, "--no-probe", "--json"))["leftovers"]
    assert found["status"] == "warn"
    assert "penstock prune" in found["advice"]
    assert found["values"] == {
        "attempts": 1,
        "prunable": 1,
        "prunable_bytes": 3000,
        "unrecorded": 0,
        "temporary_files": 1,
        "temporary_bytes": 50,
    }
    (tmp_path / "commits" / "00000007-0.json").write_bytes(b"nonsense\n")
    found = checks_of(call("doctor", tmp_path, "--no-probe", "--json"))["checkpoints"]
    assert (found["status"], found["values"]["damaged"]) == ("warn", [7])

"""`penstock doctor`: its findings, and no leftovers."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import urlencode

import pytest
from tests import interpreters
from tests.core.cli.command import tree_of

import penstock
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.abc import HOST_NAME, HostRecord, encode_host
from penstock.core.cli.bench.raw import measure
from penstock.core.cli.commands.doctor import _check_store
from penstock.core.storage.guarded import guarded
from penstock.core.types import Capabilities

SMALL = ("--probe-size", "1MiB")


def checks_of(done):
    return {check["name"]: check for check in done.json["checks"]}


# -- no leftovers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "not/there/yet"])
@pytest.mark.parametrize("options", [SMALL, ("--no-probe",)])
def test_doctor_leaves_no_files(call, tmp_path, name, options):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = tree_of(tmp_path)
    done = call("doctor", f"posix://{tmp_path}/{name}", *options)
    assert (done.code, done.err) == (0, "")
    assert ("\nok    speed " in done.out) == (options is SMALL)
    assert tree_of(tmp_path) == before


def test_doctor_leaves_no_files_in_a_root_of_hosts(call, tmp_path):
    record = encode_host(HostRecord("a", 1, ("a", "b"), "00" * 16))
    PosixBackend(PosixConfig(path=str(tmp_path / "fast"))).publish(HOST_NAME, record)
    before = tree_of(tmp_path)
    hosts = f"hosts://{tmp_path}/fast"
    for url in (hosts, f"tiered://?{urlencode({'fast': hosts, 'durable': f'{tmp_path}/durable'})}"):
        done = call("doctor", url, *SMALL)
        assert (done.code, done.err) == (0, "")
        assert " speed " in done.out
        assert tree_of(tmp_path) == before
    done = call("doctor", f"{tmp_path}/fast", *SMALL)
    assert done.code == 1
    assert "is the root of a, one of 2 hosts" in done.out
    assert "nothing was deleted" in call("bench", hosts, "--size", "1MiB").err
    assert tree_of(tmp_path) == before


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_terminated_doctor_leaves_no_files(tmp_path, number):
    root = tmp_path / "not" / "there"
    code = "from penstock.core.cli.main import main; main()"
    # This test must see its files before they are gone: then it is in mid-probe.
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


def test_probe_respects_its_limit_and_reads_back_its_writes():
    backend = MemoryBackend(MemoryConfig())
    speed = measure(backend, 20 << 20, root=None)
    assert 0 < speed.bytes <= 20 << 20
    assert speed.same
    assert list(backend.list("")) == []


# -- findings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_doctor_fails_if_a_file_is_in_the_way(call, tmp_path, name):
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
    assert (found["status"], found["values"]["damaged"]) == ("fail", [7])


@contextmanager
def soft_limit(which, value):
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def test_doctor_that_cannot_write_the_probe_fails_and_leaves_no_files(call, tmp_path):
    with soft_limit(resource.RLIMIT_FSIZE, 65_536):
        done = call("doctor", f"posix://{tmp_path}/run", *SMALL, "--json")
    assert done.code == 1
    found = checks_of(done)
    assert found["speed"]["status"] == "fail"
    assert "ulimit -f" in found["speed"]["found"]
    assert found["file size"]["status"] == "warn"
    assert found["file size"]["values"]["soft"] == 65_536
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["memory://", "posix://{}/run"])
def test_doctor_gives_no_advice_on_io_uring_for_a_store_that_never_uses_it(
    call, tmp_path, monkeypatch, url
):
    monkeypatch.setenv("PENSTOCK_DISABLE_URING", "EXFULL")
    found = checks_of(call("doctor", url.format(tmp_path), "--no-probe", "--json"))["io_uring"]
    assert (found["status"], found["advice"]) == ("info", None)
    assert found["found"].startswith("not used for ")
    config = tmp_path / "run.toml"
    config.write_text(f"backend = {{type = 'posix', path = '{tmp_path}/run'}}")
    found = checks_of(call("doctor", str(config), "--no-probe", "--json"))["io_uring"]
    assert found["advice"] is None
    fast = "{type = 'posix', path = '%s/fast'}"
    config.write_text(
        f"backend = {{type='tiered', fast={fast % tmp_path}, durable='{tmp_path}/run'}}"
    )
    for uses_it in (f"file://{tmp_path}/run", str(config)):
        found = checks_of(call("doctor", uses_it, "--no-probe", "--json"))["io_uring"]
        assert "PENSTOCK_DISABLE_URING" in found["advice"]


@pytest.mark.parametrize("command", ["verify", "copy", "compact"])
def test_other_commands_mention_a_missing_io_uring_only_with_debug(
    call, tmp_path, monkeypatch, caplog, command
):
    with penstock.Checkpointer(f"posix://{tmp_path}/run") as ckpt:
        ckpt.save({"number": 1}, step=1, mode="blocking")
    monkeypatch.setenv("PENSTOCK_DISABLE_URING", f"for {command}")  # a reason is logged once
    words = [command, tmp_path / "run", *([tmp_path / "to"] if command == "copy" else [])]
    assert call(*words).code == 0
    assert "uring is not used" not in caplog.text
    assert call("--debug", *words).code == 0
    assert "uring is not used, so posix takes its place" in caplog.text


def test_doctor_warns_that_memory_is_volatile(call):
    done = call("doctor", "memory://", "--no-probe")
    assert done.code == 0
    assert "\nwarn  lifetime " in done.out
    assert "- lifetime: use a path, or a URL" in done.out


def test_doctor_reports_a_file_in_the_way_once_with_remedy(call, tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    done = call("doctor", f"file://{tmp_path}/model.safetensors", "--json")
    failed = {name: c for name, c in checks_of(done).items() if c["status"] == "fail"}
    assert failed.keys() == {"folder"}
    assert "`penstock import`" in failed["folder"]["advice"]


def test_doctor_does_not_advise_installing_what_is_installed(call, tmp_path, monkeypatch):
    pytest.importorskip("liburing")
    monkeypatch.setattr("penstock.backends.uring.ring.flags_lacked", lambda _cpuinfo: {"avx512f"})
    text = call("doctor", tmp_path, "--no-probe").out
    assert "- io_uring: run on a CPU with AVX-512" in text
    assert "pip install liburing" not in text


def test_doctor_reports_why_io_uring_is_unused_and_a_remedy(call, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PENSTOCK_DISABLE_URING", "EXFULL")
    done = call("doctor", tmp_path, "--no-probe", "--json")
    assert (done.code, done.err) == (0, "")
    found = checks_of(done)["io_uring"]
    assert (found["status"], found["values"]) == ("warn", {"works": False})
    assert "EXFULL" in found["found"]
    assert caplog.records == []  # it is a finding, so no warning as well
    assert "unset PENSTOCK_DISABLE_URING" in found["advice"]
    text = call("doctor", tmp_path, "--no-probe").out
    assert "\nWhat to change:\n" in text
    assert "- io_uring: unset PENSTOCK_DISABLE_URING" in text


def test_doctor_warns_of_few_open_files(call, tmp_path):
    with soft_limit(resource.RLIMIT_NOFILE, 300):
        found = checks_of(call("doctor", tmp_path, "--no-probe", "--json"))["open files"]
    assert (found["status"], found["values"]["soft"]) == ("warn", 300)
    assert "ulimit -n" in found["advice"]


class _Forgetful(MemoryBackend):
    def read(self, requests):
        super().read(requests)
        requests[-1].target[-1] ^= 1


class _Idle(MemoryBackend):
    def read(self, requests):
        pass


class _WrongClock(MemoryBackend):
    def store_time_s(self):
        return super().store_time_s() - 7200


@pytest.mark.parametrize(
    ("store", "name", "status", "words"),
    [
        (_Idle, "speed", "fail", "not the bytes written"),
        (_WrongClock, "write a record", "warn", "7200 s behind"),
        (_Forgetful, "speed", "fail", "not the bytes written"),
        (MemoryBackend, "speed", "ok", "writes"),
    ],
)
def test_doctor_judges_store_behavior(store, name, status, words):
    backend = store(MemoryConfig())
    found = {c.name: c for c in _check_store(backend, None, probe_bytes=1 << 20)}
    assert found[name].status == status
    assert words in found[name].found
    assert (found[name].advice is None) == (status == "ok")


class _Broken(MemoryBackend):
    def __init__(self, config, broken):
        super().__init__(config)
        self._broken = broken

    def _meet(self, what):
        if what == self._broken:
            raise KeyError("no such shelf")

    @property
    def capabilities(self):
        self._meet("capabilities")
        return super().capabilities

    def store_time_s(self):
        self._meet("store_time_s")
        return super().store_time_s()

    def list(self, prefix, /):
        self._meet("list")
        return super().list(prefix)

    def create(self, name, /, *, size_hint=None):
        self._meet("create")
        return super().create(name, size_hint=size_hint)


@pytest.mark.parametrize(
    ("broken", "failed", "wrap"),
    [
        (None, set(), guarded),
        ("capabilities", {"direct I/O", "speed"}, guarded),
        ("store_time_s", {"write a record"}, guarded),
        ("list", {"checkpoints", "leftovers"}, guarded),
        ("create", {"speed"}, guarded),
        ("create", {"speed"}, lambda backend: backend),
    ],
)
def test_a_backend_error_fails_one_check_and_the_others_run(broken, failed, wrap):
    backend = wrap(_Broken(MemoryConfig(), broken))
    checks = {c.name: c for c in _check_store(backend, None, probe_bytes=1 << 20)}
    every = {"direct I/O", "write a record", "checkpoints", "leftovers", "speed"}
    assert checks.keys() == every - ({"speed"} if "write a record" in failed else set())
    assert {c.name for c in checks.values() if c.status == "fail"} == failed
    for name in failed:
        assert "KeyError: 'no such shelf'" in checks[name].found
        assert checks[name].advice


@pytest.mark.parametrize(
    ("notes", "status"),
    [
        ((), "info"),
        (("page cache in use: direct_io is off",), "info"),
        (("page cache in use: tmpfs keeps files in memory",), "info"),
        (("page cache in use: no O_DIRECT",), "warn"),
    ],
)
def test_direct_io_is_advised_only_where_it_works(tmp_path, notes, status):
    class Plain(MemoryBackend):
        capabilities = Capabilities(local=True, notes=notes)

    found = {c.name: c for c in _check_store(Plain(MemoryConfig()), tmp_path, probe_bytes=0)}
    check = found["direct I/O"]
    assert check.status == status
    assert (check.advice is None) == (status == "info")


@pytest.mark.parametrize("size", ["x", "1 parsec", ""])
def test_doctor_refuses_an_invalid_probe_size(call, tmp_path, size):
    assert call("doctor", tmp_path, f"--probe-size={size}").code == 2

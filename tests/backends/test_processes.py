"""Several real processes on one root: races, forks, kills, limits, a full disk."""

# ruff: noqa: PTH208 - descriptors, flags and links are tested

import os
import signal
import subprocess
import textwrap
import time

import pytest
from tests.integration.support import start_python

from penstock.testing.expectations import pattern

KINDS = ["posix", "uring"]

PRELUDE = """
import os, sys, time
from penstock.core.types import ReadRequest, WriteRequest
from penstock.core.errors import *
from penstock.testing.expectations import pattern
def opened(path, **options):
    if {kind!r} == "posix":
        from penstock.backends.posix import PosixBackend as B
    else:
        from penstock.backends.uring.engine import UringBackend as B
    return B(B.Config(path=path, **options))
"""


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "uring":
        request.getfixturevalue("needs_uring")
    return request.param


def start(kind, body, *arguments, wrap=()):
    script = PRELUDE.format(kind=kind) + textwrap.dedent(body)
    words = ["-W", "ignore", "-c", script, *arguments]
    return start_python(*words, wrap=wrap, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def test_exactly_one_racing_process_publishes_each_name(kind, tmp_path):
    body = """
        path, number = sys.argv[1:]
        backend = opened(path)
        backend.publish(f"ready/{number}", b"")
        while len(backend.list("ready/")) < 4:
            time.sleep(0.001)
        for n in range(100):
            try:
                backend.publish(f"commits/{n}.json", number.encode() * 1000, exclusive=True)
                print(n)
            except BlobExistsError:
                pass
    """
    processes = [start(kind, body, tmp_path / "root", number) for number in range(4)]
    won = [set(map(int, finish(process).split())) for process in processes]
    assert sorted(n for names in won for n in names) == list(range(100))
    for number, names in enumerate(won):
        for n in names:
            record = (tmp_path / "root" / "commits" / f"{n}.json").read_bytes()
            assert record == str(number).encode() * 1000
    assert len(os.listdir(tmp_path / "root" / "commits")) == 100


def test_a_killed_publisher_leaves_whole_records_only(tmp_path):
    body = """
        backend = opened(sys.argv[1])
        for n in range(1_000_000):
            backend.publish("r.json", bytes([n % 7]) * (1 + n % 7) * 3000)
            if n == 0:
                print("go", flush=True)
            backend.publish(f"c/{n}.json", b"x" * 5000, exclusive=True)
            backend.delete([f"c/{n - 5}.json"])
    """
    processes = [start("posix", body, tmp_path / str(n)) for n in range(5)]
    for n, process in enumerate(processes):
        assert process.stdout.readline() == "go\n"
        time.sleep(0.05 + 0.03 * n)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
    from penstock.backends.posix import PosixBackend, PosixConfig

    for n in range(5):
        with_temporaries = sum(len(files) for _, _, files in os.walk(tmp_path / str(n)))
        backend = PosixBackend(PosixConfig(path=str(tmp_path / str(n))))
        infos = backend.list("")
        assert 0 < len(infos) <= with_temporaries
        for info in infos:
            record = backend.read_record(info.name, limit_bytes=1 << 20)
            if info.name == "r.json":
                assert record == record[:1] * (1 + record[0]) * 3000
            else:
                assert record == b"x" * 5000
        backend.close()


def test_a_forked_child_gets_a_new_engine(kind, tmp_path):
    body = """
        import signal, threading
        signal.alarm(300)
        backend = opened(sys.argv[1])
        data = pattern(3 << 20)
        def store(name):
            writer = backend.create(name)
            writer.write([WriteRequest(64, (memoryview(data),))])
            writer.seal(64 + len(data))
        store("parent.raw")
        half = backend.create("half.raw")
        half.write([WriteRequest(0, (memoryview(b"half"),))])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                target = bytearray(len(data))
                backend.read([ReadRequest("parent.raw", 64, memoryview(target))])
                assert target == data
                store("child.raw")
                for call in (lambda: half.write([WriteRequest(8192, (memoryview(b"x"),))]),
                             lambda: half.seal(4)):
                    try:
                        call()
                    except StorageError as error:
                        assert "another process (fork)" in str(error), error
                    else:
                        raise AssertionError("the child used the parent's writer")
                half.abort()
                backend.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        half.seal(4)
        store("after.raw")
        print(*(info.name for info in backend.list("")))
        backend.close()
        assert threading.active_count() == 1
    """
    out = finish(start(kind, body, tmp_path / "root"))
    assert out.split() == ["after.raw", "child.raw", "half.raw", "parent.raw"]
    for name in ("parent", "child", "after"):
        content = (tmp_path / "root" / f"{name}.raw").read_bytes()
        assert content[64:] == pattern(3 << 20)


def test_a_child_cannot_abort_its_parents_blob(kind, tmp_path):
    body = """
        backend = opened(sys.argv[1])
        writer = backend.create("a.raw")
        data = pattern(1 << 20)
        writer.write([WriteRequest(0, (memoryview(data),))])
        child = os.fork()
        if child == 0:
            writer.abort()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.seal(len(data))
    """
    finish(start(kind, body, tmp_path / "root"))
    assert (tmp_path / "root" / "a.raw").read_bytes() == pattern(1 << 20)

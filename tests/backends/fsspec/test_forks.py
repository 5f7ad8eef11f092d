"""A forked child can keep using a backend, and cannot disturb its parent."""

import functools
import http.server
import os
import signal
import sys
import warnings

import pytest
from tests.backends.fault_proxy import ClosingServer

from penstock.core.errors import StorageError
from penstock.core.types import WriteRequest

PART = 5 << 20
_PATIENCE_S = 300


def in_child(task):
    """Run `task` in a forked child; fail with the text of its exception."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # The warning is about forks of a process with threads, which these tests need.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_PATIENCE_S)
            task()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            os.write(write, repr(error).encode())
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as report:
        text = report.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, text or f"the child ended with status {status}"


def put(backend, name, data):
    writer = backend.create(name)
    writer.write([WriteRequest(0, (memoryview(data),))])
    writer.seal(len(data))


def check_forks(backend):
    put(backend, "before.raw", bytes(2 * PART))
    assert backend.submit_read([]).result(300) is None
    unfinished = backend.create("unfinished.raw")
    unfinished.write([WriteRequest(0, (memoryview(b"parent"),))])

    def child():
        assert [info.name for info in backend.list("before")] == ["before.raw"]
        backend.publish("from-child.json", b"child")
        put(backend, "from-child.raw", b"x" * (2 * PART))
        with pytest.raises(StorageError, match="belongs to another process"):
            unfinished.write([WriteRequest(PART, (memoryview(b"child"),))])
        with pytest.raises(StorageError, match="belongs to another process"):
            unfinished.seal(6)
        unfinished.abort()
        backend.close()

    in_child(child)
    in_child(backend.close)
    unfinished.seal(6)
    names = [info.name for info in backend.list("")]
    assert names == ["before.raw", "from-child.json", "from-child.raw", "unfinished.raw"]
    assert backend.read_record("unfinished.raw", limit_bytes=9) == b"parent"


@pytest.mark.s3
def test_forked_child_can_use_s3(store):
    check_forks(store)


def test_forked_child_can_use_an_asynchronous_file_system(opened, tmp_path):
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    (tmp_path / "r.json").write_bytes(b"record")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ClosingServer(functools.partial(Quiet, directory=str(tmp_path))) as server:
        backend = opened(server.url)
        assert backend.read_record("r.json", limit_bytes=9) == b"record"

        def child():
            assert backend.read_record("r.json", limit_bytes=9) == b"record"
            assert [info.name for info in backend.list("")] == ["r.json"]

        in_child(child)
        assert backend.read_record("r.json", limit_bytes=9) == b"record"

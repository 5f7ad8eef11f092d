"""Stores whose files come into being by their close, and which may hang."""

import gc

import fsspec
import pytest
from fsspec.registry import _registry
from tests.backends.fsspec import object_files
from tests.integration.support import run_program

from penstock.backends.fsspec import FsspecBackend, FsspecConfig
from penstock.core.types import WriteRequest


@pytest.fixture
def backend():
    fsspec.register_implementation("gs", object_files.ObjectFiles, clobber=True)
    object_files.stored.clear()
    opened = FsspecBackend(FsspecConfig(url="gs://bucket/run"))
    yield opened
    opened.close()
    _registry.pop("gs", None)


def test_a_blob_that_nobody_ended_is_not_stored_when_it_is_forgotten(backend):
    """By then it may be another's, whose name it has."""
    writer = backend.create("blob")
    data = memoryview(bytes(20 << 20))
    backend.submit_write(writer, [WriteRequest(0, (data,))]).result(60)
    object_files.stored["bucket/run/blob"] = (b"another's", 0.0)
    del writer
    gc.collect()
    assert object_files.stored["bucket/run/blob"][0] == b"another's"


PROGRAM = """
import sys, logging
import fsspec, torch, penstock
from tests.backends.fsspec import object_files
from penstock.core import saving, workers

logging.getLogger("penstock").setLevel(logging.CRITICAL)
saving._RELEASE_S = workers._PATIENCE_S = 0.01
fsspec.register_implementation("gs", object_files.ObjectFiles, clobber=True)
what = sys.argv[1]
calls = {
    "write": lambda: ckpt.save({"w": torch.arange(4 << 20)}, 2).result(60),
    "read": lambda: ckpt.load(1),
    "delete": lambda: ckpt.delete(1),
}
ckpt = penstock.Checkpointer({"type": "fsspec", "url": "gs://bucket/run"}, io_timeout_s=1.5)
ckpt.save({"w": torch.arange(1000)}, 1).result()
object_files.hanging.add(what)
try:
    calls[what]()
except penstock.PenstockError as error:
    print(type(error).__name__, flush=True)
ckpt.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("what", ["write", "read", "delete"])
def test_a_store_that_hangs_lets_the_run_be_closed_and_the_interpreter_exit(what):
    done = run_program(PROGRAM, what, timeout=60)
    error = "RestoreError" if what == "read" else "StorageTimeoutError"
    assert (done.returncode, done.stdout.splitlines()) == (0, [error, "closed"]), done.stderr

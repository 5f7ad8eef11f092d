"""The calls to the metadata server of one save do not grow with the number of tensors."""

import sys
from collections import Counter

import pytest
import torch

import penstock
from penstock.backends.local.blob import DirectAccess
from penstock.core.types import WriteRequest

_counted = None

# Audit events of calls that a Lustre client sends to its metadata server; "open" also of folders.
CALLS = {"open", "os.mkdir", "os.link", "os.remove", "os.rename", "os.scandir", "os.rmdir"}


def _hear(event, arguments):
    if _counted is None:
        return
    if event == "subprocess.Popen":
        _counted["lfs " + arguments[1][1]] += 1
        return
    what = arguments[0] if event in CALLS else None  # a number where a pipe is opened
    if isinstance(what, str) and not what.startswith(("/proc", "/sys", "/dev")):
        _counted[event] += 1


sys.addaudithook(_hear)  # hooks cannot be removed; it counts only while `_counted` is set


def counting(action):
    global _counted  # noqa: PLW0603 - read by the hook
    _counted = Counter()
    try:
        action()
    finally:
        counted, _counted = _counted, None
    return counted


def count_calls(backend, tensors):
    """Metadata calls of the second blocking save, so that folders exist and `lfs df` was asked."""
    state = {"tensors": {f"{n:04d}": torch.full((1000,), n) for n in range(tensors)}}
    with penstock.Checkpointer(backend, retention=None) as ckpt:
        ckpt.save(state, 1, mode="blocking").result()
        return counting(lambda: ckpt.save(state, 2, mode="blocking").result())


def test_a_rank_creates_its_blob_and_part_in_a_fixed_number_of_calls(open_lustre, tmp_path):
    if refusal := DirectAccess("auto", str(tmp_path)).refusal:
        pytest.skip(f"needs a file system with direct I/O: {refusal}")
    backend = open_lustre(writers=2)
    writers = []

    def create():
        writers.append(backend.create("data/u/blobs/00000-0.raw", size_hint=1 << 30))

    def finish():
        writers[-1].write([WriteRequest(0, (memoryview(bytes(1 << 20)),))])
        writers[-1].seal(1 << 20)
        backend.publish("data/u/parts/00000.json", b"{}", exclusive=True)

    create()
    finish()
    backend.delete(["data/u/blobs/00000-0.raw", "data/u/parts/00000.json"])
    assert counting(create) == {
        "os.mkdir": 3,
        "lfs setstripe": 1,
        "open": 5,
        "os.link": 1,
        "os.remove": 1,
    }
    assert counting(finish) == {"os.mkdir": 3, "open": 7, "os.link": 1, "os.remove": 1}


@pytest.mark.slow
def test_metadata_operations_grow_with_ranks_not_with_tensors(open_lustre):
    few = count_calls(open_lustre("few"), 3)
    many = count_calls(open_lustre("many"), 1000)
    assert many == few
    assert few["lfs setstripe"] >= 1
    assert few["lfs df"] == 0
    assert 5 <= sum(few.values()) <= 100


def test_a_run_on_lustre_is_read_by_any_file_backend(open_lustre, tmp_path):
    state = {"weight": torch.arange(300_000.0), "epoch": 7}
    with penstock.Checkpointer(open_lustre(writers=3, writer=1)) as ckpt:
        ckpt.save(state, 1, mode="blocking").result()
    with penstock.Checkpointer(f"posix://{tmp_path}/root") as ckpt:
        tree = ckpt.load(1)
    assert torch.equal(tree["weight"], state["weight"])
    assert tree["epoch"] == 7

"""Killed exports, and the memory of export and import."""

import gc
import json
import os
import random
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import interpreters
from tests.integrations.files.conftest import assert_same, names_in

import penstock

pytestmark = pytest.mark.process

# Kills itself at the n-th file operation; otherwise prints their number.
EXPORT = """
import os, signal, sys, penstock
run, out, to, last = *sys.argv[1:4], int(sys.argv[4])
count = 0
def audit(event, arguments):
    global count
    if event in {"open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir"} or (
        event == "ctypes.call_function" or event == "ctypes.dlsym"
    ):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
options = {"shard_bytes": 25_000} if to == "safetensors" else {}
ckpt = penstock.Checkpointer(run)
view = ckpt.open()
sys.addaudithook(audit)
penstock.export_checkpoint(view, out, to=to, overwrite=True, **options)
print(count)
"""


def export(run, out, to, last):
    return interpreters.run("-c", EXPORT, str(run), str(out), to, str(last))


@pytest.mark.parametrize(
    ("to", "name", "before"),
    [
        pytest.param("safetensors", "hf", False, marks=pytest.mark.slow),
        ("safetensors", "hf", True),
        pytest.param("safetensors", "one.safetensors", False, marks=pytest.mark.slow),
        pytest.param("torch", "o.pt", True, marks=pytest.mark.slow),
        pytest.param("dcp", "d", True, marks=pytest.mark.slow),
    ],
)
def test_out_is_new_or_unchanged_after_a_kill_at_any_step(tmp_path, run, to, name, before):
    random.seed(f"{to}{name}{before}")
    whole = tmp_path / name
    done = export(run, whole, to, 0)
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 5
    late = range(max(1, steps - 4), steps + 1)  # the renames are among these
    kinds = set()
    for last in sorted({*random.sample(range(1, steps + 1), 2), *late}):
        out = tmp_path / f"{last}" / name
        if before:
            with penstock.Checkpointer(f"memory://{out}") as ckpt:
                ckpt.save({"model": {"old": torch.ones(3)}}, 1, mode="blocking")
                penstock.export_checkpoint(ckpt, out, to=to)
        else:
            out.parent.mkdir()
        old = snapshot(out)
        done = export(run, out, to, last)
        assert done.returncode in {0, -signal.SIGKILL}, done.stderr
        is_old = snapshot(out) == old
        kinds.add(is_old)
        if not is_old:
            assert_whole(out, to, whole)
    assert export(run, out, to, 0).returncode == 0  # the same command works after a kill
    assert_whole(out, to, whole)
    assert kinds == {True, False}


def snapshot(out):
    if out.is_dir():
        return {path.name: path.read_bytes() for path in out.iterdir()}
    return out.read_bytes() if out.exists() else None


def assert_whole(out, to, whole):
    if to == "safetensors":
        assert snapshot(out) == snapshot(whole)
    elif to == "torch":
        found, wanted = (torch.load(p, weights_only=True) for p in (out, whole))
        assert_same(found["model"], wanted["model"])
    else:
        assert names_in(out) == names_in(whole)
        assert penstock.import_checkpoint(out, f"memory://{out}", overwrite=True).objects > 5


def test_new_folders_above_an_export_are_durable(tmp_path, monkeypatch):
    synced = set()
    fsync = os.fsync

    def record(handle):
        synced.add(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save({"model": {"w": torch.ones(3)}}, 1, mode="blocking")
        monkeypatch.setattr(os, "fsync", record)
        penstock.export_checkpoint(ckpt, tmp_path / "a" / "b" / "w.safetensors", to="safetensors")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= synced


# DCP leaves a writer in a reference cycle, whose end is an error of its own.
@pytest.mark.filterwarnings("ignore:.*NoCloseWriter:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_a_write_failing_midway_is_a_storage_error_without_output(tmp_path, to):
    with penstock.Checkpointer(tmp_path / "run") as ckpt:
        state = {f"w{n}": torch.ones(200_000) for n in range(3)}
        ckpt.save({"model": state}, 1, mode="blocking")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            with pytest.raises(penstock.StorageError, match=r"the export to .* File too large"):
                penstock.export_checkpoint(ckpt, tmp_path / "o", to=to)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == ["run"]
    gc.collect()  # that writer, here and not in another test


MEASURE = """
import json, re, sys, penstock
def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
def reset():
    open("/proc/self/clear_refs", "w").write("5")
small, large = json.loads(sys.argv[1])
def work(source, target):
    WORK
work(*small)
reset()
before = memory("VmRSS")
work(*large)
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Runs of a small and of a large model, and the state of the large one."""
    root = tmp_path_factory.mktemp("sizes")
    for name, count in (("small", 1), ("large", 12)):
        state = {f"layers.{n}.weight": torch.full((4096, 1024), float(n)) for n in range(count)}
        with penstock.Checkpointer(root / name) as ckpt:
            ckpt.save({"model": state}, 1, mode="blocking")
    return root, state


@pytest.mark.parametrize(
    "way", ["safetensors", pytest.param("torch", marks=pytest.mark.slow), "dcp", "import"]
)
def test_memory_does_not_grow_with_the_model(tmp_path, sizes, way):
    root, state = sizes
    if way == "import":
        for name in ("small", "large"):
            penstock.export_checkpoint(root / name, tmp_path / f"{name}-in", to="safetensors")
        work = "penstock.import_checkpoint(source, target)"
        places = [
            [str(tmp_path / f"{n}-in"), str(tmp_path / f"{n}-out")] for n in ("small", "large")
        ]
    else:
        work = f"penstock.export_checkpoint(source, target, to={way!r})"
        places = [[str(root / n), str(tmp_path / f"{n}-out")] for n in ("small", "large")]
    done = interpreters.run("-c", MEASURE.replace("WORK", work), json.dumps(places))
    assert done.returncode == 0, done.stderr
    extra = int(done.stdout)
    assert extra <= 128 << 20  # of 192 MiB
    out = tmp_path / "large-out"
    if way == "safetensors":
        found = load_file(out / "model.safetensors")
        assert_same({name: found[name] for name in state}, state)
    elif way == "torch":
        assert_same(torch.load(out, weights_only=True, mmap=True), state)

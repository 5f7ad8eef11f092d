"""No leaks of files, threads, memory, staging, garbage, however a cycle ends.

`PENSTOCK_LEAK_CYCLES=1000` runs more of them than the suite does; `-s` prints the figures.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.integration.support import Run, place_of, same
from tests.integration.training import penstock_threads, wait_until_in

from penstock import (
    Checkpointer,
    CheckpointNotFoundError,
    DamagedError,
    PenstockError,
    StepExistsError,
    StorageError,
    UnsupportedStateError,
)
from penstock.core.storage.open import open_backend
from penstock.testing.faults import FaultyBackend

CYCLES = int(os.environ.get("PENSTOCK_LEAK_CYCLES", "16"))
WARM_UP = 6
STATE_BYTES = 1 << 20
# Far less than a state for each cycle, and more than the allocator's noise.
RSS_LIMIT_BYTES = 12 << 20
OPTIONS = {
    "chunk_bytes": 1 << 18,
    "block_bytes": 1 << 16,
    "workers": 2,
    "rules": [{"match": "encoded", "codecs": ["delta", "zstd"]}],
    "share": True,
}


def entries(folder):
    return sum(1 for _ in Path(folder).iterdir())


class Bench:
    """A run with one checkpoint, and a store that can be made to fail."""

    def __init__(self, url, root):
        self.url = url
        self.run = Run(root)
        self.store = FaultyBackend(open_backend(url))
        self.ckpt = Checkpointer(self.store, **OPTIONS)
        half = STATE_BYTES // 8
        self.state = {"raw": torch.arange(half // 2).float(), "encoded": torch.arange(half).int()}
        self.state["still"] = torch.arange(half).double()
        self.state["note"] = "x" * 1000
        self.step, self.saved = 1, copy.deepcopy(self.state)
        self.ckpt.save(self.state, 1, mode="blocking")
        self.target = {**{k: v.clone() for k, v in self.state.items() if k != "note"}, "note": ""}
        self.place = place_of(self.ckpt.open(1), "raw")

    def next(self):
        """The next step; its state differs, except for the unchanging part."""
        self.step += 1
        self.state["raw"] += 1
        self.state["encoded"] += 1
        return self.step


def save(bench, number):
    """Saves, and retention by hand, as a run does for weeks."""
    mode = ("async", "blocking", "lazy")[number % 3]
    bench.ckpt.save(bench.state, bench.next(), mode=mode).result()
    record = bench.ckpt._catalog.record(bench.step)
    borrowed = {blob.name.rpartition(".")[2] for blob in record.borrowed}
    assert borrowed == {"raw", "enc"}
    bench.ckpt.delete(bench.step)


def save_that_fails(bench, number):
    faults = ["create", "write", "seal", "publish intent", "publish parts/", "publish index"]
    operation, _, match = faults[number % len(faults)].partition(" ")
    bench.store.fail(operation, match=match)
    handle = bench.ckpt.save(bench.state, bench.next())
    with pytest.raises(StorageError, match="simulated"):
        handle.result()
    bench.ckpt.wait()
    bench.store.clear()
    # Data that failed after its seal is left to prune.
    with Checkpointer(bench.store, grace_s=1e-6) as ckpt:
        while entries(bench.run.root / "data") > 1:
            ckpt.prune()


def save_that_is_refused(bench, number):
    with pytest.raises(StepExistsError):
        bench.ckpt.save(bench.state, 1)
    with pytest.raises(UnsupportedStateError):
        bench.ckpt.save({**bench.state, "lock": threading.Lock()}, bench.step + 1)


def overwrite(bench, number):
    bench.ckpt.save(bench.state, 1, overwrite=True).result()


def restore(bench, number):
    bench.ckpt.restore(bench.target, 1)
    assert same(bench.ckpt.load(1), bench.target)


def restore_of_damage(bench, number):
    offset = bench.place.offset + number % bench.place.length
    bench.run.flip(bench.place.blob, offset)
    with pytest.raises(DamagedError, match="raw"):
        bench.ckpt.restore(bench.target, 1)
    assert not bench.ckpt.verify(1).ok
    bench.run.flip(bench.place.blob, offset)


def restore_that_fails(bench, number):
    bench.store.fail("read", nth=1 + number % 3)
    with pytest.raises(PenstockError):
        bench.ckpt.restore(bench.target, 1)
    bench.store.clear()
    with pytest.raises(CheckpointNotFoundError):
        bench.ckpt.restore(bench.target, 999_999)


def open_and_read(bench, number):
    opened = bench.ckpt.open(1)
    assert torch.equal(opened["raw"], bench.saved["raw"])
    assert opened.read("encoded").numel() == bench.state["encoded"].numel()


def verify(bench, number):
    assert bench.ckpt.verify(1).ok


def prune(bench, number):
    assert bench.ckpt.prune().uids == ()


def separate_checkpointer(bench, number):
    """As an evaluation that polls a run; with little staging."""
    with Checkpointer(bench.url, **OPTIONS, staging_bytes=0) as ckpt:
        ckpt.save(bench.state, bench.next(), mode="async")
        ckpt.wait()
        assert ckpt._saver.memory.staging._used == 0
        assert same(ckpt.load(), bench.state)
        ckpt.delete(bench.step)


WAYS = [
    save,
    save_that_fails,
    save_that_is_refused,
    pytest.param(overwrite, marks=pytest.mark.slow),  # a save and a deletion
    restore,
    restore_of_damage,
    restore_that_fails,
    pytest.param(open_and_read, marks=pytest.mark.slow),  # `restore` loads, too
    pytest.param(verify, marks=pytest.mark.slow),  # also in `restore_of_damage`
    pytest.param(prune, marks=pytest.mark.slow),  # also in `save_that_fails`
    separate_checkpointer,
]


def let_saves_end():
    """Wait for the threads of saves: some have a few more lines to run when a save is durable."""
    for thread in threading.enumerate():
        if thread.name in {"penstock-save", "penstock-watch", "penstock-capture"}:
            thread.join()


def resources(bench):
    """The count of everything that could leak."""
    let_saves_end()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            links.append(str(path.readlink()))
    maps = Path("/proc/self/maps").read_text().splitlines()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(links),
        "rings": sum("io_uring" in link for link in links),
        "memfds": sum("memfd:" in link for link in links),
        "memfd maps": sum("memfd:" in line for line in maps),
        # Of this process only: others have files there, and tensors that other tests share.
        "shm maps": sum("/dev/shm/" in one and "/torch_" not in one for one in maps),
        "data": entries(bench.run.root / "data"),
        "commits": entries(bench.run.root / "commits"),
        "staging used": bench.ckpt._saver.memory.staging._used,
        "staging": bench.ckpt._saver.memory.staging.allocated_bytes,
        "threads": len(penstock_threads()),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_cycle_leaves_no_objects(way, kind, tmp_path, monkeypatch):
    # pytest keeps all records; an error in one keeps the locals of its frames alive.
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", False)
    root = tmp_path / "run"
    bench = Bench(f"{kind}://{root}", root)
    with bench.ckpt:
        for number in range(WARM_UP):
            way(bench, number)
        before = resources(bench)
        for number in range(CYCLES):
            way(bench, number)
        after = resources(bench)
        print(f"{kind} {way.__name__}: {CYCLES} cycles, {before} -> {after}")
        assert after.pop("rss") - before.pop("rss") < RSS_LIMIT_BYTES
        # Pools create their threads on demand: ours, and the store's.
        assert after.pop("threads") <= before.pop("threads") + OPTIONS["workers"] + 2
        assert after.pop("staging used") == before.pop("staging used") == 0
        # Less is no leak: leftovers of other tests may end meanwhile.
        assert {k: n for k, n in after.items() if n > before[k]} == {}
        assert same(bench.ckpt.load(1), bench.saved)
    bench.store.close()


#
# -- memory that a checkpointer returns, and its effects on the interpreter ------------------------


def arenas(ckpt):
    """Its staging memory, which exists once it has saved."""
    found = [arena.memory for arena in ckpt._saver.memory.staging._arenas]
    assert found
    return found


@pytest.fixture
def no_collections():
    """Memory freed here is freed at once, not by the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("mode", ["async", "lazy"])
def test_closing_returns_staging_memory(mode, no_collections):
    state = {"t": torch.zeros(300_000)}
    with Checkpointer("memory://", mode=mode, defer="**") as ckpt:
        handle = ckpt.save(state, 1)
        handle.captured.result()
        memory = arenas(ckpt)
        handle.result()
        assert not any(m.closed for m in memory)
    assert all(m.closed for m in memory)


def test_a_disabled_collector_stays_off_and_a_failed_save_leaves_it_on():
    with Checkpointer("memory://") as ckpt:
        with pytest.raises(UnsupportedStateError):
            ckpt.save({"a": object()}, 1)
        assert gc.isenabled()
        gc.disable()
        try:
            ckpt.save({"a": 1}, 1).result()
            assert not gc.isenabled()
        finally:
            gc.enable()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_forked_during_a_state_query_collects_garbage():
    class Loader:
        """Starts its workers if asked for its state before the first batch."""

        def state_dict(self):
            self.worker = os.fork()
            if self.worker == 0:
                os._exit(40 + gc.isenabled())
            return {"at": 0}

        def load_state_dict(self, state):
            pass

    loader = Loader()
    with Checkpointer("memory://") as ckpt:
        ckpt.save({"loader": loader}, 1).result()
    _, status = os.waitpid(loader.worker, 0)
    assert os.waitstatus_to_exitcode(status) == 41
    assert gc.isenabled()


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_seconds_cover_all_work_of_save(mode):
    """Nothing is timed here: parts are compared with the whole."""
    state = {f"t{n}": torch.zeros(4) for n in range(500)}
    with Checkpointer("memory://", mode=mode, defer="**") as ckpt:
        began = time.monotonic()
        handle = ckpt.save(state, 1)
        returned_s = time.monotonic() - began
        seconds = handle.result().seconds
        whole_s = time.monotonic() - began
    assert 0 < seconds["plan"] <= seconds["blocked"] <= seconds["total"] <= whole_s
    assert seconds["plan"] + seconds["capture"] <= seconds["total"]
    assert seconds["blocked"] <= returned_s
    if mode == "blocking":
        assert seconds["blocked"] == seconds["total"]


def test_a_close_interrupted_by_ctrl_c_can_be_repeated(tmp_path):
    gate, before = threading.Event(), {*threading.enumerate()}
    store = FaultyBackend(open_backend(f"posix://{tmp_path}/run"))
    ckpt = Checkpointer(store, **OPTIONS)
    held = store.block("publish", gate, match="commits/")
    ckpt.save({"encoded": torch.arange(1000)}, 1)
    assert held.reached.wait(300)
    main = threading.current_thread()

    def press():
        wait_until_in(("penstock.core.concurrency.latch", "wait"), main)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()
    thread.join()
    gate.set()
    ckpt.close()
    store.close()
    for new in set(threading.enumerate()) - before:
        new.join(300)
        assert not new.is_alive(), new.name

"""A checkpoint failure never stops training, is raised once, and harms nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import mmap
import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests import interpreters
from tests.integration.support import FlyingClock
from tests.integration.training import (
    CAPTURE,
    SMALL,
    TINY_BUDGET,
    Held,
    copies,
    differences,
    held_at,
    held_at_fence,
    held_checkpointer,
    penstock_threads,
    wait_until_in,
)
from torch import nn

from penstock import (
    BusyError,
    Checkpointer,
    CommitUnknownError,
    PenstockError,
    SaveError,
    SaverClosedError,
    SaveSkippedError,
    StepExistsError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    UnsupportedStateError,
)
from penstock.core.pipeline.writer import BATCH_BYTES

ENCODED = {"rules": [{"match": "optimizer/**", "codecs": ["zstd"]}]}
WAIT = ("penstock.core.save.job", "wait_durable")


class Loop:
    """A trained model of several chunks; `saved` is the expected state of each save."""

    def __init__(self, ckpt, mode="async"):
        torch.manual_seed(0)
        self.ckpt = ckpt
        self.mode = mode
        self.model = nn.Linear(100, 120)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer, "epoch": 0}
        self.step = 0
        self.saved = {}
        self.train()

    def train(self):
        self.model(torch.randn(4, 100)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, **options):
        """One round: save, then train on."""
        self.step += 1
        self.saved[self.step] = self.snapshot()
        try:
            return self.ckpt.save(self.state, self.step, **{"mode": self.mode, **options})
        finally:
            self.train()

    def snapshot(self):
        return copies([dict(self.model.state_dict()), self.optimizer.state_dict()])

    def check(self, *steps):
        """Exactly these steps exist, and hold the state at their save."""
        assert self.ckpt.steps() == list(steps)
        for step in steps:
            fresh = Loop(self.ckpt)
            self.ckpt.restore(fresh.state, step)
            assert not differences(fresh.snapshot(), self.saved[step])
            assert self.ckpt.verify(step).ok


def errors_logged(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def assert_nothing_is_held(ckpt):
    assert ckpt._saver.memory.staging._used == 0


@pytest.fixture
def impatient(waits):
    """Check often for a stuck store, and do not wait for it to return memory.

    Returns the clock, which the test can let fly.
    """
    clock = FlyingClock()
    waits(clock=clock, poll_s=0.05, release_s=0.01)
    return clock


@pytest.fixture(params=["async", "lazy"])
def mode(request):
    return request.param


# -- real and simulated faults ---------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "penstock-test", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount(8)")
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("engine", ["posix", pytest.param("uring", marks=pytest.mark.uring)])
@pytest.mark.parametrize(
    ("rules", "mode"),
    [({}, "async"), pytest.param(ENCODED, "lazy", marks=pytest.mark.slow)],
    ids=["raw", "encoded"],
)
def test_a_full_disk_loses_only_the_saves_that_do_not_fit(small_disk, engine, rules, mode, caplog):
    with Checkpointer(f"{engine}://{small_disk}", **SMALL, **rules) as ckpt:
        loop = Loop(ckpt, mode)
        handles = []
        for _ in range(20):
            handles.append(loop.save())
            if handles[-1].durable.exception() is not None:  # and so counts as seen
                break
        full = loop.step
        assert 3 <= full < 20
        with pytest.raises(StorageFullError):
            handles[-1].result()
        ckpt.wait()
        assert len(errors_logged(caplog)) == 1
        loop.check(*range(1, full))
        blobs = {path.parent for path in small_disk.glob("data/*/blobs/*")}
        assert len(blobs) == full - 1, "the part that was written is still there"
        ckpt.delete(1)
        ckpt.delete(2)
        loop.save().result()
        loop.check(*range(3, full), full + 1)
        assert_nothing_is_held(ckpt)


def test_a_stuck_disk_fails_after_the_timeout(store, gate, mode, caplog, impatient):
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt, mode)
        loop.save().result()
        fault = store.block("write", gate)
        handle = loop.save()
        assert fault.reached.wait(300)
        loop.train()
        impatient.flies = lambda: not handle.done()
        with pytest.raises(StorageTimeoutError, match="io_timeout_s=600"):
            handle.result()
        loop.train()
        ckpt.wait()
        store.clear()  # it answers again, but the stuck write is still in flight
        loop.save().result()
        loop.check(1, 3)
        gate.set()
        join_threads_of_saves()
        loop.save().result()
        loop.check(1, 3, 4)
        assert_nothing_is_held(ckpt)
        assert len(errors_logged(caplog)) == 1
    store.close()


def test_a_stuck_disk_with_little_staging_lets_save_return(store, gate, impatient):
    """Then `save` waits for the disk, at most until the timeout."""
    fault = store.block("write", gate)
    impatient.flies = lambda: fault.reached.is_set() and not gate.is_set()
    with Checkpointer(store, **SMALL, **TINY_BUDGET) as ckpt:
        loop = Loop(ckpt)
        handle = loop.save()
        assert handle.captured.done()
        with pytest.raises(StorageTimeoutError):
            handle.result()
        gate.set()
        loop.save().result()
        loop.check(2)


def test_a_stuck_commit_is_unknown_until_the_store_answers(store, gate, impatient):
    fault = store.block("publish", gate, match="commits/")
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt)
        handle = loop.save()
        assert fault.reached.wait(300)
        impatient.flies = lambda: not handle.done()
        with pytest.raises(CommitUnknownError, match="may or may not exist"):
            handle.result()
        assert ckpt.steps() == []
        gate.set()
        join_threads_of_saves()
        loop.check(1)  # nothing of it was deleted
        loop.save().result()
        loop.check(1, 2)


OPERATIONS = [
    "create .raw",
    "create .enc",
    "write .raw",
    "write .enc",
    "seal .raw",
    "seal .enc",
    "publish intent",
    "publish parts/",
    "publish index",
    "stat intent",
]
FOREIGN = [ZeroDivisionError("in a plugin"), asyncio.CancelledError(), SystemExit(3)]


# Each operation fails with one error here, and with the others in the slow run.
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("budget", [{}, TINY_BUDGET], ids=["ample", "tiny"])
def test_any_error_of_a_writer_fails_only_its_save(store, budget, turn, caplog):
    with Checkpointer(store, **SMALL, **ENCODED, **budget) as ckpt:
        loop = Loop(ckpt)
        loop.save().result()
        for number, where in enumerate(OPERATIONS, start=turn):
            operation, match = where.split()
            error = FOREIGN[number % len(FOREIGN)]
            store.fail(operation, error, match=match)
            handle = loop.save()
            for _ in range(2):
                with pytest.raises(SaveError, match=f"{loop.step}: {type(error).__name__}"):
                    handle.result(300)
            ckpt.wait()
            assert ckpt.steps() == [1], where
            assert_nothing_is_held(ckpt)
        loop.save().result()
        loop.check(1, loop.step)
        assert len(errors_logged(caplog)) == len(OPERATIONS)


@pytest.mark.parametrize(
    ("error", "late"),
    [(StorageError("lost"), False), *((e, True) for e in (StorageError("lost"), *FOREIGN))],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_a_commit_with_a_lost_reply_is_looked_up(store, error, late):
    store.fail("publish", error, match="commits/", late=late)
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt)
        handle = loop.save()
        if late:
            assert handle.result(300).step == 1
            loop.check(1)
        else:
            with pytest.raises(CommitUnknownError):
                handle.result(300)
            assert ckpt.steps() == []
        loop.save().result()


def test_failed_clean_up_hides_nothing(store, caplog):
    store.fail("write")
    store.fail("delete", ZeroDivisionError())
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt)
        with pytest.raises(StorageError, match="simulated failure of write"):
            loop.save().result(300)
        ckpt.wait()
        assert_nothing_is_held(ckpt)
        loop.save().result()
        loop.check(2)
    assert any("could not be deleted and stays for prune" in r.getMessage() for r in caplog.records)


def test_failed_retention_does_not_fail_the_save(store, caplog):
    with Checkpointer(store, retention={"keep_last": 1}, **SMALL) as ckpt:
        loop = Loop(ckpt)
        loop.save().result()
        store.fail("delete", times=None, match="commits/")
        loop.save().result()
        ckpt.wait()
        loop.check(1, 2)
    assert not errors_logged(caplog)
    assert any("cleaning up after step 2 failed" in r.getMessage() for r in caplog.records)


def test_a_provider_failing_in_the_background_fails_only_its_save(store, caplog):
    for error in (ZeroDivisionError("in a provider"), SystemExit(3)):
        hold = Held()
        hold.error = error
        with held_checkpointer(store) as ckpt:
            loop = Loop(ckpt, "lazy")
            handle = ckpt.save({"hold": hold, **loop.state}, 1, mode="lazy")
            with held_at_fence(loop.optimizer.step):
                hold.let_go.set()
            with pytest.raises(SaveError, match=f"step 1: {type(error).__name__}"):
                handle.result(300)
            assert isinstance(handle.captured.exception(), SaveError)
            ckpt.wait()
            assert_nothing_is_held(ckpt)
            assert ckpt.steps() == []
    assert len(errors_logged(caplog)) == 2


#
# -- who learns of it ------------------------------------------------------------------------------


@pytest.fixture
def failed(store):
    """A loop whose last save failed unseen in the background."""
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt)
        loop.save().result()
        store.fail("seal")
        handle = loop.save()
        ckpt._saver.job.finished(None)
        assert handle.done()
        loop.handle = handle
        yield loop
        if not ckpt._closed:
            ckpt.wait()


def test_an_unseen_failure_is_raised_once_by_wait(failed):
    with pytest.raises(StorageError, match="simulated failure of seal"):
        failed.ckpt.wait()
    failed.ckpt.wait()
    failed.ckpt.fence()
    failed.save().result()


def test_an_unseen_failure_is_raised_once_by_fence(failed):
    with pytest.raises(StorageError, match="simulated failure of seal"):
        failed.ckpt.fence()
    failed.ckpt.fence()


def test_an_unseen_failure_is_raised_once_by_save_after_that_one_has_started(failed):
    with pytest.raises(StorageError, match="simulated failure of seal") as caught:
        failed.save()
    assert "the save of step 3 has started" in caught.value.__notes__[0]
    failed.ckpt.wait()
    failed.check(1, 3)
    failed.save().result()


def test_an_unseen_failure_is_raised_once_by_close(failed):
    with pytest.raises(StorageError, match="simulated failure of seal"):
        failed.ckpt.close()
    failed.ckpt.close()


def test_the_handle_raises_it_at_every_call(failed):
    for _ in range(3):
        with pytest.raises(StorageError, match="simulated failure of seal"):
            failed.handle.result()
    failed.ckpt.wait()  # it has been seen


@pytest.mark.parametrize("future", ["committed", "durable"])
def test_looking_at_a_future_is_seeing(failed, future):
    assert isinstance(getattr(failed.handle, future).exception(), StorageError)
    failed.ckpt.wait()


def test_wait_timeout_raises_and_the_save_continues(store, gate):
    store.block("seal", gate)
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt)
        loop.save()
        with pytest.raises(TimeoutError, match="the save of step 1 is still under way"):
            ckpt.wait(timeout=0.01)
        gate.set()
        ckpt.wait()
        loop.check(1)


def test_progress_is_not_seeing(failed):
    assert failed.handle.progress().phase == "failed"
    assert failed.handle.done()
    with pytest.raises(StorageError):
        failed.ckpt.wait()


def test_close_hides_no_exception_in_flight(failed):
    with pytest.raises(KeyError, match="the user's"), failed.ckpt:
        raise KeyError("the user's")


def test_close_in_an_except_clause_hides_nothing(failed):
    def train():
        try:
            {}["the user's"]
        except KeyError:
            failed.ckpt.close()
            raise

    with pytest.raises(KeyError, match="the user's"):
        train()


@pytest.mark.parametrize(
    ("step", "state", "error"),
    [
        (1, {"x": 1}, StepExistsError),
        (9, {"x": object()}, UnsupportedStateError),
        (9, [], UnsupportedStateError),
        (-1, {"x": 1}, PenstockError),
    ],
)
def test_a_refused_save_does_not_swallow_an_unseen_failure(failed, step, state, error):
    with pytest.raises(error):
        failed.ckpt.save(state, step)
    with pytest.raises(StorageError, match="simulated failure of seal"):
        failed.ckpt.wait()


def test_a_failed_blocking_save_does_not_swallow_an_unseen_failure(failed, store):
    store.fail("seal", StorageError("the second"))
    heard = []
    for call in (lambda: failed.save(mode="blocking"), failed.ckpt.wait):
        with pytest.raises(StorageError) as caught:
            call()
        heard.append(str(caught.value))
    assert sorted(heard) == ["simulated failure of seal", "the second"]
    failed.ckpt.wait()


def test_a_blocking_save_raises_its_own_failure_and_counts_as_seen(store, caplog):
    store.fail("seal")
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt, "blocking")
        with pytest.raises(StorageError, match="simulated failure of seal"):
            loop.save()
        ckpt.wait()
        loop.save()
        loop.check(2)
    assert len(errors_logged(caplog)) == 1


@pytest.mark.parametrize("fails", [None, "write", "publish"])
def test_futures_resolve_in_order(store, gate, mode, fails):
    store.block("create", gate)  # until all callbacks have run
    if fails:
        store.fail(fails, match="parts/" if fails == "publish" else "")
    order = []
    hold = Held()
    if mode == "async":
        hold.let_go.set()
    with held_checkpointer(store, mode=mode) as ckpt:
        handle = ckpt.save({**Loop(ckpt).state, "hold": hold}, 1)
        for name in ("durable", "committed", "captured"):
            getattr(handle, name).add_done_callback(lambda _, name=name: order.append(name))
        hold.let_go.set()
        concurrent.futures.wait([handle.captured])  # which does not count as seeing
        gate.set()
        ckpt._saver.job.finished(None)
        assert order == ["captured", "committed", "durable"]
        assert (handle.durable.exception() is None) is (fails is None)


# -- one at a time ---------------------------------------------------------------------------------


def test_on_busy_wait_commits_in_order_of_save(store, gate):
    store.block("seal", gate)
    with Checkpointer(store, on_busy="wait", **SMALL) as ckpt:
        loop = Loop(ckpt)
        first = loop.save()
        with held_at(("penstock.core.save.job", "finished"), loop.save):
            assert not first.done()
            gate.set()
        assert first.done()
        ckpt.wait()
        loop.check(1, 2)


def test_on_busy_skip_starts_nothing(store, gate):
    store.block("seal", gate)
    with Checkpointer(store, on_busy="skip", **SMALL) as ckpt:
        loop = Loop(ckpt)
        first, second = loop.save(), loop.save()
        assert (first.skipped, second.skipped) == (False, True)
        for _ in range(2):
            with pytest.raises(SaveSkippedError, match="step 2 was skipped"):
                second.result()
        assert isinstance(second.captured.exception(), SaveSkippedError)
        assert second.progress().phase == "skipped"
        gate.set()
        ckpt.wait()
        loop.save().result()
        loop.check(1, 3)


def test_on_busy_raise_starts_nothing(store, gate):
    store.block("seal", gate)
    with Checkpointer(store, on_busy="raise", **SMALL) as ckpt:
        loop = Loop(ckpt)
        loop.save()
        with pytest.raises(BusyError, match="step 1 is still under way"):
            loop.save()
        gate.set()
        ckpt.wait()
        loop.save().result()
        loop.check(1, 3)


# -- ends ------------------------------------------------------------------------------------------


def test_a_closed_checkpointer_refuses(store):
    ckpt = Checkpointer(store, **SMALL)
    loop = Loop(ckpt)
    loop.save()
    ckpt.close()
    ckpt.close()
    for call in (loop.save, ckpt.load, lambda: ckpt.restore(loop.state)):
        with pytest.raises(SaverClosedError, match="closed"):
            call()
    with Checkpointer(store, **SMALL) as again:
        loop.ckpt = again
        loop.check(1)


def in_a_child(action):
    """The result of `action` in a forked child, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(300)  # a child that hangs must not outlive the test
            answer = repr(action())
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            answer = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_saves_nor_waits_for_the_parents_capture(store):
    hold = Held()
    with held_checkpointer(store) as ckpt:
        loop = Loop(ckpt)
        handle = ckpt.save({"hold": hold, **loop.state}, 1, mode="lazy")
        loop.saved[1] = loop.snapshot()
        hold.reached.wait()

        def child():
            loop.train()  # does not wait at the parent's fence
            ckpt.save(loop.state, 2)

        assert in_a_child(child).startswith("SaverClosedError: a Checkpointer cannot be used in a")
        assert in_a_child(loop.train) == "None"
        assert in_a_child(ckpt.close) == "None"  # does not wait for missing threads

        def leave():
            with ckpt:
                pass

        assert in_a_child(leave) == "None"
        with held_at_fence(loop.train):
            hold.let_go.set()
        handle.result()
        assert ckpt.steps() == [1]
        ckpt.save(loop.state, 2, mode="lazy").result()


@contextmanager
def ctrl_c_in(place, after=None):
    """SIGINT reaches the body once it is in the function `place`, and `after` is set."""
    main = threading.current_thread()

    def interrupt():
        if after is not None:
            after.wait()
        wait_until_in(place, main)
        while not over.is_set():
            signal.pthread_kill(main.ident, signal.SIGINT)
            over.wait(10)  # lost where Python cannot raise, for instance in a finalizer

    over = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    over.set()
    thread.join()


def test_an_interrupt_during_capture_fails_that_save(store, caplog):
    hold = Held()
    with held_checkpointer(store, defer=()) as ckpt:
        loop = Loop(ckpt)
        loop.save().result()
        with ctrl_c_in(CAPTURE, after=hold.reached):
            ckpt.save({**loop.state, "hold": hold}, 2)
        loop.train()
        hold.let_go.set()
        ckpt.wait()  # the interrupted caller knows; the handle was never returned
        assert_nothing_is_held(ckpt)
        assert ckpt.steps() == [1]
        loop.step = 2
        loop.save().result()
        loop.check(1, 3)
    assert errors_logged(caplog) == ["save of step 2 failed: step 2: interrupted"]


def test_an_interrupt_before_the_capture_fails_that_save(store, caplog):
    def on_event(event):
        if (event.kind, event.step) == ("started", 2):
            raise KeyboardInterrupt

    with Checkpointer(store, on_event=on_event, **SMALL) as ckpt:
        loop = Loop(ckpt, "lazy")
        loop.save().result()
        with pytest.raises(KeyboardInterrupt):
            loop.save()
        loop.train()  # nothing is pending
        ckpt.wait()
        assert_nothing_is_held(ckpt)
        loop.save().result()
        loop.check(1, 3)
    assert errors_logged(caplog) == ["save of step 2 failed: step 2: interrupted"]


def test_an_interrupt_of_a_blocking_save_lets_it_continue(store, gate):
    store.block("seal", gate)
    with Checkpointer(store, **SMALL) as ckpt:
        loop = Loop(ckpt, "blocking")
        with ctrl_c_in(WAIT):
            loop.save()
        gate.set()
        ckpt.wait()
        loop.check(1)


@pytest.mark.parametrize("ending", ["pass", "raise KeyError('an error of training')"])
def test_a_pending_save_becomes_durable_when_the_interpreter_exits(tmp_path, ending):
    program = f"""
import sys
import torch
from penstock import Checkpointer
from penstock.core.storage.open import open_backend
from penstock.core.config.model import load_config
from penstock.core.plugins.registry import default_registry
from penstock.testing.faults import LatencyBackend

config = load_config({{"backend": "posix://" + sys.argv[1]}})
slow = LatencyBackend(open_backend(config.backend, registry=default_registry()), latency_s=0.1)
ckpt = Checkpointer(slow, chunk_bytes=16384, staging_bytes=0, mode="lazy")
model = torch.nn.Linear(100, 120)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = ckpt.save({{"model": model, "optimizer": optimizer}}, 1)
assert not handle.done()
{ending}
"""
    done = interpreters.run("-c", program, tmp_path / "run", cwd=Path(__file__).parents[3])
    assert ("an error of training" in done.stderr) is (ending != "pass"), done.stderr
    assert done.returncode == (0 if ending == "pass" else 1)
    with Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [1]
        assert ckpt.verify(1).ok


# -- nothing is lost in between --------------------------------------------------------------------


def join_threads_of_saves():
    """The threads that each save starts; hangs if one does not end."""
    for thread in threading.enumerate():
        if thread.name in {"penstock-save", "penstock-watch", "penstock-capture"}:
            thread.join()


def test_a_failed_save_holds_its_memory_until_the_store_releases_it(store, gate):
    state = {"w": torch.ones(2 * BATCH_BYTES // 4)}
    with Checkpointer(store, chunk_bytes=BATCH_BYTES) as ckpt:  # each chunk is a separate write
        failing = store.fail("write", match=".raw")
        held = store.block("write", gate, nth=2, match=".raw")
        handle = ckpt.save(state, 1)
        assert failing.reached.wait(300)
        assert held.reached.wait(300)
        assert not ckpt._saver.job.released.wait(1)
        gate.set()
        with pytest.raises(StorageError, match="simulated"):
            handle.result(300)
        assert ckpt._saver.job.released.wait(300)
        assert_nothing_is_held(ckpt)


@pytest.mark.parametrize(
    "budget",
    [pytest.param({}, id="ample", marks=pytest.mark.slow), pytest.param(TINY_BUDGET, id="tiny")],
)
def test_many_saves_leave_no_threads_or_staging(store, budget):
    before = len(penstock_threads())
    with Checkpointer(store, **SMALL, **ENCODED, **budget) as ckpt:
        loop = Loop(ckpt)
        allocated = None
        # Its own, with helpers, and the backend's; all grow on demand.
        pools = 2 * ckpt._workers.count - 1 + 2
        for number in range(25):
            loop.mode = ("async", "lazy", "blocking")[number % 3]
            if number % 7 == 3:
                store.fail("write", nth=1 + number % 2)
            try:
                loop.save().durable.exception()
            except StorageError:
                assert loop.mode == "blocking"
            join_threads_of_saves()
            assert_nothing_is_held(ckpt)
            if number == 10:
                allocated = ckpt._saver.memory.staging.allocated_bytes
        assert len(penstock_threads()) <= before + pools
        assert ckpt._saver.memory.staging.allocated_bytes == allocated
    store.close()


@pytest.mark.parametrize("mode", ["async", "lazy", "blocking"])
def test_a_state_growing_beyond_the_budget_never_deadlocks(store, mode):
    """Arenas of earlier, smaller states must not eat up the budget for chunks of later ones."""
    with Checkpointer(store, mode=mode, **SMALL, **TINY_BUDGET) as ckpt:
        for step in range(1, 12):
            size = 24 * step * step
            flat = torch.arange(float(size * 3))
            state = {
                "strided": torch.arange(float(2 * size))[::2],  # cannot be written straight
                "flat": flat,
                "optimizer": torch.optim.SGD([flat]),
            }
            ckpt.save(state, step).result(300)
            tree = ckpt.load(step, include=["strided", "flat"])
            assert torch.equal(tree["strided"], state["strided"])
            assert torch.equal(tree["flat"], flat)
            assert_nothing_is_held(ckpt)


# -- memory that a failed save had lent ------------------------------------------------------------


def assert_movable(tensor):
    """`tensor` is free to move to shared memory."""
    mover = threading.Thread(target=tensor.share_memory_, daemon=True)
    mover.start()
    mover.join(300)
    assert tensor.is_shared()


def test_a_hung_store_keeps_only_memory_that_it_was_given(store, gate, impatient):
    tensor = torch.zeros(300_000)
    with Checkpointer(store, mode="blocking") as ckpt:
        impatient.flies = store.block("publish", gate, match="intent").reached.is_set
        with pytest.raises(StorageTimeoutError):
            ckpt.save({"t": tensor}, 1)
        assert_movable(tensor)
        gate.set()


def test_a_save_without_memory_for_encoded_frames_releases_all(store, monkeypatch):
    tensor = torch.zeros(300_000)
    rules = [{"match": "**", "codecs": ["zstd"]}]
    real = mmap.mmap

    def scarce(fileno, length, *args, **options):
        if fileno == -1 and length < 1 << 20:
            raise MemoryError
        return real(fileno, length, *args, **options)

    with Checkpointer(store, mode="blocking", chunk_bytes=16384, rules=rules) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", scarce)
            with pytest.raises(SaveError):
                ckpt.save({"t": tensor}, 1)
        ckpt.wait()
        assert_movable(tensor)
        ckpt.save({"t": torch.zeros(300)}, 1)

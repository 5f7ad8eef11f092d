"""A replay that ends half way says so; restoring again is right."""

import signal
import subprocess
import threading

import pytest
from tests import interpreters
from tests.effort import every
from tests.integration.log.tiny import Tiny, bits_of, logged, restored
from tests.integration.support import memory

import penstock
from penstock.core.abc import API_VERSION
from penstock.core.plugins.registry import Registry
from penstock.providers.replayer import TorchReplayer
from penstock.testing.faults import Fault, FaultyBackend

NOTE = "The state is between two steps now: restore again."


def stopping(act):
    """A registry whose replayer calls `act` before the third step that a restore takes."""

    class Stopping(TorchReplayer):
        api_version = API_VERSION
        taken = 0

        def step(self, optimizer, captured, /):
            if threading.current_thread() is threading.main_thread():  # else it is the log's check
                type(self).taken += 1
                if self.taken == 3:
                    act()
            super().step(optimizer, captured)

    registry = Registry()
    registry.register(Stopping, replace=True)
    return registry


def interrupt():
    raise KeyboardInterrupt


def test_interrupted_replay_says_so_and_a_second_one_is_right():
    store = memory()
    logged(store)
    training = Tiny(seed=9)
    with penstock.Checkpointer(store, registry=stopping(interrupt)) as ckpt:
        with pytest.raises(KeyboardInterrupt) as raised:
            ckpt.restore(training.state)
        assert NOTE in raised.value.__notes__
        assert not ckpt.log(training.state, 5)
        assert ckpt.restore(training.state).step == 4
        assert training.bits() == bits_of(4)
        training.step(5)
        assert ckpt.log(training.state, 5)
    assert restored(store) == 5


def test_interrupted_restore_while_steps_are_logged_never_logs_a_wrong_step():
    store = memory()
    logged(store)
    training = Tiny(seed=9)
    registry = stopping(interrupt)
    with penstock.Checkpointer(store, registry=registry) as ckpt:
        ckpt.restore(training.state, 2)
        training.step(3)
        assert ckpt.log(training.state, 3)
        with pytest.raises(KeyboardInterrupt):
            ckpt.restore(training.state)
        training.step(4)
        assert not ckpt.log(training.state, 4)
    assert restored(store) == 3


def test_foreign_error_of_a_step_restores_the_base(caplog):
    def fail():
        msg = "no kernel"
        raise RuntimeError(msg)

    store = memory()
    logged(store)
    training = Tiny(seed=9)
    with penstock.Checkpointer(store, registry=stopping(fail)) as ckpt:
        assert ckpt.restore(training.state).step == 0
    assert training.bits() == bits_of(0)
    assert "the step of optimizer failed: RuntimeError: no kernel" in caplog.text


def test_store_that_fails_while_steps_are_replayed():
    inner = memory()
    logged(inner)
    store = FaultyBackend(inner)
    assert restored(store) == 4
    reads = [names for name, names in store.calls if name == "read" and ".log" in str(names)]
    seen = set()
    for number in range(1, len(reads) + 1, every(2)):
        error = penstock.StorageError("gone")
        store = FaultyBackend(inner, Fault("read", number, match=".log", error=error))
        training = Tiny(seed=9)
        with penstock.Checkpointer(store) as ckpt:
            with pytest.raises(penstock.PenstockError) as raised:
                ckpt.restore(training.state)
            is_noted = NOTE in getattr(raised.value, "__notes__", ())
            seen.add(is_noted)
            assert is_noted or training.bits() == bits_of(0)
            assert ckpt.restore(training.state).step == 4
        assert training.bits() == bits_of(4)
    assert seen == {False, True}


PROGRAM = """
import sys, time
import penstock
from tests.integration.log.test_interrupted import Tiny, stopping

def wait():
    print("half way", flush=True)
    time.sleep(600)

with penstock.Checkpointer(sys.argv[1], registry=stopping(wait)) as ckpt:
    ckpt.restore(Tiny(seed=9).state)
"""


@pytest.mark.process
def test_killed_replay_changes_nothing_in_the_store(tmp_path):
    logged(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    process = interpreters.start("-c", PROGRAM, str(tmp_path), stdout=subprocess.PIPE)
    assert process.stdout.readline() == "half way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert restored(tmp_path) == 4

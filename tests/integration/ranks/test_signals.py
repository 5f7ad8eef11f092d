"""A signal handler that interrupts a save of several ranks on one of them."""

import signal
import threading
import time

import pytest
from tests.integration.ranks.saving import Job
from tests.integration.support import checkpointer, memory

from penstock import BusyError, RankError


@pytest.fixture
def on_signal():
    """Calls a handler at SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, lambda *_: handler())
    signal.signal(signal.SIGUSR1, before)


class Starts:
    """Sends this process a signal once, before or after this thread starts another."""

    def __init__(self, name, when):
        self._wanted = name, when
        self._caller = threading.current_thread()
        self._start = threading.Thread.start
        self.sent = 0

    def as_method(self):
        def start(thread):
            self._look(thread, "before")
            self._start(thread)
            self._look(thread, "after")

        return start

    def _look(self, thread, when):
        mine = threading.current_thread() is self._caller and not self.sent
        if mine and (thread.name.removeprefix("penstock-"), when) == self._wanted:
            self.sent += 1
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(("when", "interrupted"), [("before", 0), ("after", 1)])
@pytest.mark.parametrize("name", ["save", "watch", "capture"])
def test_a_save_survives_a_handler_interrupting_its_start_on_one_rank(
    interrupted, name, when, on_signal, monkeypatch
):
    """The others know of it: a new start would join an abandoned one."""
    store = memory()
    job = Job(2, store)
    found = []

    def other():
        with job.checkpointer(1 - interrupted) as ckpt:
            found.extend(ckpt.save({"a": step}, step).result(300).step for step in (1, 2))

    thread = threading.Thread(target=other)
    thread.start()
    on_signal(lambda: ckpt.fence(1.0))
    starts = Starts(name, when)
    monkeypatch.setattr(threading.Thread, "start", starts.as_method())
    with job.checkpointer(interrupted) as ckpt:
        with pytest.raises(BusyError) as raised:
            ckpt.save({"a": 1}, 1)
        assert "save of step 1, which the handler interrupted, has started" in str(
            raised.value.__notes__
        )
        ckpt.save({"a": 2}, 2).result(300)
    thread.join()
    assert starts.sent
    assert found == [1, 2]
    with checkpointer(store) as ckpt:
        assert ckpt.steps() == [1, 2]


class Interrupted:
    """State that sends this process a signal when first requested."""

    def __init__(self):
        self.sent = False

    def state_dict(self):
        if not self.sent:
            self.sent = True
            signal.raise_signal(signal.SIGUSR1)
        return {"number": 7}

    def load_state_dict(self, state):
        pass


class Quiet:
    def state_dict(self):
        return {"number": 7}

    def load_state_dict(self, state):
        pass


def test_a_save_survives_a_handler_interrupting_planning_on_one_rank(on_signal):
    store = memory()
    job = Job(2, store)
    found = []

    def other():
        with job.checkpointer(1) as ckpt:
            found.extend(ckpt.save({"a": Quiet()}, step).result(300).step for step in (1, 2))

    thread = threading.Thread(target=other)
    thread.start()
    on_signal(lambda: ckpt.fence(1.0))
    with job.checkpointer(0) as ckpt:
        with pytest.raises(BusyError):
            ckpt.save({"a": Interrupted()}, 1)
        ckpt.save({"a": Quiet()}, 2).result(300)
    thread.join()
    assert found == [1, 2]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_save_refused_in_a_handler_of_one_rank_fails_on_the_others(interrupted, on_signal):
    """A signal to all ranks interrupts a save on only some of them: they stay in step."""
    store = memory()
    job = Job(2, store)
    found = []

    def other():
        with job.checkpointer(1 - interrupted) as ckpt:
            found.append(ckpt.save({"a": Quiet()}, 1).result(300).step)
            with pytest.raises((RankError, BusyError), match="called in a signal handler"):
                ckpt.save({"a": Quiet()}, 2, mode="blocking")
            found.append(ckpt.save({"a": Quiet()}, 3).result(300).step)

    thread = threading.Thread(target=other)
    thread.start()
    on_signal(lambda: ckpt.save({"a": Quiet()}, 2))
    with job.checkpointer(interrupted) as ckpt:
        with pytest.raises(BusyError):
            ckpt.save({"a": Interrupted()}, 1)
        ckpt.save({"a": Quiet()}, 3).result(300)
    thread.join()
    assert found == [1, 3]


def test_a_save_skipped_in_a_handler_of_one_rank_fails_on_the_others(on_signal):
    job = Job(2, memory(), on_busy="skip")
    found = []

    def leader():
        with job.checkpointer(0, timeout_s=60.0) as ckpt:
            ckpt.save({"a": Quiet()}, 1).result(300)
            with pytest.raises(RankError, match="rank 1 on node1 skipped it: the signal handler"):
                ckpt.save({"a": Quiet()}, 2, mode="blocking")
            found.append("told")  # before the other has left
            found.append(ckpt.save({"a": Quiet()}, 3).result(300).step)

    thread = threading.Thread(target=leader)
    thread.start()
    on_signal(lambda: ckpt.save({"a": Quiet()}, 2))
    with job.checkpointer(1) as ckpt:
        ckpt.save({"a": Interrupted()}, 1).result(300)
        while "told" not in found and thread.is_alive():
            time.sleep(0.01)
        ckpt.save({"a": Quiet()}, 3).result(300)
    thread.join()
    assert found == ["told", 3]

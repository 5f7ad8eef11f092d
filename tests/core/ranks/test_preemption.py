"""Leaving after the same step: signals in this process, and ranks that are threads."""

import signal
import threading
from queue import SimpleQueue

import pytest
from tests.integration.ranks.saving import Job
from tests.integration.support import memory

from penstock import ConfigError, Preemption
from penstock.core.ranks.preemption import AgreedStop
from penstock.testing.coordination import MemoryCoordination
from penstock.testing.hasty import FAST, timing_in_force

PATIENCE_S = 300.0


@pytest.fixture
def stops():
    """Creates the stop of each rank; closes all in the end."""
    job, made = Job(2, memory()), []

    def make(rank, limit_s=PATIENCE_S, **group):
        asked = SimpleQueue()
        with timing_in_force(FAST):
            made.append(AgreedStop(job.group(rank, **group), asked, limit_s=limit_s))
        made[-1].ask = asked.put
        return made[-1]

    make.board = job.board
    yield make
    threads = [threading.Thread(target=stop.close) for stop in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def holds(stop):
    """Wait until a rank passes no further step."""
    while not (stop._holds or stop._known.is_open):
        stop._known.wait(0.01)


@pytest.mark.parametrize("asked", [0, 1])
def test_ranks_stop_after_the_furthest_step_of_any_rank(stops, asked):
    ahead, back = stops(0), stops(1)
    assert not any(ahead.is_past(step) for step in range(6))
    assert not any(back.is_past(step) for step in range(3))
    (ahead, back)[asked].ask("SIGTERM")
    holds(ahead)
    holds(back)
    assert [back.is_past(step) for step in range(3, 8)] == [False, False, False, True, True]
    assert ahead.is_past(6)


def test_rank_that_begins_late_stops_with_the_others(stops):
    early = stops(0)
    early.is_past(0)
    early.ask("SIGTERM")
    holds(early)
    late = stops(1)
    holds(late)
    assert [late.is_past(0), late.is_past(1), early.is_past(1)] == [False, True, True]


def test_rank_runs_to_the_end_once_another_has_ended_its_loop(stops):
    ended, other = stops(0), stops(1)
    ended.is_past(9)
    ended.close()
    other.is_past(8)
    other.ask("SIGTERM")
    holds(other)
    assert not other.is_past(9)


def test_ranks_that_time_out_continue(stops, caplog):
    other = stops(1, limit_s=0.1)  # short: rank 0 never arrives
    other.ask("SIGTERM")
    holds(other)
    assert not other.is_past(0)
    assert "training continues" in caplog.text
    late = stops(0)
    holds(late)
    assert not late.is_past(0)


def test_step_does_not_wait_for_a_store_that_hangs(stops):
    class Hanging(MemoryCoordination):
        called, released = threading.Event(), threading.Event()

        def read(self, keys, /):
            self.called.set()
            assert self.released.wait(PATIENCE_S)
            return super().read(keys)

    stop = stops(0, coordination=Hanging(stops.board))
    assert Hanging.called.wait(PATIENCE_S)
    assert not any(stop.is_past(step) for step in range(100))
    assert not Hanging.released.is_set()
    Hanging.released.set()


def test_rank_0_leaves_when_all_others_know_the_stop(stops):
    """The store of the job may be in its process."""

    class Late(MemoryCoordination):
        released = threading.Event()

        def wait(self, key, timeout_s, /):
            assert self.released.wait(PATIENCE_S)
            return super().wait(key, timeout_s)

    leader, other = stops(0), stops(1, coordination=Late(stops.board))
    leader.ask("SIGTERM")
    assert leader.is_past(0) or leader._known.wait(PATIENCE_S)
    assert leader.is_past(1)
    parting = threading.Thread(target=leader.close)
    parting.start()
    parting.join(0.5)
    waits = parting.is_alive()
    Late.released.set()
    parting.join()
    assert waits
    assert other.is_past(1)


def test_one_process_leaves_after_a_signal_and_runs_earlier_handlers():
    ran = []

    def earlier(number, _):
        ran.append(number)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        with Preemption(["SIGUSR1", signal.SIGUSR2]) as leaving:
            assert not leaving(1)
            signal.raise_signal(signal.SIGUSR1)
            assert ran == [signal.SIGUSR1]
            assert [leaving(1), leaving(2), leaving(2), leaving(3)] == [False, True, True, True]
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_ranks_that_cannot_find_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"), Preemption(["SIGUSR1"]):
        pass
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with Preemption(["SIGUSR1"], ranks="alone") as leaving:
        assert not leaving(0)


@pytest.mark.parametrize("wrong", ["TERM", 0, "SIGKILL"])
def test_signal_that_cannot_be_handled_is_named(wrong):
    with pytest.raises(ConfigError, match=str(wrong)), Preemption([wrong]):
        pass

"""Hung or failing calls of tiers: what the caller gets, and when the tier is used again."""

import threading
from contextlib import closing

import pytest
from tests.integration.support import memory

from penstock.core.abc import Tier
from penstock.core.concurrency.timing import CountedClock
from penstock.core.concurrency.workers import Workers
from penstock.core.errors import StorageError, StorageTimeoutError
from penstock.core.format.records import commit_name
from penstock.core.tiers.outages import NotAskedError, Outages
from penstock.testing.faults import Fault, FaultyBackend
from penstock.testing.hasty import FAST


@pytest.fixture
def clock():
    return CountedClock()


@pytest.fixture
def tiers():
    fast, durable = FaultyBackend(memory()), FaultyBackend(memory())
    return Tier("fast", fast), Tier("durable", durable, durable=True)


@pytest.fixture
def outages(waits, clock, tiers):
    times = {"tier_rest_first_s": 60.0, "tier_rest_most_s": 100.0, "tier_quick_error_s": 1.0}
    waits(FAST, clock=clock, repeat_log_s=300.0, **times)
    with closing(Workers(1)) as workers:
        yield Outages(tiers, workers, 10.0)


def failing(clock, seconds):
    """A call that takes this long, then fails."""

    def call():
        clock.advance(seconds)
        raise StorageError("no route to host")

    return call


def test_tier_that_fails_slowly_is_paused_for_growing_times(outages, clock):
    for pause_s in (60.0, 100.0):  # twice the first pause, and at most `tier_rest_most_s`
        with pytest.raises(StorageError, match="no route"):
            outages.ask(0, failing(clock, 2.0))
        assert outages.is_any_paused()
        with pytest.raises(NotAskedError):
            outages.ask(0, list)
        assert outages.ask(1, list) == outages.ask(0, list, despite_pause=True) == []
        clock.advance(pause_s - 1.0)
        with pytest.raises(NotAskedError):
            outages.ask(0, list)
        clock.advance(1.0)
        assert outages.ask(0, list) == []


def test_quick_error_starts_no_pause_and_a_reply_ends_one(outages, clock):
    with pytest.raises(StorageError):
        outages.ask(0, failing(clock, 0.5))
    assert outages.ask(0, list) == []
    with pytest.raises(StorageError):
        outages.ask(0, failing(clock, 2.0))
    outages.end(0)
    assert not outages.is_any_paused()


def test_hung_call_is_abandoned(outages, clock):
    event = threading.Event()

    def hang():
        clock.advance(11.0)
        event.wait(60)

    try:
        with pytest.raises(StorageTimeoutError, match="no answer for 10 s"):
            outages.ask(0, hang)
    finally:
        event.set()
    assert outages.is_any_paused()


def test_each_reason_is_logged_once_per_interval(outages, clock, caplog):
    for reason in ("a", "a", "b"):
        outages.warn(0, StorageError(reason))
    outages.warn(0, NotAskedError("c"))
    assert len(caplog.records) == 2
    clock.advance(300.0)
    outages.warn(0, StorageError("a"))
    assert len(caplog.records) == 3
    outages.end(0)
    outages.warn(0, StorageError("b"))
    assert len(caplog.records) == 4


def test_entries_come_from_all_responsive_tiers(outages, tiers, caplog):
    fast, durable = (tier.backend for tier in tiers)
    for backend, *names in (fast, (2, 0), (3, 1)), (durable, (1, 0), (3, 0)):
        for step, generation in names:
            backend.publish(commit_name(step, generation), b"")
    everything = {
        1: [commit_name(1, 0)],
        2: [commit_name(2, 0)],
        3: [commit_name(3, 0), commit_name(3, 1)],
    }
    assert outages.entries(strict=True) == everything
    fast.add(Fault("list", times=None, error=StorageError("no route to host")))
    assert list(outages.entries(strict=False)) == [1, 3]
    assert "tier fast does not answer" in caplog.text
    with pytest.raises(StorageError, match="no route"):
        outages.entries(strict=True)
    durable.add(Fault("list", times=None, error=StorageError("no route to host")))
    with pytest.raises(StorageError, match="no route"):
        outages.entries(strict=False)

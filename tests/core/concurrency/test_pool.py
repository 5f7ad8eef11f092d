"""A thread pool that hung calls neither exhaust nor keep open."""

import threading

import pytest

from penstock.core.concurrency.pool import Pool
from penstock.core.concurrency.timing import Timing

QUICK = Timing(poll_s=0.01)


def test_an_error_reaches_the_waiter_and_the_thread_lives():
    pool = Pool(1, "one")

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        pool.submit(fail).result(60)
    assert pool.submit(lambda: 3).result(60) == 3
    pool.shutdown(wait=True)


def test_task_of_a_failed_call_never_runs(monkeypatch):
    pool, ran = Pool(1, "one"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: pool.no_such_thing)
        with pytest.raises(AttributeError):
            pool.submit(lambda: ran.append("of the failed call"))
    pool.submit(lambda: ran.append("of the next")).result(60)
    pool.shutdown(wait=True)
    assert ran == ["of the next"]


@pytest.mark.parametrize("stuck_s", [-1.0, float("inf")], ids=["stuck", "patient"])
def test_hung_calls_do_not_exhaust_the_pool_forever(stuck_s):
    """Once they count as stuck: here either at once, or never."""
    pool = Pool(2, "two", stuck_s=stuck_s, timing=QUICK)
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hang():
        begun.release()
        assert gate.wait(60)

    hanging = [pool.submit(hang) for _ in range(2)]
    assert begun.acquire(timeout=60)
    assert begun.acquire(timeout=60)
    third = pool.submit(lambda: "done")
    if stuck_s < 0:
        assert third.result(60) == "done"
        assert not any(future.done() for future in hanging)
        pool.shutdown(wait=True)  # although they still hang
        assert not any(future.done() for future in hanging)
        gate.set()
    else:
        assert not third.done()
        gate.set()
        pool.shutdown(wait=True)
        assert third.result(0) == "done"
    for future in hanging:
        future.result(60)


def test_a_dropped_pool_runs_queued_tasks_and_ends_its_threads():
    pool = Pool(2, "dropped")
    gate = threading.Event()
    futures = [pool.submit(lambda: gate.wait(60)) for _ in range(2)]
    futures += [pool.submit(lambda n=n: n) for n in range(20)]
    threads = [t for t in threading.enumerate() if t.name.startswith("dropped_")]
    assert len(threads) == 2
    del pool
    gate.set()
    assert [future.result(60) for future in futures] == [True, True, *range(20)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

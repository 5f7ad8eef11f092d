"""How many cores there are for this process."""

import os
import threading
from contextlib import closing

import pytest

from penstock.core.concurrency.workers import Workers, default_workers, usable_cores


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    alone = usable_cores()
    assert 0 < alone <= len(os.sched_getaffinity(0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_cores() == alone / 4


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.max": "9900000 100000\n"}, 8),
    ],
)
def test_a_container_may_have_fewer_cores_than_the_machine(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(str(tmp_path)) == cores


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(1, 1, 1), (3, 1, 3), (64, 1, 4), (8, 4, 2), (2, 8, 1)]
)
def test_each_core_up_to_four_gets_a_worker(cores, ranks, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert default_workers(str(tmp_path)) == workers


def test_tasks_run_concurrently_in_the_calling_thread_too():
    meet = threading.Barrier(3)

    def task():
        meet.wait(60)
        return threading.current_thread()

    with closing(Workers(3)) as workers:
        threads = workers.side_by_side([task] * 3)
        assert len(set(threads)) == 3
        assert threading.current_thread() in threads
        assert workers.side_by_side([]) == []
    with closing(Workers(1)) as workers:
        outcomes = workers.side_by_side([threading.current_thread] * 3)
        assert outcomes == [threading.current_thread()] * 3


def test_concurrent_tasks_all_run_even_if_some_fail():
    def fail():
        raise ZeroDivisionError

    with closing(Workers(2)) as workers:
        outcomes = workers.side_by_side([fail, lambda: 1, fail, lambda: 2])
    assert [type(outcome) for outcome in outcomes] == [
        ZeroDivisionError,
        int,
        ZeroDivisionError,
        int,
    ]


def test_concurrent_tasks_need_no_more_threads(monkeypatch):
    ran = []
    started = threading.Thread.start

    def start(thread):
        if thread.name.startswith("penstock-copy_1"):
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with closing(Workers(4)) as workers:
        for _ in range(2):
            ran.append(0)
            tasks = [lambda: ran.append(1)] * 6
            assert workers.side_by_side(tasks) == [None] * 6
    assert ran == [0, *[1] * 6] * 2

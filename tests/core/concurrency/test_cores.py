"""How many cores training uses, from clocks that the test sets."""

import os

from penstock.core.concurrency.cores import CoreMeter


def test_the_cores_of_training_are_measured_between_two_saves():
    now = [0.0, 0.0]
    meter = CoreMeter(lambda: tuple(now))
    assert meter.busy == 1.0
    now[:] = 0.25, 0.25
    meter.begin_save()
    assert meter.busy == 1.0, "so short a time says nothing"
    now[:] = 10, 25
    meter.begin_save()
    assert meter.busy == 2.5
    now[:] = 20, 95  # the save itself
    meter.end_save()
    now[:] = 24, 97
    meter.begin_save()
    assert meter.busy == 0.5


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    alone = CoreMeter().cores
    assert alone == len(os.sched_getaffinity(0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert CoreMeter().cores == alone / 4

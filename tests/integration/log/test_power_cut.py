"""A power cut during any effect of saves and logs loses at most the last logged step."""

import random

import pytest
from tests.effort import every
from tests.integration.atomic.crash_scenarios import mortal
from tests.integration.log.tiny import Tiny, WithoutAppends, bits_of, restored

import penstock
from penstock.testing.powercut import Disk, PowerCut

SECOND, LAST = 3, 5  # steps of the second save, and of the last entry


def saved(handle):
    return handle.committed.done() and handle.committed.exception() is None


def train(store, sync):
    """Train until the power fails; return the last step that was promised to be durable."""
    promised = [-1]
    with mortal(), penstock.Checkpointer(store, workers=1, log_sync=sync) as ckpt:
        training, recorder = Tiny(), ckpt._log.recorder
        for step in range(LAST + 1):
            training.step(step)
            if step == 0:
                ckpt.save(training.state, step, mode="blocking")
                promised.append(step)
            elif step == SECOND:
                handle = ckpt.save(training.state, step)
                covered = len(recorder._logs) == 2  # the log before it continues until the commit
            elif ckpt.log(training.state, step) and (step < SECOND or covered or saved(handle)):
                promised.append(step - sync)
        recorder.flush()
        if not recorder.ended and saved(handle):
            promised.append(LAST)
    return max(promised)


@pytest.mark.parametrize("sync", [1, 2])
@pytest.mark.parametrize("wrap", [lambda store: store, WithoutAppends], ids=["appends", "objects"])
@pytest.mark.parametrize("most_cuts", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_power_cut_during_any_effect_loses_at_most_log_sync_steps(wrap, most_cuts, sync):
    points, found = 0, set()
    while True:
        disk = Disk(cut_at=points + 1)
        promised = train(wrap(PowerCut(disk)), sync)
        over = not disk.dead
        chance = random.Random(points)
        for survived in disk.cuts(chance, most=most_cuts):
            store = PowerCut(survived)
            try:
                step = restored(store)
            except penstock.CheckpointNotFoundError:
                step = -1
            assert step >= promised
            found.add(step)
        if step >= 0 and points % 9 == 0:
            check_that_it_continues(store, step)
        if over:
            break
        points += every(3)
    assert {-1, 0, LAST} <= found
    assert len(found) >= LAST


def check_that_it_continues(store, step):
    training = Tiny(seed=9)
    with penstock.Checkpointer(store) as ckpt:
        assert ckpt.resume(training.state) == step + 1
        training.step(step + 1)
        assert ckpt.log(training.state, step + 1)
    assert training.bits() == bits_of(step + 1)
    assert restored(store) == step + 1

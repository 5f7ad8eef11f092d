"""Chains in a process with forks, Ctrl-C, and hung stores."""

from __future__ import annotations

import threading

import pytest
from tests.integration.deltas.test_chains import RULES, bases_of, check, weights
from tests.integration.support import FlyingClock, run_program

import penstock
from penstock.core.errors import StorageTimeoutError
from penstock.core.storage.open import open_backend
from penstock.testing.faults import Fault, FaultyBackend
from penstock.testing.hasty import FAST

FORKING = """
import os, sys
import penstock
from tests.integration.deltas.test_chains import RULES, weights

root = sys.argv[1]
with penstock.Checkpointer(root, rules=RULES, workers=2) as ckpt:
    for step in (0, 1):
        ckpt.save(weights(step), step=step, mode="blocking")
    if os.fork() == 0:
        try:
            ckpt.save(weights(9), step=9)
        except penstock.SaverClosedError:
            with penstock.Checkpointer(root, rules=RULES, workers=2) as own:
                own.save(weights(2), step=2, mode="blocking")
                own.save(weights(3), step=3, mode="blocking")
            os._exit(0)
        os._exit(1)
    assert os.wait()[1] == 0
    for step in (4, 5):
        ckpt.save(weights(step), step=step, mode="blocking")
"""


def test_a_forked_child_extends_the_chain_and_its_parent_continues(tmp_path):
    done = run_program(FORKING, str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stderr
    assert bases_of(tmp_path, range(6)) == [None, (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    check(tmp_path, range(6))


@pytest.fixture
def store(tmp_path):
    return FaultyBackend(open_backend(tmp_path))


def test_a_worker_hung_in_the_base_of_a_failed_save_spoils_no_later_one(tmp_path, store, waits):
    clock = FlyingClock()
    waits(FAST, clock=clock, release_s=0.01)
    released = threading.Event()
    options = {"rules": RULES, "workers": 2}
    with penstock.Checkpointer(store, **options) as ckpt:
        ckpt.save(weights(0), step=0, mode="blocking")
        ckpt._saver._kept.drop()  # so that the base is read
        stuck = store.add(Fault("read", times=1, match=".enc", until=released))
        clock.flies = stuck.reached.is_set
        with pytest.raises(StorageTimeoutError):
            ckpt.save(weights(1), step=1, mode="blocking")
        clock.flies = lambda: False
        assert stuck.reached.is_set()
        given_up = ckpt._saver.job
        ckpt.save(weights(2), step=2, mode="blocking")
        released.set()  # the worker of step 1 encodes its chunk, and keeps it
        given_up.released.wait()
        for step in (3, 4):
            ckpt.save(weights(step), step=step, mode="blocking")
    check(tmp_path, [0, 2, 3, 4])
    assert bases_of(tmp_path, [2, 3, 4]) == [(0, 1), (2, 2), (3, 3)]

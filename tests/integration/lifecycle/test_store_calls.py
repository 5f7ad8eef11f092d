"""How often a restore calls the store: each call is a round trip to a bucket."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.integration.support import checkpointer, memory

from penstock import DamagedError
from penstock.core.format.records import COMMIT_PREFIX, commit_name
from penstock.testing.faults import FaultyBackend

STEPS = (1, 2, 3)


@pytest.fixture
def store():
    backend = memory()
    with checkpointer(backend) as ckpt:
        for step in STEPS:
            ckpt.save({"w": torch.full((8,), float(step))}, step=step, mode="blocking")
    return FaultyBackend(backend)


def of_commits(store):
    """How often commit records were listed, and each one read."""
    names = [name for call, (name, *_) in store.calls if name.startswith(COMMIT_PREFIX)]
    return Counter(names)


def overwrite(store, step):
    name = commit_name(step, 0)
    store.inner.delete([name])
    store.inner.publish(name, b"{}")


@pytest.mark.parametrize(
    "use",
    [
        lambda ckpt, **options: ckpt.restore({"w": torch.zeros(8)}, **options),
        lambda ckpt, **options: ckpt.restore({"w": torch.zeros(8)}, on_damage="raise", **options),
        lambda ckpt, **options: ckpt.load(on_damage="fallback", **options),
        lambda ckpt, **options: ckpt.open(**options),
    ],
    ids=["restore", "restore or raise", "load or fall back", "open"],
)
def test_commit_records_are_listed_once_and_one_is_read_once(store, use):
    with checkpointer(store) as ckpt:
        for count, step in enumerate(("latest", 3), start=1):
            use(ckpt, step=step)
            assert of_commits(store) == {COMMIT_PREFIX: count, commit_name(3, 0): count}


def test_a_fallback_reads_the_record_of_each_tried_step_once(store):
    for step in (2, 3):
        overwrite(store, step)
    with checkpointer(store) as ckpt:
        report = ckpt.restore({"w": torch.zeros(8)}, on_damage="fallback")
    assert (report.step, report.fell_back_from) == (1, (3, 2))
    assert of_commits(store) == {COMMIT_PREFIX: 1} | {commit_name(s, 0): 1 for s in STEPS}


def test_a_record_replaced_since_the_listing_is_looked_up_again(store):
    class Overwritten(FaultyBackend):
        def read_record(self, name, /, *, limit_bytes):
            if name == commit_name(3, 0) and not done:
                done.append(name)
                with checkpointer(store.inner) as ckpt:
                    state = {"w": torch.full((8,), 9.0)}
                    ckpt.save(state, step=3, overwrite=True, mode="blocking")
            return super().read_record(name, limit_bytes=limit_bytes)

    done = []
    state = {"w": torch.zeros(8)}
    with checkpointer(Overwritten(store.inner)) as ckpt:
        assert ckpt.restore(state).step == 3
    assert state["w"][0] == 9.0
    assert done


def test_a_damaged_newest_record_is_read_once(store):
    overwrite(store, 3)
    with checkpointer(store) as ckpt, pytest.raises(DamagedError):
        ckpt.restore({"w": torch.zeros(8)})
    assert of_commits(store)[COMMIT_PREFIX] == 1

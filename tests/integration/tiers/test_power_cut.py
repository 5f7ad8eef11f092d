"""Tiers and power cuts: torn data in either place breaks no promise."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from tests.integration.support import checkpointer, make_state, same

from penstock import PenstockError
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.catalog.prune import prune
from penstock.core.catalog.survey import survey_run
from penstock.core.tiers.whereabouts import pending
from penstock.testing.faults import SimulatedCrashError
from penstock.testing.hasty import FAST
from penstock.testing.powercut import Disk, PowerCut

# A process without power ends all of its threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SCENARIOS = ("evict", "overwrite", "chain")
KEEP_LAST = 2
CHAINED = {
    "rules": [{"match": "optimizer/**", "codecs": ["delta", "zstd"]}],
    "deltas": {"every": 3},
    "share": True,
    "retention": {"keep_last": KEEP_LAST},
}
STILL = torch.arange(9000.0)  # saves of a chain share it
MASTER = torch.randn(90, 100, generator=torch.Generator().manual_seed(1))
POINTS = 2  # effects at which a disk loses power; the slow test takes all of them


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST, drain_failing_s=0.1)


class Reports:
    """The reports on each save: number of the state by step, the newest of each."""

    def __init__(self):
        self.committed = {}
        self.durable = {}
        self.begun = {}


def open_tiers(fast, durable, **more):
    config = TieredConfig(fast="memory://", durable="memory://", keep_fast=1)
    backend = TieredBackend(config, fast=PowerCut(fast), durable=PowerCut(durable))
    return checkpointer(backend, **more)


def state_of(number):
    """New tensors, an unchanging one, one that changes a little, and its rounded copy."""
    state = make_state(number)
    state["optimizer"]["master"] = MASTER + number
    state["model"]["half"] = state["optimizer"]["master"].bfloat16()
    return {**state, "still": STILL}


def run(scenario, fast, durable, reports):
    """Some saves, until one of the disks loses power."""
    steps = {"evict": [1, 2, 3, 4], "overwrite": [1, 2, 2, 1], "chain": [1, 2, 3, 4, 5]}[scenario]
    more = CHAINED if scenario == "chain" else {}
    with suppress(SimulatedCrashError, PenstockError), open_tiers(fast, durable, **more) as ckpt:
        for number, step in enumerate(steps, 1):
            reports.begun.setdefault(step, []).append(number)
            handle = ckpt.save(state_of(number), step, overwrite=scenario == "overwrite")
            for future, where in (
                (handle.committed, reports.committed),
                (handle.durable, reports.durable),
            ):
                with suppress(PenstockError, SimulatedCrashError):
                    future.result(300)
                    where[step] = number
            if fast.dead or durable.dead:
                break


def retired(step, found):
    """Whether retention may have deleted a saved step."""
    return step not in found and sum(later > step for later in found) >= KEEP_LAST


def check(fast, durable, reports):
    """Listed steps are whole, reported ones exist, and another process finishes the rest."""
    places = {name: PowerCut(disk) for name, disk in (("fast", fast), ("durable", durable))}
    found = {}
    for name, backend in places.items():
        with checkpointer(backend) as alone:
            for step in alone.steps():
                assert alone.verify(step).ok, (name, step)
                number = alone.load(step)["epoch"]
                assert number in reports.begun[step]
                assert same(alone.load(step), state_of(number))
                found.setdefault(step, {})[name] = number
    for step, number in reports.durable.items():
        if not retired(step, found):
            assert found[step]["durable"] >= number, (step, found)
    for step, number in reports.committed.items():
        if not retired(step, found):
            assert max(found[step].values()) >= number, (step, found)
    with open_tiers(fast, durable) as ckpt:
        ckpt.save(state_of(9), 9).result(300)
    assert pending(PowerCut(fast)) == []
    with checkpointer(PowerCut(durable)) as alone:
        for step, numbers in found.items():
            assert alone.load(step)["epoch"] == max(numbers.values())
            assert alone.verify(step).ok
    for backend in places.values():
        prune(backend, grace_s=0)
        survey = survey_run(backend)
        # The intent left by a killed deletion goes with the last borrower of its save.
        assert survey.data.keys() == survey.needed


def effects(scenario):
    """The count on either disk in an undisturbed run."""
    fast, durable, reports = Disk(), Disk(), Reports()
    run(scenario, fast, durable, reports)
    assert reports.durable == {step: numbers[-1] for step, numbers in reports.begun.items()}
    check(fast.copy(), durable.copy(), reports)
    return {"fast": fast.effects, "durable": durable.effects}


def cut_during(scenario, which, at, *, ends):
    reports, seed = Reports(), f"{scenario} {which} {at}"
    disks = {name: Disk(cut_at=at if name == which else None) for name in ("fast", "durable")}
    run(scenario, disks["fast"], disks["durable"], reports)
    choice = random.Random(seed)
    for number in range(ends):
        # Both tiers may be in one machine, or not.
        both = {
            name: disk.cut(choice) if name == which or number % 2 else disk.copy()
            for name, disk in disks.items()
        }
        check(both["fast"], both["durable"], reports)


@pytest.mark.parametrize(("scenario", "which"), [("evict", "fast"), ("overwrite", "durable")])
def test_a_power_cut_in_either_tier_breaks_no_promise(scenario, which):
    most = effects(scenario)[which]
    assert most >= 20
    for at in range(most // POINTS, most + 1, most // POINTS):
        cut_during(scenario, which, at, ends=2)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["fast", "durable"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_during_any_effect_breaks_no_promise(scenario, which):
    for at in range(1, effects(scenario)[which] + 1):
        cut_during(scenario, which, at, ends=4)

"""A power cut during any effect on the store: old or new, whole, no permanent leftovers."""

from __future__ import annotations

import random

import pytest
from tests.effort import every
from tests.integration.atomic.crash_scenarios import check_run, each_scenario

from penstock.testing.faults import LatencyBackend
from penstock.testing.powercut import PowerCut

JITTER = {"write": 0.002, "seal": 0.002}


# One of each kind of call; `test_crash` has others in the quick run.
QUICK = ["save async encoded", "retention", "delete two generations", "prune"]


@pytest.mark.parametrize("most_cuts", [2, pytest.param(6, marks=pytest.mark.slow)])  # at one point
@each_scenario(*QUICK)
def test_a_power_cut_during_any_effect_leaves_old_or_new(scenario, most_cuts):
    prepared = scenario.prepared()
    found, points, cuts = [], 0, 0
    while True:
        disk = prepared.copy(cut_at=points + 1)
        # Raw and encoded blobs are written in parallel: now one is ahead, now the other.
        promised = scenario.run(LatencyBackend(PowerCut(disk), jitter_s=JITTER, seed=points))
        over = not disk.dead
        chance = random.Random(f"{scenario.name} {points}")
        for survived in disk.cuts(chance, most=most_cuts):
            found.append(check_run(survived, scenario.ends[-1 if over else promised :]))
            cuts += 1
        if over:
            break
        points += every(2)
    assert points, "there was nothing to cut"
    print(f"{scenario.name}: {cuts} cuts at {points} points")
    assert all(end in found for end in scenario.ends)
